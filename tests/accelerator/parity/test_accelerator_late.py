"""Optimizer state that leaves in the step after the one that wrote it: the same numbers, whatever comes between the steps."""

from __future__ import annotations

import copy
import errno
import functools
import io
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.accelerator import target
from tests.fault.storage.faulty import FaultyEngine
from tests.parity.late import LATE, late_tensors
from tests.support.covering import in_turn, pairwise
from tests.support.models import MODELS
from tests.support.parity import (
    HOST,
    NVME,
    TIERS,
    Tiers,
    Workload,
    are_same_bits,
    check_parity,
    config_for,
    copy_of,
    differing,
    state_of,
)
from tieroff.errors import StoreError
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.table import is_leaving
from tieroff.storage.engines import choose


@pytest.mark.parametrize(("workload", "tiers"), in_turn(MODELS, TIERS, half=0))
def test_model_computes_the_same(workload: Workload, tiers: Tiers, tmp_path: Path) -> None:
    workload = replace(workload, steps=workload.steps + 1)  # in the first planned step nothing is there yet that is late
    engine = check_parity(workload, tiers, target.backend, tmp_path, policy=LATE)
    assert late_tensors(engine.plan)


# -- what may come between two steps, or into one ---------------------------------------------------------------------


class Loop:
    """A training loop whose user does something in every step from the fourth on.

    Attributes:
        noted: what the user saw.
    """

    def __init__(self, config: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.device = target.device()
        self.model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 8)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.noted: list[Any] = []
        self.kept: list[Tensor] = []
        self.config = config
        self.wrap()

    def wrap(self) -> None:
        if self.config is not None:
            tieroff.wrap(self.model, self.optimizer, self.config, backend=target.backend())

    @property
    def states(self) -> list[Tensor]:
        parameters = list(self.model.parameters())
        return [self.optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]

    @property
    def leaving(self) -> list[HomeItem]:
        """Those that the last step left to the next one."""
        if self.config is None:
            return []
        return [item for item in tieroff.engine(self.model).executor.homes.states.values() if is_leaving(item)]

    def batch(self, rows: int = 6) -> Tensor:
        return torch.randn(rows, 24).to(self.device)

    def step(self, rows: int = 6, before_update: Callable[[], None] | None = None) -> None:
        loss = self.model(self.batch(rows)).square().mean()
        self.noted.append(copy_of(loss))
        loss.backward()
        if before_update is not None:
            before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()


def read(loop: Loop) -> None:
    loop.noted += [copy_of(state.sum()) for state in loop.states]


def write(loop: Loop) -> None:
    for state in loop.states:
        state.mul_(0.5)


def write_data(loop: Loop) -> None:
    for state in loop.states:
        state.data.mul_(0.5)


def write_some_and_read_all(loop: Loop) -> None:
    loop.states[2].data.add_(1.0)
    read(loop)


def write_a_kept_alias(loop: Loop) -> None:
    for alias in loop.kept:
        alias.mul_(0.5)
    loop.kept = [state.data for state in loop.states[::2]]


def write_in_a_thread(loop: Loop) -> None:
    thread = threading.Thread(target=write_data, args=(loop,))
    thread.start()
    thread.join()


def replace_one(loop: Loop) -> None:
    parameter = next(iter(loop.model.parameters()))
    loop.optimizer.state[parameter]["exp_avg"] = torch.full_like(parameter, 0.25)


def assign_memory(loop: Loop) -> None:
    for state in loop.states:
        state.data = state.detach().clone() * 2


def look_at_state_dict(loop: Loop) -> None:
    loop.noted.append(state_of(loop.optimizer))


def load_state_dict(loop: Loop) -> None:
    found = copy.deepcopy(loop.optimizer.state_dict())
    loop.step()
    loop.optimizer.load_state_dict(found)


def save_and_load(loop: Loop) -> None:
    file = io.BytesIO()
    torch.save(loop.optimizer.state_dict(), file)
    loop.step()
    file.seek(0)
    loop.optimizer.load_state_dict(torch.load(file, weights_only=True))


def evaluate(loop: Loop) -> None:
    with torch.no_grad():
        loop.noted.append(copy_of(loop.model(loop.batch(3)).sum()))
    assert not loop.leaving, "a forward that is no step finds the room"


def step_of_another_kind(loop: Loop) -> None:
    loop.step(rows=9)


def sleep(loop: Loop) -> None:
    if loop.config is not None:
        tieroff.sleep(loop.model)
        assert not loop.leaving
        tieroff.wake(loop.model)


def update_outside_a_step(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def write_before_the_update(loop: Loop) -> None:
    loop.step(before_update=functools.partial(write_data, loop))


def _in_forward(loop: Loop, module: int, act: Callable[[Loop], None]) -> None:
    handle = loop.model[module].register_forward_hook(lambda *_: act(loop))
    try:
        loop.step()
    finally:
        handle.remove()


def write_in_forward(loop: Loop) -> None:
    _in_forward(loop, 0, write_data)


def read_late_in_forward(loop: Loop) -> None:
    _in_forward(loop, 4, read)


def fail_in_forward(loop: Loop) -> None:
    def fail(_: Loop) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _in_forward(loop, 2, fail)


def fail_in_backward(loop: Loop) -> None:
    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    out = loop.model(loop.batch())
    out.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        out.sum().backward()
    loop.optimizer.zero_grad()


def leave_the_plan(loop: Loop) -> None:
    loop.model[1](loop.model[0](loop.batch()))
    loss = loop.model(loop.batch()).square().mean() + loop.model(loop.batch()).mean()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def wrap_again(loop: Loop) -> None:
    if loop.config is not None and len(loop.noted) == 5:
        tieroff.unwrap(loop.model)
        look_at_state_dict(loop)
        loop.wrap()
    elif len(loop.noted) == 5:
        look_at_state_dict(loop)


ACTIONS = [
    *(read, write, write_data, write_some_and_read_all, write_a_kept_alias, write_in_a_thread, replace_one, assign_memory),
    look_at_state_dict,
    *(load_state_dict, save_and_load, evaluate, step_of_another_kind, sleep, update_outside_a_step, write_before_the_update),
    *(write_in_forward, read_late_in_forward, fail_in_forward, fail_in_backward, leave_the_plan, wrap_again),
]


def _run(config: dict[str, Any] | None, act: Callable[[Loop], None]) -> tuple[Loop, int]:
    """Returns the loop when it is over, and in how many steps something was left for the next one before the user acted."""
    loop, late_steps = Loop(config), 0
    for index in range(11):
        torch.manual_seed(index)
        loop.step()
        late_steps += bool(loop.leaving)
        if index >= 4:
            act(loop)
    if config is not None:
        tieroff.unwrap(loop.model)
    return loop, late_steps


@functools.cache
def _warm_up() -> None:
    """The first loop of a process does not equal the same loop later in the last bit, without tieroff too."""
    _run(None, read)


def _are_equal(ours: Any, theirs: Any) -> bool:
    return not differing(ours, theirs) if isinstance(ours, dict) else are_same_bits(ours, theirs)


# Updated in backward, a step leaves nothing to write before the update.
CASES = [
    *(case for case in pairwise(ACTIONS, [False, True], [HOST, NVME]) if case[:2] != (write_before_the_update, True)),
    (write_before_the_update, False, NVME),
]


@pytest.mark.parametrize(
    ("act", "is_in_backward", "tiers"), CASES, ids=lambda value: str(getattr(value, "name", getattr(value, "__name__", value)))
)
def test_nothing_is_lost_that_users_do(act: Callable[[Loop], None], is_in_backward: bool, tiers: Tiers, tmp_path: Path) -> None:
    config = config_for(tiers, tmp_path, policy=LATE)
    config["plan"]["update_in_backward"] = is_in_backward
    _warm_up()
    plain, _ = _run(None, act)
    wrapped, late_steps = _run(config, act)
    assert late_steps >= 2
    assert len(plain.noted) == len(wrapped.noted)
    pairs = enumerate(zip(wrapped.noted, plain.noted, strict=True))
    assert [index for index, (ours, theirs) in pairs if not _are_equal(ours, theirs)] == []
    assert differing(state_of(plain.optimizer), state_of(wrapped.optimizer)) == []
    values = [{name: copy_of(value) for name, value in loop.model.state_dict().items()} for loop in (plain, wrapped)]
    assert differing(*values) == []


def test_state_that_could_not_leave_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write after another fails, each in a run of its own; the error comes in the step that began it or in the next one."""
    engines: list[FaultyEngine] = []

    def choose_faulty(name: str, **_measured: str | None) -> FaultyEngine:
        engines.append(FaultyEngine(choose(name)))
        return engines[-1]

    monkeypatch.setattr("tieroff.session.build.choose", choose_faulty)
    _warm_up()
    plain = Loop(None)
    values = [_step_and_look(plain, index) for index in range(9)]
    failed: list[int] = []
    for after in range(0, 40, 3):
        steps: tuple[int, ...] = (8,)
        loop = Loop(config_for(NVME, tmp_path, policy=LATE))
        for index in range(7):
            _step_and_look(loop, index)
        engines[-1].inject("write", "errno", errno=errno.EIO, after=after)
        try:
            for index in (7, 8):
                torch.manual_seed(index)
                loop.step()
        except StoreError:
            failed.append(index)
            steps = (6, 7, 8)
        seen = [state_of(loop.optimizer)]  # before anything was repaired
        tieroff.unwrap(loop.model)
        seen.append(state_of(loop.optimizer))
        for state in seen:
            assert [key for key in state if not any(are_same_bits(state[key], values[step][key]) for step in steps)] == []
    assert set(failed) == {7, 8}


def _step_and_look(loop: Loop, index: int) -> dict[str, Any]:
    torch.manual_seed(index)
    loop.step()
    return state_of(loop.optimizer)
