"""The portable kernels on a caller's arrays.

Channels are split into groups and padded to whole blocks; sums that the kernels leave open are closed. A padded channel
or state has A = 0, u = 0, B = 0 and C = 0: it stays 0, and so do its gradients. Nothing is padded where sizes fit.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arguments
from pallas_kernels.portable.backward import backward as run_backward
from pallas_kernels.portable.forward import forward as run_forward
from pallas_kernels.portable.stages import Plan, Values
from pallas_kernels.tiling import Sizes, Tiling


def forward(
    arguments: Arguments, tiling: Tiling, *, delta_softplus: bool, keep_states: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """y (b, l, d), the last state (b, d, n), and the states before each chunk (b, chunks, n, d) if to be kept."""
    layout = _Layout(arguments.sizes, tiling)
    plan = _plan(arguments, layout, delta_softplus)
    results = run_forward(layout.values(arguments), plan, keep_states=keep_states)
    boundaries = None if results.boundaries is None else layout.from_sequence(results.boundaries)
    return layout.from_sequence(results.y), layout.from_state(results.last_state), boundaries


def backward(
    arguments: Arguments,
    boundaries: jax.Array,
    dy: jax.Array,
    dlast: jax.Array,
    tiling: Tiling,
    *,
    delta_softplus: bool,
) -> Arguments:
    """The gradient of each argument, in its dtype; None for `reset`."""
    layout = _Layout(arguments.sizes, tiling)
    plan = _plan(arguments, layout, delta_softplus)
    gradients = run_backward(
        layout.values(arguments),
        layout.sequence(boundaries),
        layout.sequence(dy),
        layout.state(dlast),
        plan,
    )

    n = arguments.sizes.n

    def projection(constant: jax.Array | None, part: slice, argument: jax.Array) -> jax.Array:
        if constant is None:  # over channel blocks, always in the same order: (b, l, g, n)
            total = jnp.swapaxes(gradients.projections[..., part].sum(2), 1, 2)
        else:
            total = layout.from_state(constant.sum(0))
        return total.reshape(argument.shape).astype(argument.dtype)

    return Arguments(
        u=layout.from_sequence(gradients.u),
        delta=layout.from_sequence(gradients.delta),
        A=layout.from_state(gradients.A.sum(0)),
        B=projection(gradients.B, slice(None, n), arguments.B),
        C=projection(gradients.C, slice(-n, None), arguments.C),
        D=layout.from_sequence(gradients.D.sum(0)),
        z=None if gradients.z is None else layout.from_sequence(gradients.z),
        delta_bias=layout.from_sequence(gradients.delta_bias.sum(0)),
        initial_state=layout.from_state(gradients.initial_state),
        reset=None,
    )


def _plan(arguments: Arguments, layout: _Layout, delta_softplus: bool) -> Plan:
    return Plan(
        sizes=layout.padded,
        tiling=layout.tiling,
        wide=arguments.A.dtype,
        constant_B=arguments.constant_B,
        constant_C=arguments.constant_C,
        softplus=delta_softplus,
    )


@dataclasses.dataclass(frozen=True)
class _Layout:
    """From a caller's arrays to the kernels' and back."""

    sizes: Sizes
    tiling: Tiling

    @property
    def padded(self) -> Sizes:
        """The sizes that the kernels see."""
        s = self.sizes
        return dataclasses.replace(s, d=s.g * self.tiling.blocks(s) * self.tiling.channels)

    def values(self, arguments: Arguments) -> Values:
        """The kernels' inputs. B and C are small, and Triton reads their entries one by one: they come wide."""
        wide = arguments.A.dtype

        def constant(matrix: jax.Array) -> jax.Array:
            return self.state(matrix.reshape(self.sizes.d, self.sizes.n))

        return Values(
            u=self.sequence(arguments.u),
            delta=self.sequence(arguments.delta),
            A=constant(arguments.A),
            B=constant(arguments.B) if arguments.constant_B else arguments.B.astype(wide),
            C=constant(arguments.C) if arguments.constant_C else arguments.C.astype(wide),
            D=self.sequence(arguments.D),
            z=None if arguments.z is None else self.sequence(arguments.z),
            delta_bias=self.sequence(arguments.delta_bias),
            initial_state=self.state(arguments.initial_state),
            reset=None if arguments.reset is None else arguments.reset.astype(jnp.int32),
        )

    def sequence(self, array: jax.Array) -> jax.Array:
        """(..., d) -> (..., g, r)"""
        grouped = array.reshape(*array.shape[:-1], self.sizes.g, self.sizes.r)
        return _padded(grouped, -1, self.padded.r)

    def from_sequence(self, array: jax.Array) -> jax.Array:
        """(..., g, r) -> (..., d)"""
        return array[..., : self.sizes.r].reshape(*array.shape[:-2], self.sizes.d)

    def state(self, array: jax.Array) -> jax.Array:
        """(..., d, n) -> (..., n, g, r)"""
        return self.sequence(jnp.swapaxes(array, -1, -2))

    def from_state(self, array: jax.Array) -> jax.Array:
        """(..., n, g, r) -> (..., d, n)"""
        return jnp.swapaxes(self.from_sequence(array), -1, -2)


def _padded(array: jax.Array, axis: int, size: int) -> jax.Array:
    """Zeros behind, up to `size`."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths) if array.shape[axis] < size else array
