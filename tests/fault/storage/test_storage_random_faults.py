"""Random calls with random faults under them, by seed, against a dict: what a store hands out is what it was given."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.storage.faulty import Action, FaultyEngine, Kind
from tieroff.errors import StateError, StoreError
from tieroff.storage import buffers
from tieroff.storage.engines import available, choose
from tieroff.storage.nvme.file_store import FileStore, Room

KIB = 2**10
CALLS = 120
SEEDS = range(8)

FAULTS: list[tuple[Action, Kind]] = [
    ("write", "errno"),
    ("write", "short"),
    ("write", "flip"),
    ("write", "lost"),
    ("write", "late"),
    ("write", "misdirected"),
    ("read", "errno"),
    ("read", "short"),
    ("read", "flip"),
    ("read", "late"),
    ("read", "misdirected"),
    ("verify", "errno"),
    ("verify", "flip"),
]


@pytest.fixture(params=available())
def engine(request: pytest.FixtureRequest) -> Iterator[FaultyEngine]:
    engine = FaultyEngine(choose(request.param))
    yield engine
    engine.close()


class Run:
    """One sequence of calls; `values` holds what each place must hold, None where no value was stored well.

    A late end is waited for in vain first, as a caller with a time-out does.
    """

    def __init__(self, engine: FaultyEngine, folder: Path, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.store = FileStore([folder], 4096 * KIB, engine, "always", room=Room(grow_bytes=256 * KIB))
        self.values: dict[Any, bytes | None] = {}
        self.told = 0
        self.compared = 0

    def finish(self, transfer: Any) -> bool:
        try:
            try:
                transfer.wait(0.0)
            except StoreError:
                self.engine.release()
                transfer.wait(30)
        except StoreError as error:
            assert error.path == self.store.dirs[0] and error.errno
            self.told += 1
            return False
        return True

    def memory(self, size_bytes: int) -> buffers.Buffer:
        buffer = buffers.allocate(size_bytes)
        buffer[:size_bytes] = self.random.randbytes(size_bytes)
        return buffer

    def size(self) -> int:
        return self.random.randrange(1, 100 * KIB)

    def write_block(self, block: Any) -> None:
        source = self.memory(block.size_bytes)
        self.values[block] = None
        if self.finish(self.store.write(block, source.address, source)):
            self.values[block] = source[: block.size_bytes]

    def read_block(self, block: Any) -> None:
        target = self.memory(block.size_bytes)
        try:
            is_read = self.finish(self.store.read(block, target.address, target))
        except StateError:
            assert self.values[block] is None
            return
        if is_read:
            assert target[: block.size_bytes] == self.values[block]
            self.compared += 1

    def write_home(self, home: Any) -> None:
        source = self.memory(home.size_bytes)
        if not self.finish(home.write(source.address, source)):
            return
        try:
            home.publish()
        except StoreError:
            self.told += 1
        else:
            self.values[home] = source[: home.size_bytes]

    def read_home(self, home: Any) -> None:
        target = self.memory(home.size_bytes)
        if self.finish(home.read(target.address, target)):
            assert target[: home.size_bytes] == self.values[home]
            self.compared += 1


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_hold_what_a_dict_holds_or_say_so(engine: FaultyEngine, tmp_path: Path, seed: int) -> None:
    run = Run(engine, tmp_path, seed)
    for _ in range(CALLS):
        if run.random.random() < 0.3:
            action, kind = run.random.choice(FAULTS)
            engine.inject(action, kind, errno=5 if kind == "errno" else 0, after=run.random.randrange(3))
        blocks = list(run.values)
        call = run.random.choice(["allocate", "write", "write", "read", "read", "read", "free"])
        if call == "allocate" or not blocks:
            run.values[run.store.allocate(run.size())] = None
        elif call == "write":
            run.write_block(run.random.choice(blocks))
        elif call == "read":
            run.read_block(run.random.choice(blocks))
        elif len(blocks) > 8:
            block = run.random.choice(blocks)
            del run.values[block]
            run.store.free(block)
        if run.random.random() < 0.2:
            engine.clear()
    assert run.told and run.compared
    run.store.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_homes_hold_what_a_dict_holds_or_say_so(engine: FaultyEngine, tmp_path: Path, seed: int) -> None:
    """Without writes that land on another home: until the store has noticed one, that looks like somebody's change."""
    run = Run(engine, tmp_path, seed)
    homes = [run.store.home(run.size()) for _ in range(6)]
    for home in homes:
        run.values[home] = bytes(home.size_bytes)
        run.write_home(home)
    for _ in range(CALLS):
        if run.random.random() < 0.3:
            action, kind = run.random.choice([fault for fault in FAULTS if fault != ("write", "misdirected")])
            engine.inject(action, kind, errno=5 if kind == "errno" else 0, after=run.random.randrange(3))
        home = run.random.choice(homes)
        if run.random.random() < 0.5:
            run.write_home(home)
        else:
            run.read_home(home)
        assert bytes(memoryview(home).cast("B")) == run.values[home]
        if run.random.random() < 0.2:
            engine.clear()
    assert run.told and run.compared
    homes.clear()
    run.values.clear()
    run.store.close()
