"""A checkpoint folder on disk: its JSON read with care, and its weight files seen to be whole before any is loaded."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_mlx.errors import CheckpointError

_HEADER_LIMIT = 100_000_000  # the safetensors format's own limit, in bytes
_AGAIN = "download it again"
# Tensors of a target file that text decoding never loads.
_SKIPPED = ("vision_tower", "model.visual", "mtp.", "language_model.mtp.", "model.mtp.")


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Read one JSON object; raise CheckpointError that names checkpoint, file and fault."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{name}: {path.name} is missing from {path.parent}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{name}: {path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{name}: {path} is not valid JSON (line {error.lineno}: {error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: {path} holds JSON beyond all measure: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: {path} does not hold a JSON object")
    return value


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Read config.json, with the stop ids of generation_config.json (the longer list) put over its own."""
    config = read_json(folder / "config.json", name)
    if (folder / "generation_config.json").is_file():
        stops = read_json(folder / "generation_config.json", name).get("eos_token_id")
        config |= {"eos_token_id": stops} if stops is not None else {}
    return config


def weight_bytes(folder: Path, name: str) -> int:
    """Return the bytes of weights to be loaded; raise CheckpointError that names the first missing, cut or bad file."""
    index = folder / "model.safetensors.index.json"
    paths = sorted(folder.glob("model*.safetensors"))
    if index.is_file():
        shards = read_json(index, name).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"{name}: {index.name} has no weight_map")
        missing = sorted({str(shard) for shard in shards.values()} - {path.name for path in paths})
        if missing:
            raise CheckpointError(f"{name} is incomplete: {folder} lacks {', '.join(missing[:3])} of {index.name}")
    if not paths:
        raise CheckpointError(f"{name}: {folder} holds no model*.safetensors; convert the weights or download it again")
    parts = [header(path, name) for path in paths]
    return loaded_bytes({key: entry["data_offsets"] for part in parts for key, entry in part.items()})


def header(path: Path, name: str) -> dict[str, Mapping[str, Any]]:
    """Read a safetensors header, not its data: {tensor: {dtype, shape, data_offsets}}; raise where the file is cut."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= min(_HEADER_LIMIT, size - 8) else b""
    except OSError as error:
        raise CheckpointError(f"{name}: {path} cannot be read: {error}") from error
    if not text:
        raise CheckpointError(f"{name}: {path.name} ({size:,} bytes) is cut short, or no safetensors file; {_AGAIN}")
    try:
        entries = {key: entry for key, entry in json.loads(text).items() if key != "__metadata__"}
        end = 8 + length + max((_end(entry["data_offsets"]) for entry in entries.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{name}: {path.name} has a damaged safetensors header; {_AGAIN}") from error
    if end != size:
        raise CheckpointError(f"{name}: {path.name} has {size:,} of {end:,} bytes; {_AGAIN}")
    return entries


def _end(offsets: Sequence[int]) -> int:
    start, end = offsets
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end):
        raise ValueError(f"data_offsets {offsets}")
    return end


def loaded_bytes(offsets: Mapping[str, Sequence[int]]) -> int:
    """Sum the bytes, given as [start, end], of those tensors that text decoding loads."""
    return sum(end - start for name, (start, end) in offsets.items() if not name.startswith(_SKIPPED))
