"""Host memory: buffers, slabs, free lists, limits, and the choice of an engine."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import mmap
import random
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.injector import Injector, interrupt
from tieroff.errors import ConfigError, StateError, StoreError
from tieroff.storage import buffers, engines
from tieroff.storage.engines import Engine
from tieroff.storage.extents import FreeList
from tieroff.storage.host.pool import HostStore
from tieroff.storage.host.slabs import RegisteredSlabs
from tieroff.storage.limits import host_limit_bytes

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


@pytest.mark.parametrize("comes_from_driver", [False, True])
def test_an_interrupt_unmaps_no_memory_that_is_pinned(engine: Engine, comes_from_driver: bool) -> None:
    """To pin gigabytes takes seconds, in which Ctrl-C comes; the driver would go on with pages that are nobody's any more."""
    registered: dict[int, int] = {}
    injector, is_last = Injector(), False

    def register(address: int, size_bytes: int) -> None:
        registered[address] = size_bytes
        if comes_from_driver:
            interrupt()

    def unregister(address: int) -> None:
        assert is_mapped(address)
        registered.pop(address, None)

    for at in itertools.count():
        store = HostStore(8 * MIB, engine, RegisteredSlabs(register, unregister), slab_bytes=MIB)
        is_last = comes_from_driver or not injector.run(functools.partial(store.reserve, MIB), at)
        if comes_from_driver:
            assert injector.run(functools.partial(store.reserve, MIB))
        store.repair()
        assert sum(registered.values()) == store.reserved_bytes, f"interrupted before line {at}: {injector.where}"
        store.close()
        assert not registered
        if is_last:
            break
    assert comes_from_driver or at > 20


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


def test_capacity_above_the_limit_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="at most"):
        HostStore(host_limit_bytes() + 2**40, engine)
    with pytest.raises(ConfigError, match="above 0"):
        HostStore(0, engine)


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
