"""Which files make a checkpoint: one safetensors file, or shards named by an index."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tieroff.checkpoint.shard import Shard, StoredTensor
from tieroff.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files whose headers were all checked.

    Attributes:
        path: as given.
        shards: by path.
        tensors: by name.
    """

    path: Path
    shards: dict[Path, Shard]
    tensors: dict[str, StoredTensor]


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads every header of a file, of the shards of an index, or of a folder that holds either (the file goes first).

    Raises:
        CheckpointError: something is missing, truncated, contradictory, or outside the folder.
        StoreError: a file could not be read.
    """
    if path.is_dir():
        single, index = path / WEIGHTS_FILE, path / INDEX_FILE
        if not single.exists() and not index.exists():
            there = sorted(entry.name for entry in path.iterdir())[:8]
            raise CheckpointError(
                f"{path}: no {WEIGHTS_FILE} or {INDEX_FILE} in this folder, but {', '.join(there) or 'an empty folder'}; "
                "name the file itself if it has another name"
            )
        found = _open(single if single.exists() else index)
    else:
        found = _open(path)
    return Checkpoint(path, found.shards, found.tensors)


def _open(path: Path) -> Checkpoint:
    if path.suffix != ".json":
        shard = Shard(path)
        return Checkpoint(path, {path: shard}, shard.tensors)
    weight_map = read_index(path)
    shards = {name: Shard(path.parent / name) for name in sorted(set(weight_map.values()))}
    tensors: dict[str, StoredTensor] = {}
    for name, file in weight_map.items():
        if name not in shards[file].tensors:
            raise CheckpointError(f"{path}: the index puts {name} in {path.parent / file}, which does not hold it")
        tensors[name] = shards[file].tensors[name]
    for shard in shards.values():
        for name, tensor in shard.tensors.items():
            if tensors.setdefault(name, tensor).path != shard.path:
                raise CheckpointError(f"{path}: {name} is in two files, {tensors[name].path} and {shard.path}")
    return Checkpoint(path, {shard.path: shard for shard in shards.values()}, tensors)


def read_index(path: Path) -> dict[str, str]:
    """Returns an index's mapping from tensors to files in its folder.

    Raises:
        CheckpointError: the file is missing or not an index, or names a path outside its folder.
    """
    weight_map = _document(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) and file for file in weight_map.values()):
        raise CheckpointError(f'{path}: "weight_map" does not map names of tensors to names of files')
    for name, file in weight_map.items():
        parts = PurePosixPath(file)
        if parts.is_absolute() or ".." in parts.parts:
            raise CheckpointError(f"{path}: {file!r} for {name} is not in the index's own folder; it is not read")
    return weight_map


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: this index is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: this index is not readable JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got a {type(document).__name__}")
    return document


def metadata_of(path: Path) -> dict[str, Any]:
    """Returns the metadata of an index; {} if it has none.

    Raises:
        CheckpointError: the file is missing or not an index.
    """
    metadata = _document(path).get("metadata")
    return metadata if isinstance(metadata, dict) else {}
