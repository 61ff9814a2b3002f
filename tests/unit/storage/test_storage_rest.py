"""Blocks at rest: room that is anybody's, and its owner's again as long as nobody took it."""

from __future__ import annotations

import itertools
import mmap
import random
from collections.abc import Iterator

import pytest

from tests.support.injector import Injector
from tieroff.errors import StoreError
from tieroff.storage import engines
from tieroff.storage.host.pool import HostStore
from tieroff.storage.store import Block

PAGE = mmap.PAGESIZE


class Copy:
    """A copy outside of the store."""

    start_ns = stop_ns = 0

    def __init__(self) -> None:
        self.is_over = False

    def done(self) -> bool:
        return self.is_over

    def wait(self, timeout_s: float | None = None) -> None:
        self.is_over = True

    def wait_ended(self, timeout_s: float | None = None) -> bool:
        self.is_over = True
        return True


def pages_of(blocks: list[Block]) -> list[int]:
    return [block.offset // PAGE + page for block in blocks for page in range(block.extent_bytes // PAGE)]


def longest_run(live: list[Block]) -> int:
    """Returns how many of the store's pages in a row are nobody's."""
    taken = set(pages_of(live))
    runs = [list(group) for is_taken, group in itertools.groupby(range(8), taken.__contains__) if not is_taken]
    return max(map(len, runs), default=0)


@pytest.fixture
def store() -> Iterator[HostStore]:
    engine = engines.choose("auto")
    store = HostStore(8 * PAGE, engine, slab_bytes=8 * PAGE)
    yield store
    store.close()
    engine.close()


def test_a_block_that_rested_is_the_same_afterwards(store: HostStore) -> None:
    block = store.allocate(3 * PAGE - 5)
    address = store.address(block)
    store.rest(block)
    assert store.used_bytes == 0
    others = [store.allocate(PAGE) for _ in range(5)]
    assert store.used_bytes == 5 * PAGE and store.peak_bytes == 5 * PAGE
    assert store.resume(block) and store.address(block) == address
    assert store.used_bytes == store.peak_bytes == 8 * PAGE
    assert not {store.address(other) for other in others} & {address, address + PAGE, address + 2 * PAGE}
    with pytest.raises(StoreError, match="no room for"):
        store.allocate(1)


def test_room_of_resting_blocks_goes_to_others_the_longest_first(store: HostStore) -> None:
    blocks = [store.allocate(2 * PAGE) for _ in range(4)]
    for block in blocks:
        store.rest(block)
    taken = store.allocate(2 * PAGE)
    assert [store.resume(block) for block in blocks] == [False, True, True, True]
    store.free(blocks[0])  # does no harm
    store.free(taken)
    assert store.used_bytes == 6 * PAGE
    assert store.allocate(2 * PAGE) is not None


def test_a_larger_block_gets_the_room_of_several(store: HostStore) -> None:
    for block in [store.allocate(PAGE) for _ in range(8)]:
        store.rest(block)
    whole = store.allocate(8 * PAGE)
    assert store.used_bytes == 8 * PAGE == whole.extent_bytes


def test_memory_is_not_taken_from_the_system_while_blocks_rest() -> None:
    engine = engines.choose("auto")
    store = HostStore(64 * PAGE, engine, slab_bytes=4 * PAGE)
    for block in [store.allocate(PAGE) for _ in range(4)]:
        store.rest(block)
    store.allocate(PAGE)
    assert store.reserved_bytes == 4 * PAGE
    store.close()
    engine.close()


def test_a_block_whose_copy_goes_on_rests_and_gives_its_room_when_it_is_over(store: HostStore) -> None:
    block, copy = store.allocate(8 * PAGE), Copy()
    block.note(copy)
    store.rest(block)
    assert store.resume(block)  # who copied it has the next copy in order with this one
    store.rest(block)
    store.allocate(PAGE)  # waits for the copy
    assert copy.is_over
    assert not store.resume(block)


def test_repair_keeps_the_room_of_a_resting_block_until_its_copy_is_over(store: HostStore) -> None:
    """Copies of another device are none that whoever repairs has waited for."""
    block, copy = store.allocate(2 * PAGE), Copy()
    block.note(copy)
    store.rest(block)
    store.repair()
    others = [store.allocate(PAGE) for _ in range(6)]
    assert {other.offset for other in others}.isdisjoint({block.offset, block.offset + PAGE})
    assert not copy.is_over
    store.allocate(2 * PAGE)
    assert copy.is_over


def test_a_full_store_has_no_room_for_what_rested(store: HostStore) -> None:
    block = store.allocate(4 * PAGE)
    store.rest(block)
    store.capacity_bytes = 3 * PAGE
    assert not store.resume(block)


def test_resting_blocks_may_be_freed(store: HostStore) -> None:
    block = store.allocate(8 * PAGE)
    store.rest(block)
    store.free(block)
    assert store.used_bytes == 0 and not store.resume(block)
    assert store.allocate(8 * PAGE).extent_bytes == 8 * PAGE


def test_blocks_that_come_and_go_and_rest_never_overlap(store: HostStore) -> None:
    seeded = random.Random(7)
    live: list[Block] = []
    resting: list[Block] = []
    came_back = lost = 0
    for _ in range(4000):
        action = seeded.random()
        if action < 0.4:
            size_bytes = seeded.randrange(1, 3 * PAGE)
            if longest_run(live) * PAGE >= size_bytes:  # whatever rests
                live.append(store.allocate(size_bytes))
            else:
                with pytest.raises(StoreError, match="no room for"):
                    store.allocate(size_bytes)
        elif action < 0.55 and live:
            store.free(live.pop(seeded.randrange(len(live))))
        elif action < 0.8 and live:
            resting.append(live.pop(seeded.randrange(len(live))))
            store.rest(resting[-1])
        elif action < 0.95 and resting:
            block = resting.pop(seeded.randrange(len(resting)))
            if store.resume(block):
                live.append(block)
                came_back += 1
            else:
                lost += 1
        elif resting:
            store.free(resting.pop(seeded.randrange(len(resting))))
        assert store.used_bytes == sum(block.extent_bytes for block in live) <= store.capacity_bytes
        assert len(set(pages_of(live))) == len(pages_of(live))
    assert came_back > 100 and lost > 100


@pytest.mark.parametrize("does", ["rest", "resume", "take"])
def test_an_exception_anywhere_leaves_a_store_that_repair_mends(store: HostStore, does: str) -> None:
    injector = Injector()
    for at in itertools.count():
        kept, block = store.allocate(PAGE), store.allocate(4 * PAGE)
        if does != "rest":
            store.rest(block)
        if does == "take":
            was_interrupted = injector.run(lambda: store.free(store.allocate(6 * PAGE)), at)
        else:
            act = store.rest if does == "rest" else store.resume
            was_interrupted = injector.run(lambda: act(block), at)  # noqa: B023 - it runs here
        store.repair()
        store.free(block)  # its owner does not know how far it came
        assert store.used_bytes == PAGE, injector.where
        others = [store.allocate(PAGE) for _ in range(7)]
        assert len({other.offset for other in (kept, *others)}) == 8, injector.where
        for other in (kept, *others):
            store.free(other)
        if not was_interrupted:
            break
    assert at > 4
