"""Saves a model's weights as safetensors files, tensor by tensor, so that a save that fails leaves the old ones whole.

[Note: whole at every moment] All bytes are written under temporary names and are on the drive before anything is renamed.
One file replaces its predecessor by its rename. Of several, each has a name that no earlier save used, so the old index
names old files until the new index takes its place. Only then are the files of the predecessor removed, and only those
that an earlier save of this library wrote. What a save under way has written is gone after an error; where its process was
killed the next save into that folder removes it. Saves hold a shared lock of the folder, so it knows that nobody is at it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tieroff.api import engine_of
from tieroff.checkpoint.folder import INDEX_FILE, WEIGHTS_FILE, metadata_of, read_index
from tieroff.checkpoint.load import Progress
from tieroff.checkpoint.shard import Shard, code_of, size_of, write_shard
from tieroff.checkpoint.targets import check_arguments, targets_of
from tieroff.errors import CheckpointError, ConfigError, StoreError
from tieroff.units import parse_bytes

log = logging.getLogger("tieroff")

_TEMPORARY = re.compile(
    r"\.(model-\d{5}-of-\d{5,}-[0-9a-f]{12}\.safetensors|model\.safetensors(\.index\.json)?)\.[0-9a-f]{12}\.part"
)
_WRITER = {"format": "pt", "writer": "tieroff"}

Named = list[tuple[str, torch.Tensor]]


def save_weights(
    model: torch.nn.Module, folder: str | Path, *, max_shard_bytes: int | str = "5GiB", on_progress: Progress | None = None
) -> list[Path]:
    """Saves a model's parameters and persistent buffers as safetensors files, without holding them in memory.

    One file, `model.safetensors`, where it is no larger than a shard may be; else shards and
    `model.safetensors.index.json`, as Hugging Face's libraries read them. Of tied parameters the first name is stored, and
    the others are noted in the metadata. A checkpoint that the folder holds already stays whole until the new one is.
    Of several processes, one calls this.

    Args:
        model: wrapped or not.
        folder: made where it is missing.
        max_shard_bytes: of tensors in one file; a larger tensor gets a file of its own.
        on_progress: called with (bytes written, bytes in all) after each tensor.

    Returns:
        The files; the index is the last.

    Raises:
        CheckpointError: the state dict holds something else than plain tensors with values, or the folder holds a
            `model.safetensors` of other origin, which readers would prefer to an index.
        StateError: this is no module or no path.
        StoreError: a drive failed or is full. The folder holds what it held before.
    """
    check_arguments("save_weights", model, folder)
    limit_bytes = parse_bytes(max_shard_bytes)
    if limit_bytes == 0:
        raise ConfigError(f'save_weights: expected max_shard_bytes above 0, got {max_shard_bytes!r}; write "5GiB"')
    tensors, metadata = _named(model)
    shards = split_in_shards(tensors, limit_bytes)
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _failed("make a folder", path, error) from error
    before = _Predecessor.of(path)
    if len(shards) > 1 and (path / WEIGHTS_FILE).exists() and path / WEIGHTS_FILE not in before.files:
        raise CheckpointError(
            f"save_weights: {path} holds a {WEIGHTS_FILE} of other origin, which would be read instead of the {len(shards)} "
            "shards; move it away, or save elsewhere"
        )
    written = _write(shards, metadata, path, _releasing(model, sum(size_of(t) for _, t in tensors), on_progress))
    before.remove(but=written)
    return written


def _named(model: torch.nn.Module) -> tuple[Named, dict[str, str]]:
    """Returns tensors under their first names, and the metadata with the other names."""
    metadata = dict(_WRITER)
    tensors: Named = []
    on_meta = []
    for target in targets_of(model):
        code_of(target.tensor.dtype)  # asked before anything is written
        tensors.append((target.name, target.tensor))
        metadata |= dict.fromkeys(target.names[1:], target.name)
        if target.tensor.is_meta:
            on_meta.append(target.name)
    if on_meta:
        raise CheckpointError(f"save_weights: {len(on_meta)} tensors are on the meta device, without values: {on_meta[0]}, ...")
    return tensors, metadata


def split_in_shards(tensors: Named, limit_bytes: int) -> list[Named]:
    """Returns the tensors in order, in lists of bounded size; in each the widest types first, so that all lie aligned."""
    shards: list[Named] = [[]]
    room = limit_bytes
    for name, tensor in tensors:
        size_bytes = size_of(tensor)
        if size_bytes > room and shards[-1]:
            shards.append([])
            room = limit_bytes
        shards[-1].append((name, tensor))
        room -= size_bytes
    return [sorted(shard, key=lambda pair: -pair[1].element_size()) for shard in shards]


def _releasing(model: torch.nn.Module, total_bytes: int, on_progress: Progress | None) -> Callable[[torch.Tensor], None]:
    """Returns what to do when a tensor was written: its pages are given back, out of the page cache too."""
    engine, done_bytes = engine_of(model), 0

    def written(tensor: torch.Tensor) -> None:
        nonlocal done_bytes
        if engine is not None:
            engine.trim(tensor)
        done_bytes += size_of(tensor)
        if on_progress is not None:
            on_progress(done_bytes, total_bytes)

    return written


def _write(
    shards: Sequence[Named], metadata: dict[str, str], folder: Path, written: Callable[[torch.Tensor], None]
) -> list[Path]:
    """Writes everything, then gives it its names: [Note: whole at every moment]."""
    token = uuid.uuid4().hex[:12]
    names = [f"model-{i:05}-of-{len(shards):05}-{token}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS_FILE]
    with _Staging(folder, token) as staging:
        for name, shard in zip(names, shards, strict=True):
            with staging.file(name) as fd:
                write_shard(fd, shard, metadata, written)
            log.info("wrote %s", name)
        if len(shards) > 1:
            index = {
                "metadata": {**metadata, "total_size": sum(size_of(t) for shard in shards for _, t in shard)},
                "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name, _ in shard},
            }
            with staging.file(INDEX_FILE) as fd:
                _write_text(fd, json.dumps(index, indent=2))
        return staging.publish()


def _write_text(fd: int, text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(fd, data) :]
    os.fsync(fd)


@dataclass
class _Staging:
    """Files under temporary names in the folder they are meant for; what is not published is removed."""

    folder: Path
    token: str
    pending: dict[Path, Path] = field(default_factory=dict)  # temporary name -> final one
    published: list[Path] = field(default_factory=list)
    is_done: bool = False
    lock_fd: int = -1

    def __enter__(self) -> _Staging:
        try:
            self.lock_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _failed("open", self.folder, error) from error
        # A file system without locks has nobody's files removed.
        with suppress(OSError):
            _remove_of_killed(self.folder, self.lock_fd)
            fcntl.flock(self.lock_fd, fcntl.LOCK_SH)
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self.lock_fd)
        if self.is_done:
            return
        # A shard that has its name already is in no index, so it goes too; a single file, or the index, is renamed last.
        for path in (*self.pending, *self.published):
            with suppress(OSError):  # the error that brought us here is the one to tell
                path.unlink(missing_ok=True)

    @contextmanager
    def file(self, name: str) -> Iterator[int]:
        """Gives a descriptor to write a new file."""
        final = self.folder / name
        temporary = self.folder / f".{name}.{self.token}.part"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self.pending[temporary] = final
            try:
                yield fd
            finally:
                os.close(fd)
        except OSError as error:
            raise _failed("write", final, error) from error

    def publish(self) -> list[Path]:
        """Gives the files their names, in the order in which they were written, and waits until the folder shows them."""
        files = list(self.pending.values())
        try:
            _sync_folder(self.folder)
            for temporary, final in list(self.pending.items()):
                os.replace(temporary, final)
                del self.pending[temporary]
                if final != files[-1]:
                    self.published.append(final)
        except OSError as error:
            raise _failed("name the files in", self.folder, error) from error
        self.is_done = True  # the last rename is the one that counts: from here on the new files are the checkpoint
        try:
            _sync_folder(self.folder)
        except OSError as error:
            raise StoreError(
                f"save_weights: cannot sync {self.folder}: {error.strerror}; the new checkpoint is in place, but a power loss "
                "might undo that; the previous one remains beside it",
                path=str(self.folder),
                errno=error.errno,
            ) from error
        return files


def _remove_of_killed(folder: Path, lock_fd: int) -> None:
    """Removes what saves left whose processes were killed, unless one is under way.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            try:
                path.unlink(missing_ok=True)
                log.info("removed %s, which a save left that was killed", path)
            except OSError as error:
                log.warning("%s, which a save left that was killed, could not be removed: %s", path, error)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class _Predecessor:
    """The files of the folder's checkpoint that this library wrote, in the order of removal."""

    files: tuple[Path, ...]

    @classmethod
    def of(cls, folder: Path) -> _Predecessor:
        """Reads the folder; unreadable files and those of other origin are left alone."""
        files: list[Path] = []
        single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
        with suppress(CheckpointError, StoreError):
            if single.exists() and Shard(single).metadata.get("writer") == _WRITER["writer"]:
                files.append(single)
        with suppress(CheckpointError):
            if index.exists() and metadata_of(index).get("writer") == _WRITER["writer"]:
                files += [index, *(folder / name for name in sorted(set(read_index(index).values())))]
        return cls(tuple(files))

    def remove(self, but: Sequence[Path]) -> None:
        """Removes the files except those whose names the new checkpoint uses; a failure is logged, not raised."""
        for path in self.files:
            if path not in but:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    log.warning("%s, of the previous checkpoint, could not be removed: %s", path, error)


def _failed(action: str, path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"save_weights: cannot {action} {path}: {error.strerror or error}; the previous checkpoint is unchanged",
        path=str(path),
        errno=error.errno,
    )
