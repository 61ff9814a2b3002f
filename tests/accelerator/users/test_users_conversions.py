"""Parameters that were elsewhere, or of another type, for a while, and parameters made of those that are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tieroff
from tests.accelerator import target
from tests.accelerator.users.loops import STEPS, WIDTH, Program, Usage, check
from tieroff.errors import StateError


def elsewhere_and_back(p: Program) -> None:
    """With each way comes another node that accumulates gradients; these lie below when more is added to them."""
    p.wrap()
    for index in range(STEPS):
        if index == 1:
            p.model.cpu()
            p.model.to(target.device())
        if index == 2:
            p.model.double().float()
        p.loss(index).backward()
        loss = p.loss(index + STEPS)
        loss.backward()
        p.update(loss)


def on_the_host_until_the_next_step(p: Program) -> None:
    """A wrapped model comes back by itself: its engine computes on the device, wherever parameters were assigned from."""
    p.wrap()
    for index in range(STEPS):
        if index in (1, 3):
            p.model.cpu()
            if p.is_plain:
                p.model.to(target.device())
        p.step(index)
        assert {parameter.device.type for parameter in p.parameters} == {target.device().type}


def where_they_are(p: Program) -> None:
    """Each parameter is assigned to itself, as `Module.to` does, or what is the same memory."""
    p.wrap()
    for index in range(STEPS):
        p.model.to(target.device())
        p.step(index)
        p.model.to(target.device())
        for parameter in p.parameters:
            parameter.data = parameter
            parameter.data = parameter.detach()


def weight_norm_in_mid_training(p: Program) -> None:
    p.wrap()
    p.steps(3)
    nn.utils.parametrizations.weight_norm(p.model.second)
    p.optimizer.param_groups[0]["params"] = p.parameters
    p.steps(6, 3)


def parameters_of_parameters(p: Program) -> None:
    """They share memory: a write of one is seen in the other."""
    p.wrap()
    p.steps(4)
    made = [nn.Parameter(parameter, requires_grad=False) for parameter in p.parameters]
    assert {type(parameter) for parameter in made} == {nn.Parameter}
    made[0].mul_(0.5)
    p.model.inside = lambda model, x: x * nn.Parameter(model.third.weight).mean()
    p.steps(4, 4)
    p.note(*made)
    del made
    p.steps(4, 8)


USAGES = {
    "elsewhere_and_back": elsewhere_and_back,
    "on_the_host_until_the_next_step": on_the_host_until_the_next_step,
    "weight_norm": weight_norm_in_mid_training,
    "parameters_of_parameters": parameters_of_parameters,
}


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
def test_training_goes_on_the_same(usage: Usage, tmp_path: Path) -> None:
    check(usage, tmp_path)


def test_a_parameter_is_made_of_a_tensor_as_before() -> None:
    class Own(nn.Parameter):
        pass

    data = torch.ones(2)
    for kind in (nn.Parameter, Own):
        made = kind(data, requires_grad=False)
        assert (type(made), made.data_ptr(), made.requires_grad) == (kind, data.data_ptr(), False)
    assert nn.Parameter().shape == (0,)


def test_parameters_stay_what_they_are_where_there_is_no_room(tmp_path: Path) -> None:
    check(where_they_are, tmp_path, policy="auto", device="min")


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))


def weight_norm_everywhere(p: Program) -> None:
    """The new parameters, which have the old ones' memory, fit no least budget at once."""
    p.wrap()
    p.steps(STEPS)
    if not p.is_plain:
        with pytest.raises(StateError, match="unwrap the model"):
            nn.ParameterList(nn.Parameter(parameter) for parameter in p.parameters)
        tieroff.unwrap(p.model)
    for layer in p.model:
        nn.utils.parametrizations.weight_norm(layer)
    p.optimizer.param_groups[0]["params"] = p.parameters
    p.wrap()
    p.steps(STEPS, STEPS)


def test_parameters_of_others_that_fit_no_budget_at_once_are_made_where_nothing_is_wrapped(tmp_path: Path) -> None:
    check(weight_norm_everywhere, tmp_path, make=deep, policy="auto", device="min")
