"""Threads that dirty a home's pages and give them back while new values are written past them: no page is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tieroff.storage import buffers
from tieroff.storage.engines import Engine, available, choose
from tieroff.storage.nvme.file_home import FileHome
from tieroff.storage.nvme.file_store import FileStore, Room

PAGE = 4096
PAGES = 1024  # with fewer, a broken rule goes unseen for longer
SIZE = PAGES * PAGE
ROUNDS = 40
MARK = 8  # bytes at the start of each page that belong to the thread that dirties it; the rest is the value


@pytest.fixture(params=available())
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = choose(request.param)
    yield engine
    engine.close()


@pytest.fixture
def store(engine: Engine, tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore([tmp_path], 8 * SIZE, engine, checksum="off", room=Room(grow_bytes=SIZE))
    store.return_pages(0.001)
    yield store
    store.close()


class Dirtier:
    """Writes a growing number at the start of every page of a home, over and over, until it is told to stop."""

    def __init__(self, home: FileHome) -> None:
        self.marks = np.frombuffer(memoryview(home), dtype=np.uint64).reshape(PAGES, -1)[:, 0]
        self.count = 0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_stopping:
            self.count += 1
            self.marks[:] = self.count

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()


def value(seed: int) -> buffers.Buffer:
    """Returns a home's bytes in which every page differs from that of every other seed."""
    buffer = buffers.allocate(SIZE)
    np.frombuffer(buffer, dtype=np.uint8)[:] = np.random.default_rng(seed).integers(1, 255, SIZE, dtype=np.uint8)
    return buffer


def wrong_pages(home: FileHome, expected: buffers.Buffer) -> list[int]:
    """Returns the pages whose bytes behind the mark are not the expected ones."""
    views = (memoryview(home), memoryview(expected))
    ours, theirs = (np.frombuffer(view, dtype=np.uint8).reshape(PAGES, PAGE)[:, MARK:] for view in views)
    return [int(page) for page in np.flatnonzero((ours != theirs).any(axis=1))]


def test_new_values_replace_every_page_while_a_thread_dirties_them(store: FileStore) -> None:
    home = store.home(SIZE)
    dirtier = Dirtier(home)
    try:
        for seed in range(ROUNDS):
            source = value(seed)
            home.write(source.address, source).wait(60)
            home.publish()
            assert wrong_pages(home, source) == [], f"round {seed}"
            home.trim()  # what comes now comes from the drive
            assert wrong_pages(home, source) == [], f"round {seed}, on the drive"
    finally:
        dirtier.stop()
    assert dirtier.count > ROUNDS


def test_pages_of_one_home_survive_the_direct_writes_of_its_neighbours(store: FileStore) -> None:
    dirtied, first, second = (store.home(SIZE) for _ in range(3))
    keep = value(1000)
    dirtied.write(keep.address, keep).wait(60)
    dirtied.publish()
    dirtier = Dirtier(dirtied)
    try:
        for seed in range(ROUNDS // 2):
            for offset, home in enumerate((first, second)):
                source = value(2 * seed + offset)
                home.write(source.address, source).wait(60)
                home.publish()
                assert wrong_pages(home, source) == []
            target = buffers.allocate(SIZE)
            dirtied.read(target.address, target).wait(60)
            pages = np.frombuffer(target, dtype=np.uint8).reshape(PAGES, PAGE)[:, MARK:]
            assert (pages == np.frombuffer(keep, dtype=np.uint8).reshape(PAGES, PAGE)[:, MARK:]).all()
    finally:
        dirtier.stop()
    for _ in range(2):
        assert dirtier.marks.tolist() == [dirtier.count] * PAGES
        assert wrong_pages(dirtied, keep) == []
        dirtied.trim()
