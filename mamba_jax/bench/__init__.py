"""`python -m mamba_jax.bench`: the scans and their rivals side by side, in time, memory and errors."""
