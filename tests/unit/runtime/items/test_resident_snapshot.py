"""What a plan has on the device all the time is looked at in one go: nothing that happened to it between steps is missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.items.spill import Spill
from tieroff.runtime.items.table import ResidentSnapshot
from tieroff.runtime.items.traffic import Traffic
from tieroff.storage.engines.native import NativeEngine
from tieroff.storage.host.pool import HostStore

WIDTH = 8
PLAN = object()


class Model:
    """Two parameters and the optimizer state of one, all of which stay on the device."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.weight, self.other = nn.Parameter(torch.ones(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.state = torch.ones(WIDTH, WIDTH)
        self.items: list[HomeItem] = [
            ParameterItem(0, "weight", self.weight, Tier.HOST),
            ParameterItem(1, "other", self.other, Tier.HOST),
            HomeItem(("state", 0, "x"), "x", TensorClass.OPTIMIZER, self.state, Tier.HOST),
        ]
        for item in self.items:
            item.adopt(traffic)
            item.stays_resident = True


@pytest.fixture
def model() -> Iterator[Model]:
    engine = NativeEngine()
    store = HostStore(1 << 20, engine)
    model = Model(Traffic(CpuBackend(), Spill({Tier.HOST: store}, (Tier.HOST,))))
    yield model
    for item in model.items:
        if item.tensor is not None:
            item.detach(model.traffic)
    store.close()
    engine.close()


def give_a_parameter_memory(model: Model) -> None:
    model.weight.data = torch.zeros(WIDTH, WIDTH)


def give_state_memory(model: Model) -> None:
    model.state.data = torch.zeros(WIDTH, WIDTH)


def convert_a_parameter(model: Model) -> None:
    model.weight.data = model.weight.data.bfloat16()


def shorten_a_parameter(model: Model) -> None:
    """In the memory that it has."""
    model.weight.data = model.weight.data[:-1]


def transpose_a_parameter(model: Model) -> None:
    """In the memory that it has, with the sizes that it has."""
    model.weight.data = model.weight.data.t()


def swap_two(model: Model) -> None:
    model.weight.data, model.other.data = model.other.data, model.weight.data


def let_state_die(model: Model) -> None:
    del model.state


def send_below(model: Model) -> None:
    model.items[2].leave(model.traffic)


def copy_below(model: Model) -> None:
    """It lies where it lay, and has a place below besides."""
    model.traffic.store(model.items[2])


@pytest.mark.parametrize(
    "change",
    [
        give_a_parameter_memory,
        give_state_memory,
        convert_a_parameter,
        shorten_a_parameter,
        transpose_a_parameter,
        swap_two,
        let_state_die,
        send_below,
        copy_below,
    ],
)
def test_what_does_not_stand_as_it_stood_is_noticed(change: Callable[[Model], None], model: Model) -> None:
    snapshot = ResidentSnapshot(model.items, PLAN)
    assert snapshot.others == [] and snapshot.holds()
    change(model)
    assert not snapshot.holds()


def test_values_may_be_written(model: Model) -> None:
    snapshot = ResidentSnapshot(model.items, PLAN)
    with torch.no_grad():
        model.weight.add_(1)
    model.state.fill_(2)
    assert snapshot.holds()


def test_no_second_look_at_the_same_items_of_the_same_plan(model: Model) -> None:
    snapshot = ResidentSnapshot(model.items, PLAN)
    assert snapshot.is_of([*model.items], PLAN)
    assert not snapshot.is_of(model.items, object())
    assert not snapshot.is_of(model.items[:-1], PLAN)
    assert not snapshot.is_of([*model.items, model.items[0]], PLAN)
    again = HomeItem(("state", 0, "x"), "x", TensorClass.OPTIMIZER, model.state, Tier.HOST)
    assert not snapshot.is_of([*model.items[:-1], again], PLAN), "optimizer state that was loaded has a new item"


@pytest.mark.parametrize("change", [send_below, give_state_memory])
def test_what_stays_and_is_away_is_looked_at_until_it_is_back(change: Callable[[Model], None], model: Model) -> None:
    change(model)
    snapshot = ResidentSnapshot(model.items, PLAN)
    assert snapshot.others == model.items[2:] and snapshot.holds()
    assert not snapshot.is_of(model.items, PLAN)


def test_what_the_plan_moves_is_looked_at_each_time(model: Model) -> None:
    """Wherever it is, it is none of those that stand, which are looked at once."""
    model.items[0].stays_resident = False
    snapshot = ResidentSnapshot(model.items, PLAN)
    model.items[0].leave(model.traffic)
    assert snapshot.others == model.items[:1]
    assert snapshot.holds() and snapshot.is_of(model.items, PLAN)
