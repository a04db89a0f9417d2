"""`python -m train --dry-run`: what a run would be and what it would need, with nothing read, written or run.

    python -m train --config configs/mamba-130m.toml --dry-run --compile-for h200 --mesh fsdp=8

The compiler's own figures for the very program that would run, on each device: what stays there between steps
(parameters, moments), and what a step needs beside it (activations, gradients).
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import jax
from jax.sharding import Mesh

from train.config import TrainConfig
from train.devices import make_mesh, start
from train.errors import UsageError
from train.mesh import count_devices
from train.optim import make_optimizer
from train.report import Report, duration
from train.sharding import abstract, abstract_batch
from train.start import check_splits
from train.step import abstract_model, compile_train_step, count_parameters, make_train_step, model_config

_MIB = 2**20


def dry_run(config: TrainConfig, report: Report) -> None:
    """Print settings and budget, and compile the training step.

    Raises:
        UsageError: the settings cannot be met, or nothing here compiles for the GPU that is asked for.
    """
    if config.init_from is not None:
        raise UsageError("--dry-run reads no checkpoint: --init-from None, and flags for the sizes of its model")
    mesh = _mesh(config)
    architecture = model_config(config)
    check_splits(config, architecture)
    report.table({name: str(value) for name, value in config.settings().items() if value is not None})

    graphdef, params = abstract_model(architecture)
    optimizer = make_optimizer(config)
    opt_state = abstract(jax.eval_shape(optimizer.init, params), mesh)
    params = abstract(params, mesh)
    packed = config.documents or config.min_seq_len is not None
    batch = abstract_batch(mesh, config.batch_size, config.seq_len, segments=packed)
    device = mesh.devices.flat[0]
    budget = {
        "devices": f"{mesh.size} x {device.device_kind}",
        "parameters": f"{count_parameters(params):,}, of float32: {_mib(params)} on each device",
        "moments": f"{_mib(opt_state)} on each device",
        "batch": f"{config.batch_size} x {config.seq_len} tokens: {_mib(batch)} on each device",
    }
    report.table(budget)
    begun = time.perf_counter()
    with report.wait("compiling the training step"):
        step = make_train_step(graphdef, optimizer, accumulate=config.accumulate)
        memory: Any = compile_train_step(step, mesh, params, opt_state, batch).memory_analysis()
    temporaries, arguments = memory.temp_size_in_bytes, memory.argument_size_in_bytes
    # Parameters and moments are donated: what comes out takes their place.
    added = memory.output_size_in_bytes - memory.alias_size_in_bytes
    report.table(
        {
            "compiled": f"in {duration(time.perf_counter() - begun)}, not run",
            "temporaries": f"{temporaries / _MIB:,.0f} MiB on each device: activations and gradients",
            "in all": f"{(arguments + temporaries + added) / _MIB:,.0f} MiB on each device",
        }
    )


def _mesh(config: TrainConfig) -> Mesh:
    """Of the devices here, or of GPUs that are not."""
    if config.compile_for == "here":
        start(config.mesh, config.distributed)
        return make_mesh(config.mesh)
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver to ask
    jax.config.update("jax_platforms", "cpu")
    from pallas_kernels.gpu_report import absent_devices

    try:
        devices = absent_devices(config.compile_for, count_devices(config.mesh))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"--compile-for {config.compile_for}: this jax does not compile for CUDA ({reason}); "
            "pip install 'mamba-jax[gpu-compile]', with Python 3.12 or newer"
        ) from None
    return make_mesh(config.mesh, devices)


def _mib(tree: Any) -> str:
    """What the arrays of a tree take on one device."""
    leaves = jax.tree.leaves(tree)
    total = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    return f"{total / _MIB:,.1f} MiB"
