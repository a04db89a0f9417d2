"""Causal depthwise convolution over time: a whole sequence, a piece of one, packed documents, ragged rows.

Shapes: b batch, l length, d channels, w width of the convolution.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mamba_jax.norm import along_last


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    window: jax.Array | None = None,
    document: jax.Array | None = None,
) -> jax.Array:
    """y_t = bias + sum_k weight[k] x_{t-(w-1)+k}, each channel by itself.

    Args:
        x: (b, l, d).
        weight: (w, d); weight[w-1] meets the present token. The sum is in float32 at least.
        bias: (d,), or None.
        window: (b, w-1, d), the inputs before x; zeros if None.
        document: (b, l) int, the number of the document that each token is in. Inputs of another document count as
            zero. A number is used for one document only, and the window belongs to the first token's.

    Returns:
        (b, l, d) in x's dtype.

    Source: `causal_conv1d_fn` without its activation. Shifted products are what XLA fuses into one pass over x; its own
    grouped convolution is far slower on a CPU.
    """
    width, length = weight.shape[0], x.shape[1]
    extended = _extend(x, window, width)
    y = jnp.zeros(x.shape, weight.dtype) if bias is None else along_last(bias, x.shape)
    for k in range(width):
        tap = extended[:, k : k + length]
        if document is not None and k < width - 1:
            same = _document_of_inputs(document, width)[:, k : k + length] == document
            tap = jnp.where(same[..., None], tap, 0)
        y = y + tap * along_last(weight[k], x.shape)
    return y.astype(x.dtype)


def window_from_left(
    x: jax.Array,
    width: int,
    axis_name: str,
    *,
    window: jax.Array | None = None,
    document: jax.Array | None = None,
) -> jax.Array:
    """The window of this device's part of a sequence: the last inputs of the part before it.

    Under `shard_map`, with the length split over the devices of a mesh axis, in order.

    Args:
        x: (b, l, d), this device's part, l of w-1 or more.
        width: w.
        axis_name: the mesh axis.
        window: (b, w-1, d), the inputs before the whole sequence; zeros if None.
        document: (b, l) int, this device's part of what `causal_conv` takes. Inputs of another document than the
            part's first token are zero.

    Returns:
        (b, w-1, d) in x's dtype.
    """
    start = x.shape[1] - (width - 1)
    to_the_right = [(i, i + 1) for i in range(lax.axis_size(axis_name) - 1)]
    inputs = lax.ppermute(x[:, start:], axis_name, to_the_right)  # the first part receives zeros
    if document is not None:
        inputs_of = lax.ppermute(document[:, start:], axis_name, to_the_right)
        inputs = jnp.where((inputs_of == document[:, :1])[..., None], inputs, 0)
    if window is None:
        return inputs
    return jnp.where(lax.axis_index(axis_name) == 0, window.astype(x.dtype), inputs)


def advance_window(
    window: jax.Array | None,
    x: jax.Array,
    width: int,
    *,
    lengths: jax.Array | None = None,
    document: jax.Array | None = None,
) -> jax.Array:
    """The window that `causal_conv` needs for the tokens after x: the last w-1 inputs of each row.

    Args:
        window: (b, w-1, d), the inputs before x; zeros if None.
        x: (b, l, d), l of 0 or more.
        width: w.
        lengths: (b,) int, how many tokens from the front of a row count; all of them if None.
        document: as in `causal_conv`. Inputs that are not of a row's last document become zero.

    Returns:
        (b, w-1, d) in x's dtype.
    """
    size, length = width - 1, x.shape[1]
    extended = _extend(x, window, width)
    inputs_of = None if document is None else _document_of_inputs(document, width)
    if lengths is None:
        last = extended[:, length:]
        last_of = None if inputs_of is None else inputs_of[:, length:]
    else:
        index = lengths[:, None] + jnp.arange(size)
        last = jnp.take_along_axis(extended, index[..., None], axis=1)
        last_of = None if inputs_of is None else jnp.take_along_axis(inputs_of, index, axis=1)
    if last_of is None:
        return last
    # The newest input is the row's last token, or the window's own newest entry where a row has no token.
    return jnp.where((last_of == last_of[:, -1:])[..., None], last, 0)


def _extend(x: jax.Array, window: jax.Array | None, width: int) -> jax.Array:
    """x with the w-1 inputs before it: (b, w-1+l, d)."""
    if window is None:
        return jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    return jnp.concatenate([window.astype(x.dtype), x], axis=1)


def _document_of_inputs(document: jax.Array, width: int) -> jax.Array:
    """Document of each row of `_extend`: (b, w-1+l)."""
    return jnp.pad(document, ((0, 0), (width - 1, 0)), mode="edge")
