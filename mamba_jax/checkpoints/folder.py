"""Where a model's files are: a folder, or the Hugging Face hub; and which of a folder's files hold its tensors."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mamba_jax.checkpoints.safetensors_file import read_safetensors
from mamba_jax.checkpoints.tensors import Tensor
from mamba_jax.checkpoints.torch_file import read_torch

CONFIG = "config.json"
SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
# In the order in which `transformers` looks for them.
_WEIGHTS = (SAFETENSORS, f"{SAFETENSORS}.index.json", TORCH, f"{TORCH}.index.json")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SMALL_FILES = ("config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json")


def checkpoint_folder(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder that `name` means: itself, or the local copy of a model on the Hugging Face hub, fetched if need be.

    Args:
        name: a folder, or OWNER/MODEL on the hub.
        revision: branch, tag or commit on the hub.

    Raises:
        ValueError: there is no such folder, and no such model, or the hub is out of reach.
        ImportError: `name` is a hub's, and `huggingface_hub` is not installed.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{folder} is a file; `name` must be the folder that it is in")
    if not isinstance(name, str) or not _HUB_NAME.fullmatch(name):
        raise ValueError(
            f"there is no folder {folder}, and that is no model's name on the Hugging Face hub (OWNER/MODEL)"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(
            f"there is no folder {name}; to fetch it from the Hugging Face hub: pip install 'mamba-jax[pretrained]'"
        ) from None
    try:
        # A model's weights may lie there in both formats: the second is fetched only where there is no first.
        local = Path(snapshot_download(name, revision=revision, allow_patterns=[*_SMALL_FILES, "model*.safetensors*"]))
        if weights_file(local) is None:
            local = Path(snapshot_download(name, revision=revision, allow_patterns=["pytorch_model*.bin*"]))
    except (OSError, ValueError) as error:  # its own errors are of these two kinds
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"there is no folder {name}, and the Hugging Face hub did not give it: {type(error).__name__}: {reason}"
        ) from None
    return local


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file.

    Raises:
        ValueError: there is no such file, or it holds no table.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} holds no {path.name}") from None
    except ValueError as error:  # of JSON and of UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a table, got {type(data).__name__}")
    return data


def weights_file(folder: Path) -> Path | None:
    """The file that holds a folder's tensors or, where they are in several, lists those."""
    return next((folder / name for name in _WEIGHTS if (folder / name).exists()), None)


def read_weights(folder: Path, problems: list[str]) -> dict[str, Tensor]:
    """All tensors of a folder, none of them read yet; a line in `problems` for each file that cannot be used."""
    main = weights_file(folder)
    if main is None:
        problems.append(f"there is none of {', '.join(_WEIGHTS)}")
        return {}
    files = _shards(main, problems) if main.suffix == ".json" else [main]
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            found = read_safetensors(path) if path.suffix == ".safetensors" else read_torch(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        problems += [f"tensor `{name}` stands in {path.name} and in another file" for name in found if name in tensors]
        tensors |= found
    return tensors


def stale_weights(folder: Path, written: set[str]) -> list[Path]:
    """Files with tensors from an earlier checkpoint in the folder, besides those that were just `written`."""
    patterns = (SAFETENSORS, "model-*-of-*.safetensors", TORCH, "pytorch_model-*-of-*.bin", "*.index.json")
    return [path for pattern in patterns for path in folder.glob(pattern) if path.name not in written]


def _shards(index: Path, problems: list[str]) -> list[Path]:
    """The files that an index lists and that are there."""
    try:
        weight_map = read_json(index).get("weight_map")
    except ValueError as error:
        problems.append(str(error))
        return []
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        problems.append(f"{index.name} holds no `weight_map` from tensors to files")
        return []
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    found = []
    for name in sorted(set(weight_map.values())):
        path = index.parent / name
        if Path(name).name != name or path.suffix != suffix:
            problems.append(f"{index.name} names {name!r}, which is no {suffix} file beside it")
        elif not path.exists():
            problems.append(f"{name} is missing; {index.name} names it")
        else:
            found.append(path)
    return found
