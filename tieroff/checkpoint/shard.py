"""One safetensors file: what its header says, its tensors one at a time, and how one is written tensor by tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tieroff.errors import CheckpointError, StoreError
from tieroff.storage.memory import align_up, write_back

_CHUNK_BYTES = 32 << 20  # written at once, on the drive and out of the page cache before the next

CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


def code_of(dtype: torch.dtype) -> str:
    """Returns the format's name of a type.

    Raises:
        CheckpointError: the format has no name for it.
    """
    if dtype not in CODES:
        raise CheckpointError(f"safetensors files cannot hold {dtype}; save it with torch.save")
    return CODES[dtype]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        code: its type, as the format calls it ("F32").
        shape: in elements.
        position: rank by place in the file.
    """

    name: str
    path: Path
    code: str
    shape: tuple[int, ...]
    position: int


class Shard:
    """A file whose header was checked: it is whole, and its tensors fill it without overlapping.

    Attributes:
        tensors: by name.
        metadata: what the writer noted.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            CheckpointError: there is no such file, or it is truncated or something else.
        """
        self.path = path
        self._identity = _identity_of(path)
        with _opened(path) as file:
            self.metadata: dict[str, str] = dict(file.metadata() or {})
            self.tensors = {name: self._described(file, name, i) for i, name in enumerate(file.offset_keys())}

    def _described(self, file: safe_open, name: str, position: int) -> StoredTensor:
        view = file.get_slice(name)
        return StoredTensor(name, self.path, str(view.get_dtype()), tuple(view.get_shape()), position)

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], torch.Tensor]]:
        """Gives a function from a name to its tensor, on memory of its own; what was read leaves the page cache.

        Raises:
            CheckpointError: the file was replaced or changed since its header was read.
            StoreError: the drive did not return the bytes.
        """
        if _identity_of(self.path) != self._identity:
            raise CheckpointError(f"{self.path}: another file since loading began; load again")
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _opened(self.path) as file:

                def read(name: str) -> torch.Tensor:
                    with _telling(self.path, f"read {name}"):
                        tensor: torch.Tensor = file.get_tensor(name)
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    return tensor

                yield read
        finally:
            os.close(fd)


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    with _telling(path, "open"):
        file = safe_open(path, "pt", backend="pread")
    with file as entered:
        yield entered


@contextmanager
def _telling(path: Path, action: str) -> Iterator[None]:
    """Turns errors of the library and the system into errors that name the file."""
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: not a whole safetensors file: {error} ({_size_of(path)} bytes, on {action}); it is truncated or "
            "something else: fetch or save it again"
        ) from error
    except OSError as error:
        message = f"{path}: {action}: {error.strerror or error}"
        raise StoreError(message, path=str(path), errno=error.errno) from error


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _identity_of(path: Path) -> tuple[int, ...]:
    if not path.is_file():
        raise CheckpointError(
            f"{path}: expected a safetensors file, but it is {'a folder' if path.is_dir() else 'missing'}; "
            "name a .safetensors file, or the folder of a checkpoint"
        )
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def header_of(tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> bytes:
    """Returns a file's bytes up to the first tensor, for tensors that follow one another in this order.

    The header is a length (8 bytes, little-endian) and JSON, padded so that data begin at a multiple of 8 bytes.
    """
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, tensor in tensors:
        end = begin + size_of(tensor)
        described[name] = {"dtype": code_of(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (align_up(len(text), 8) - len(text))
    return len(text).to_bytes(8, "little") + text


def size_of(tensor: torch.Tensor) -> int:
    """Returns a tensor's bytes in a file."""
    return tensor.numel() * tensor.element_size()


def write_shard(
    fd: int, tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str], written: Callable[[torch.Tensor], None]
) -> int:
    """Writes an empty file and waits until it is on the drive; returns its bytes.

    Memory: tensors on the CPU in the order of their elements are written from where they lie, others by a copy each.

    Args:
        written: called with each tensor once its bytes are written.

    Raises:
        OSError: the drive refused.
    """
    header = header_of(tensors, metadata)
    os.posix_fallocate(fd, 0, len(header) + sum(size_of(tensor) for _, tensor in tensors))  # a full drive shows now
    offset = _write(fd, memoryview(header), 0)
    for _, tensor in tensors:
        offset += _write(fd, _bytes_of(tensor), offset)
        written(tensor)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return offset


def _write(fd: int, data: memoryview, offset: int) -> int:
    done = 0
    while done < len(data):
        count = os.write(fd, data[done : done + _CHUNK_BYTES])
        if count == _CHUNK_BYTES:  # a large tensor: what is written need not stay in memory
            write_back(fd, offset + done, count)
            os.posix_fadvise(fd, offset + done, count, os.POSIX_FADV_DONTNEED)
        done += count
    return done


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
