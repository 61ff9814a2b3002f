"""What `tieroff plan` says beside its row: fit, wear, the tightest resource, and what more of each would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieroff.core.buckets import BYTES_BELOW
from tieroff.core.explain.describe import describe
from tieroff.core.machine import Machine
from tieroff.core.plan import Plan
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.policies import all_policies
from tieroff.study.compare.advice import advice, explain, questions, reliefs
from tieroff.study.compare.rows import Result, Row, plan_row
from tieroff.units import format_bytes

GB = 10**9
MS = 10**6
HOST_LINK = "a link to the host twice as fast"
DRIVES = "drives twice as fast"
FASTER_DEVICE = "a device that computes twice as fast"


def chain(count: int = 6, duration_ns: int = 100 * MS, size_bytes: int = GB) -> Trace:
    """Activations that are written forwards and read backwards."""
    tensors = tuple(Tensor(f"a{i}", size_bytes, TensorClass.ACTIVATION) for i in range(count))
    forward = [Op(f"forward{i}", duration_ns, (i - 1,) if i else (), (i,)) for i in range(count)]
    backward = [Op(f"backward{i}", duration_ns, (i,)) for i in reversed(range(count))]
    return Trace((*forward, *backward), tensors, origin="step")  # so no op is run again


def machine(**changes: int) -> Machine:
    base = Machine("box", host_bytes=64 * GB, d2h_bytes_per_s=2 * GB, h2d_bytes_per_s=2 * GB)
    return replace(base, **changes)  # type: ignore[arg-type]


def row(**changes: float) -> Row:
    base = Row("auto", "ok", 2.0, 1.0, 1.5, 1.0, 3 * GB, 4 * GB, 0, 0, 0, 0, 0, 0.0, 0.1)
    return replace(base, **changes)  # type: ignore[arg-type]


def planned(trace: Trace, of: Machine, budget: dict[Tier, int], policy: str = "auto", effort: str = "fast") -> list[str]:
    result = plan_row(trace, of, budget, policy, effort)
    return [*explain(trace, of, budget, result), *advice(trace, of, budget, result, effort)]


EMPTY = Plan("auto", "", 12, {}, {}, (), ())


def test_step_that_waits_for_the_host_link_is_helped_by_a_faster_one() -> None:
    trace, budget = chain(), {Tier.DEVICE: 3 * GB, Tier.HOST: 64 * GB}
    result = plan_row(trace, machine(), budget)
    assert result.row.step_s is not None
    assert result.row.step_s > 1.1 * trace.ideal_ns / 1e9
    found, left_out = reliefs(trace, machine(), budget, result)
    assert left_out == []
    assert {relief.what for relief in found} == {
        HOST_LINK,
        "twice the host memory",
        "10 % more device memory",
        "25 % more device memory",
        FASTER_DEVICE,
    }
    assert found == sorted(found, key=lambda relief: relief.step_s)
    assert found[0].what == HOST_LINK
    assert found[0].step_s < 0.9 * result.row.step_s
    text = "\n".join(advice(trace, machine(), budget, result))
    assert f"what would help most: {HOST_LINK}." in text
    assert all(relief.what in text for relief in found)


def test_step_that_waits_for_the_drives_is_helped_by_faster_ones() -> None:
    of = machine(nvme_bytes=100 * GB, nvme_write_bytes_per_s=GB, nvme_read_bytes_per_s=GB, host_bytes=0)
    trace, budget = chain(), {Tier.DEVICE: 3 * GB, Tier.HOST: 0}
    result = plan_row(trace, of, budget)
    found, _ = reliefs(trace, of, budget, result)
    assert found[0].what == DRIVES
    assert HOST_LINK not in {relief.what for relief in found}  # there is no host tier whose link could be


def test_step_that_hardly_waits_needs_a_faster_device_and_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing needs to be planned")

    monkeypatch.setattr("tieroff.study.compare.advice.make_plan", refuse)
    trace, budget = chain(), {Tier.DEVICE: 6 * GB}
    result = plan_row(trace, machine(), budget)
    assert "Nothing moved, because everything fits" in "\n".join(explain(trace, machine(), budget, result))
    assert advice(trace, machine(), budget, result) == [
        "The tightest resource is the device's speed: the step hardly waits for anything else."
    ]


def test_budget_that_cannot_be_met_says_what_is_short_and_what_would_do() -> None:
    trace, budget = chain(), {Tier.DEVICE: GB}
    result = plan_row(trace, machine(), budget)
    text = "\n".join(explain(trace, machine(), budget, result))
    assert advice(trace, machine(), budget, result) == []
    assert text.startswith("It does not fit.")
    assert "forward1" in text
    assert "With nothing moved the step needs 5.59 GiB" in text


def test_explanation_gives_bytes_time_and_share_of_each_link() -> None:
    found = row(d2h_bytes=2 * GB, h2d_bytes=GB)
    text = "\n".join(explain(chain(), machine(), {Tier.DEVICE: 3 * GB}, Result(found, EMPTY)))
    assert "a step of 2.00 s; 1.00 s without any wait (50.0% of ideal), and no plan is faster than 1.50 s" in text
    assert "1.86 GiB per step device to host: 50.0% of the step" in text
    assert "953.67 MiB per step host to device: 25.0% of the step" in text
    assert "It needs 3.73 GiB of host." in text
    assert "estimated" not in text


def test_what_is_needed_below_includes_state_that_is_updated_in_slices() -> None:
    trace, budget = chain(), {Tier.DEVICE: 3 * GB, Tier.HOST: 8 * GB}
    sliced = replace(trace, meta={**trace.meta, BYTES_BELOW: f"host={GB}"})
    without, found = (plan_row(one, machine(), budget) for one in (trace, sliced))
    assert found.plan is not None and found.timeline is not None and without.timeline is not None
    assert (found.row.peak_host_bytes or 0) - (without.row.peak_host_bytes or 0) == GB
    assert max(found.timeline.memory[Tier.HOST]) == found.row.peak_host_bytes
    needed = f"{format_bytes(found.row.peak_host_bytes or 0)} of host, 953.67 MiB of it for state that is updated in slices."
    assert f"It needs {needed}" in explain(sliced, machine(), budget, found)
    of = format_bytes(found.plan.budget_bytes[Tier.HOST] + GB)
    line = f"host holds at most {needed.replace('of host', f'of {of}')}"
    assert line in describe(sliced, found.plan)


def test_host_memory_that_holds_nothing_but_such_state_is_not_said_to_be_unused() -> None:
    budget = {Tier.DEVICE: 8 * GB, Tier.HOST: 8 * GB}
    found = plan_row(chain(), machine(), budget)
    assert found.plan is not None and found.plan.moves_nothing
    sliced = replace(chain(), meta={BYTES_BELOW: f"host={GB}"})
    texts = [" ".join(explain(trace, machine(), budget, found)) for trace in (chain(), sliced)]
    assert ["unused" in text for text in texts] == [True, False]


def test_explanation_gives_the_life_of_the_drives() -> None:
    found = row(nvme_write_bytes=2 * GB)  # 1 GB/s: 86.4 TB a day
    of = machine(nvme_bytes=GB, nvme_write_bytes_per_s=GB, nvme_read_bytes_per_s=GB)

    def text(endurance_bytes: int) -> str:
        worn = replace(of, nvme_endurance_bytes=endurance_bytes)
        return "\n".join(explain(chain(), worn, {Tier.DEVICE: 3 * GB}, Result(found, EMPTY)))

    assert "writes 86.4 TB to the drives, of the 864 TB that they take in their life: 10 days of it" in text(864 * 10**12)
    assert "2.0 years of it" in text(round(86.4e12 * 365.25 * 2))
    assert "how long they last is not known" in text(0)


def test_explanation_marks_estimated_times_and_a_budget_above_the_machine() -> None:
    dry = replace(chain(), origin="dry", meta={"durations": "estimated: roofline of machine box"})
    text = "\n".join(explain(dry, machine(device_bytes=2 * GB), {Tier.DEVICE: 3 * GB}, Result(row(), EMPTY)))
    assert "Op times are not measured (estimated: roofline of machine box)" in text
    assert "The budget is above the 1.86 GiB of device memory of this machine." in text


def test_questions_that_come_too_late_are_left_out_and_said() -> None:
    trace, budget = chain(), {Tier.DEVICE: 3 * GB}
    result = plan_row(trace, machine(), budget)
    found, left_out = reliefs(trace, machine(), budget, result, time_limit_s=-1.0)
    assert found == []
    assert left_out == [question.what for question in questions(trace, machine(), budget)]
    text = "\n".join(advice(trace, machine(), budget, result, time_limit_s=-1.0))
    assert f"Not tried, for lack of time: {HOST_LINK}" in text


def test_after_a_long_search_a_fast_plan_is_what_others_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_ns = iter([4_000, 1_000, 3_000, 4_000, 5_000, 2_000])
    monkeypatch.setattr("tieroff.study.compare.advice.make_plan", lambda *_: replace(EMPTY, step_ns=next(steps_ns)))
    found, _ = reliefs(chain(), machine(), {Tier.DEVICE: 3 * GB}, Result(row(step_s=3.0), EMPTY), "high")
    assert [relief.step_s for relief in found] == [0.75, 1.5, 2.25, 3.0, 3.0]


MOVE_TOO_LITTLE = {"mlp-offload", "ssdtrain", "vdnn-conv", "zero-infinity", "zero-offload"}
"""Policies whose published rule moves too few of a chain's activations for this budget."""


@pytest.mark.parametrize("effort", ["fast", "high"])
@pytest.mark.parametrize("policy", all_policies())
def test_every_policy_and_effort_gets_advice(policy: str, effort: str) -> None:
    text = "\n".join(planned(chain(4), machine(), {Tier.DEVICE: 3 * GB}, policy, effort))
    if policy in MOVE_TOO_LITTLE:
        assert f"what the rule of policy '{policy}' moves leaves" in text
        return
    assert "It fits" in text
    assert FASTER_DEVICE in text or "the device's speed" in text


@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    rates=st.tuples(*[st.integers(1, 20)] * 4),
    durations=st.lists(st.integers(0, 40), min_size=12, max_size=12),
    share=st.floats(0.5, 1.0),
    host_share=st.floats(0.0, 1.0),
)
def test_more_of_a_resource_never_makes_the_step_longer(
    sizes: list[int], rates: tuple[int, ...], durations: list[int], share: float, host_share: float
) -> None:
    count = len(sizes)
    base = chain(count)
    tensors = tuple(replace(t, size_bytes=size) for t, size in zip(base.tensors, sizes, strict=True))
    trace = replace(base, tensors=tensors).with_durations(durations[: 2 * count])
    of = Machine(
        host_bytes=100,
        nvme_bytes=100,
        d2h_bytes_per_s=rates[0] * GB,
        h2d_bytes_per_s=rates[1] * GB,
        nvme_write_bytes_per_s=rates[2] * GB,
        nvme_read_bytes_per_s=rates[3] * GB,
    )
    budget = {Tier.DEVICE: max(int(sum(sizes) * share), 1), Tier.HOST: int(sum(sizes) * host_share)}
    result = plan_row(trace, of, budget)
    if result.plan is None:
        return
    found, _ = reliefs(trace, of, budget, result)
    assert result.row.step_s is not None
    assert all(0 <= relief.step_s <= result.row.step_s for relief in found)
    assert explain(trace, of, budget, result)
