"""The Mamba language model: tokens -> embedding -> blocks -> norm -> logits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from mamba_jax import initializers
from mamba_jax.block import Mamba
from mamba_jax.config import MambaConfig, RematPolicy, Scan
from mamba_jax.norm import RMSNorm
from mamba_jax.packing import Rows, arrange
from mamba_jax.parallel import constrain_residual
from mamba_jax.state import MambaState, zero_state

if TYPE_CHECKING:
    from mamba_jax.pretrained import Format, Partition, Progress

_REMAT_POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Layer(nnx.Module):
    """Pre-norm residual around a block: residual + mixer(norm(residual))."""

    def __init__(self, config: MambaConfig, *, rngs: nnx.Rngs):
        """Args: `config` of the model; `rngs`, whose "params" stream is used."""
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=jnp.dtype(config.dtype))
        self.mixer = Mamba(
            **{name: getattr(config, name) for name in _BLOCK_FIELDS},
            out_proj_scale=config.n_layer**-0.5 if config.rescale_prenorm_residual else 1.0,
            rngs=rngs,
        )

    def __call__(
        self, residual: jax.Array, rows: Rows, state: MambaState | None, *, return_state: bool
    ) -> tuple[jax.Array, MambaState | None]:
        """Residual (b, l, d_model) of packed rows -> same, and the block's new state if asked for."""
        y, state = self.mixer.mix(self.norm(residual), rows, state, return_state=return_state)
        return constrain_residual(residual + y.astype(residual.dtype)), state


_BLOCK_FIELDS = (
    "d_model", "d_state", "d_conv", "expand", "dt_rank", "d_inner", "dt_min", "dt_max", "dt_init", "dt_scale",
    "dt_init_floor", "selective", "conv_bias", "bias", "use_bcdt_norm", "mixer_rms_eps", "scan", "dtype",
)  # fmt: skip


class MambaLM(nnx.Module):
    """Mamba language model.

    Source: arXiv 2312.00752, section 4.2; `mamba_ssm.models.mixer_seq_simple.MambaLMHeadModel`.

    Parameters are float32: `embedding` (padded vocabulary, d_model), `layers` (each parameter of a `Layer` with the
    layers stacked in front, scanned over, so that compile time does not grow with depth), `norm_f.scale`, and, if the
    head is not tied to the embedding, `lm_head.kernel` (d_model, padded vocabulary).
    """

    def __init__(self, config: MambaConfig, *, rngs: nnx.Rngs):
        """Make a model with fresh parameters.

        Args:
            config: sizes and options.
            rngs: source of randomness; the "params" stream is used.
        """
        self.config = config
        shape = (config.padded_vocab_size, config.d_model)
        self.embedding = nnx.Param(initializers.embedding(config.initializer_range)(rngs.params(), shape, jnp.float32))
        self.layers = _stacked_layers(config, rngs.params())
        self.norm_f = RMSNorm(config.d_model, eps=config.norm_eps, dtype=jnp.dtype(config.dtype))
        self.lm_head = None if config.tie_embeddings else _untied_head(config, rngs)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        scan: Scan = "auto",
        dtype: DTypeLike = "float32",
        remat: bool = False,
        remat_policy: RematPolicy = "nothing",
        mesh: Mesh | None = None,
        partition: Partition | None = None,
        revision: str | None = None,
        progress: Progress | None = None,
    ) -> MambaLM:
        """A model with the parameters of a checkpoint.

        It may be of the original `mamba_ssm` format (`state-spaces/mamba-*`), of `transformers`' Mamba or FalconMamba
        (`-hf`), or the folder of a run of `python -m train`, whose newest checkpoint is taken. No code in it is run.
        Parameters are read tensor by tensor, straight to their devices, and become float32 whatever they are stored in.

        Args:
            name: a folder, or OWNER/MODEL on the Hugging Face hub.
            scan, dtype, remat, remat_policy: how the model is computed, as in `MambaConfig`.
            mesh: devices to place the parameters on; None is the default device.
            partition: of a parameter's path in the model and its shape, how it is split over the mesh; None keeps a
                whole copy on every device. Only the parts that this process needs are read.
            revision: branch, tag or commit on the hub.
            progress: called with the bytes read and their total after each tensor; None draws a bar on a terminal.

        Raises:
            ValueError: there is no such model, or it cannot be loaded; every tensor that is missing, unknown or
                misshapen and every key of its configuration that is not understood is listed.
            ImportError: an optional library that this model needs is missing; the message says how to install it.
        """
        from mamba_jax import pretrained

        return pretrained.load(
            cls, name, scan=scan, dtype=dtype, remat=remat, remat_policy=remat_policy, mesh=mesh, partition=partition,
            revision=revision, progress=progress,
        )  # fmt: skip

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        format: Format = "hf",
        *,
        dtype: str = "float32",
        extra_config: dict[str, Any] | None = None,
        max_shard_bytes: int = 5 * 10**9,
    ) -> None:
        """Write the model as a checkpoint; tensors of an earlier one in the folder are replaced.

        Args:
            folder: where to; it is made if need be.
            format: "hf" (`config.json`, `model.safetensors`), which `transformers` opens; or "original"
                (`config.json`, `pytorch_model.bin`), which `mamba_ssm` opens.
            dtype: of the stored tensors: "float32", "bfloat16" or "float16".
            extra_config: further keys for `config.json`, such as `eos_token_id`.
            max_shard_bytes: in the "hf" format, more than this is split into several files.

        Raises:
            ValueError: an argument is not one of its choices, or the original format cannot express the model.
        """
        from mamba_jax import pretrained

        pretrained.save(
            self, folder, format, dtype=dtype, extra_config=extra_config, max_shard_bytes=max_shard_bytes
        )  # fmt: skip

    def __call__(
        self,
        tokens: jax.Array,
        *,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        state: MambaState | None = None,
        return_state: bool = False,
    ) -> Any:
        """Logits of the token after each token.

        Args:
            tokens: (b, l) int, l of 0 or more.
            attention_mask, segment_ids, state, return_state: as in `hidden`.

        Returns:
            (b, l, vocab_size) logits, float32 at least, without the embedding's padding rows, so that those are never
            sampled and take no part in a softmax; with `return_state` a pair of them and the new state.

        Raises:
            ValueError: a shape or dtype is wrong.
        """
        hidden, state = self._hidden(tokens, attention_mask, segment_ids, state, return_state)
        logits = self.head(hidden)
        return (logits, state) if return_state else logits

    def hidden(
        self,
        tokens: jax.Array,
        *,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        state: MambaState | None = None,
        return_state: bool = False,
    ) -> Any:
        """What the head turns into logits: the normed activations after the last layer.

        Args:
            tokens: (b, l) int, l of 0 or more.
            attention_mask: (b, l), 1 for tokens and 0 for padding, which may stand anywhere and changes nothing.
            segment_ids: (b, l) int, the document of each token; nothing passes from one to the next.
            state: what an earlier call returned, or `init_state`; it is not changed. None: the sequence begins.
            return_state: also return the state after these tokens.

        Returns:
            (b, l, d_model) in the config's dtype, zeros at padding; with `return_state` a pair of it and the state.

        Raises:
            ValueError: a shape or dtype is wrong.
        """
        hidden, state = self._hidden(tokens, attention_mask, segment_ids, state, return_state)
        return (hidden, state) if return_state else hidden

    def embed(self, tokens: jax.Array) -> jax.Array:
        """(...) int -> (..., d_model), what the first layer adds to."""
        dtype = jnp.dtype(self.config.dtype)
        residual_dtype = jnp.promote_types(dtype, jnp.float32) if self.config.residual_in_fp32 else dtype
        # An id outside the vocabulary gives NaN, which is seen, rather than some other token's embedding.
        return jnp.take(self.embedding[...], tokens, axis=0, mode="fill").astype(residual_dtype)

    def head(self, hidden: jax.Array) -> jax.Array:
        """(..., d_model) -> (..., vocab_size) logits, float32 at least."""
        dtype = jnp.dtype(self.config.dtype)
        wide = jnp.promote_types(dtype, jnp.float32)
        if self.lm_head is None:
            weight, contract = self.embedding[...], 1
        else:
            weight, contract = self.lm_head.kernel[...], 0
        logits = lax.dot_general(
            hidden.astype(dtype),
            weight.astype(dtype),
            (((hidden.ndim - 1,), (contract,)), ((), ())),
            preferred_element_type=wide,
        )
        return logits[..., : self.config.vocab_size]

    def init_state(self, batch: int) -> MambaState:
        """The state before the first token of `batch` rows, layers stacked in front: zeros."""
        config = self.config
        mixer = self.layers.mixer
        return zero_state((config.n_layer, batch), mixer.d_inner, config.d_state, config.d_conv, config.dtype)

    def _hidden(
        self,
        tokens: jax.Array,
        attention_mask: jax.Array | None,
        segment_ids: jax.Array | None,
        state: MambaState | None,
        return_state: bool,
    ) -> tuple[jax.Array, MambaState | None]:
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"`tokens` must be integers of shape (batch, length), got {tokens.dtype} of shape {tokens.shape}"
            )
        config = self.config
        if state is not None and (state.ssm.ndim != 4 or state.ssm.shape[0] != config.n_layer):
            raise ValueError(f"`state` must be of {config.n_layer} layers, got `ssm` of shape {state.ssm.shape}")
        # All layers have seen the same documents: the first one's state speaks for them.
        first = None if state is None else jax.tree.map(lambda leaf: leaf[0], state)
        rows = arrange(tokens.shape, attention_mask, segment_ids, first)
        residual = constrain_residual(self.embed(rows.pack(tokens)))
        residual, state = self._run_layers(residual, rows, state, return_state)
        return rows.unpack(self.norm_f(residual)), state

    def _run_layers(
        self, residual: jax.Array, rows: Rows, state: MambaState | None, return_state: bool
    ) -> tuple[jax.Array, MambaState | None]:
        """Residual (b, l, d_model) through all layers; one compiled body, whatever the depth."""
        graphdef, params = nnx.split(self.layers)

        def body(residual: jax.Array, inputs: tuple[Any, MambaState | None]) -> tuple[jax.Array, MambaState | None]:
            params, state = inputs
            layer = nnx.merge(graphdef, params)
            return layer(residual, rows, state, return_state=return_state)

        if self.config.remat:
            # Inside a scan nothing can be merged with the recomputation, so the costly guard against it is not needed.
            body = jax.checkpoint(body, prevent_cse=False, policy=_REMAT_POLICIES[self.config.remat_policy])
        return lax.scan(body, residual, (params, state))


def _untied_head(config: MambaConfig, rngs: nnx.Rngs) -> nnx.Linear:
    init = initializers.projection(config.d_model)
    return nnx.Linear(config.d_model, config.padded_vocab_size, use_bias=False, kernel_init=init, rngs=rngs)


def _stacked_layers(config: MambaConfig, key: jax.Array) -> Layer:
    """A `Layer` whose parameters have `n_layer` independent draws stacked in front."""

    def parameters(key: jax.Array) -> Any:
        return nnx.state(Layer(config, rngs=nnx.Rngs(params=key)))

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Layer(config, rngs=nnx.Rngs(0))))
    # One compiled program: run one by one, these small operations take seconds to compile.
    stacked = jax.jit(jax.vmap(parameters))(jax.random.split(key, config.n_layer))
    return nnx.merge(graphdef, stacked)
