"""Items and places of one step serve the next one, and nobody who holds memory of a step sees another value in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tieroff.core.plan import Residency, Transfer
from tieroff.core.schedule import Tick
from tieroff.core.tensor import Tier
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.items.residency import State
from tieroff.runtime.items.spill import Spill
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.step.program import Actions, make_program
from tieroff.storage.engines.native import NativeEngine
from tieroff.storage.host.pool import HostStore

DEVICE, HOST = Tier.DEVICE, Tier.HOST


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    engine = NativeEngine()
    store = HostStore(1 << 20, engine)
    traffic = Traffic(CpuBackend(), Spill({HOST: store}, (HOST,)))
    traffic.begin_step(is_planned=True)
    yield traffic
    traffic.forget_spares()
    assert store.used_bytes == 0
    store.close()
    engine.close()


def saved(traffic: Traffic, size_bytes: int, value: int) -> ActivationItem:
    item = ActivationItem(0, size_bytes, HOST)
    traffic.hold(item, torch.full((size_bytes,), value, dtype=torch.uint8))
    return item


def test_a_failed_copy_of_a_small_tensor_leaves_it_on_the_device(traffic: Traffic) -> None:
    """Copies that the engine cannot make at once are transfers like any other."""
    item = saved(traffic, 64, 7)
    item.leave(traffic)
    traffic.want(item)
    item.state = State.DEVICE  # it was written
    store = traffic.stores[HOST]
    assert isinstance(store, HostStore)
    engine: Any = store.engine
    engine.native.inject("copy", errno=5)
    with pytest.raises(tieroff.StoreError, match="copying activation 0 out"):
        item.leave(traffic)
    engine.native.clear_faults()
    assert item.state is State.DEVICE
    assert item.device is not None and torch.equal(item.device, torch.full((64,), 7, dtype=torch.uint8))
    traffic.end(item)


def test_an_interrupt_as_a_copy_arrives_leaves_one_that_is_still_on_its_way(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repair drops such a one. One that counted as there would be taken for what the item knew of its memory before."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    item = saved(traffic, 64, 7)
    item.leave(traffic)
    with monkeypatch.context() as patch:
        patch.setattr(ActivationItem, "arrived", interrupted)
        with pytest.raises(KeyboardInterrupt):
            traffic.want(item)
    assert item.state.name == "ARRIVING"
    assert torch.equal(traffic.want(item), torch.full((64,), 7, dtype=torch.uint8))
    assert item.state is State.BOTH
    traffic.end(item)


def test_the_place_of_a_spare_item_rests_while_no_tensor_needs_it(traffic: Traffic) -> None:
    store, size_bytes = traffic.stores[HOST], 40 << 10
    item = saved(traffic, size_bytes, 7)
    item.leave(traffic)
    place, address = item.place, item.place.address if item.place is not None else None
    traffic.retire(item)
    assert store.used_bytes == 0
    assert traffic.spare(("activation", 0), size_bytes) is item
    item.begin_again()
    traffic.hold(item, torch.full((size_bytes,), 8, dtype=torch.uint8))
    item.leave(traffic)
    assert place is not None and item.place is place and place.address == address
    assert torch.equal(traffic.want(item), torch.full((size_bytes,), 8, dtype=torch.uint8))
    traffic.retire(item)
    whole = saved(traffic, store.capacity_bytes, 9)
    whole.leave(traffic)
    assert whole.state is State.LOWER
    assert traffic.spare(("activation", 0), size_bytes) is item and item.place is None
    traffic.end(item)
    traffic.end(whole)


def test_a_program_leaves_out_what_asks_nothing_of_the_runtime() -> None:
    out = Transfer(0, DEVICE, HOST, 1, 2, 0)
    back = Transfer(0, HOST, DEVICE, 3, 3, 0)
    ticks = (
        Tick(begins=(Residency(0, DEVICE, 0, 2),)),
        Tick(issues=(out,)),
        Tick(await_outs=(out,), ends=(Residency(0, DEVICE, 0, 2), Residency(1, DEVICE, 0, 2))),
        Tick(issues=(back,), await_ins=(back,)),
    )
    assert make_program(ticks, {0}) == (
        None,
        Actions((), (), (), ((False, 0),), ()),
        Actions((), (0,), (0,), (), ()),
        Actions((), (), (), ((True, 0),), (0,)),
    )


class Loop:
    """Keeps what a step made for longer than the step."""

    def __init__(self, is_wrapped: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if is_wrapped:
            config = {"device": "cpu", "budget": {"device": "60%", "host": "64MiB"}, "plan": {"min_bytes": 0}}
            tieroff.wrap(self.model, self.optimizer, config)
        self.kept: list[torch.Tensor] = []
        self.found: list[torch.Tensor] = []

    def step(self, index: int) -> None:
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(index), requires_grad=True)
        loss = self.model(inputs).square().mean()
        loss.backward(retain_graph=index % 3 == 0)
        if index % 3 == 0:  # backward once more, from what was saved
            self.found.append(torch.autograd.grad(loss, inputs)[0])
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.found.append(loss.detach())
        self.found += [kept.clone() for kept in self.kept]  # as they are a step later
        self.kept = [*gradients, *(p.data[0] for p in self.model.parameters() if index % 4 == 0)]


def test_what_people_keep_of_a_step_stays_as_it_was() -> None:
    loops = Loop(False), Loop(True)
    for loop in loops:
        for index in range(14):
            loop.step(index)
    stats = tieroff.engine(loops[1].model).stats()
    assert stats.phase == "planned" and sum(stats.moved_bytes.values()) > 0
    for plain, wrapped in zip(loops[0].found, loops[1].found, strict=True):
        assert torch.equal(plain, wrapped)
    tieroff.unwrap(loops[1].model)
