"""Mamba in JAX: the selective scan three ways behind one function, and the Flax modules around it."""

from mamba_jax.block import Mamba as Mamba
from mamba_jax.config import MambaConfig as MambaConfig
from mamba_jax.generation import generate as generate
from mamba_jax.model import MambaLM as MambaLM
from mamba_jax.scan import selective_scan as selective_scan
from mamba_jax.scan import selective_state_update as selective_state_update
from mamba_jax.scan import sequence_parallel_scan as sequence_parallel_scan
from mamba_jax.state import MambaState as MambaState
