"""What a program does while the CPU still updates: it sees the values of the plain run, however late they come."""

from __future__ import annotations

import copy
import gc
import io
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.accelerator import sim, target
from tests.accelerator.updates.late import Lateness
from tests.accelerator.updates.loop import STEPS_BEFORE, Loop, differing, fused_adamw
from tieroff.runtime.optimizer.host.job import Job
from tieroff.updates.native import HAS_UPDATES

pytestmark = pytest.mark.skipif(not HAS_UPDATES, reason="built without updates in host memory")

LATE_STEPS = 2
ALLOCATION_BYTES = 512
Usage = Callable[[Loop], None]


def reads_parameters(loop: Loop) -> None:
    loop.step()
    loop.note(*[parameter.sum() for parameter in loop.parameters])


def reads_state(loop: Loop) -> None:
    loop.step()
    loop.note(*[state["exp_avg"].norm() for state in loop.state])


def averages(loop: Loop) -> None:
    mean = torch.zeros_like(loop.parameters[0])
    loop.step()
    for parameter in loop.parameters[::2]:
        mean.lerp_(parameter.detach(), 0.3)
    loop.note(mean)


def copies_the_model(loop: Loop) -> None:
    loop.step()
    twin = copy.deepcopy(loop.parameters)
    loop.note(*twin)


def pickles(loop: Loop) -> None:
    loop.step()
    file = io.BytesIO()
    torch.save([loop.model.state_dict(), loop.optimizer.state_dict()], file)
    file.seek(0)
    model, optimizer = torch.load(file, weights_only=True)
    loop.note(*model.values(), *[value for entries in optimizer["state"].values() for value in entries.values()])


def keeps_a_state_dict(loop: Loop) -> None:
    loop.step()
    kept = {name: value.cpu() for name, value in loop.model.state_dict().items()}
    before = {name: value.clone() for name, value in kept.items()}
    loop.step()
    loop.note(*[torch.equal(value, before[name]) for name, value in kept.items()])
    loop.note(*before.values())


def keeps_an_optimizers_state_dict(loop: Loop) -> None:
    loop.step()
    kept = [value.cpu() for entries in loop.optimizer.state_dict()["state"].values() for value in entries.values()]
    before = [value.clone() for value in kept]
    loop.step()
    if loop.engine is not None:  # in the plain run the next update writes them: theirs are tensors of the optimizer
        assert all(map(torch.equal, kept, before))
    loop.note(*before)


def reads_counters(loop: Loop) -> None:
    loop.step()
    loop.note(*[float(state["step"]) for state in loop.state])


def changes_options(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.step()
    for group in loop.optimizer.param_groups:
        group["lr"], group["weight_decay"] = group["lr"] * 0.1, 0.5
    loop.optimizer.zero_grad()


def clips_twice(loop: Loop) -> None:
    loop.backward()
    loop.note(nn.utils.clip_grad_norm_(loop.parameters, 0.02), nn.utils.clip_grad_norm_(loop.parameters, 0.01))
    loop.optimizer.step()
    loop.note(*[parameter.grad for parameter in loop.parameters])
    loop.optimizer.zero_grad()


def clears_at_once(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def clears_in_place(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.note(*[parameter.grad for parameter in loop.parameters])
    loop.optimizer.zero_grad()


def keeps_gradients(loop: Loop) -> None:
    loop.steps(5, set_to_none=False)
    if loop.engine is not None:
        loop.assert_updated_below()
    loop.backward()
    loop.optimizer.step()
    loop.backward()  # adds to what that update reads
    loop.note(*[parameter.grad for parameter in loop.parameters])
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def clears_what_is_infinite(loop: Loop) -> None:
    """No product makes that zero."""
    loop.backward()
    loop.optimizer.step()
    torch._foreach_mul_([parameter.grad for parameter in loop.parameters], float("-inf"))
    loop.optimizer.zero_grad(set_to_none=False)
    loop.optimizer.step()  # as the gradients are
    loop.note(*[parameter.grad for parameter in loop.parameters])
    loop.optimizer.zero_grad()


def adds_to_gradients(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.step()
    loop.backward()
    loop.note(*[parameter.grad for parameter in loop.parameters])
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def gives_other_memory(loop: Loop) -> None:
    loop.step()
    for parameter in loop.parameters[:3]:
        parameter.data = torch.ones_like(parameter) * 0.01
    loop.note(*loop.parameters)


def writes_parameters(loop: Loop) -> None:
    loop.step()
    with torch.no_grad():
        for parameter in loop.parameters:
            parameter.mul_(0.5)


def loads(loop: Loop) -> None:
    values = [value.detach().cpu().clone() for value in loop.parameters]
    state = copy.deepcopy(loop.optimizer.state_dict())
    loop.step()
    loop.model.load_state_dict(dict(zip(loop.model.state_dict(), values, strict=True)))
    loop.optimizer.load_state_dict(state)


def holds_an_alias(loop: Loop) -> None:
    alias = loop.parameters[0].data
    loop.step()
    loop.note(alias, loop.parameters[0])


def holds_an_array(loop: Loop) -> None:
    loop.step()
    array = loop.model.state_dict()["0.weight"].cpu().numpy()
    loop.note(torch.from_numpy(numpy.copy(array)))


def steps_again(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.step()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def adds_a_group(loop: Loop) -> None:
    loop.step()
    extra = nn.Parameter(torch.ones(4, device=target.device()))
    loop.optimizer.add_param_group({"params": [extra], "lr": 0.5})
    loop.step()
    loop.optimizer.param_groups.pop()


def evaluates(loop: Loop) -> None:
    loop.step()
    with torch.no_grad():
        loop.note(loop.model(torch.ones(2, 64, device=target.device())))


USAGES: tuple[Usage, ...] = (
    reads_parameters,
    reads_state,
    averages,
    copies_the_model,
    pickles,
    keeps_a_state_dict,
    keeps_an_optimizers_state_dict,
    reads_counters,
    changes_options,
    clips_twice,
    clears_at_once,
    clears_in_place,
    keeps_gradients,
    clears_what_is_infinite,
    adds_to_gradients,
    gives_other_memory,
    writes_parameters,
    loads,
    holds_an_alias,
    holds_an_array,
    steps_again,
    adds_a_group,
    evaluates,
)


RARE = 4  # from which on they run among the long tests alone
CASES = [
    pytest.param(usage, id=usage.__name__, marks=[pytest.mark.long] if i >= RARE else []) for i, usage in enumerate(USAGES)
]
WAITS = [case for case in CASES if case.id not in ("holds_an_alias",)]  # where an alias is held, the device updates


@pytest.fixture
def lateness(monkeypatch: pytest.MonkeyPatch) -> Lateness:
    return Lateness(monkeypatch)


def run(usage: Usage, folder: Path | None, lateness: Lateness) -> Loop:
    loop = Loop(folder, fused_adamw)
    loop.steps(STEPS_BEFORE)
    if loop.engine is not None:
        loop.assert_updated_below()
    lateness.set()
    for _ in range(LATE_STEPS):
        usage(loop)
    loop.step()
    return loop.finish()


@pytest.mark.parametrize("usage", CASES)
def test_a_program_sees_the_values_of_the_plain_run(usage: Usage, lateness: Lateness, tmp_path: Path) -> None:
    plain, wrapped = run(usage, None, lateness), run(usage, tmp_path, lateness)
    assert differing(plain, wrapped) == []


@pytest.mark.parametrize("usage", WAITS)
def test_without_the_wait_it_does_not(
    usage: Usage, lateness: Lateness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(usage, None, lateness)
    monkeypatch.setattr(Job, "wait", lambda self, timeout_s=None: None)
    try:
        is_wrong = bool(differing(plain, run(usage, tmp_path, lateness)))
    except AssertionError:  # the program noticed it by itself
        is_wrong = True
    # State that is loaded takes the place of what jobs write: no value shows that, but its memory is used beside them.
    assert is_wrong or sim.races()
    sim.forget_races()


def test_a_child_is_forked_when_no_job_runs(lateness: Lateness, tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.steps(STEPS_BEFORE)
    lateness.set()
    loop.step()
    (pool,) = lateness.pools
    assert not pool.native.is_done(pool.submitted[-1])
    pid = os.fork()
    if not pid:
        os._exit(not all(map(pool.native.is_done, pool.submitted)))
    assert os.waitpid(pid, 0)[1] == 0
    loop.finish()


def test_a_model_may_be_dropped_while_jobs_run(lateness: Lateness, tmp_path: Path) -> None:
    """They write to memory that stays until they are over; the device has nothing left of the model."""
    device = target.device()
    before = torch.accelerator.memory_allocated(device)
    for _ in range(2):
        loop = Loop(tmp_path)
        loop.steps(STEPS_BEFORE)
        loop.assert_updated_below()
        lateness.set()
        loop.step()
        pool = lateness.pools.pop()
        assert not pool.native.is_done(pool.submitted[-1])
        engine = weakref.ref(loop.engine)
        del loop, pool
        gc.collect()
        assert engine() is None
        torch.accelerator.synchronize(device)  # memory is free when what used it is over
        left = torch.accelerator.memory_allocated(device) - before
        assert left <= 8 * ALLOCATION_BYTES, "only what a library keeps, such as the last norms"


def test_step_returns_and_the_next_forward_begins_before_the_jobs_end(lateness: Lateness, tmp_path: Path) -> None:
    """Each job waits for a gate, so nothing here depends on how long anything takes."""
    plain, loop = Loop(None), Loop(tmp_path)
    for one in (plain, loop):
        one.steps(STEPS_BEFORE + 1)
    (pool,) = lateness.pools
    pool.are_shut = True
    loop.step()
    pool.are_shut = False
    assert not any(map(pool.native.is_done, pool.submitted[-len(pool.gates) :]))
    *others, last = pool.gates
    for gate in others:
        gate.open()
    seen: list[bool] = []

    def first_layer_begins(*_: Any) -> None:
        seen.append(pool.native.is_done(pool.submitted[-1]))
        last.open()

    handle = loop.model[0].register_forward_pre_hook(first_layer_begins)
    loop.step()
    handle.remove()
    assert seen == [False]
    plain.steps(2)
    assert differing(plain.finish(), loop.finish()) == []


def test_gradients_are_set_to_zero_before_the_jobs_that_read_them_end(lateness: Lateness, tmp_path: Path) -> None:
    plain, loop = Loop(None), Loop(tmp_path)
    for one in (plain, loop):
        one.steps(STEPS_BEFORE + 4, set_to_none=False)
    loop.assert_updated_below()
    (pool,) = lateness.pools
    pool.are_shut = True
    loop.step(set_to_none=False)
    pool.are_shut = False
    assert not any(map(pool.native.is_done, pool.submitted[-len(pool.gates) :]))
    for gate in pool.gates:
        gate.open()
    loop.step(set_to_none=False)
    plain.steps(2, set_to_none=False)
    assert differing(plain.finish(), loop.finish()) == []
