"""The selective scan: one function, three forms; and its single step for decoding."""

from mamba_jax.scan.api import selective_scan as selective_scan
from mamba_jax.scan.step import selective_state_update as selective_state_update
