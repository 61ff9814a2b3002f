"""Any sequence of calls on any store, against a dict."""

from __future__ import annotations

import ctypes
import random
import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from tieroff.errors import StoreError
from tieroff.storage import buffers
from tieroff.storage.engines import Engine, available, choose
from tieroff.storage.host.pool import HostStore
from tieroff.storage.memory import align_up
from tieroff.storage.nvme.file_store import FileStore, Room
from tieroff.storage.space import SpaceStore
from tieroff.storage.store import Block, Home

KIB = 2**10
CAPACITY_BYTES = 512 * KIB

sizes = st.integers(1, 100 * KIB)
shifts = st.sampled_from([0, 1, 64])
seeds = st.integers(0, 2**32)


class StoreMachine(RuleBasedStateMachine):
    """Blocks and homes hold what a dict says they hold; bytes are accounted for after every step."""

    engine: Engine
    kind: str

    def __init__(self) -> None:
        super().__init__()
        self.folders = [tempfile.TemporaryDirectory() for _ in range(2)]
        dirs = [folder.name for folder in self.folders]
        self.store: SpaceStore = (
            HostStore(CAPACITY_BYTES, self.engine, slab_bytes=128 * KIB)
            if self.kind == "host"
            else FileStore(dirs, CAPACITY_BYTES, self.engine, "always", room=Room(min_free_bytes=0, grow_bytes=64 * KIB))
        )
        self.values: dict[Any, bytes | None] = {}

    blocks = Bundle("blocks")
    homes = Bundle("homes")

    def held_bytes(self) -> int:
        return sum(align_up(item.size_bytes, self.store.alignment_bytes) for item in self.values)

    @rule(target=blocks, size=sizes)
    def allocate(self, size: int) -> Any:
        try:
            block = self.store.allocate(size)
        except StoreError:
            # In pieces or full; but never while as much as the largest request is free in one piece.
            assert self.held_bytes() + align_up(size, self.store.alignment_bytes) > CAPACITY_BYTES // 8
            return multiple()
        self.values[block] = None
        return block

    @rule(block=blocks)
    def free(self, block: Block) -> None:
        if block in self.values:
            del self.values[block]
            self.store.free(block)

    @rule(block=blocks, shift=shifts, seed=seeds)
    def write(self, block: Block, shift: int, seed: int) -> None:
        if block not in self.values:
            return
        data = random.Random(seed).randbytes(block.size_bytes)
        memory = buffers.allocate(block.size_bytes + shift)
        memory[shift : shift + block.size_bytes] = data
        self.store.write(block, memory.address + shift, memory).wait(30)
        self.values[block] = data

    @rule(block=blocks, shift=shifts)
    def read(self, block: Block, shift: int) -> None:
        if self.values.get(block) is None:
            return
        memory = buffers.allocate(block.size_bytes + shift)
        self.store.read(block, memory.address + shift, memory).wait(30)
        assert memory[shift : shift + block.size_bytes] == self.values[block]

    @rule(target=homes, size=sizes)
    def home(self, size: int) -> Any:
        try:
            home = self.store.home(size)
        except StoreError:
            return multiple()
        ctypes.memset(home.address, 0, size)
        self.values[home] = bytes(size)
        return home

    @rule(home=homes, shift=shifts, seed=seeds)
    def home_write(self, home: Home, shift: int, seed: int) -> None:
        data = random.Random(seed).randbytes(home.size_bytes)
        memory = buffers.allocate(home.size_bytes + shift)
        memory[shift : shift + home.size_bytes] = data
        try:
            home.write(memory.address + shift, memory).wait(30)
        except StoreError:
            return  # no room for the shadow: the old value stays
        home.publish()
        self.values[home] = data

    @rule(home=homes, seed=seeds)
    def home_touch(self, home: Home, seed: int) -> None:
        start = seed % home.size_bytes
        part = random.Random(seed).randbytes(min(5000, home.size_bytes - start))
        ctypes.memmove(home.address + start, part, len(part))
        value = self.values[home]
        assert value is not None
        self.values[home] = value[:start] + part + value[start + len(part) :]

    @rule(home=homes)
    def home_read(self, home: Home) -> None:
        memory = buffers.allocate(home.size_bytes)
        home.read(memory.address, memory).wait(30)
        assert memory[: home.size_bytes] == self.values[home]

    @rule(home=homes)
    def home_trim(self, home: Home) -> None:
        home.trim()
        assert ctypes.string_at(home.address, home.size_bytes) == self.values[home]

    @invariant()
    def bytes_are_accounted_for(self) -> None:
        assert self.store.used_bytes == self.held_bytes() <= self.store.peak_bytes <= CAPACITY_BYTES
        assert self.store.used_bytes <= self.store.reserved_bytes

    def teardown(self) -> None:
        for item in list(self.values):
            if isinstance(item, Block):
                self.store.free(item)
        self.store.close()
        for folder in self.folders:
            folder.cleanup()


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("kind", ["host", "file"])
def test_store_holds_what_a_dict_holds(name: str, kind: str) -> None:
    engine = choose(name)
    machine: Any = type("Machine", (StoreMachine,), {"engine": engine, "kind": kind})
    case = machine.TestCase
    case.settings = settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    try:
        case().runTest()
    finally:
        engine.close()
