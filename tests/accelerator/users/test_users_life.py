"""What people do with parameters, gradients and state dicts between and inside steps."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.accelerator import target
from tests.accelerator.users.loops import STEPS, Net, Program, Usage, check, run
from tests.support.parity import NVME
from tieroff.core.tensor import Tier


def write_through_data(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        loss = p.loss(index)
        loss.backward()
        for parameter in p.parameters:
            parameter.data.mul_(0.99)
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach(), alpha=0.01)
        p.update(loss)
        for parameter in p.parameters:
            parameter.data.clamp_(-0.2, 0.2)


def write_inside_forward(p: Program) -> None:
    captured = p.parameters

    def inside(model: Net, x: Tensor) -> Tensor:
        model.fourth.weight.data.mul_(0.9)
        captured[4].data.mul_(0.9)
        return x

    p.model.inside = inside
    p.wrap()
    p.steps()


def write_what_is_held_in_later_steps(p: Program) -> None:
    """First in steps that follow their plan: in the middle of forward, between forward and backward, and in backward."""
    held = p.parameters

    def write() -> None:
        for parameter in held:
            parameter.data.mul_(0.9)

    def inside(model: Net, x: Tensor) -> Tensor:
        if place == 0:
            write()
        x.register_hook(lambda _: write() if place == 2 else None)
        return x

    p.model.inside = inside
    p.wrap()
    for index in range(STEPS):
        place = index - 5
        loss = p.loss(index)
        if place == 1:
            write()
        loss.backward()
        p.update(loss)


def assign_between_steps(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        p.step(index)
        for parameter in p.parameters:
            parameter.data = parameter.data * 0.9


def assign_before_the_update(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        loss = p.loss(index)
        loss.backward()
        for parameter in p.parameters:
            parameter.data = parameter.data.clamp(-0.1, 0.1)
        p.update(loss)


def assign_inside_forward(p: Program) -> None:
    def inside(model: Net, x: Tensor) -> Tensor:
        model.third.weight.data = model.third.weight.data * 0.9
        return x

    p.model.inside = inside
    p.wrap()
    p.steps()


def memory_of_two_swapped(p: Program) -> None:
    """Each holds the other one's memory, of which neither may have the other one's gradients."""
    p.wrap()
    for index in range(STEPS):
        loss = p.loss(index)
        loss.backward()
        p.note(*[parameter.grad for parameter in p.parameters])
        p.update(loss)
        one, other = p.model.second.weight, p.model.third.weight
        if index == STEPS - 3:
            with torch.no_grad():
                one.data, other.data = other.data, one.data


def assign_what_the_program_keeps(p: Program) -> None:
    p.wrap()
    p.steps(4)
    own = torch.full_like(p.model.second.weight, 1 / 30, requires_grad=False)
    p.model.second.weight.data = own
    p.steps(3, 4)
    p.note(own)
    own.mul_(0.5)
    p.steps(3, 7)
    p.note(own)


def assign_transposed(p: Program) -> None:
    p.wrap()
    p.steps(4)
    p.model.second.weight.data = p.model.second.weight.data.t().contiguous().t()
    p.steps(5, 4)
    p.note(p.model.second.weight.stride())


def averaged_weights_swapped_in(p: Program) -> None:
    averaged = [parameter.detach().clone() for parameter in p.parameters]
    p.wrap()
    for index in range(STEPS):
        p.step(index)
        for mean, parameter in zip(averaged, p.parameters, strict=True):
            mean.lerp_(parameter.data, 0.1)
        kept = [parameter.data for parameter in p.parameters]
        for mean, parameter in zip(averaged, p.parameters, strict=True):
            parameter.data = mean
        with torch.no_grad():
            p.note(p.loss(50 + index))
        for old, parameter in zip(kept, p.parameters, strict=True):
            parameter.data = old
    p.note(*averaged)


def averaged_model(p: Program) -> None:
    average = copy.deepcopy(p.model)
    theirs, ours = list(average.parameters()), p.parameters
    p.wrap()
    for index in range(STEPS):
        p.step(index)
        with torch.no_grad():
            torch._foreach_lerp_(theirs, ours, 0.1)
    p.note(*theirs)


def aliases_before_wrap(p: Program) -> None:
    kept = [parameter.data for parameter in p.parameters]
    p.wrap()
    p.steps(4)
    p.note(*kept)
    for alias in kept:
        alias.mul_(0.9)
    p.steps(4, 4)
    p.note(*kept)


def views_across_steps(p: Program) -> None:
    p.wrap()
    p.steps(3)
    views = [parameter.view(-1) for parameter in p.parameters]
    p.steps(4, 3)
    p.note(*views)


def gradients_kept(p: Program) -> None:
    p.wrap()
    kept: list[Any] = []
    for index in range(STEPS):
        loss = p.loss(index)
        loss.backward()
        kept += [parameter.grad for parameter in p.parameters]
        p.update(loss)
    p.note(*kept)


def gradients_assigned(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        loss = p.loss(index)
        loss.backward()
        for number, parameter in enumerate(p.parameters):
            assert parameter.grad is not None
            if number % 2:
                parameter.grad = parameter.grad * 0.5
            else:
                parameter.grad.data = parameter.grad.data * 0.5
        p.update(loss)


def copies_and_files(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        p.step(index)
        copied = copy.deepcopy(p.model)
        p.note(p.loss(20, copied), str({(type(x).__name__, x.device.type) for x in copied.parameters()}))
        p.note(p.loss(21, pickle.loads(pickle.dumps(p.model))))
        file = io.BytesIO()
        torch.save(p.model.state_dict(), file)
        file.seek(0)
        p.note(*torch.load(file, map_location="cpu").values())


def frozen_for_a_while(p: Program) -> None:
    p.wrap()
    p.steps(2)
    p.model.second.requires_grad_(False)
    p.steps(5, 2)
    p.model.second.requires_grad_(True)
    p.steps(6, 7)


def state_of_the_host_assigned(p: Program) -> None:
    """Its tensors lie on the host, and live on in the program's hands."""
    p.wrap()
    p.steps(4)
    state = copy.deepcopy({name: value for name, value in p.model.state_dict().items() if name.startswith("second.")})
    p.model.load_state_dict(state, strict=False, assign=True)
    p.steps(6, 4)
    p.note(*p.parameters)


def written_by_initialisers(p: Program) -> None:
    p.wrap()
    p.steps(4)
    with torch.no_grad():
        p.model.second.weight.copy_(torch.full_like(p.model.second.weight, 0.1))
        p.model.third.weight[0].zero_()
        p.model.third.weight.view(-1)[5:9] = 1.0
        nn.init.zeros_(p.model.fourth.bias)
        p.model.first.bias += 1
    p.steps(4, 4)


def errors_of_users(p: Program) -> None:
    p.wrap()
    p.steps(3)

    def fail(*_: Any) -> Any:
        raise KeyError("the user's own")

    inside, p.model.inside = p.model.inside, fail
    with pytest.raises(KeyError, match="own"):
        p.loss(3)
    p.model.inside = inside
    p.step(4)
    hook = p.model.second.weight.register_hook(fail)
    with pytest.raises(KeyError, match="own"):
        p.loss(5).backward()
    hook.remove()
    p.optimizer.zero_grad()
    p.steps(3, 6)


def two_threads(p: Program) -> None:
    """One trains, and one reads."""
    p.wrap()
    p.steps(3)
    is_over, finite = threading.Event(), []

    def read() -> None:
        while not is_over.is_set():
            finite.append(all(bool(torch.isfinite(parameter.detach().cpu()).all()) for parameter in p.parameters))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        p.steps(5, 3)
    finally:
        is_over.set()
        reader.join()
    p.note(all(finite))


def device_of_first_parameter(p: Program) -> None:
    p.wrap()
    for index in range(STEPS):
        rows = p.rows(index).cpu().to(next(p.model.parameters()).device)
        loss = p.model(rows).square().mean()
        loss.backward()
        p.update(loss)


USAGES = {
    "write_through_data": write_through_data,
    "write_inside_forward": write_inside_forward,
    "write_what_is_held_later": write_what_is_held_in_later_steps,
    "assign_between_steps": assign_between_steps,
    "assign_before_the_update": assign_before_the_update,
    "assign_inside_forward": assign_inside_forward,
    "assign_what_is_kept": assign_what_the_program_keeps,
    "assign_transposed": assign_transposed,
    "averaged_weights": averaged_weights_swapped_in,
    "averaged_model": averaged_model,
    "aliases_before_wrap": aliases_before_wrap,
    "views": views_across_steps,
    "gradients_kept": gradients_kept,
    "gradients_assigned": gradients_assigned,
    "copies_and_files": copies_and_files,
    "frozen": frozen_for_a_while,
    "state_assigned": state_of_the_host_assigned,
    "initialisers": written_by_initialisers,
    "errors": errors_of_users,
    "device_of_first_parameter": device_of_first_parameter,
}


@pytest.mark.parametrize("device", ["75%", "95%"])
def test_each_of_two_that_swapped_their_memory_gets_its_own_gradients(device: str, tmp_path: Path) -> None:
    check(memory_of_two_swapped, tmp_path, planned=0, device=device, policy="auto")  # the last steps are another model's


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
def test_life_goes_on_the_same(usage: Usage, tmp_path: Path) -> None:
    check(usage, tmp_path)


@pytest.mark.parametrize("usage", [write_through_data, assign_before_the_update], ids=["write", "assign"])
def test_life_goes_on_the_same_over_files(usage: Usage, tmp_path: Path) -> None:
    check(usage, tmp_path, tiers=NVME)


class Scripted(Net):
    """Its second layer is TorchScript's, whose parameters are read without Python."""

    def __init__(self) -> None:
        super().__init__()
        self.second: Any = torch.jit.script(self.second)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_part(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        p.steps()

    check(usage, tmp_path, make=Scripted)


def test_a_thread_may_read_while_another_trains(tmp_path: Path) -> None:
    check(two_threads, tmp_path, planned=0)


def test_a_state_dict_keeps_the_values_of_its_moment(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        p.steps(5)
        moment = p.model.state_dict()
        if p.is_plain:  # whose state dict follows the model
            moment = {name: value.cpu().clone() for name, value in moment.items()}
        assert {value.device.type for value in moment.values()} == {"cpu"}
        p.steps(3, 5)
        p.note(*moment.values())
        p.model.load_state_dict(moment)
        p.steps(3, 8)
        p.note(*moment.values())

    check(usage, tmp_path)


def test_memory_assigned_between_forward_and_backward_is_an_error(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        p.steps(4)
        loss = p.loss(4)
        p.model.third.weight.data = p.model.third.weight.data * 2
        with pytest.raises(tieroff.StateError, match="given other memory"):
            loss.backward()
        del loss  # with its graph, which holds the weight
        p.optimizer.zero_grad()
        p.steps(4, 5)
        assert p.phases[-1] == ("planned", 0)

    run(usage, tmp_path)


def test_all_parameters_at_once_beyond_the_budget_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        p.steps()
        if p.engine is None:
            p.note(torch.nn.utils.parameters_to_vector(p.parameters), torch.stack([x.norm() for x in p.parameters]))
            return
        all_bytes = sum(parameter.numel() * parameter.element_size() for parameter in p.parameters)
        runner = p.engine.executor.context.runner
        assert runner.planned is not None
        budgets = {**runner.planned.plan.budget_bytes, Tier.DEVICE: all_bytes // 2}
        runner.planned = replace(runner.planned, plan=replace(runner.planned.plan, budget_bytes=budgets))
        norms = [parameter.norm() for parameter in p.parameters]  # one after the other fits
        for use in (lambda: torch._foreach_add(p.parameters, 1.0), lambda: [x.data for x in p.parameters]):
            with pytest.raises(tieroff.StateError, match=r"tieroff\.on_host"):
                use()
        with tieroff.on_host(p.model):
            vector = torch.nn.utils.parameters_to_vector(p.parameters)
        assert vector.device.type == "cpu"
        p.note(vector, torch.stack(norms))

    check(usage, tmp_path)


def test_what_is_written_on_the_host_counts(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        for index in range(STEPS):
            p.step(index)
            if p.is_plain:
                with torch.no_grad():
                    torch._foreach_mul_(p.parameters, 0.5)
                continue
            with tieroff.on_host(p.model), torch.no_grad():
                torch._foreach_mul_(p.parameters, 0.5)
            assert {parameter.device.type for parameter in p.parameters} == {target.NAME}

    check(usage, tmp_path)


def test_a_clipped_gradient_is_read_on_the_host_with_its_factor(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        for index in range(STEPS):
            loss = p.loss(index)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(p.parameters, 1e-3)  # what lies below waits for it
            with contextlib.nullcontext() if p.is_plain else tieroff.on_host(p.model):
                p.note(*[parameter.grad.detach().cpu() for parameter in p.parameters])
            p.update(loss)

    check(usage, tmp_path)
