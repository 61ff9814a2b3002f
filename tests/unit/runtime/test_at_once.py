"""Small tensors that move many at once end as they would one by one, whatever somebody did to one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.items.at_once import fetch_all, leave_all, show_all, store_all
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.residency import State
from tieroff.runtime.items.spill import Spill
from tieroff.runtime.items.traffic import Traffic
from tieroff.storage.engines.native import NativeEngine
from tieroff.storage.host.pool import HostStore

COUNT, SIZE = 5, 64


class Bench:
    """Items that have been up and down once, so that each has a room, and lie below now."""

    def __init__(self) -> None:
        self.engine = NativeEngine()
        self.store = HostStore(1 << 20, self.engine)
        self.traffic = Traffic(CpuBackend(), Spill({Tier.HOST: self.store}, (Tier.HOST,)))
        self.traffic.begin_step(is_planned=True)
        self.tensors = [torch.full((SIZE,), float(number)) for number in range(COUNT)]
        self.items = [
            HomeItem(("state", number, "x"), f"{number}", TensorClass.OPTIMIZER, tensor, Tier.HOST)
            for number, tensor in enumerate(self.tensors)
        ]
        for item in self.items:
            item.adopt(self.traffic)
            item.leave(self.traffic)
            item.lift(self.traffic)
            item.leave(self.traffic)
        assert all(item.room is not None and item.state is State.LOWER for item in self.items)

    def up(self) -> None:
        """Brings all up that may come."""
        fetch_all(self.traffic, self.items)
        for item in show_all(self.items):
            item.refresh(self.traffic)
            item.lift(self.traffic)
            item.touch(self.traffic)

    def down(self) -> None:
        """Sends all below that may go."""
        leave_all(self.traffic, self.items)

    def check(self, expected: list[float]) -> None:
        """The tensors hold these values, wherever they lie."""
        assert [tensor.tolist() for tensor in self.tensors] == [[value] * SIZE for value in expected]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for item in bench.items:
        item.detach(bench.traffic)
    bench.items.clear()
    bench.tensors.clear()
    assert bench.store.used_bytes == 0
    assert bench.traffic.device_bytes == 0
    bench.store.close()
    bench.engine.close()


def add(bench: Bench) -> None:
    for tensor in bench.tensors:
        tensor.add_(10)


def test_many_come_up_are_written_and_go_below(bench: Bench) -> None:
    addresses = [tensor.data_ptr() for tensor in bench.tensors]
    for turn in range(1, 4):
        bench.up()
        assert all(item.is_lifted and item.state is State.DEVICE for item in bench.items)
        assert bench.traffic.device_bytes == COUNT * SIZE * 4
        add(bench)
        bench.down()
        assert all(item.state is State.LOWER for item in bench.items)
        assert bench.traffic.device_bytes == 0
        assert [tensor.data_ptr() for tensor in bench.tensors] == addresses
        bench.check([number + 10.0 * turn for number in range(COUNT)])


def test_copies_and_bytes_are_counted(bench: Bench) -> None:
    bench.traffic.keeps_timeline = True
    bench.traffic.begin_step(is_planned=True)
    bench.up()
    bench.down()
    assert bench.traffic.counts.moved_bytes == {"d2h": 1280, "h2d": 1280, "nvme_write": 0, "nvme_read": 0}
    assert bench.traffic.counts.by_class["optimizer"] == 2560
    assert [link for _, link, _, _ in bench.traffic.spans] == ["h2d"] * COUNT + ["d2h"] * COUNT
    assert all(0 < copy.start_ns <= copy.stop_ns and copy.done() for _, _, copy, _ in bench.traffic.spans)


def test_what_comes_up_and_is_not_written_is_not_copied_out(bench: Bench) -> None:
    fetch_all(bench.traffic, bench.items)
    moved = dict(bench.traffic.counts.moved_bytes)
    bench.down()
    assert bench.traffic.counts.moved_bytes == moved
    assert all(item.state is State.LOWER for item in bench.items)
    bench.check([float(number) for number in range(COUNT)])


def test_one_that_somebody_holds_up_stays_up(bench: Bench) -> None:
    bench.up()
    alias = bench.tensors[2].view(-1)
    add(bench)
    bench.down()
    assert [item.device is not None for item in bench.items] == [number == 2 for number in range(COUNT)]
    alias.add_(1)
    bench.check([10.0, 11.0, 13.0, 13.0, 14.0])


def test_one_that_somebody_holds_below_stays_below(bench: Bench) -> None:
    alias = bench.tensors[2].view(-1)
    bench.up()
    assert [item.device is not None for item in bench.items] == [number != 2 for number in range(COUNT)]
    add(bench)
    alias.add_(1)
    bench.down()
    bench.check([10.0, 11.0, 13.0, 13.0, 14.0])


def test_memory_below_that_somebody_took_while_it_was_up_is_his(bench: Bench) -> None:
    bench.up()
    below = bench.items[2].lower
    assert below is not None
    alias = below.view(-1)
    del below
    add(bench)
    bench.down()
    assert alias.tolist() == [2.0] * SIZE
    bench.check([number + 10.0 for number in range(COUNT)])


@pytest.mark.parametrize("is_up", [False, True])
def test_other_memory_that_one_is_given_counts(bench: Bench, is_up: bool) -> None:
    if is_up:
        bench.up()
    bench.tensors[2].data = torch.full((SIZE,), 7.0)
    if not is_up:
        bench.up()
    add(bench)
    bench.down()
    bench.check([10.0, 11.0, 17.0, 13.0, 14.0])


def test_a_write_below_while_a_copy_is_up_counts(bench: Bench) -> None:
    fetch_all(bench.traffic, bench.items)
    bench.tensors[2].mul_(3)
    left = show_all(bench.items)
    assert left == [bench.items[2]]
    bench.up()
    add(bench)
    bench.down()
    bench.check([10.0, 11.0, 16.0, 13.0, 14.0])


def test_what_is_stored_and_written_again_is_copied_again(bench: Bench) -> None:
    bench.up()
    store_all(bench.traffic, bench.items)
    assert all(item.state is State.BOTH for item in bench.items)
    bench.tensors[2].add_(10)
    bench.down()
    bench.check([0.0, 1.0, 12.0, 3.0, 4.0])


def test_where_a_fault_waits_they_go_one_by_one(bench: Bench) -> None:
    bench.engine.native.inject("copy", errno=5, after=1000)
    bench.up()
    add(bench)
    bench.down()
    bench.engine.native.clear_faults()
    bench.check([number + 10.0 for number in range(COUNT)])


def test_no_tensor_is_shown_under_a_dispatch_mode(bench: Bench) -> None:
    fetch_all(bench.traffic, bench.items)
    with FlopCounterMode(display=False):
        assert show_all(bench.items) == bench.items
    bench.up()
    bench.down()
    bench.check([float(number) for number in range(COUNT)])


def test_small_memory_is_copied_in_the_calling_thread() -> None:
    engine = NativeEngine()
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    triples = [target.data_ptr(), source.data_ptr(), 32, target.data_ptr() + 32, source.data_ptr() + 32, 32]
    span = engine.copy_now(triples)
    assert span is not None
    assert 0 < span[0] <= span[1]
    assert torch.equal(source, target)
    for wrong, message in (
        (triples[:2], "a target, a source and a size"),
        ([0, source.data_ptr(), 8], "addresses of memory"),
        ([target.data_ptr(), source.data_ptr(), (32 << 10) + 1], "32 KiB or less"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.copy_now(wrong)
    engine.close()
    with pytest.raises(Exception, match="closed"):
        engine.copy_now(triples)
