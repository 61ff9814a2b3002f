"""`torch.utils.swap_tensors` on a parameter, at any moment of a step: what the plain loop computes, or torch's own error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.twins import Mlp, Setting, adam, assert_same, follow
from tieroff.runtime.items.offloaded import WatchedParameter

pytestmark = pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")
STEPS, SWAPPED = 9, (4, 6)

SETTINGS: dict[str, dict[str, Any]] = {
    "cpu-floor": {"nvme": True},
    "delayed-floor": {"delayed": True},
    "delayed-auto-80": {"policy": "auto", "device": "80%", "delayed": True},
}
MOMENTS = ("before forward", "in forward", "behind forward", "in backward", "behind backward", "behind the update")


def trained() -> tuple[Any, Any]:
    model = Mlp()
    return model, adam(model)


def frozen() -> tuple[Any, Any]:
    """The swapped parameter has no gradient, so that torch allows it at any moment."""
    model, optimizer = trained()
    model.first.weight.requires_grad_(False)
    return model, optimizer


class Swapping:
    """A loop that swaps a parameter at one moment of some steps.

    Attributes:
        classes: the parameter had when it was swapped.
    """

    def __init__(self, moment: str, way: str) -> None:
        self._moment, self._way = moment, way
        self.classes: set[type] = set()

    def _swap(self, parameter: nn.Parameter) -> None:
        self.classes.add(type(parameter))
        other = nn.Parameter(torch.full(parameter.shape, 0.01), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, other)
        if self._way == "and back":
            other.data.mul_(1.5)  # of a watched one: nobody is told, and no version moves
            torch.utils.swap_tensors(parameter, other)

    def step(self, model: Any, optimizer: Any, index: int) -> Any:
        """Returns the loss, and what torch said against the swap."""

        def now(moment: str) -> None:
            if moment == self._moment and index in SWAPPED:
                self._swap(dict(model.named_parameters())["first.weight"])  # no use of it, which would be noticed

        optimizer.zero_grad()
        handles = [
            model.second.register_forward_pre_hook(lambda *_: now("in forward")),
            model.second.weight.register_post_accumulate_grad_hook(lambda _: now("in backward")),
        ]
        loss, said = torch.zeros(()), ""
        try:
            now("before forward")
            loss = model(torch.randn(4, 8)).square().mean()
            now("behind forward")
            loss.backward()
            now("behind backward")
            optimizer.step()
            now("behind the update")
        except RuntimeError as error:
            said = str(error)
        for handle in handles:
            handle.remove()
        return loss, said


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("make", [trained, frozen])
@pytest.mark.parametrize("way", ["for good", "and back"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_swapping_a_parameter(moment: str, way: str, make: Any, setting: str, tmp_path: Path) -> None:
    swapping = Swapping(moment, way)
    plain = follow(make, Swapping(moment, way).step, STEPS)
    wrapped = follow(make, swapping.step, STEPS, Setting(tmp_path, **SETTINGS[setting]))
    assert_same(plain.seen, wrapped.seen)
    if moment == "in forward" and "floor" in setting:
        assert WatchedParameter in swapping.classes


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_parameter_made_of_one_in_forward(setting: str, tmp_path: Path) -> None:
    classes: set[type] = set()

    def step(model: Any, optimizer: Any, index: int) -> Any:
        def scaled(_module: Any, inputs: Any) -> torch.Tensor:
            weight = dict(model.named_parameters())["first.weight"]  # no use of it, which would be noticed
            classes.add(type(weight))
            made = nn.Parameter(weight)
            assert type(made) is nn.Parameter
            out: torch.Tensor = inputs[0] * made.detach().mean()  # else the graph would hold it, and with it the memory
            return out

        optimizer.zero_grad()
        handle = model.second.register_forward_pre_hook(scaled)
        loss = model(torch.randn(4, 8)).square().mean()
        handle.remove()
        loss.backward()
        optimizer.step()
        return loss

    plain = follow(trained, step, STEPS)
    assert_same(plain.seen, follow(trained, step, STEPS, Setting(tmp_path, **SETTINGS[setting])).seen)
    if "floor" in setting:
        assert WatchedParameter in classes
