"""The planner in a process of its own: what comes back, how it ends, and that steps go on meanwhile."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.twins import Setting, assert_same, look
from tieroff.core.io.json_files import load_trace_json
from tieroff.core.machine import Machine
from tieroff.core.plan import RUNTIME_EXECUTOR
from tieroff.core.seams import Made
from tieroff.core.tensor import Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import ConfigError, InfeasiblePlanError, InvalidPlanError, StateError
from tieroff.planner.beside.client import planner
from tieroff.planner.beside.messages import read_answer, read_request, write_error, write_request
from tieroff.planner.beside.work import Order, Question, carry_out
from tieroff.session import workshop

GIB = 2**30
MACHINE = Machine(d2h_bytes_per_s=GIB, h2d_bytes_per_s=GIB, peer_bytes_per_s=(1, 2), dirs={"a": {"engine": "threads"}})


@pytest.fixture(scope="module")
def trace(project: Path) -> Trace:
    return load_trace_json(project / "tests/data/traces/lstm.json")


def order_of(trace: Trace, share: float = 0.6, policy: str = "greedy") -> Order:
    budget = {Tier.DEVICE: int(trace.peak_bytes * share), Tier.HOST: GIB, Tier.NVME: 0}
    return Order((trace,), MACHINE, budget, policy, "fast", replace(RUNTIME_EXECUTOR, tiers=(Tier.HOST,), min_bytes=0))


def process() -> int:
    """Returns the process that plans, which is started where there is none."""
    planner().open()
    planner().close()  # whoever holds one for all tests still does
    pid = planner().pid
    assert pid is not None
    return pid


def until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may end between opening and reading
        return False
    return state != "Z"


def test_a_plan_is_the_one_that_the_trainer_would_make(trace: Trace) -> None:
    order = order_of(trace)
    assert planner().ask(order).take() == carry_out(order)


def sent(document: dict[str, Any]) -> dict[str, Any]:
    """Returns a document as the channel gives it to the other side."""
    received: dict[str, Any] = json.loads(json.dumps(document))
    return received


def test_requests_come_through_as_they_are(trace: Trace) -> None:
    order = replace(order_of(trace), traces=(trace, trace), recompute=("a",), chooses_layers=True)
    assert read_request(sent(write_request(order))) == order
    question = Question(carry_out(order_of(trace)).plan, trace, MACHINE)
    assert read_request(sent(write_request(question))) == question


def test_a_longer_trace_takes_no_more_calls_of_the_thread_that_asks(trace: Trace) -> None:
    """It is the one that trains, and asks again whenever speeds have changed."""
    plan, calls = carry_out(order_of(trace)).plan, [0, 0]
    longer = replace(trace, ops=8 * trace.ops, tensors=8 * trace.tensors)
    for index, one in enumerate((trace, longer)):

        def count(*_: object, index: int = index) -> None:
            calls[index] += 1

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            write_request(Question(plan, one, MACHINE))
        finally:
            sys.setprofile(before)
    assert calls[0] == calls[1] > 0


def test_an_infeasible_budget_is_told_with_its_figures(trace: Trace) -> None:
    order = order_of(trace, share=0.01)
    with pytest.raises(InfeasiblePlanError) as beside:
        planner().ask(order).take()
    with pytest.raises(InfeasiblePlanError) as here:
        carry_out(order)
    assert (str(beside.value), vars(beside.value)) == (str(here.value), vars(here.value))
    assert beside.value.needed_bytes > beside.value.available_bytes > 0


def test_the_next_trace_is_planned_where_the_first_does_not_fit(trace: Trace) -> None:
    wide = replace(trace, ops=tuple(replace(op, transient_bytes=GIB) for op in trace.ops))
    found = planner().ask(replace(order_of(trace), traces=(wide, trace))).take()
    assert isinstance(found, Made) and found.index == 1


@pytest.mark.parametrize(
    "error", [InvalidPlanError("moved twice", rule="issue"), ConfigError("unknown"), InfeasiblePlanError("no", is_proven=False)]
)
def test_errors_come_back_as_themselves(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        read_answer(write_error(error))
    assert (str(raised.value), vars(raised.value)) == (str(error), vars(error))


def test_a_bug_in_planning_is_told_with_its_place() -> None:
    with pytest.raises(StateError, match=r"a bug in tieroff:\n(.|\n)*KeyError: 'tensor'"):
        read_answer(write_error(KeyError("tensor")))
    with pytest.raises(ConfigError, match="unknown policy 'nobodys'"):
        planner().ask(Order((_one_op(),), MACHINE, {Tier.DEVICE: 1}, "nobodys", "fast", RUNTIME_EXECUTOR)).take()


def _one_op() -> Trace:
    return Trace((Op("a", 1),), ())


def test_want_of_memory_in_planning_is_no_bug() -> None:
    with pytest.raises(StateError, match="has no memory left"):
        read_answer(write_error(MemoryError()))


def test_what_the_planner_logs_is_said_by_the_trainer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tieroff")
    document: dict[str, Any] = {"number": -1, "log": [[logging.INFO, "3 layers run again"]], "forecast": [1, 1]}
    planner().answered(document)
    assert "3 layers run again" in caplog.text


def test_a_planner_that_is_killed_is_asked_again(trace: Trace) -> None:
    job = planner().ask(order_of(trace))
    first = process()
    os.kill(first, signal.SIGKILL)
    assert job.take() == carry_out(order_of(trace))
    assert planner().pid != first


def test_a_planner_that_is_killed_every_time_is_an_error(trace: Trace) -> None:
    job = planner().ask(order_of(trace))
    for _ in range(2):
        pid = process()
        os.kill(pid, signal.SIGKILL)
        assert until(lambda pid=pid: job.is_done or planner().pid != pid)  # type: ignore[misc]
    with pytest.raises(StateError, match="the process that plans ended"):
        job.take()


def test_ctrl_c_interrupts_the_wait_and_not_the_planner(trace: Trace) -> None:
    pid = process()
    assert os.getpgid(pid) != os.getpgid(0)
    planner().ask(order_of(trace)).take()  # it has begun, and ignores the signal
    os.kill(pid, signal.SIGSTOP)
    job = planner().ask(order_of(trace))
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        job.take()
    interrupt.join()
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGCONT)
    assert job.take() == carry_out(order_of(trace))
    assert planner().pid == pid


TRAINER = """
import os, sys, time
print("main runs", flush=True)
from tieroff.planner.beside.client import planner
planner().open()
print(planner().pid, flush=True)
{then}
"""


def run_trainer(then: str) -> subprocess.Popen[str]:
    """Starts a trainer as a script of its own, whose `__main__` says when it runs."""
    return subprocess.Popen([sys.executable, "-c", TRAINER.format(then=then)], stdout=subprocess.PIPE, text=True)


def lines_of(trainer: subprocess.Popen[str], count: int) -> list[str]:
    assert trainer.stdout is not None
    return [trainer.stdout.readline().strip() for _ in range(count)]


def test_it_is_nice_and_knows_no_torch() -> None:
    with run_trainer("time.sleep(60)") as trainer:
        pid = int(lines_of(trainer, 2)[1])
        assert until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == min(os.nice(0) + 10, 19))
        maps = Path(f"/proc/{pid}/maps")
        assert until(lambda: "numpy" in maps.read_text())
        assert "libtorch" not in maps.read_text()
        trainer.kill()


@pytest.mark.parametrize("has_child", [False, True], ids=["alone", "with a forked child that lives on"])
def test_it_ends_with_a_trainer_that_is_killed(has_child: bool) -> None:
    fork = "child = os.fork()\nif child: print(child, flush=True)\n" if has_child else ""
    with run_trainer(f"{fork}time.sleep(60)") as trainer:
        found = lines_of(trainer, 3 if has_child else 2)
        pid = int(found[1])
        assert is_alive(pid)
        trainer.kill()
    assert until(lambda: not is_alive(pid), 10)
    if has_child:
        os.kill(int(found[2]), signal.SIGKILL)


@pytest.mark.parametrize("then", ["", "planner().close(); time.sleep(60)", "raise SystemExit(3)"])
def test_it_ends_when_nobody_plans_any_more(then: str) -> None:
    trainer = run_trainer(then)
    pid = int(lines_of(trainer, 2)[1])
    assert until(lambda: not is_alive(pid), 10)
    trainer.kill()
    rest, _ = trainer.communicate()
    assert rest == "", "the planner's process ran the trainer's main again"


def test_a_forked_child_has_a_planner_of_its_own(trace: Trace) -> None:
    pid = process()
    child = os.fork()
    if child == 0:
        os._exit(0 if planner().pid is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert planner().pid == pid
    assert planner().ask(order_of(trace)).take() == carry_out(order_of(trace))


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def _goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps do not wait for plans."""
    monkeypatch.setattr(workshop, "steps_wait", False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seen: list[dict[str, Any]]) -> None:
    for _ in range(steps):
        torch.manual_seed(len(seen))
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(look(model, optimizer, loss))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.usefixtures("_goes_on")
def test_steps_go_on_while_the_planner_stands_still(tmp_path: Path) -> None:
    plain: list[dict[str, Any]] = []
    train(*made(), 14, plain)
    model, optimizer = made()
    Setting(tmp_path).wrap(model, optimizer, policy="auto")
    engine, seen = tieroff.engine(model), list[dict[str, Any]]()
    train(model, optimizer, 2, seen)
    pid = process()
    os.kill(pid, signal.SIGSTOP)
    train(model, optimizer, 6, seen)
    assert engine.stats().phase == "measured", "expected steps without a plan while none is made"
    with pytest.raises(StateError, match="there is no plan yet"):
        engine.plan  # noqa: B018
    os.kill(pid, signal.SIGCONT)
    kind = engine._steps.last
    assert kind is not None
    assert until(lambda: kind.asked is not None and kind.asked.pending.is_due)
    train(model, optimizer, 6, seen)
    assert engine.stats().phase in ("planned", "nothing moved")
    assert engine.stats().fallbacks == 0
    tieroff.unwrap(model)
    assert_same(plain, seen)


@pytest.mark.usefixtures("_goes_on")
def test_another_model_between_asking_and_answer_changes_nothing(tmp_path: Path) -> None:
    """Parameters are frozen while the plan is under way: it is of a step that is no more, and is never adopted."""
    model, optimizer = made()
    Setting(tmp_path).wrap(model, optimizer)
    engine, seen = tieroff.engine(model), list[dict[str, Any]]()
    train(model, optimizer, 2, seen)
    pid = process()
    os.kill(pid, signal.SIGSTOP)
    train(model, optimizer, 1, seen)
    before = engine._steps.last
    next(model.parameters()).requires_grad_(False)
    os.kill(pid, signal.SIGCONT)
    train(model, optimizer, 2, seen)
    assert engine._steps.last is not before
    assert before is not None and before.planned is None
    tieroff.unwrap(model)


def test_a_policy_of_the_users_plans_in_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(
        "import os\nfrom tieroff.planner.policies import find_policy\n"
        "from tieroff.planner.policy import policy\n"
        "pids = []\n"
        "@policy('own')\n"
        "def own(problem):\n    pids.append(os.getpid())\n    return find_policy('floor')(problem)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model, optimizer = made()
    Setting(tmp_path).wrap(model, optimizer, policy="own:own")
    train(model, optimizer, 4, [])
    assert tieroff.engine(model).stats().phase == "planned"
    own = sys.modules.pop("own")
    assert own.pids and set(own.pids) == {os.getpid()}
    tieroff.unwrap(model)


@pytest.mark.parametrize("executable", ["/nowhere/python", None, "/bin/false"], ids=["missing", "not known", "ends at once"])
def test_a_trainer_that_may_start_no_process_plans_itself(
    executable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    planner().end()
    model, optimizer = made()
    Setting(tmp_path).wrap(model, optimizer)
    train(model, optimizer, 4, [])
    assert tieroff.engine(model).stats().phase == "planned"
    assert caplog.text.count("the trainer plans, and its steps wait") == 1
    tieroff.unwrap(model)


def test_a_path_that_is_no_text_is_passed_over_as_python_does(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [Path("/nowhere"), *sys.path])
    planner().end()
    assert planner().ask(order_of(trace)).take() == carry_out(order_of(trace))


def test_an_answer_for_which_there_is_no_descriptor_is_no_error_of_a_step(trace: Trace) -> None:
    pid = process()
    planner().ask(order_of(trace)).take()
    os.kill(pid, signal.SIGSTOP)
    job = planner().ask(order_of(trace))
    limits, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(free)
    os.kill(pid, signal.SIGCONT)
    time.sleep(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        assert until(lambda: job.is_done)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "Too many open files" in job.refusal
    assert planner().ask(order_of(trace)).take() == carry_out(order_of(trace))
