"""The Pallas form: the kernels of `pallas_kernels`, compiled on GPUs, through Pallas' interpreter on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_kernels
from mamba_jax.scan.inputs import ScanInputs
from pallas_kernels.choice import LEAST_CAPABILITY
from pallas_kernels.device import Gpu


def scan(inputs: ScanInputs) -> tuple[jax.Array, jax.Array]:
    """The selective scan by kernels that keep the state on chip (paper, section 3.3.2): y in u's dtype, last_state."""
    x = inputs
    return pallas_kernels.selective_scan(
        x.u, x.delta, x.A, x.B, x.C, x.D, x.z, x.delta_bias, x.initial_state, x.reset, delta_softplus=x.delta_softplus
    )


def check_supported(inputs: ScanInputs) -> None:
    """Raise NotImplementedError for what no kernel has, naming the forms that have it."""
    if jnp.iscomplexobj(inputs.A):
        raise NotImplementedError(
            '`scan="pallas"` takes real A, B and C only; for complex ones use "sequential" or "associative"'
        )


def is_best(inputs: ScanInputs, gpu: Gpu) -> bool:
    """Whether "auto" means the kernels on this GPU: capability 8.0 or more, real and at most float32 arguments."""
    return gpu.capability >= LEAST_CAPABILITY and inputs.A.dtype == jnp.float32
