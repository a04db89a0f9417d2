"""What `mamba_jax.pretrained` reads and writes: the files, the names of their tensors, their configurations."""
