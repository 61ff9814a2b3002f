"""The native module by itself: its types, checksums and the page returner."""

from __future__ import annotations

import ast
import ctypes
import inspect
import mmap
import os
import random
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from tieroff.errors import StateError
from tieroff.storage import buffers

native: Any = pytest.importorskip("tieroff._native")

ENGINES = ["ThreadEngine", *(["RingEngine"] if native.ring_refusal() == 0 else [])]


def stub_members(project: Path) -> dict[str, Any]:
    """Names in the stub: for a function its parameter names, for a class the same of its members."""

    def parameters(node: ast.FunctionDef) -> list[str]:
        by_name = [argument.arg for argument in node.args.kwonlyargs]
        return [argument.arg for argument in node.args.args if argument.arg != "self"] + ["*"] * bool(by_name) + by_name

    members: dict[str, Any] = {}
    for node in ast.parse((project / "tieroff/_native.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            members[node.name] = parameters(node)
        if isinstance(node, ast.ClassDef):
            members[node.name] = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
            members[node.name] = {
                name: "property" if item.decorator_list else parameters(item) for name, item in members[node.name].items()
            }
    return members


def built_parameters(function: Any) -> list[str]:
    signature = re.match(r"\w+\((.*)\) ->", function.__doc__)
    assert signature is not None, function.__doc__
    names = [part.split(":")[0].strip() for part in re.split(r",(?![^\[]*\])", signature[1]) if part]
    return [name for name in names if name != "self"]


def is_constructor(name: str, item: Any) -> bool:
    return name == "__init__" and "Initialize self" not in item.__doc__  # the module's own, not the one of object


def built_members() -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in vars(native).items():
        if inspect.isclass(value):
            members[name] = {
                key: "property" if isinstance(item, property) else built_parameters(item)
                for key, item in vars(value).items()
                if isinstance(item, property) or (callable(item) and not key.startswith("_")) or is_constructor(key, item)
            }
        elif callable(value):
            members[name] = built_parameters(value)
    return members


def test_stub_matches_what_is_built(project: Path) -> None:
    stub, built = stub_members(project), built_members()
    assert built == stub


def test_crc32c_known_values() -> None:
    """The check value of the CRC catalogue, and RFC 3720 B.4."""
    for crc in (native.crc32c, native.crc32c_table):
        assert crc(b"123456789") == 0xE3069283
        assert crc(bytes(32)) == 0x8A9136AA
        assert crc(b"\xff" * 32) == 0x62A8AB43
        assert crc(bytes(range(32))) == 0x46DD794E
        assert crc(b"") == 0


def test_crc32c_by_instruction_equals_by_table() -> None:
    data = random.Random(1).randbytes(5000)
    for start in range(9):
        for size in (0, 1, 7, 8, 9, 63, 64, 65, 4099):
            part = data[start : start + size]
            assert native.crc32c(part) == native.crc32c_table(part)
            assert native.crc32c(part, 77) == native.crc32c_table(part, 77)
    assert native.crc32c(data) != zlib.crc32(data)


def test_crc32c_combines() -> None:
    seeded = random.Random(2)
    for _ in range(200):
        first, second = (seeded.randbytes(seeded.randrange(3000)) for _ in range(2))
        combined = native.crc32c_combine(native.crc32c(first), native.crc32c(second), len(second))
        assert combined == native.crc32c(first + second)


@pytest.mark.parametrize("name", ENGINES)
def test_transfer_checksum_does_not_depend_on_chunks(tmp_path: Path, name: str) -> None:
    size = 1_000_003
    source = buffers.allocate(size)
    source[:size] = random.Random(3).randbytes(size)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    found = set()
    for chunk_bytes in (4096, 65536, 2**20):
        engine = getattr(native, name)(3, 3, chunk_bytes)
        write = engine.write(fd, 0, source.address, size, 4096, 1, True)
        assert write.wait(30) and write.errno == 0 and write.done_bytes == size
        read = engine.read(fd, 0, source.address, size, 4096, 1, True)
        assert read.wait(30)
        discarded = engine.read(fd, 0, 0, size, 4096, 1, True)  # for the checksum alone
        assert discarded.wait(30) and discarded.done_bytes == size
        found |= {write.checksum, read.checksum, discarded.checksum}
        engine.close()
    os.close(fd)
    assert found == {native.crc32c(source[:size])}


@pytest.mark.parametrize(
    "arguments",
    [
        {"size_bytes": 0},
        {"address": 0},
        {"offset": 100},
        {"block_bytes": 3000},
        {"block_bytes": 2**21},
        {"memory_alignment": 0},
    ],
)
@pytest.mark.parametrize("name", ENGINES)
def test_engine_refuses_wrong_requests(name: str, arguments: dict[str, int]) -> None:
    engine = getattr(native, name)()
    request = {"fd": 0, "offset": 0, "address": 8, "size_bytes": 4096, "block_bytes": 4096, "memory_alignment": 1}
    with pytest.raises(ValueError, match="expected"):
        engine.read(**(request | arguments))
    engine.close()
    with pytest.raises(StateError, match="closed"):
        engine.read(**request)


def name_of(task: str) -> str:
    try:
        return Path(f"/proc/self/task/{task}/comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "iou-gone"


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("arguments", [(0, 1, 2**20), (1, 0, 2**20), (1, 1, 5000), (1, 1, 1024), (1, 1, 2**31)])
def test_engine_refuses_wrong_options(name: str, arguments: tuple[int, int, int]) -> None:
    def held() -> tuple[set[str], int]:
        tasks = Path("/proc/self/task")
        return {task.name for task in tasks.iterdir()}, len(os.listdir("/proc/self/fd"))

    threads, files = held()
    with pytest.raises(ValueError, match="expected"):
        getattr(native, name)(*arguments)
    now, files_now = held()
    # The kernel's own workers for rings of earlier tests come and go.
    assert {task for task in now - threads if not name_of(task).startswith("iou-")} == set()
    assert files_now == files


@pytest.mark.parametrize("name", ENGINES)
def test_bad_descriptor_and_bad_memory_are_errors_of_the_transfer(tmp_path: Path, name: str) -> None:
    engine = getattr(native, name)()
    memory = buffers.allocate(4096)
    read = engine.read(10_000, 0, memory.address, 4096, 4096, 1)
    assert read.wait(30)
    assert read.errno == 9  # EBADF
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write = engine.write(fd, 0, 4096, 4096, 4096, 1)  # nothing is mapped in the first pages
    assert write.wait(30)
    assert write.errno == 14  # EFAULT
    os.close(fd)
    engine.close()


def test_page_returner_drops_pages_and_can_be_set_slower(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\7" * 2**20)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 2**20) as mapped:
        mapped[:] = b"\x09" * 2**20
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        returner = native.PageReturner(address, 2**20, 1_000_000)
        assert returner.wait_rounds(3, 30)
        returner.set_interval(3_600_000_000_000)
        rounds = returner.round_count
        assert not returner.wait_rounds(rounds + 2, 0.02)
        returner.close()
        returner.close()
        assert returner.errno == 0
        assert mapped[:] == b"\x09" * 2**20
    assert path.read_bytes() == b"\x09" * 2**20


@pytest.mark.parametrize("name", ENGINES)
def test_a_small_copy_of_memory_is_made_at_once_unless_a_fault_waits_for_it(name: str) -> None:
    engine = getattr(native, name)()
    source, target = ctypes.create_string_buffer(b"x" * 4096), ctypes.create_string_buffer(4096 + 1)
    copy = engine.copy(ctypes.addressof(target), ctypes.addressof(source), 4096, False)
    # No thread was asked, so nothing has to be waited for.
    assert (copy.done(), copy.done_bytes, copy.errno, target.raw[:4096]) == (True, 4096, 0, b"x" * 4096)
    assert 0 < copy.start_ns <= copy.stop_ns

    engine.inject("copy", hang=True)
    held = engine.copy(ctypes.addressof(target), ctypes.addressof(source), 4096, True)
    engine.wait_hanging(1, 30.0)
    assert not held.done()
    engine.release()
    assert held.wait(30.0)

    engine.close()
    with pytest.raises(StateError, match="closed"):
        engine.copy(ctypes.addressof(target), ctypes.addressof(source), 4096, False)
