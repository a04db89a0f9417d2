"""The sizes and options of a Mamba language model, in one frozen record."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

# Layers and width of the published models (arXiv 2312.00752, table 12, and the `state-spaces/mamba-*` checkpoints).
_PRESET_SIZES = {
    "mamba-130m": (24, 768),
    "mamba-370m": (48, 1024),
    "mamba-790m": (48, 1536),
    "mamba-1.4b": (48, 2048),
    "mamba-2.8b": (64, 2560),
}

Scan = Literal["auto", "sequential", "associative", "pallas"]
DtInit = Literal["random", "constant"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
RematPolicy = Literal["nothing", "dots"]


def default_d_inner(d_model: int, expand: float) -> int:
    """Width inside a block: expand * d_model, as `mamba_ssm.Mamba` has it."""
    return int(expand * d_model)


def default_dt_rank(d_model: int) -> int:
    """Rank of the projection that makes Delta: ceil(d_model / 16), as `mamba_ssm.Mamba` has it."""
    return math.ceil(d_model / 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Sizes and options of `MambaLM`, under the names that `mamba_ssm` gives them.

    `d_inner` and `dt_rank` may be left to be derived; once the record exists both are whole numbers.
    The defaults are mamba-130m's; `preset` gives the other published models.

    Raises:
        ValueError: a field is out of its range; the message names it in backticks.
    """

    vocab_size: int = 50277
    d_model: int = 768
    n_layer: int = 24
    d_state: int = 16
    d_conv: int = 4
    expand: float = 2
    d_inner: int | None = None  # None: expand * d_model
    dt_rank: int | Literal["auto"] = "auto"  # "auto": ceil(d_model / 16)

    dt_min: float = 0.001  # range of softplus(dt_bias) at the start
    dt_max: float = 0.1
    dt_init: DtInit = "random"  # dt_proj's weight: uniform, or "constant"
    dt_scale: float = 1.0
    dt_init_floor: float = 1e-4
    initializer_range: float = 0.02  # standard deviation of the embedding
    rescale_prenorm_residual: bool = True  # out_proj starts smaller by sqrt(n_layer)

    selective: bool = True  # False: B, C and Delta are learned constants, the same at every step
    conv_bias: bool = True
    bias: bool = False  # of in_proj and out_proj
    use_bcdt_norm: bool = False  # FalconMamba: B, C and dt pass through an RMSNorm without weights
    mixer_rms_eps: float = 1e-6  # of that norm

    norm_eps: float = 1e-5
    residual_in_fp32: bool = True
    tie_embeddings: bool = True
    pad_vocab_size_multiple: int = 8

    scan: Scan = "auto"
    dtype: Dtype = "float32"  # of activations; parameters are float32 always
    remat: bool = False  # keep only each layer's input for the backward pass
    remat_policy: RematPolicy = "nothing"  # what else remat keeps: "nothing", or "dots", the results of matrix products

    def __post_init__(self) -> None:
        # The sizes first: the others are derived from them.
        for name in ("vocab_size", "d_model", "n_layer", "d_state", "d_conv", "pad_vocab_size_multiple"):
            _check_positive_integer(name, getattr(self, name))
        _check_positive("expand", self.expand)
        if self.d_inner is None:
            object.__setattr__(self, "d_inner", default_d_inner(self.d_model, self.expand))
        if self.dt_rank == "auto":
            object.__setattr__(self, "dt_rank", default_dt_rank(self.d_model))
        _check_positive_integer("d_inner", self.d_inner)
        _check_positive_integer("dt_rank", self.dt_rank, " or 'auto'")

        for name in ("dt_min", "dt_max", "dt_scale", "dt_init_floor", "mixer_rms_eps", "norm_eps"):
            _check_positive(name, getattr(self, name))
        if self.use_bcdt_norm and not self.selective:
            raise ValueError("`use_bcdt_norm` needs `selective`: constant B, C and Delta have no norms")
        if self.dt_min > self.dt_max:
            raise ValueError(f"`dt_min` is {self.dt_min}, above `dt_max`, {self.dt_max}")
        if not self.initializer_range >= 0:
            raise ValueError(f"`initializer_range` must not be negative, got {self.initializer_range!r}")
        for name, choices in (("dt_init", DtInit), ("scan", Scan), ("dtype", Dtype), ("remat_policy", RematPolicy)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"`{name}` must be one of {', '.join(get_args(choices))}, got {getattr(self, name)!r}")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to a multiple of `pad_vocab_size_multiple`."""
        return math.ceil(self.vocab_size / self.pad_vocab_size_multiple) * self.pad_vocab_size_multiple

    @classmethod
    def preset(cls, name: str, **changes: Any) -> MambaConfig:
        """Configuration of a published model: mamba-130m, mamba-370m, mamba-790m, mamba-1.4b or mamba-2.8b.

        Args:
            name: which one; a `state-spaces/` in front is allowed.
            **changes: fields to set otherwise; the derived sizes follow.

        Raises:
            ValueError: no such model, or a changed field is out of its range.
        """
        key = name.removeprefix("state-spaces/")
        if key not in _PRESET_SIZES:
            raise ValueError(f"`name` must be one of {', '.join(_PRESET_SIZES)}, got {name!r}")
        n_layer, d_model = _PRESET_SIZES[key]
        fields: dict[str, Any] = {"n_layer": n_layer, "d_model": d_model}
        return cls(**(fields | changes))

    def replace(self, **changes: Any) -> MambaConfig:
        """A copy with some fields changed, in which sizes that had their derived values are derived again.

        `dataclasses.replace` would keep the old `d_inner` and `dt_rank` beside a new `d_model`.

        Raises:
            ValueError: a changed field is out of its range.
        """
        derived: dict[str, Any] = {}
        if self.d_inner == default_d_inner(self.d_model, self.expand):
            derived["d_inner"] = None
        if self.dt_rank == default_dt_rank(self.d_model):
            derived["dt_rank"] = "auto"
        return dataclasses.replace(self, **(derived | changes))


def _check_positive_integer(name: str, value: object, alternative: str = "") -> None:
    # bool is an int to Python, but `n_layer=True` is a mistake.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` must be a whole number of at least 1{alternative}, got {value!r}")


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be a number above 0, got {value!r}")
