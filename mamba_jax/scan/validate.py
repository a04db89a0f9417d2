"""Checks of the scan's arguments: each mistake gives one line that says what was given and what is wanted."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def check_arguments(*, u, delta, A, B, C, D, z, delta_bias, initial_state, segment_ids) -> None:
    """Raise ValueError for the first argument of `selective_scan` that is wrong."""
    if u.ndim != 3:
        raise ValueError(f"`u` has shape {u.shape}; expected (b, l, d): batch, length, channels")
    b, l, d = u.shape
    if A.ndim != 2 or A.shape[0] != d:
        raise ValueError(f"`A` has shape {A.shape}; expected (d, n) with d = {d}, the channels of `u`")
    n = A.shape[1]
    for name, v in (("delta", delta), ("z", z)):
        check_shape(name, v, (b, l, d), "(b, l, d), the shape of `u`")
    for name, m in (("B", B), ("C", C)):
        _check_matrix(name, m, b, l, d, n)
    for name, v in (("D", D), ("delta_bias", delta_bias)):
        check_shape(name, v, (d,), "(d,)")
    check_shape("initial_state", initial_state, (b, d, n), "(b, d, n)")
    check_shape("segment_ids", segment_ids, (b, l), "(b, l)")
    for name, v in (("u", u), ("delta", delta), ("z", z), ("D", D), ("delta_bias", delta_bias)):
        check_floating(name, v)
    check_floating("A", A, or_complex=True)
    is_complex = jnp.iscomplexobj(A)
    for name, v in (("B", B), ("C", C), ("initial_state", initial_state)):
        check_floating(name, v, or_complex=is_complex)
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"`segment_ids` has dtype {segment_ids.dtype}; expected integers")


def check_shape(name: str, v: jax.Array | None, shape: tuple[int, ...], meaning: str) -> None:
    """Raise ValueError if `v` is there and has another shape."""
    if v is not None and v.shape != shape:
        raise ValueError(f"`{name}` has shape {v.shape}; expected {shape}: {meaning}")


def check_floating(name: str, v: jax.Array | None, *, or_complex: bool = False) -> None:
    """Raise ValueError if `v` is there and is not of real floating dtype (or complex, where that may be)."""
    if v is None or jnp.issubdtype(v.dtype, jnp.floating) or (or_complex and jnp.iscomplexobj(v)):
        return
    only_with = (
        "; a complex one needs a complex `A`" if jnp.iscomplexobj(v) and name in ("B", "C", "initial_state") else ""
    )
    raise ValueError(
        f"`{name}` has dtype {v.dtype}; expected a floating dtype{' or complex' if or_complex else ''}{only_with}"
    )


def _check_matrix(name: str, m: jax.Array, b: int, l: int, d: int, n: int) -> None:
    """B or C: (b, l, n), (b, l, g, n) with g dividing d, or constant (d, n)."""
    groups = m.shape[2] if m.ndim == 4 else 1
    wanted = {2: (d, n), 3: (b, l, n), 4: (b, l, groups, n)}.get(m.ndim)
    if m.shape != wanted:
        raise ValueError(
            f"`{name}` has shape {m.shape}; expected (b, l, n) = {(b, l, n)}, (b, l, g, n) with g groups, "
            f"or constant (d, n) = {(d, n)}"
        )
    if groups < 1 or d % groups:
        raise ValueError(f"`{name}` has {groups} groups; expected a number that divides the {d} channels of `u`")
