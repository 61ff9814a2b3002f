"""Host memory: buffers, slabs, free lists, limits, and the choice of an engine."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import random
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tieroff.errors import ConfigError, StateError, StoreError
from tieroff.storage import buffers, engines
from tieroff.storage.engines import Engine
from tieroff.storage.extents import FreeList
from tieroff.storage.host.pool import HostStore
from tieroff.storage.host.slabs import RegisteredSlabs
from tieroff.storage.limits import host_limit_bytes, locked_limit_bytes

MIB = 2**20


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = engines.choose("threads" if "threads" in engines.available() else "aiofiles")
    yield engine
    engine.close()


@pytest.mark.parametrize("size_bytes", [0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1, 3 * MIB])
def test_buffer_is_whole_pages(size_bytes: int) -> None:
    buffer = buffers.allocate(size_bytes)
    assert buffer.address % mmap.PAGESIZE == 0
    assert buffer.size_bytes == len(buffer) >= max(1, size_bytes)
    assert buffer.size_bytes - size_bytes <= mmap.PAGESIZE
    assert buffer[-1] == 0
    buffer[-1] = 7
    assert buffer[-1] == 7


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_buffer_leaves_the_process_with_its_last_tensor() -> None:
    torch = pytest.importorskip("torch")
    buffer = buffers.allocate(64 * MIB)
    address = buffer.address
    gone: list[int] = []
    weakref.finalize(buffer, gone.append, 1)
    row = torch.frombuffer(buffer, dtype=torch.uint8)[5:]
    del buffer
    gc.collect()
    row.fill_(3)
    assert not gone and is_mapped(address + 32 * MIB)
    del row
    gc.collect()
    assert gone and not is_mapped(address + 32 * MIB)


def test_free_list_against_a_map_of_bytes() -> None:
    seeded = random.Random(5)
    area, used = FreeList(), bytearray()
    taken: list[tuple[int, int]] = []
    for _ in range(2000):
        action = seeded.random()
        if action < 0.05:
            size = seeded.randrange(1, 60)
            area.extend(size)
            used += bytes(size)
        elif action < 0.6 or not taken:
            size = seeded.randrange(1, 20)
            offset = area.take(size)
            if offset is None:
                assert bytes(size) not in used
            else:
                assert used[offset : offset + size] == bytes(size)
                used[offset : offset + size] = b"\1" * size
                taken.append((offset, size))
        else:
            offset, size = taken.pop(seeded.randrange(len(taken)))
            area.give(offset, size)
            used[offset : offset + size] = bytes(size)
        assert area.used_bytes == sum(used)
        assert area.largest_bytes == max((len(run) for run in bytes(used).split(b"\1")), default=0)
        assert area.tail_bytes == len(used) - len(bytes(used).rstrip(b"\0"))


@pytest.mark.parametrize("wrong", [(0, 4), (6, 4), (-1, 1), (9, 2)])
def test_free_list_refuses_what_is_not_used(wrong: tuple[int, int]) -> None:
    area = FreeList()
    area.extend(10)
    assert area.take(3) == 0  # 3..10 is free
    with pytest.raises(StateError, match="freed twice"):
        area.give(*wrong)
    assert area.free_bytes == 7


def test_free_list_gives_the_range_freed_last_of_equal_ones() -> None:
    area = FreeList()
    area.extend(60)
    offsets = [area.take(10) for _ in range(6)]
    assert offsets == [0, 10, 20, 30, 40, 50]
    for offset in (40, 0, 20):
        area.give(offset, 10)
    assert [area.take(10) for _ in range(4)] == [20, 0, 40, None]


def test_leases_are_exact_and_the_one_freed_last_comes_next(engine: Engine) -> None:
    store = HostStore(8 * MIB, engine, slab_bytes=MIB)
    blocks = [store.allocate(3 * mmap.PAGESIZE - 5) for _ in range(8)]
    assert store.used_bytes == 8 * 3 * mmap.PAGESIZE  # whole pages, and no power of two
    assert store.reserved_bytes == MIB
    addresses = [store.address(block) for block in blocks]
    for index in (4, 1, 6):
        store.free(blocks[index])
    assert [store.address(store.allocate(3 * mmap.PAGESIZE)) for _ in range(3)] == [addresses[i] for i in (6, 1, 4)]
    store.close()


def test_slabs_are_registered_when_made_and_unregistered_at_close(engine: Engine) -> None:
    registered: dict[int, int] = {}

    def unregister(address: int) -> None:
        del registered[address]

    store = HostStore(8 * MIB, engine, RegisteredSlabs(registered.__setitem__, unregister), slab_bytes=MIB)
    assert registered == {}
    store.reserve(4 * MIB)
    blocks = [store.allocate(MIB) for _ in range(6)]
    assert list(registered.values()) == [4 * MIB, MIB, MIB]
    for block in blocks:
        address = store.address(block)
        assert any(base <= address and address + MIB <= base + size for base, size in registered.items())
        store.free(block)
    assert store.allocate(4 * MIB).offset == 0
    with pytest.raises(StateError, match="at most"):
        store.reserve(9 * MIB)
    store.reserve(7 * MIB)
    assert list(registered.values()) == [4 * MIB, MIB, MIB, MIB]
    store.close()
    assert registered == {}


def test_slab_memory_goes_with_the_last_home(engine: Engine) -> None:
    store = HostStore(8 * MIB, engine)
    home = store.home(MIB)
    view = memoryview(home)
    address = home.address
    store.close()
    del home, store
    gc.collect()
    assert is_mapped(address)
    assert view.nbytes == MIB
    del view
    gc.collect()
    assert not is_mapped(address)


def test_slab_that_the_system_refuses_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_names: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    store = HostStore(8 * MIB, engine)
    monkeypatch.setattr("tieroff.storage.host.slabs.Mapping", refuse)
    with pytest.raises(StoreError, match=r"^\[budget\] host: cannot take 8.00 MiB .*lower it") as caught:
        store.allocate(1)
    assert caught.value.errno == 12
    store.close()


def test_slab_is_refused_when_others_took_the_memory_meanwhile(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Asked of the cgroup again for each slab: one that does not fit would have this process killed."""
    group = {
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": str(4 * MIB),
        "sys/fs/cgroup/job/memory.current": "0",
        "proc/meminfo": "MemAvailable: 1000000 kB\n",
    }
    root = machine(tmp_path, group)
    monkeypatch.setattr("tieroff.storage.host.pool.host_limit_bytes", lambda: host_limit_bytes(root))
    with pytest.raises(ConfigError, match=r"at most 4\.00 MiB"):
        HostStore(5 * MIB, engine)
    store = HostStore(4 * MIB, engine, slab_bytes=MIB)
    store.allocate(MIB)
    machine(root, {**group, "sys/fs/cgroup/job/memory.current": str(3 * MIB + 1)})
    with pytest.raises(StoreError, match="cgroups have left") as caught:
        store.allocate(MIB)
    assert caught.value.errno == errno.ENOMEM
    assert store.reserved_bytes == store.used_bytes == MIB
    machine(root, group)
    store.allocate(MIB)
    store.close()


def test_slab_that_cannot_be_pinned_is_given_back_and_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def register(address: int, size_bytes: int) -> None:
        pinned.append(address)
        raise StoreError("cudaHostRegister returned 2", errno=2)

    monkeypatch.setattr("tieroff.storage.host.pool.locked_limit_bytes", lambda: 8 * MIB)
    store = HostStore(64 * MIB, engine, RegisteredSlabs(register, lambda _address: None))
    with pytest.raises(StoreError, match=r"returned 2; this process has 8\.00 MiB left to lock \(ulimit -l\)") as caught:
        store.reserve(32 * MIB)
    assert caught.value.errno == 2
    del caught
    gc.collect()
    assert store.reserved_bytes == 0
    assert not is_mapped(pinned[0] + 16 * MIB)
    store.close()


LIMITS = "Limit   Soft Limit   Hard Limit   Units\nMax locked memory         {}              8388608              bytes\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/limits": LIMITS.format("unlimited")}, None),
        ({"proc/self/limits": LIMITS.format(8 * MIB)}, 8 * MIB),
        ({"proc/self/limits": LIMITS.format(8 * MIB), "proc/self/status": "VmLck: 1024 kB\nVmPin: 2048 kB\n"}, 5 * MIB),
        ({"proc/self/limits": LIMITS.format(MIB), "proc/self/status": "VmLck: 4096 kB\n"}, 0),
    ],
)
def test_locked_limit_is_what_the_process_may_still_lock(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert locked_limit_bytes(machine(tmp_path, files)) == expected


def test_capacity_above_the_limit_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="at most"):
        HostStore(host_limit_bytes() + 2**40, engine)
    with pytest.raises(ConfigError, match="above 0"):
        HostStore(0, engine)


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": "MemAvailable: 1000 kB\n"} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1_024_000),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 1_024_000),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "900000\n",
                "sys/fs/cgroup/a/b/memory.current": "100\n",
                "sys/fs/cgroup/a/memory.max": "500000\n",
                "sys/fs/cgroup/a/memory.current": "200000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 50000\n",
            },
            350_000,
        ),
        (
            {
                "proc/self/cgroup": "0::/not/mounted/here\n",
                "sys/fs/cgroup/memory.max": "70000\n",
                "sys/fs/cgroup/memory.current": "80000\n",
            },
            0,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,memory:/job\n4:cpuset:/\n",
                f"{V1}/job/memory.limit_in_bytes": "9223372036854771712\n",
                f"{V1}/job/memory.usage_in_bytes": "1\n",
                f"{V1}/memory.limit_in_bytes": "600000\n",
                f"{V1}/memory.usage_in_bytes": "300000\n",
                f"{V1}/memory.stat": "inactive_file 5\ntotal_inactive_file 100000\n",
            },
            400_000,
        ),
    ],
)
def test_host_limit_is_the_least_up_the_tree(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert host_limit_bytes(machine(tmp_path, files)) == expected


@pytest.mark.parametrize("name", ["none such", "Threads", ""])
def test_engine_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"auto or one of .*aiofiles"):
        engines.choose(name)


def test_engine_auto_takes_native_else_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if "threads" in engines.available():
        engine = engines.choose("auto")
        assert engine.name == "threads" and engine.is_direct
        assert caplog.text == ""
        engine.close()
    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules["tieroff.storage.engines.choose"], "available", lambda: ["aiofiles"])
    caplog.set_level(logging.WARNING)
    engine = engines.choose("auto")
    assert engine.name == "aiofiles" and not engine.is_direct
    assert "native engine is not built" in caplog.text and "buffered" in caplog.text
    engine.close()
    engine.close()
