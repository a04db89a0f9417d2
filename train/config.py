"""The settings of a run, and where they come from: defaults, then a TOML file, then flags.

Every field of `TrainConfig` is a flag (`seq_len` is `--seq-len`) and, but for `COMMAND_ONLY`, a key of the TOML file.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from train.errors import UsageError
from train.folder import resumed_folder
from train.mesh import parse_mesh

PROGRAM = "python -m train"
# These belong to one call of the command, not to the run: no TOML file holds them.
COMMAND_ONLY = ("config", "run_dir", "resume", "distributed", "profile", "dry_run", "compile_for")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a Mamba language model.

    With no flags at all: about a million parameters, on the source of Python's standard library, byte by byte.
    """

    config: str | None = None
    """A TOML file with settings; flags override it."""
    run_dir: str | None = None
    """The run's folder; by default a new one under runs/. One that already holds a run is left alone."""
    resume: bool = False
    """Go on from the last checkpoint of --run-dir (by default the newest run under runs/), with that run's settings."""
    dry_run: bool = False
    """Print the settings, the memory that each device needs, and compile the training step without running it."""
    compile_for: Literal["here", "h200", "b200", "a100", "ada"] = "here"
    """What --dry-run compiles for: the devices here, or GPUs that are not (the extra gpu-compile)."""
    distributed: bool = False
    """One of several processes, started alike: jax.distributed finds the others (SLURM, Open MPI, Kubernetes, ...)."""
    profile: str | None = None
    """START:STOP, two steps between which the device is traced, into the run's folder."""

    task: Literal["lm", "selective_copying", "induction_heads"] = "lm"
    """What is learned: a language model of --data, or one of the Mamba paper's two synthetic tasks."""
    memorize_tokens: int = 16
    """Data tokens to remember, of selective copying."""
    data: str | None = None
    """A text file or a token file (*.bin, as nanoGPT writes them), a folder of either, or a quoted glob; by default the
    source of Python's standard library."""
    tokenizer: str | None = None
    """A tokenizer.json, its folder, or a hub model that has one, for texts; by default a token is a byte."""
    token_dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """Of token files; auto is what python -m train.tokenize wrote beside them, or else uint16."""
    documents: bool = False
    """Keep documents apart: nothing passes from one to the next (segment_ids)."""
    separator: int | None = None
    """The token between two documents; by default the tokenizer's end of text, and for bytes a zero."""
    val_fraction: float = 0.1
    """The share of the text that is held out: whole files from its end, or the tail of the last if that is larger."""
    seed: int = 0
    """Seed of the parameters, of the batches and of the sample."""

    init_from: str | None = None
    """A checkpoint to start from, whose sizes are the model's: another run's folder, one with a published model, or
    OWNER/MODEL on the Hugging Face hub."""
    vocab_size: int = 256
    """Number of tokens; 256 for bytes. A task's special tokens are among them."""
    d_model: int = 192
    """Width of the residual stream."""
    n_layer: int = 4
    """Number of blocks."""
    d_state: int = 16
    """States a channel."""
    d_conv: int = 4
    """Width of the causal convolution."""
    expand: float = 2.0
    """Channels inside a block, as a multiple of d_model."""
    dt_rank: int | Literal["auto"] = "auto"
    """Rank of the projection to Delta; auto is d_model / 16."""
    selective: bool = True
    """Whether B, C and Delta depend on the input; without, they are learned constants, and the model time-invariant."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of activations; parameters and moments are float32 always."""
    remat: bool = False
    """Keep only each block's input for the backward pass: less memory, more arithmetic."""
    remat_policy: Literal["nothing", "dots"] = "nothing"
    """What remat keeps besides: nothing, or the results of matrix products."""
    scan: Literal["auto", "sequential", "associative", "pallas"] = "auto"
    """Which form of the selective scan runs; auto chooses by platform."""

    mesh: str = ""
    """Devices to train on, such as data=2,fsdp=2: data and fsdp split the batch, fsdp the parameters and moments too,
    seq the length, tensor the channels; by default one device."""
    accumulate: int = 1
    """Parts of a batch whose gradients are computed one after the other and added up: less memory."""

    steps: int = 240
    """Training steps."""
    batch_size: int = 4
    """Sequences a step."""
    seq_len: int = 256
    """Tokens a sequence, a task's answers among them."""
    min_seq_len: int | None = None
    """Of a task: train on sequences of seq_len, half of it, a quarter, and so on down to this, each length as often as
    the others, packed into rows of seq_len; by default on seq_len alone. Validation is at seq_len always."""
    lr: float = 4e-3
    """Peak learning rate."""
    min_lr: float = 2e-4
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    decay_steps: int = 240
    """Steps from the first to the end of the cosine; a longer run stretches it, a shorter one is its beginning."""
    weight_decay: float = 0.1
    """AdamW's decay; A_log, B, C, D, biases and norms have none."""
    beta1: float = 0.9
    """Adam's first decay rate."""
    beta2: float = 0.95
    """Adam's second decay rate."""
    grad_clip: float = 1.0
    """The largest global gradient norm."""

    log_every: int = 10
    """Steps between two printed lines; metrics.jsonl holds every step."""
    eval_every: int = 60
    """Steps between two validations; the last step is always validated."""
    eval_batches: int = 16
    """Batches a validation, spread evenly over the held-out text."""
    checkpoint_every: int = 120
    """Steps between two checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay on disk."""
    keep_every: int | None = None
    """A checkpoint whose step is a multiple of this stays for good."""
    on_bad_loss: Literal["stop", "skip"] = "stop"
    """What to do at a step whose loss or gradient is not finite, or a spike: stop, or go on without that step."""
    spike_factor: float | None = None
    """A loss of more than so many times its running mean is a spike; by default none is."""
    tensorboard: bool = False
    """Write the numbers for TensorBoard, too, into the run's folder."""
    wandb: str | None = None
    """Send the numbers to this project of Weights & Biases, too."""
    sample_tokens: int = 400
    """Length of the sample that is written at the end; 0 writes none."""
    sample_prompt: str = "\n"
    """What the sample goes on from."""
    temperature: float = 0.8
    """Temperature of the sample; 0 always takes the likeliest token."""

    def settings(self) -> dict[str, Any]:
        """All fields that belong to the run, in order: those that its config.toml holds."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in COMMAND_ONLY}


_UNUSED = {"lm": ("memorize_tokens", "min_seq_len"), "induction_heads": ("memorize_tokens",)}  # by task
_POSITIVE = ("lr", "grad_clip")
_ABOVE_1 = ("spike_factor",)
_BETWEEN_0_AND_1 = ("val_fraction", "beta1", "beta2")
_AT_LEAST_0 = ("separator", "min_lr", "warmup_steps", "weight_decay", "sample_tokens", "temperature")
_AT_LEAST_1 = (
    "vocab_size", "d_model", "n_layer", "d_state", "d_conv", "expand", "dt_rank", "steps", "batch_size", "seq_len",
    "min_seq_len", "memorize_tokens", "accumulate", "decay_steps", "log_every", "eval_every", "eval_batches",
    "checkpoint_every", "keep_checkpoints", "keep_every",
)  # fmt: skip


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Settings from the command line: defaults < the resumed run's config.toml < the --config file < flags.

    Raises:
        UsageError: for a TOML file that is missing or wrong, or a value out of its range.
        SystemExit: tyro's own, with exit code 2, for a wrong flag; 0 after --help.
    """
    import tyro

    def read_flags(default: TrainConfig) -> TrainConfig:
        return tyro.cli(TrainConfig, prog=PROGRAM, args=list(arguments), default=default)

    # Read twice: first for where the files are, then on top of what they say.
    flags = read_flags(TrainConfig())
    run_dir, files = flags.run_dir, []
    if flags.resume:
        folder = resumed_folder(flags.run_dir)
        run_dir = str(folder)
        # A run that was killed at once may have none yet.
        files += [folder / "config.toml"] if (folder / "config.toml").exists() else []
    if flags.config is not None:
        files.append(Path(flags.config))
    default = TrainConfig()
    for path in files:
        default = dataclasses.replace(default, **read_toml(path))
    config = dataclasses.replace(read_flags(default), run_dir=run_dir)
    check_ranges(config)
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, each of its field's type.

    Raises:
        UsageError: if it cannot be read; or for all its unknown keys (with the nearest name) and wrong types at once.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    hints = typing.get_type_hints(TrainConfig)
    names = [name for name in hints if name not in COMMAND_ONLY]
    mistakes = []
    for name, value in values.items():
        if name in COMMAND_ONLY:
            mistakes.append(f"{name} is a flag of the command ({_flag(name)}), not a setting")
        elif name not in names:
            near = difflib.get_close_matches(name.replace("-", "_"), names, n=1)
            mistakes.append(f"unknown key {name}" + (f"; perhaps you meant {near[0]}" if near else ""))
        elif not _is_of_type(value, hints[name]):
            mistakes.append(f"{name} = {value!r}: {_describe(hints[name])} is wanted")
    if mistakes:
        raise UsageError(f"{path}:\n" + "\n".join(f"  {mistake}" for mistake in mistakes))
    return {name: float(value) if hints[name] is float else value for name, value in values.items()}


def write_toml(path: Path, config: TrainConfig) -> None:
    """Write the resolved settings, in one go; `--config` with this file then asks for the same run."""
    from mamba_jax.atomic import replacing  # here, as the package takes a second to load, and a wrong flag needs none

    lines = ["# The settings of this run as resolved from defaults, file and flags.\n"]
    for name, value in config.settings().items():
        lines.append(f"# {name}: not set\n" if value is None else f"{name} = {_toml_value(value)}\n")
    with replacing(path) as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")


def check_ranges(config: TrainConfig) -> None:
    """Whether every number is in its range.

    Raises:
        UsageError: naming all that are not.
    """
    mistakes = ["--run-dir: the name of a folder is wanted"] if config.run_dir == "" else []
    for names, wanted, holds in (
        (_POSITIVE, "a number above 0", lambda x: 0 < x < math.inf),
        (_ABOVE_1, "a number above 1", lambda x: 1 < x < math.inf),
        (_BETWEEN_0_AND_1, "a number between 0 and 1", lambda x: 0 < x < 1),
        (_AT_LEAST_0, "0 or more", lambda x: 0 <= x < math.inf),
        (_AT_LEAST_1, "1 or more", lambda x: x == "auto" or 1 <= x < math.inf),
        (("seed",), "a number from 0 to 2**63 - 1", lambda x: 0 <= x < 2**63),
    ):
        values = {name: value for name in names if (value := getattr(config, name)) is not None}
        mistakes += [f"{_flag(name)} {value}: {wanted} is wanted" for name, value in values.items() if not holds(value)]
    mistakes += [
        f"{_flag(name)} {getattr(config, name)}: --task {config.task} has no use for it"
        for name in _UNUSED.get(config.task, ())
        if getattr(config, name) != getattr(TrainConfig, name)
    ]
    if mistakes:
        raise UsageError("\n".join(mistakes))
    parse_mesh(config.mesh)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_of_type(value: object, hint: object) -> bool:
    """Whether a TOML value fits a field: an integer may stand for a float, a boolean for nothing else."""
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_of_type(value, option) for option in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, typing.cast(type, hint))


def _describe(hint: object) -> str:
    """A field's type in words."""
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint) if option is not types.NoneType)
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[typing.cast(type, hint)]


def _toml_value(value: object) -> str:
    """A TOML literal; JSON's strings are TOML's basic strings."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
