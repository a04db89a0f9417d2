"""Mamba's selective scan as Pallas kernels. It can be used without `mamba_jax`, which imports it."""

from pallas_kernels.choice import explain as explain
from pallas_kernels.selective_scan import selective_scan as selective_scan
