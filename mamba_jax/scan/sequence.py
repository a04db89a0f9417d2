"""The selective scan over a length that is split over devices: sequence parallelism.

The recurrence is linear, so a part's effect on all that follows is one pair (decay, state), both (b, d, n):

    h_last = decay * h_before + state,   decay = exp(A sum_t Delta_t),   state = h_last from zero

Each device scans its part from zero for that pair alone, y is not asked for; the pairs are combined in order across
devices; then each part is scanned from its true state. Nothing is divided by a decay: strong decay underflows to zero.

The other way, to keep y of the scan from zero and to add C_t exp(A sum_{s<=t} Delta_s) h_before, is not cheaper: on 2
cores at (1, 1024, 1536, 16) float32 that took 31 ms, and 122 ms with its gradient; a scan for its last state alone 18
and 79 ms (2026-12-02).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from mamba_jax.scan.api import Scan, checked_inputs, run_form
from mamba_jax.scan.associative import combine
from mamba_jax.scan.inputs import ScanInputs

AxisName = str | tuple[str, ...]


def sequence_parallel_scan(
    u: jax.Array,
    delta: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    z: jax.Array | None = None,
    delta_bias: jax.Array | None = None,
    *,
    axis_name: AxisName,
    delta_softplus: bool = False,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_last_state: bool = False,
    scan: Scan = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`selective_scan` of a sequence whose length is split over the devices of a mesh axis, in order.

    To be called under `jax.shard_map`, where each device holds an equally long part of what has a length:

        P = jax.sharding.PartitionSpec
        def scan_parts(u, delta, A, B, C):
            return sequence_parallel_scan(u, delta, A, B, C, axis_name="seq")
        whole, none = P(None, "seq"), P()
        y = jax.shard_map(scan_parts, mesh=mesh, in_specs=(whole, whole, none, whole, whole), out_specs=whole)(...)

    Between devices pass ceil(log2 p) + 1 messages of two states (b, d, n) each, for p parts: their size does not depend
    on the length. The work is that of two scans, one of them for its last state alone.

    Source: the parallel scan over pairs of the paper's section 3.3.2 (Blelloch 1990), with devices for elements.

    Args:
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, scan: as in `selective_scan`, of this device's part.
        axis_name: the mesh axis, or axes, over which the length is split.
        initial_state: (b, d, n), the state before the whole sequence, the same on each device of the axis.
        segment_ids: (b, l) integers of this part; documents may run over the border between two parts.
        return_last_state: whether to return the state after the whole sequence as well.

    Returns:
        y (b, l, d) of this part; with `return_last_state` a pair of it and last_state (b, d, n), the same on each
        device of the axis. Differentiable as the form is. With `scan="pallas"` (or "auto" on a GPU) `shard_map` needs
        check_vma=False, and then gradients must be taken outside of it, as its own rules have it for any sum over
        devices.

    Raises:
        ValueError, NotImplementedError: as `selective_scan`.
    """
    inputs = checked_inputs(
        scan, u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias, initial_state=initial_state,
        segment_ids=segment_ids, delta_softplus=delta_softplus,
    )  # fmt: skip
    part, parts = lax.axis_index(axis_name), lax.axis_size(axis_name)
    if segment_ids is not None:
        inputs = dataclasses.replace(inputs, reset=_with_borders(inputs.reset, jnp.asarray(segment_ids), axis_name))
    # The first part begins with the true state at once: a decay for it is never needed.
    start = jnp.where(part == 0, inputs.initial_state, 0)
    _, state = run_form(scan, dataclasses.replace(inputs, initial_state=start))
    before = jnp.where(part == 0, start, state_before(total_decay(inputs), state, axis_name))
    y, state = run_form(scan, dataclasses.replace(inputs, initial_state=before))
    if not return_last_state:
        return y
    return y, lax.psum(jnp.where(part == parts - 1, state, 0), axis_name)


def total_decay(inputs: ScanInputs) -> jax.Array:
    """(b, d, n), the product of exp(Delta_t A) over the whole part; zero where a document begins in it."""
    decay = jnp.exp(jnp.sum(_step_sizes(inputs), axis=1)[..., None] * inputs.A)
    return decay if inputs.reset is None else jnp.where(jnp.any(inputs.reset, axis=1)[:, None, None], 0, decay)


def state_before(decay: jax.Array, state: jax.Array, axis_name: AxisName) -> jax.Array:
    """The state before each device's part, from every part's pair: (b, d, n), zero on the first device.

        h_before[k] = sum_{j < k} (product of decay[i] for j < i < k) state[j]

    Args:
        decay: (b, d, n), what a state is multiplied by over the part.
        state: (b, d, n), the state after the part from zero; on the first device from the true initial state.
        axis_name: the mesh axis or axes whose devices hold the parts, in order.
    """
    parts = lax.axis_size(axis_name)

    def from_left(pair: tuple[jax.Array, jax.Array], distance: int) -> tuple[jax.Array, jax.Array]:
        # Where there is no such neighbour zeros arrive: a state of zero, and a decay that has nothing to act on.
        return lax.ppermute(pair, axis_name, [(i, i + distance) for i in range(parts - distance)])

    pair, covered = from_left((decay, state), 1), 1
    while covered < parts - 1:  # a prefix in log2 steps (Hillis and Steele 1986)
        pair = combine(from_left(pair, covered), pair)
        covered *= 2
    return pair[1]


def _with_borders(reset: jax.Array | None, segment_ids: jax.Array, axis_name: AxisName) -> jax.Array | None:
    """`reset` (b, l) with the first step of each part but the first compared with the last of the part before."""
    if reset is None or reset.shape[1] == 0:
        return reset
    parts = lax.axis_size(axis_name)
    previous = lax.ppermute(segment_ids[:, -1], axis_name, [(i, i + 1) for i in range(parts - 1)])
    begins = (lax.axis_index(axis_name) > 0) & (segment_ids[:, 0] != previous)
    return reset.at[:, 0].set(begins)


def _step_sizes(inputs: ScanInputs) -> jax.Array:
    """Delta (b, l, d), wide."""
    Delta = inputs.delta.astype(inputs.D.dtype) + inputs.delta_bias
    return jax.nn.softplus(Delta) if inputs.delta_softplus else Delta
