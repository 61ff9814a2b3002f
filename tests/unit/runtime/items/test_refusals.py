"""Who could not leave the device is asked again until it has left, unless it is used meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.support.parity import machine_file
from tieroff.runtime.executor import Executor
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.step.mode import DEMAND

WIDTH = 64


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    plan = {"min_bytes": 0, "machine": str(machine_file(tmp_path))}
    tieroff.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), {"plan": plan, "nvme": {"dirs": [str(tmp_path)]}})
    yield model
    tieroff.unwrap(model)


def executor_in_a_step(model: nn.Module) -> tuple[Executor, ParameterItem]:
    """Returns the executor, as in a step without a plan, and the item of the first parameter, which is up."""
    executor = tieroff.engine(model).executor
    item = executor.homes.parameter(model[0].weight)  # type: ignore[index]
    assert item is not None
    item.lift(executor.traffic)
    executor.state.mode = DEMAND
    return executor, item


def hold(item: ParameterItem) -> Tensor:
    """Returns an alias of the device copy."""
    return item.living.detach()


def tick(executor: Executor, count: int = 1) -> None:
    for index in range(count):
        executor.clock.tick(("some", index), lambda: "some")


def test_one_that_was_held_leaves_at_the_tick_after_its_holder_let_go(model: nn.Module) -> None:
    executor, item = executor_in_a_step(model)
    alias = hold(item)
    item.leave(executor.traffic)
    tick(executor, 3)
    assert item.device is not None
    del alias
    tick(executor)
    assert item.device is None
    assert not executor.traffic.refused


def test_one_that_is_used_meanwhile_is_left_to_its_user(model: nn.Module) -> None:
    executor, item = executor_in_a_step(model)
    alias = hold(item)
    item.leave(executor.traffic)
    item.lift(executor.traffic)
    del alias
    tick(executor, 2)
    assert item.device is not None


def test_one_that_is_held_for_good_costs_later_ticks_nothing_and_is_asked_where_user_code_runs(model: nn.Module) -> None:
    executor, item = executor_in_a_step(model)
    alias = hold(item)
    item.leave(executor.traffic)
    executor.on_demand.release_all()
    assert not executor.traffic.refused
    del alias
    tick(executor)
    assert item.device is not None
    executor.on_demand.release_reachable()
    assert item.device is None


def test_one_that_a_thread_beside_the_step_reads_leaves_when_that_has_ended(model: nn.Module) -> None:
    executor, item = executor_in_a_step(model)
    with executor.beside():
        item.leave(executor.traffic)
        tick(executor)
        assert item.device is not None
    tick(executor)
    assert item.device is None


def test_what_its_holder_wrote_counts(model: nn.Module) -> None:
    executor, item = executor_in_a_step(model)
    alias = item.living.data  # whose writes move no version
    executor.traffic.store(item)
    executor.traffic.settle(item)
    item.leave(executor.traffic)
    alias.fill_(2)
    del alias
    tick(executor)
    assert item.device is None
    assert torch.equal(model[0].weight, torch.full((WIDTH, WIDTH), 2.0))  # type: ignore[index]
