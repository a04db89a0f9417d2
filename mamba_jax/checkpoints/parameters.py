"""Which tensor of a checkpoint is which parameter of `MambaLM`, and how each is laid out in both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, cast

import numpy as np

from mamba_jax.checkpoints.configs import Format
from mamba_jax.checkpoints.tensors import FLOATS, Tensor, aligned_empty
from mamba_jax.config import MambaConfig

Layout = Literal["same", "transposed", "convolution"]
HEAD = "lm_head.weight"
_EMBEDDINGS: dict[Format, str] = {"hf": "backbone.embeddings.weight", "original": "backbone.embedding.weight"}
_LAYER = "backbone.layers.{}."

# PyTorch's linear layers hold (out, in), ours (in, out); its depthwise convolution (d, 1, w), ours (w, d).
_TO_OURS: dict[Layout, Callable[[np.ndarray], np.ndarray]] = {
    "same": lambda array: array,
    "transposed": lambda array: array.T,
    "convolution": lambda array: array[:, 0].T,
}
_TO_THEIRS: dict[Layout, Callable[[np.ndarray], np.ndarray]] = {
    "same": lambda array: array,
    "transposed": lambda array: array.T,
    "convolution": lambda array: array.T[:, None],
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of the model: its path in the NNX state, and the tensors of a checkpoint that make it up."""

    path: tuple[str, ...]
    names: tuple[str, ...]  # of the tensors: one for each layer, or a single one
    shape: tuple[int, ...]  # of each tensor in the checkpoint
    layout: Layout
    stacked: bool  # whether the layers are stacked in front


def parameters(config: MambaConfig, format: Format) -> list[Parameter]:
    """Every parameter of the model, embedding first. A tied head is none."""
    d_model, n_state = config.d_model, config.d_state
    d_inner, rank = cast(int, config.d_inner), cast(int, config.dt_rank)  # derived by the record where not given
    embedding = (config.padded_vocab_size, d_model)

    def single(path: tuple[str, ...], name: str, shape: tuple[int, ...], layout: Layout = "same") -> Parameter:
        return Parameter(path, (name,), shape, layout, stacked=False)

    def stacked(path: tuple[str, ...], name: str, shape: tuple[int, ...], layout: Layout = "same") -> Parameter:
        names = tuple(_LAYER.format(layer) + name for layer in range(config.n_layer))
        return Parameter(("layers", *path), names, shape, layout, stacked=True)

    found = [
        single(("embedding",), _EMBEDDINGS[format], embedding),
        stacked(("norm", "scale"), "norm.weight", (d_model,)),
        stacked(("mixer", "in_proj", "kernel"), "mixer.in_proj.weight", (2 * d_inner, d_model), "transposed"),
        stacked(("mixer", "conv_weight"), "mixer.conv1d.weight", (d_inner, 1, config.d_conv), "convolution"),
        stacked(("mixer", "x_proj", "kernel"), "mixer.x_proj.weight", (rank + 2 * n_state, d_inner), "transposed"),
        stacked(("mixer", "dt_proj", "kernel"), "mixer.dt_proj.weight", (d_inner, rank), "transposed"),
        stacked(("mixer", "dt_bias"), "mixer.dt_proj.bias", (d_inner,)),
        stacked(("mixer", "A_log"), "mixer.A_log", (d_inner, n_state)),
        stacked(("mixer", "D"), "mixer.D", (d_inner,)),
        stacked(("mixer", "out_proj", "kernel"), "mixer.out_proj.weight", (d_model, d_inner), "transposed"),
    ]
    if config.conv_bias:
        found.append(stacked(("mixer", "conv_bias"), "mixer.conv1d.bias", (d_inner,)))
    if config.bias:
        found.append(stacked(("mixer", "in_proj", "bias"), "mixer.in_proj.bias", (2 * d_inner,)))
        found.append(stacked(("mixer", "out_proj", "bias"), "mixer.out_proj.bias", (d_model,)))
    found.append(single(("norm_f", "scale"), "backbone.norm_f.weight", (d_model,)))
    if not config.tie_embeddings:
        found.append(single(("lm_head", "kernel"), HEAD, embedding, "transposed"))
    return found


def rename_embedding(tensors: Mapping[str, Tensor], format: Format) -> dict[str, Tensor]:
    """The tensors with the embedding under this format's name: the two differ in an s, and some files mix them."""
    named = dict(tensors)
    for other in _EMBEDDINGS.values():
        if other in named and _EMBEDDINGS[format] not in named:
            named[_EMBEDDINGS[format]] = named.pop(other)
    return named


def check_tensors(
    wanted: list[Parameter], tensors: Mapping[str, Tensor], config: MambaConfig, problems: list[str]
) -> None:
    """A line in `problems` for each tensor that is missing, unknown, misshapen or not of floating-point numbers."""
    shapes = {name: parameter.shape for parameter in wanted for name in parameter.names}
    tied = config.tie_embeddings and HEAD in tensors
    if tied:
        shapes[HEAD] = wanted[0].shape
    problems += [f"tensor `{name}` is missing" for name in shapes if name not in tensors]
    problems += [f"tensor `{name}` is unknown" for name in tensors if name not in shapes]
    misshapen = [name for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape]
    problems += [f"tensor `{name}` has shape {tensors[name].shape} instead of {shapes[name]}" for name in misshapen]
    problems += [
        f"tensor `{name}` holds {tensors[name].dtype}, not floating-point numbers"
        for name in shapes
        if name in tensors and tensors[name].dtype not in FLOATS
    ]
    embedding = wanted[0].names[0]
    if tied and embedding in tensors and not {HEAD, embedding} & set(misshapen):
        head, rows = tensors[HEAD].read(), tensors[embedding].read()
        if not np.array_equal(head, rows):
            problems.append(f"tensor `{HEAD}` differs from `{embedding}`, but the config says that they are tied")


def fill(
    parameter: Parameter, tensors: Mapping[str, Tensor], index: tuple[slice, ...], on_read: Callable[[str], None]
) -> np.ndarray:
    """The part `index` of a parameter, float32, read tensor by tensor into an array that is made once."""
    shape = np.broadcast_to(np.float32(0), our_shape(parameter))[index].shape
    out = aligned_empty(shape, np.dtype(np.float32))
    names, inner = (parameter.names[index[0]], index[1:]) if parameter.stacked else (parameter.names, index)
    for part, name in zip(out if parameter.stacked else (out,), names, strict=True):
        part[...] = _TO_OURS[parameter.layout](tensors[name].read())[inner]
        on_read(name)
    return out


def our_shape(parameter: Parameter) -> tuple[int, ...]:
    """The parameter's shape in the model."""
    shape = _TO_OURS[parameter.layout](np.broadcast_to(np.float32(0), parameter.shape)).shape
    return (len(parameter.names), *shape) if parameter.stacked else shape


def take_apart(parameter: Parameter, value: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The checkpoint's tensors of a parameter, in the order of `parameter.names`."""
    for layer in value if parameter.stacked else (value,):
        yield _TO_THEIRS[parameter.layout](layer).astype(dtype)
