"""The checking mode finds what it is there for."""

from __future__ import annotations

import pytest
import torch

from tests.support.checking import states_checked
from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.items import at_once
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.residency import State
from tieroff.runtime.items.spill import Spill
from tieroff.runtime.items.traffic import Traffic
from tieroff.storage.engines.native import NativeEngine
from tieroff.storage.host.pool import HostStore


def turns() -> list[str]:
    """Sends small tensors down and up, many at once; returns what the checking mode found."""
    engine = NativeEngine()
    store = HostStore(1 << 20, engine)
    traffic = Traffic(CpuBackend(), Spill({Tier.HOST: store}, (Tier.HOST,)))
    traffic.begin_step(is_planned=True)
    tensors = [torch.full((64,), float(number)) for number in range(3)]
    items = [HomeItem(("state", n, "x"), f"item {n}", TensorClass.OPTIMIZER, t, Tier.HOST) for n, t in enumerate(tensors)]
    with states_checked() as found:
        for item in items:
            item.adopt(traffic)
            item.leave(traffic)
            item.lift(traffic)
            item.touch(traffic)
            item.leave(traffic)
        for _ in range(2):
            for tensor in tensors:
                tensor.mul_(2)  # below, so that what was up before is old
            at_once.fetch_all(traffic, items)
            at_once.show_all(items)
            for tensor in tensors:
                tensor.add_(1)
            at_once.leave_all(traffic, items)
    for item in items:
        item.detach(traffic)
    items.clear()
    tensors.clear()
    store.close()
    engine.close()
    return found


def test_right_moves_pass() -> None:
    assert turns() == []


@pytest.mark.parametrize("link", ["h2d", "d2h"])
def test_a_copy_that_was_not_made_is_found(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(traffic: Traffic, moved: object, copies: list[int], way: str) -> bool:
        return True if way == link else copy_all(traffic, moved, copies, way)  # type: ignore[arg-type]

    copy_all = Traffic.copy_all
    monkeypatch.setattr(Traffic, "copy_all", forgets)
    assert any("with two values" in text for text in turns())


def test_a_tensor_that_leaves_without_a_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_once, "store_all", lambda traffic, items: None)

    def leaves(traffic: Traffic, items: list[HomeItem]) -> None:
        for item in items:
            traffic.free_device(item)
            item.state = State.LOWER

    monkeypatch.setattr(at_once, "leave_all", leaves)
    assert "item 0 went from DEVICE to LOWER" in turns()
