"""Planned steps that do not take what their plan was made for have it made again; one that does ends the search."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.parity.recompute.test_recompute_cost import PauseClock
from tieroff.core.io.run_folder import load_run
from tieroff.core.machine import Machine, save_machine
from tieroff.core.plan import Plan
from tieroff.core.seams import Made, Pending
from tieroff.core.trace import Op, Queue, Trace
from tieroff.errors import InfeasiblePlanError, StoreError
from tieroff.planner.predict import predict
from tieroff.runtime.step.feedback import Feedback
from tieroff.session.planning import Planning
from tieroff.session.workshop import Known
from tieroff.units import NS_PER_S, parse_bytes

MS = 1_000_000
MIB = 1 << 20
MACHINE = Machine(nvme_read_bytes_per_s=1000 * MIB, nvme_write_bytes_per_s=1000 * MIB)


class Copy:
    """A copy that was under way from `start_ns` to `stop_ns`."""

    def __init__(self, start_ns: int, stop_ns: int) -> None:
        self.start_ns, self.stop_ns = start_ns, stop_ns

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Ended long ago."""


def trace_of(*durations_ns: int) -> Trace:
    return Trace(ops=tuple(Op(f"op {i}", ns) for i, ns in enumerate(durations_ns)), tensors=())


def as_seen(rates: dict[str, float]) -> Machine:
    speeds: dict[str, Any] = {f"{link}_bytes_per_s": min(int(rate), 1000 * MIB) for link, rate in rates.items()}
    return replace(MACHINE, **speeds)


def looked(feedback: Feedback, durations_ns: list[int], *copies: tuple[str, int, int, int]) -> int:
    """Takes steps of these durations and copies (link, start, stop, bytes) until there are enough; returns how many."""
    for count in range(1, 1000):
        at = count * 1000 * MS
        spans = [(0, link, Copy(at + start, at + stop), size) for link, start, stop, size in copies]
        if feedback.take(list(durations_ns), spans):
            return count
    raise AssertionError("no look after 1000 steps")


def test_durations_as_planned_settle_the_plan_after_three_steps() -> None:
    feedback, trace = Feedback(), trace_of(50 * MS, 50 * MS)
    assert looked(feedback, [52 * MS, 54 * MS]) == 3
    assert feedback.look(trace, as_seen) == ""
    assert feedback.settle()
    assert feedback.settled_after == 3
    assert looked(feedback, [52 * MS, 54 * MS]) == 8
    assert feedback.look(trace, as_seen) == ""
    assert not feedback.settle()
    assert feedback.settled_after == 3


def test_a_plan_that_holds_is_looked_at_ever_more_rarely_and_only_at_the_last_steps_before() -> None:
    feedback, trace = Feedback(), trace_of(50 * MS)
    steps = [0, 0]  # passed, seen
    looks = []
    for _ in range(400):
        passes = feedback.passes()
        steps[not passes] += 1
        if not passes and feedback.take([52 * MS], ()):
            assert feedback.look(trace, as_seen) == ""
            feedback.settle()
            looks.append(tuple(steps))
            steps = [0, 0]
    assert looks == [(0, 3), (3, 5), (11, 5), (27, 5), *[(59, 5)] * 5]


def test_bytes_of_the_steps_that_were_seen_count() -> None:
    """40 MiB a step at half the speed: 40 ms, above the noise of 30 ms in 3 s; only 5 of each 8 steps are seen."""
    feedback, trace = Feedback(), trace_of(3000 * MS)
    for _ in range(11):
        if not feedback.passes() and feedback.take([3000 * MS], [(0, "nvme_read", Copy(0, 80 * MS), 40 * MIB)]):
            reason = feedback.look(trace, as_seen)
            feedback.settle()
    assert "nvme_read moves 500.00 MiB/s" in reason


def test_a_link_whose_speed_takes_less_than_a_hundredth_of_the_step_is_no_reason_to_plan() -> None:
    """20 MiB at 1,000 MiB/s and at half of it: 20 ms more."""
    for step_ms, is_told in ((2100, False), (1900, True)):
        feedback = Feedback()
        looked(feedback, [step_ms * MS], ("nvme_read", 0, 40 * MS, 20 * MIB))
        assert bool(feedback.look(trace_of(step_ms * MS), as_seen)) == is_told


@pytest.mark.parametrize("durations", [[58 * MS, 58 * MS], [42 * MS, 42 * MS]])
def test_durations_more_than_a_tenth_off_say_so(durations: list[int]) -> None:
    feedback = Feedback()
    looked(feedback, durations)
    expected = f"compute takes {sum(durations) / MS} ms, planned were 100.0 ms"
    assert feedback.look(trace_of(50 * MS, 50 * MS), as_seen) == expected


def test_median_of_each_op_counts() -> None:
    """Neither one slow step, nor the shortest duration that each op ever had."""
    feedback = Feedback()
    for durations in ([50 * MS, 70 * MS], [40 * MS, 500 * MS], [400 * MS, 50 * MS]):
        feedback.take(durations, ())
    assert feedback.typical_ns == [50 * MS, 70 * MS]
    assert feedback.look(trace_of(60 * MS, 60 * MS), as_seen) == ""
    assert feedback.look(trace_of(45 * MS, 60 * MS), as_seen) == "compute takes 120.0 ms, planned were 105.0 ms"


def test_collectives_take_together_what_they_took_together() -> None:
    """In each step another one waits for a late rank."""
    ops = [Op("gather", 10 * MS, queue=Queue.COMMUNICATION), Op("compute", 10 * MS, awaits=0)] * 3
    trace = Trace(ops=tuple(replace(op, awaits=i - 1 if i % 2 else -1) for i, op in enumerate(ops)), tensors=())
    feedback = Feedback()
    for late in range(3):
        feedback.take([(20 * MS if i == 2 * late else 5 * MS) if i % 2 == 0 else 10 * MS for i in range(6)], ())
    assert feedback.typical_ns == [5 * MS, 10 * MS] * 3
    assert feedback.typical_for(trace) == [10 * MS, 10 * MS] * 3
    assert feedback.typical_for(trace_of(*[10 * MS] * 6)) == feedback.typical_ns
    assert feedback.look(trace, as_seen) == ""


def test_the_latest_steps_count() -> None:
    feedback = Feedback()
    for duration_ns in [90 * MS] * 20 + [50 * MS] * 8:
        feedback.take([duration_ns], ())
    assert feedback.typical_ns == [50 * MS]


def test_a_plan_holds_as_long_as_it_is_as_near_to_the_bound_as_it_was() -> None:
    feedback = Feedback()
    assert not feedback.holds(100, 100), "nobody knows how near it was"
    feedback.slack = 1.1
    assert feedback.holds(112, 100) and feedback.holds(1120, 1000) and not feedback.holds(1130, 1000)


def test_short_steps_are_not_planned_again_for_noise() -> None:
    feedback = Feedback()
    looked(feedback, [4 * MS, 4 * MS], ("nvme_read", 0, 2 * MS, MIB))
    assert feedback.look(trace_of(2 * MS, 2 * MS), as_seen) == ""


def test_link_that_is_slower_beside_compute_says_so() -> None:
    feedback, trace = Feedback(), trace_of(50 * MS, 50 * MS)
    # Two that overlap: busy from 0 to 40 ms for 20 MiB, half of what the plan was made for.
    copies = ("nvme_read", 0, 30 * MS, 10 * MIB), ("nvme_read", 20 * MS, 40 * MS, 10 * MIB)
    looked(feedback, [50 * MS, 50 * MS], *copies)
    assert feedback.look(trace, as_seen) == "nvme_read moves 500.00 MiB/s, planned were 1000.00 MiB/s"
    assert feedback.plan_again() == {"nvme_read": pytest.approx(500 * MIB)}
    looked(feedback, [50 * MS, 50 * MS], *copies)
    assert feedback.look(trace, as_seen) == ""
    feedback.settle()
    looked(feedback, [50 * MS, 50 * MS], ("nvme_read", 0, 1, 20 * MIB))
    assert "nvme_read moves 1000.00 MiB/s, planned were 500.00 MiB/s" in feedback.look(trace, as_seen)


def test_link_faster_than_the_machine_changes_nothing() -> None:
    feedback = Feedback()
    looked(feedback, [50 * MS], ("nvme_read", 0, MS, 100 * MIB))
    assert feedback.look(trace_of(50 * MS), as_seen) == ""


def test_links_are_not_compared_where_the_machine_is_not_known() -> None:
    feedback = Feedback()
    looked(feedback, [50 * MS], ("nvme_read", 0, 500 * MS, MIB))
    assert feedback.look(trace_of(50 * MS), lambda rates: None) == ""


def test_plan_that_never_fits_is_made_anew_ever_more_rarely() -> None:
    feedback, trace = Feedback(), trace_of(50 * MS)
    counts = []
    for _ in range(6):
        counts.append(looked(feedback, [100 * MS]))
        assert feedback.look(trace, as_seen)
        feedback.plan_again()
        assert feedback.settled_after == 0
    assert counts == [3, 2, 2, 8, 16, 32]  # with the traced and the measured step, the third plan is there after nine


class Sleepy(nn.Module):
    """Layers that take as long as one says."""

    wait = staticmethod(time.sleep)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.delay_s = 0.005

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            self.wait(self.delay_s)
        return x


def config(folder: Path, nvme_rate: str) -> dict[str, object]:
    """Returns a config with a machine file whose drive has this bandwidth both ways."""
    rate = parse_bytes(nvme_rate)
    host = parse_bytes("10GiB")
    machine = Machine(d2h_bytes_per_s=host, h2d_bytes_per_s=host, nvme_write_bytes_per_s=rate, nvme_read_bytes_per_s=rate)
    save_machine(machine, folder / "machine.toml")
    return {
        "device": "cpu",
        "budget": {"device": "60%", "nvme": "1GiB"},
        "nvme": {"dirs": [str(folder)], "staging": "1MiB"},
        "plan": {"min_bytes": "4KiB", "policy": "floor", "machine": str(folder / "machine.toml")},
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(64, 256)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_engine_plans_again_when_the_model_slows_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tieroff")
    model = Sleepy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tieroff.wrap(model, optimizer, config=config(tmp_path, "1MiB"))  # so slow that no copy is slower than planned
    engine = tieroff.engine(model)
    train(model, optimizer, 3)
    ideal_ns = engine.trace.ideal_ns
    model.delay_s = 0.1
    for _ in range(40):  # the look that is under way may still have a fast step in it
        train(model, optimizer, 1)
        if engine.trace.ideal_ns > ideal_ns + 6 * 50 * MS:
            break
    else:
        raise AssertionError("the plan is still the one for fast layers")
    assert engine.stats().plans >= 1
    assert "compute takes" in caplog.text and "the step was planned again" in caplog.text
    assert "It was planned again, " in engine.explain()
    tieroff.unwrap(model)


def at_rate(spans: Iterable[tuple[int, str, Any, int]], bytes_per_s: int) -> Iterator[tuple[int, str, Any, int]]:
    """Yields the copies as they would have been one after the other at this rate."""
    at_ns = 0
    for number, link, _, size_bytes in spans:
        begun_ns, at_ns = at_ns, at_ns + size_bytes * NS_PER_S // bytes_per_s
        yield number, link, Copy(begun_ns, at_ns), size_bytes


def test_a_plan_that_would_gain_nothing_by_another_one_predicts_what_is_known_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that the layers move and links of half the speed that was said: what else runs here changes neither."""
    clock, take = PauseClock(), Feedback.take
    monkeypatch.setattr(time, "monotonic_ns", clock.now_ns)
    monkeypatch.setattr(Sleepy, "wait", staticmethod(clock.wait))
    monkeypatch.setattr(Feedback, "take", lambda feedback, durations, spans: take(feedback, durations, at_rate(spans, 5 << 30)))
    model = Sleepy()
    model.delay_s = 0.02
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tieroff.wrap(model, optimizer, config=config(tmp_path, "10GiB"))  # next to none of the step is transfers
    engine = tieroff.engine(model)
    while not engine.history.steps or not engine.stats().settled_after:
        train(model, optimizer, 1)
    plan, plans = engine.plan, engine.stats().plans
    model.delay_s = 0.06
    train(model, optimizer, 20)
    assert engine.stats().plans == plans and engine.stats().settled_after
    assert engine.plan.transfers == plan.transfers
    assert plan.step_ns < 6 * 40 * MS and engine.plan.step_ns > 6 * 60 * MS
    engine.save_run(tmp_path / "run")
    assert predict(load_run(tmp_path / "run"))[1] == "", "expected the run's trace and machine to be those of the prediction"
    tieroff.unwrap(model)


def test_engine_says_when_the_plan_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "tieroff")
    monkeypatch.setattr(Feedback, "look", lambda *_: "")
    model = Sleepy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tieroff.wrap(model, optimizer, config=config(tmp_path, "1MiB"))
    engine = tieroff.engine(model)
    train(model, optimizer, 15)
    assert (engine.stats().plans, engine.stats().settled_after) == (1, 3)
    assert caplog.text.count("the plan holds after 3 planned steps") == 1
    tieroff.unwrap(model)


def test_engine_plans_again_for_a_drive_slower_than_its_machine_file(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tieroff.wrap(model, optimizer, config=config(tmp_path, "1000GiB"))
    engine = tieroff.engine(model)
    for _ in range(8):
        model(torch.ones(8, 2048)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.stats().plans >= 2
    engine.save_run(tmp_path / "run")
    planned = load_run(tmp_path / "run").machine
    assert planned is not None
    assert 0 < planned.nvme_read_bytes_per_s < parse_bytes("500GiB")
    tieroff.unwrap(model)


def test_plan_that_was_given_stays(tmp_path: Path) -> None:
    def run(plan: Plan | None, delay_s: float) -> tuple[Plan, int]:
        torch.manual_seed(0)
        model = Sleepy()
        model.delay_s = delay_s
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        tieroff.wrap(model, optimizer, config=config(tmp_path, "1MiB"), plan=plan)
        train(model, optimizer, 7)
        engine = tieroff.engine(model)
        found = engine.plan, engine.stats().plans
        tieroff.unwrap(model)
        return found

    first, _ = run(None, 0.0)
    assert run(first, 0.01) == (first, 1)


@pytest.mark.parametrize("kind", [InfeasiblePlanError, StoreError])
def test_plan_that_cannot_be_made_again_runs_on(
    kind: type[Exception], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Sleepy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tieroff.wrap(model, optimizer, config=config(tmp_path, "1MiB"))
    engine = tieroff.engine(model)
    train(model, optimizer, 2)
    model.delay_s = 0.03
    train(model, optimizer, 1)
    planned = engine.plan

    def refuse(plans: Planning, traces: Sequence[Trace], rates: dict[str, float], **options: bool) -> Pending[Made]:
        def take() -> Made:
            raise kind("there is less room than there was")

        return Known(take)

    monkeypatch.setattr(Planning, "plan", refuse)
    monkeypatch.setattr(
        Planning, "forecast", lambda *_: Known(lambda: None)
    )  # nobody knows whether another plan would gain anything
    train(model, optimizer, 4)
    assert "keeps its plan: there is less room than there was" in caplog.text
    assert engine.plan is planned
    assert (engine.stats().phase, engine.stats().plans, engine.stats().settled_after) == ("planned", 1, 0)
    tieroff.unwrap(model)
