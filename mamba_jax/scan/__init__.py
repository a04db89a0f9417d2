"""The selective scan: one function, three forms; over a length split over devices; and its single step for decoding."""

from mamba_jax.scan.api import selective_scan as selective_scan
from mamba_jax.scan.sequence import sequence_parallel_scan as sequence_parallel_scan
from mamba_jax.scan.step import selective_state_update as selective_state_update
