"""What differs between the versions of jax that the kernels run on (0.10.2 to 0.12), in one place."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

# Before 0.11.2 the interpreter of Mosaic GPU kernels misses races and mishandles copies that reach out of bounds.
HAS_MOSAIC = jax.__version_info__ >= (0, 11, 2)


def triton_params(num_warps: int, num_stages: int) -> triton.CompilerParams:
    """Compiler parameters that send a `pl.pallas_call` to Triton; without any, jax 0.10 sends it to Mosaic GPU."""
    return triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def accept_triton_deprecation() -> None:
    """Silence jax 0.11's notice that the Triton backend will go: it is aimed at us, not at the callers of a scan.

    It is raised while a program is lowered, where nothing of ours is on the stack, so a filter must be left behind.
    """
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)


def load(ref, valid: jax.Array | None = None) -> jax.Array:
    """What the reference holds; zeros, and nothing is read, if the scalar `valid` is False."""
    return ref[...] if valid is None else triton.load(ref, mask=jnp.broadcast_to(valid, ref.shape), other=0)


def store(ref, values: jax.Array, valid: jax.Array | None = None) -> None:
    """Write the values, cast to the reference's dtype, unless the scalar `valid` is False."""
    if valid is None:
        ref[...] = values.astype(ref.dtype)
    else:
        triton.store(ref, values.astype(ref.dtype), mask=jnp.broadcast_to(valid, values.shape))


_at_lowering_p = Primitive("at_lowering")


def at_lowering(x: jax.Array, action: Callable[[], None]) -> jax.Array:
    """x itself; `action` is called when a program that needs it is lowered.

    Every branch of `lax.platform_dependent` is traced, but only the branch for the platform at hand is lowered: what
    must be said, refused or prepared there and nowhere else goes into such an action.
    """
    return _at_lowering_p.bind(x, action=action)


def _lower(ctx: mlir.LoweringRuleContext, x, *, action: Callable[[], None]):
    action()
    return [x]


def _run(x: jax.Array, *, action: Callable[[], None]) -> jax.Array:
    action()
    return x


_at_lowering_p.def_abstract_eval(lambda x, *, action: x)
_at_lowering_p.def_impl(_run)
mlir.register_lowering(_at_lowering_p, _lower)
batching.defvectorized(_at_lowering_p)
