"""The Mamba block: in_proj -> convolution -> x_proj, dt_proj -> selective scan -> gate -> out_proj."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from mamba_jax import initializers
from mamba_jax.config import DtInit, MambaConfig, Scan, default_d_inner, default_dt_rank
from mamba_jax.conv import advance_window
from mamba_jax.norm import rms_norm
from mamba_jax.packing import Rows, arrange
from mamba_jax.parallel import causal_conv, selective_scan
from mamba_jax.scan import selective_state_update
from mamba_jax.state import MambaState, state_dtype, zero_state

# softplus(-1e4 + any sensible bias) is exactly 0: the state stays as it was, and so do all gradients.
_NO_STEP = -1e4


class Mamba(nnx.Module):
    """One Mamba layer, without norm and residual.

        [x, z] = x W_in;  u = silu(conv(x));  [dt, B, C] = u W_x;  Delta = softplus(dt W_dt + dt_bias);  A = -exp(A_log)
        h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t u_t;  y_t = (C_t h_t + D u_t) silu(z_t);  out = y W_out

    Source: arXiv 2312.00752, sections 3.4 and 3.6; `mamba_ssm.modules.mamba_simple.Mamba`.

    Parameters are float32: `in_proj`, `x_proj`, `dt_proj`, `out_proj` (nnx.Linear, kernels (in, out)), `conv_weight`
    (w, d_inner), `conv_bias` and `dt_bias` (d_inner,), `A_log` (d_inner, n), `D` (d_inner,). Weight decay is for the
    kernels and `conv_weight` alone.

    With `selective=False` it is the same block around a time-invariant scan: B and C (d_inner, n) are parameters in
    place of `x_proj` and `dt_proj`, and Delta = softplus(dt_bias).
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | Literal["auto"] = "auto",
        *,
        d_inner: int | None = None,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: DtInit = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        selective: bool = True,
        conv_bias: bool = True,
        bias: bool = False,
        use_bcdt_norm: bool = False,
        mixer_rms_eps: float = 1e-6,
        out_proj_scale: float = 1.0,
        scan: Scan = "auto",
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Make a block with fresh parameters.

        Args:
            d_model: width outside the block.
            d_state, d_conv, expand, dt_rank, d_inner, dt_min, dt_max, dt_init, dt_scale, dt_init_floor, selective,
                conv_bias, bias, use_bcdt_norm, mixer_rms_eps: as in `MambaConfig`.
            out_proj_scale: factor on out_proj's initial weights; n_layer^-0.5 inside a model.
            scan: form of the selective scan: "auto", "sequential", "associative" or "pallas".
            dtype: of the activations.
            rngs: source of randomness; the "params" stream is used.

        Raises:
            ValueError: an argument is out of its range; the message names it in backticks.
        """
        self.dtype = jnp.dtype(dtype)
        fields: dict[str, Any] = {"dtype": self.dtype.name}  # any name; the record checks it
        MambaConfig(  # for its checks alone
            d_model=d_model, d_state=d_state, d_conv=d_conv, expand=expand, dt_rank=dt_rank, d_inner=d_inner,
            dt_min=dt_min, dt_max=dt_max, dt_init=dt_init, dt_scale=dt_scale, dt_init_floor=dt_init_floor,
            selective=selective, use_bcdt_norm=use_bcdt_norm, mixer_rms_eps=mixer_rms_eps, scan=scan, **fields,
        )  # fmt: skip
        self.d_model, self.d_state, self.d_conv = d_model, d_state, d_conv
        self.d_inner = default_d_inner(d_model, expand) if d_inner is None else d_inner
        self.dt_rank = default_dt_rank(d_model) if dt_rank == "auto" else dt_rank
        self.bcdt_norm_eps = mixer_rms_eps if use_bcdt_norm else None
        self.scan: Scan = scan

        def linear(fan_in: int, out: int, init: nnx.Initializer, *, use_bias: bool = False) -> nnx.Linear:
            return nnx.Linear(fan_in, out, use_bias=use_bias, kernel_init=init, dtype=self.dtype, rngs=rngs)

        projection = initializers.projection
        self.in_proj = linear(d_model, 2 * self.d_inner, projection(d_model), use_bias=bias)
        self.selective = selective
        if selective:
            self.x_proj = linear(self.d_inner, self.dt_rank + 2 * d_state, projection(self.d_inner))
            # dt_proj's bias is `dt_bias`: the scan adds it, in float32, before the softplus.
            self.dt_proj = linear(
                self.dt_rank, self.d_inner, initializers.dt_projection(self.dt_rank, dt_init, dt_scale)
            )  # fmt: skip
        else:
            self.B = nnx.Param(jnp.ones((self.d_inner, d_state), jnp.float32))
            self.C = nnx.Param(initializers.constant_C(rngs.params(), (self.d_inner, d_state)))
        self.out_proj = linear(self.d_inner, d_model, projection(self.d_inner, out_proj_scale), use_bias=bias)
        channels = (self.d_inner,)
        self.conv_weight = nnx.Param(projection(d_conv)(rngs.params(), (d_conv, *channels)))
        self.conv_bias = nnx.Param(projection(d_conv)(rngs.params(), channels)) if conv_bias else None
        self.dt_bias = nnx.Param(initializers.dt_bias(dt_min, dt_max, dt_init_floor)(rngs.params(), channels))
        self.A_log = nnx.Param(initializers.a_log(rngs.params(), (*channels, d_state)))
        self.D = nnx.Param(jnp.ones(channels, jnp.float32))

    def __call__(
        self,
        x: jax.Array,
        *,
        state: MambaState | None = None,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        return_state: bool = False,
    ) -> Any:
        """Apply the block to a sequence, or to the next piece of one.

        Args:
            x: (b, l, d_model), l of 0 or more.
            state: what an earlier call returned, or `init_state`; it is not changed. None: the sequence begins.
            attention_mask: (b, l), 1 for tokens and 0 for padding, which may stand anywhere and changes nothing.
            segment_ids: (b, l) int, the document of each token. The convolution and the state start afresh wherever the
                id changes, and at the first token if its id is not the state's.
            return_state: also return the state after x.

        Returns:
            (b, l, d_model), zeros at padding; with `return_state` a pair of it and the new state.

        Raises:
            ValueError: a shape or dtype is wrong.
        """
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"`x` must have shape (batch, length, {self.d_model}), got {x.shape}")
        rows = arrange(x.shape[:2], attention_mask, segment_ids, state)
        y, new_state = self.mix(rows.pack(x), rows, state, return_state=return_state)
        y = rows.unpack(y)
        return y if new_state is None else (y, new_state)

    def mix(
        self, x: jax.Array, rows: Rows, state: MambaState | None, *, return_state: bool
    ) -> tuple[jax.Array, MambaState | None]:
        """`__call__` for rows that are packed already: (b, l, d_model) -> same, and the new state if asked for."""
        x, z = self._project_in(x)
        window, h = self._start(x.shape[0], rows, state)
        conv_bias = None if self.conv_bias is None else self.conv_bias[...]
        u = jax.nn.silu(causal_conv(x, self.conv_weight[...], conv_bias, window=window, document=rows.document))
        delta, B, C = self._select(u)
        y, last_h = self._scan(u, rows.where_token(delta, _NO_STEP), B, C, z, h, rows)
        y = self.out_proj(y)
        if not return_state:
            return y, None
        wide = state_dtype(self.dtype)
        segment_id, has_segment = (self.init_state(x.shape[0]) if state is None else state).segments()
        last = advance_window(window, x, self.d_conv, lengths=rows.lengths, document=rows.document)
        return y, MambaState(
            conv=last.astype(wide),
            ssm=last_h.astype(wide),
            segment_id=segment_id if rows.segment_id is None else rows.segment_id,
            has_segment=has_segment if rows.has_segment is None else rows.has_segment,
        )

    def init_state(self, batch: int) -> MambaState:
        """The state before the first token of `batch` rows: zeros."""
        return zero_state((batch,), self.d_inner, self.d_state, self.d_conv, self.dtype)

    def _start(
        self, batch: int, rows: Rows, state: MambaState | None
    ) -> tuple[jax.Array | None, jax.Array | None]:  # fmt: skip
        """Window (b, w-1, d) and h (b, d, n) that the rows begin with, zero where a new document begins."""
        if state is None:
            return None, None
        for name, got, want in (
            ("state.conv", state.conv.shape, (batch, self.d_conv - 1, self.d_inner)),
            ("state.ssm", state.ssm.shape, (batch, self.d_inner, self.d_state)),
        ):
            if got != want:
                raise ValueError(f"`{name}` must have shape {want}, got {got}")
        if rows.afresh is None:
            return state.conv, state.ssm
        afresh = rows.afresh[:, None, None]
        return jnp.where(afresh, 0, state.conv), jnp.where(afresh, 0, state.ssm)

    def _project_in(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x and z (b, l, d_inner), in one product whose two results are apart before it: so channels can be split.

        Halving its (b, l, 2 d_inner) afterwards would move half of each activation between the devices that share them.
        """
        kernel, bias = self.in_proj.kernel[...], self.in_proj.bias
        kernel = kernel.reshape(self.d_model, 2, self.d_inner).astype(self.dtype)
        xz = jnp.einsum("bld,dtc->bltc", x.astype(self.dtype), kernel)
        if bias is not None:
            xz = xz + bias[...].reshape(2, self.d_inner).astype(self.dtype)
        return xz[:, :, 0], xz[:, :, 1]

    def _select(self, u: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What makes the scan selective: delta (b, l, d), without its bias, and B and C (b, l, n), from u (b, l, d).

        In a block that is not selective delta is zero, and B and C are (d, n).
        """
        if not self.selective:
            return jnp.zeros_like(u), self.B[...], self.C[...]
        dt, B, C = jnp.split(self.x_proj(u), [self.dt_rank, self.dt_rank + self.d_state], axis=-1)
        if self.bcdt_norm_eps is not None:
            dt, B, C = (rms_norm(part, eps=self.bcdt_norm_eps) for part in (dt, B, C))
        return self.dt_proj(dt), B, C

    def _scan(
        self,
        u: jax.Array,
        delta: jax.Array,
        B: jax.Array,
        C: jax.Array,
        z: jax.Array,
        h: jax.Array | None,
        rows: Rows,
    ) -> tuple[jax.Array, jax.Array]:
        """Gated y (b, l, d) and the last state (b, d, n); a single token goes through the step function instead."""
        A = -jnp.exp(self.A_log[...])
        D, dt_bias = self.D[...], self.dt_bias[...]
        if u.shape[1] == 1:
            channels = (u.shape[0], *A.shape)
            if h is None:
                h = jnp.zeros(channels, state_dtype(self.dtype))
            # To the step function, constants are as many groups as there are channels.
            B, C = (m[:, 0] if self.selective else jnp.broadcast_to(m, channels) for m in (B, C))
            y, last_h = selective_state_update(
                h, u[:, 0], delta[:, 0], A, B, C, D, z[:, 0], dt_bias, dt_softplus=True
            )  # fmt: skip
            return y[:, None], last_h
        return selective_scan(
            u, delta, A, B, C, D, z, dt_bias, initial_state=h, segment_ids=rows.document, scan=self.scan
        )  # fmt: skip
