"""Mamba in JAX: the selective scan three ways, and the Flax modules around it."""

from mamba_jax.scan import selective_scan as selective_scan
from mamba_jax.scan import selective_state_update as selective_state_update
