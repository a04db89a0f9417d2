"""The inputs that every implementation gets, and the check of what it returns against the float64 oracle.

    h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t,   y_t = sum_n C_t[n] h_t[n] + D u_t

Axis legend: b batch, l length, d channels, n state.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from mamba_jax.reference.oracle import selective_scan_oracle, selective_scan_oracle_gradients

ARGUMENTS = ("u", "delta", "A", "B", "C", "D")
CHECKED_CHANNELS = 8
"""So many channels, spread evenly, are compared with the oracle, at every length and in every row of the batch."""

TOLERANCES = {"float32": 6e-5, "bfloat16": 3e-2, "float16": 3e-3}
"""Largest error over the largest value, by dtype: mamba_ssm's own rtol for its kernels, in float32 a tenth of it."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One set of inputs, as mamba-130m would make them: delta from softplus, A = -(1..n).

    `arguments` and `dy`, the cotangent of y, are NumPy arrays; u, delta, B, C and dy in `dtype`, A and D in float32.
    """

    batch: int
    length: int
    channels: int
    state: int
    dtype: str
    seed: int

    @functools.cached_property
    def arguments(self) -> dict[str, np.ndarray]:
        b, l, d, n = self.batch, self.length, self.channels, self.state
        rng = np.random.default_rng(self.seed)
        sequence = jnp.dtype(self.dtype)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32).astype(sequence)

        # Step sizes between 0.001 and 0.1, as softplus(dt_bias) is drawn (paper, section 3.6).
        delta = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (b, l, d))).astype(sequence)
        A = -np.tile(np.arange(1, n + 1, dtype=np.float32), (d, 1))
        return {
            "u": normal(b, l, d), "delta": delta, "A": A, "B": normal(b, l, n), "C": normal(b, l, n),
            "D": np.ones(d, np.float32),
        }  # fmt: skip

    @functools.cached_property
    def dy(self) -> np.ndarray:
        shape = (self.batch, self.length, self.channels)
        return np.random.default_rng(self.seed + 1).standard_normal(shape, dtype=np.float32).astype(self.dtype)

    @functools.cached_property
    def checked(self) -> np.ndarray:
        """The channels that are compared with the oracle."""
        return np.unique(np.linspace(0, self.channels - 1, CHECKED_CHANNELS).astype(int))

    @functools.cached_property
    def masked_dy(self) -> np.ndarray:
        """dy in the checked channels, zero elsewhere: dB and dC, sums over channels, are then the oracle's too."""
        masked = np.zeros_like(self.dy)
        masked[..., self.checked] = self.dy[..., self.checked]
        return masked

    @functools.cached_property
    def wanted(self) -> dict[str, np.ndarray]:
        """The oracle's y and gradients, in the checked channels, in float64."""
        part: dict[str, Any] = {
            name: value[..., self.checked] if name in ("u", "delta", "D") else value
            for name, value in self.arguments.items()
        }
        part["A"] = self.arguments["A"][self.checked]
        y, _ = selective_scan_oracle(**part)
        gradients = selective_scan_oracle_gradients(**part, dy=self.dy[..., self.checked])
        return {"y": y} | {f"d{name}": gradients[name] for name in ARGUMENTS}

    def part(self, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What `wanted` has of y and the gradients, in float64."""
        axes = {"y": -1, "du": -1, "ddelta": -1, "dD": -1, "dA": 0}
        return {
            name: np.asarray(np.take(v, self.checked, axes[name]) if name in axes else v).astype(np.float64)
            for name, v in results.items()
        }

    def mistake(self, results: dict[str, np.ndarray]) -> str | None:
        """What is wrong with `results`, y and perhaps gradients for `masked_dy`; None if nothing is."""
        for name, got in self.part(results).items():
            want = self.wanted[name]
            if got.shape != want.shape:
                return f"{name} has shape {got.shape}, expected {want.shape}"
            error = relative_error(got, want)
            if not error <= TOLERANCES[self.dtype]:  # so that NaN counts as wrong
                return f"{name} is off by {error:.1e} of its largest value, more than {TOLERANCES[self.dtype]:.0e}"
        return None


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest error over the largest wanted value; 0 where there is nothing to compare."""
    if not want.size:
        return 0.0
    return float(np.max(np.abs(got.astype(np.float64) - want)) / max(np.max(np.abs(want)), np.finfo(np.float64).tiny))
