"""What a run says of itself before it begins: versions, device, model, scan and why, text, batch, schedule."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import cast

import flax
import jax
from jax.sharding import Mesh

from pallas_kernels import explain
from pallas_kernels.choice import LEAST_CAPABILITY
from pallas_kernels.device import target_gpu
from train.config import TrainConfig
from train.corpus import Corpus
from train.errors import UsageError
from train.step import model_config
from train.tasks import SyntheticTask


def banner(
    config: TrainConfig, mesh: Mesh, corpus: Corpus | SyntheticTask, run_dir: Path, n_parameters: int
) -> dict[str, str]:
    """Names and what they stand for, in order."""
    device = jax.devices()[0]
    split = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    data = task_rows(config, corpus) if isinstance(corpus, SyntheticTask) else text_rows(config, corpus)
    return {
        "versions": f"jax {jax.__version__}, flax {flax.__version__}, Python {platform.python_version()}",
        "device": f"{mesh.size} of {jax.device_count()} x {device.device_kind}{cores}{processes}"
        + (f"; {split}" if split else ""),
        "model": f"{n_parameters:,} parameters: {config.n_layer} Mamba blocks of width {config.d_model}, "
        f"{config.d_state} states a channel, {config.dtype}",
        "scan": scan_reason(config.scan, device.platform),
        **kernels(config, device.platform),
        **data,
        "rate": f"{config.lr:g} after {config.warmup_steps} steps, "
        f"then a cosine down to {config.min_lr:g} at step {max(config.decay_steps, config.steps):,}",
        "run": str(run_dir),
    }


def text_rows(config: TrainConfig, corpus: Corpus) -> dict[str, str]:
    """What is read, and how much of it."""
    tokens = config.batch_size * config.seq_len
    total = config.steps * tokens
    why = "not UTF-8" if corpus.unit == "bytes" else "no tokens"
    left_out = f"; {corpus.n_left_out} files left out, {why}" if corpus.n_left_out else ""
    return {
        "text": f"{corpus.name}: {len(corpus.train):,} {corpus.unit} from {corpus.n_train_files} files to learn, "
        f"{len(corpus.validation):,} from {corpus.n_validation_files} held out{left_out}",
        "batch": f"{tokens:,} tokens a step: {config.batch_size} sequences of {config.seq_len} {corpus.unit}",
        "steps": f"{config.steps:,}: {total:,} tokens, {total / len(corpus.train):.1%} of the text",
    }


def task_rows(config: TrainConfig, task: SyntheticTask) -> dict[str, str]:
    """What is asked, and how often."""
    return {
        "task": task.describe(),
        "batch": f"{config.batch_size} rows of {config.seq_len} tokens a step, drawn for it, of sequences of "
        f"{' or '.join(map(str, task.lengths()))}",
        "steps": f"{config.steps:,}: {config.steps * config.batch_size:,} rows; by chance {1 / task.n_answers:.1%} "
        "of the answers would be right",
    }


def kernels(config: TrainConfig, platform: str) -> dict[str, str]:
    """Which kernels run the scan; nothing where none do.

    Raises:
        UsageError: they were asked for and cannot run on this device.
    """
    if not scan_reason(config.scan, platform).startswith("pallas"):
        return {}
    model = model_config(config)
    sizes = config.batch_size, config.seq_len, cast(int, model.d_inner), model.d_state  # the record derived it
    try:
        return {"kernels": str(explain(*sizes, dtype=config.dtype))}
    except NotImplementedError as error:
        raise UsageError(f"--scan {config.scan}: {error}; use sequential or associative") from None


def scan_reason(scan: str, platform: str) -> str:
    """Which form of the scan runs on this platform, and why."""
    if scan == "pallas" and platform == "cpu":
        return "pallas, as asked for; on a CPU Pallas' interpreter runs the kernels"
    if scan != "auto":
        return f"{scan}, as asked for"
    if platform == "cpu":
        return "sequential: auto's choice on a CPU"
    gpu = target_gpu()
    if gpu is None:
        return f"associative: auto's choice on {platform}"
    capability = f"compute capability {gpu.capability / 10:.1f}"
    if gpu.capability >= LEAST_CAPABILITY:
        return f"pallas: auto's choice on GPUs with {capability}"
    return f"associative: auto's choice, as {capability} is too old for the kernels of pallas"
