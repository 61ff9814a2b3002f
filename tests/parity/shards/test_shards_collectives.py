"""FSDP2's collectives in recorded steps: ops of communication in the order of the calls, beside compute where they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.shards.collectives import KINDS, TAKES_S
from tests.parity.shards.launched import Found, told_by
from tieroff.core.check.plan import check
from tieroff.core.check.rules import Rule
from tieroff.core.io.run_folder import Run, load_run
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace, validate
from tieroff.errors import InvalidPlanError
from tieroff.planner.make_plan import make_plan
from tieroff.planner.simulate.simulator import simulate
from tieroff.report.lanes import spans_of

pytestmark = pytest.mark.timeout(300)

# The root's group stays gathered; in backward the next group is gathered before the gradients of this one are reduced.
IN_ORDER = [
    *("gather:root", "gather:blocks.0", "gather:blocks.1", "gather:blocks.2", "gather:blocks.3"),
    *("gather:blocks.3", "gather:blocks.2", "reduce:blocks.3", "gather:blocks.1", "reduce:blocks.2"),
    *("gather:blocks.0", "reduce:blocks.1", "reduce:blocks.0", "reduce:root"),
]
US = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("collectives")


@pytest.fixture(scope="module")
def told(folder: Path, project: Path) -> Found:
    return told_by(project, folder, 2, tuple(KINDS), "collectives")


@pytest.fixture(scope="module")
def runs(folder: Path, told: Found) -> dict[str, Run]:
    return {kind: load_run(folder / "rank-0" / kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_collectives_as_events_have_the_numbers_of_plain_fsdp2(told: Found, kind: str) -> None:
    for found in told[kind]:
        assert found["differ"] == []
        assert (found["phase"], found["fallbacks"]) == ("planned", 0)
        assert found["stood in"] and found["given back"]
        assert found["own"] == (54 if "late" in kind else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_are_ops_of_communication_in_the_order_in_which_fsdp2_makes_them(runs: dict[str, Run], kind: str) -> None:
    trace = runs[kind].trace
    validate(trace)
    assert [trace.ops[index].name for index in trace.communication] == IN_ORDER
    prefetched = [index for index in trace.communication if trace.done_at[index] > index + 2]
    if kind == "at once":
        assert all(map(trace.blocks, trace.communication))
    else:  # those that FSDP2 gathers ahead go on beside the compute of another group
        assert [trace.ops[index].name for index in prefetched] == [f"gather:blocks.{i}" for i in (3, 2, 1, 0)]
        assert not any(trace.blocks(index) for index in trace.communication if trace.ops[index].name.startswith("gather"))


def timed(trace: Trace) -> Trace:
    """Returns the step with ops of 10 us, and communication of 200."""
    return trace.with_durations([200 * US if index in trace.communication else 10 * US for index in range(len(trace.ops))])


def test_simulated_step_waits_for_collectives_that_are_over_at_once_and_runs_beside_the_others(runs: dict[str, Run]) -> None:
    for kind in KINDS:
        trace = timed(runs[kind].trace)
        plan = make_plan(trace, Machine(), {Tier.DEVICE: trace.peak_bytes})
        timeline = simulate(plan, trace, Machine())
        serial_ns = sum(op.duration_ns for op in trace.ops)
        beside_ns = 10 * US * len([op for op in trace.ops if op.name.startswith("beside")])
        assert beside_ns == (0 if kind == "at once" else 9 * 10 * US)
        if kind == "at once":
            assert timeline.step_ns == serial_ns
        else:  # compute that FSDP2 has while four groups are gathered ahead, before which only the issue of others is hidden
            assert serial_ns - 4 * 200 * US - beside_ns <= timeline.step_ns < serial_ns - beside_ns - 200 * US


def test_shard_that_arrives_after_its_gather_has_begun_is_refused(runs: dict[str, Run]) -> None:
    run = runs["at once"]
    trace, plan = run.trace, run.plan
    check(plan, trace, IDEAL_EXECUTOR)
    gathers = [index for index in trace.communication if trace.ops[index].name.startswith("gather")]
    shards = [
        number
        for number, transfer in enumerate(plan.transfers)
        if transfer.target is Tier.DEVICE and trace.tensors[transfer.tensor].kind is TensorClass.PARAMETER
    ]
    late = 0
    for number in shards:
        transfer = plan.transfers[number]
        gather = next((index for index in gathers if index >= transfer.ready_by), None)
        if gather is None:
            continue  # for the update
        changed = replace(transfer, ready_by=gather + 1)
        with pytest.raises(InvalidPlanError) as refused:
            check(
                replace(plan, transfers=(*plan.transfers[:number], changed, *plan.transfers[number + 1 :])),
                trace,
                IDEAL_EXECUTOR,
            )
        assert refused.value.rule == Rule.NOT_READY
        late += 1
    assert late >= 9  # one for each gather at least


def test_measured_step_shows_the_lane_and_what_compute_waits_for(runs: dict[str, Run]) -> None:
    for kind, run in runs.items():
        assert run.timeline.communication == run.trace.communication
        spans = spans_of(run.timeline, run.trace)
        peers = [span for span in spans if span.lane == "peers"]
        assert [span.name for span in peers[:2]] == ["all-gather of the group of root", "all-gather of the group of blocks.0"]
        waits = [span.name for span in spans if span.lane == "stalls" and span.cause == "peers"]
        if kind == "at once":
            assert waits == IN_ORDER
        if kind == "beside, late":  # in forward nothing is computed meanwhile
            assert waits[:5] == IN_ORDER[:5]
            took_ns = [span.stop_ns - span.start_ns for span in peers if span.name.startswith("all-gather")]
            assert min(took_ns) >= 0.9e9 * TAKES_S


@pytest.mark.parametrize("kind", KINDS)
def test_measured_collective_and_compute_beside_it_make_up_the_step(runs: dict[str, Run], kind: str) -> None:
    """What a rank waited for is no part of the ops round it: the trace's own clock comes to no more than the step."""
    run = runs[kind]
    timeline = run.timeline
    stalls_ns = sum(stall.duration_ns for stall in timeline.stalls if stall.communication >= 0)
    assert timeline.compute_ns + stalls_ns <= timeline.step_ns
