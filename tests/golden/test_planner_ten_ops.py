"""Ten ops worked out by hand: what `floor` and `greedy` must plan, to the tick.

Three activations of 40 bytes are written by ops 0, 1, 2 and read by ops 9, 8, 7; ops 4 to 6 need 60 bytes besides. So
180 bytes are live in ops 4 to 6, the budget is 140, and one activation has to leave. Ops take 100 ns, a transfer 40.
"""

from __future__ import annotations

import pytest

from tieroff.core.machine import Machine
from tieroff.core.plan import Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.timeline import Stall
from tieroff.core.trace import Op, Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.make_plan import make_plan, plan_with_timeline

DEVICE, HOST = Tier.DEVICE, Tier.HOST

_WRITES = {0: (0,), 1: (1,), 2: (2,)}
_READS = {9: (0,), 8: (1,), 7: (2,)}
_TRACE = Trace(
    ops=tuple(
        Op(f"op{i}", 100, _READS.get(i, ()), _WRITES.get(i, ()), transient_bytes=60 if 4 <= i <= 6 else 0) for i in range(10)
    ),
    tensors=tuple(Tensor(f"a{i}", 40, TensorClass.ACTIVATION) for i in range(3)),
    name="ten ops",
)
_MACHINE = Machine(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)
_BUDGET = {DEVICE: 140, HOST: 200}


def test_floor_sends_everything_out_and_waits_for_each_transfer() -> None:
    plan, timeline = plan_with_timeline(_TRACE, _MACHINE, _BUDGET, "floor")
    assert set(plan.residencies) == {
        Residency(0, DEVICE, 0, 1),
        Residency(0, HOST, 1, 10),
        Residency(0, DEVICE, 9, 10),
        Residency(1, DEVICE, 1, 2),
        Residency(1, HOST, 2, 9),
        Residency(1, DEVICE, 8, 9),
        Residency(2, DEVICE, 2, 3),
        Residency(2, HOST, 3, 8),
        Residency(2, DEVICE, 7, 8),
    }
    assert set(plan.transfers) == {
        Transfer(0, DEVICE, HOST, 1, 1, 0),
        Transfer(0, HOST, DEVICE, 9, 9, 2),
        Transfer(1, DEVICE, HOST, 2, 2, 1),
        Transfer(1, HOST, DEVICE, 8, 8, 1),
        Transfer(2, DEVICE, HOST, 3, 3, 2),
        Transfer(2, HOST, DEVICE, 7, 7, 0),
    }
    assert plan.peak_bytes == {DEVICE: 60, HOST: 120, Tier.NVME: 0}
    assert plan.step_ns == timeline.step_ns == 1000 + 6 * 40
    assert timeline.stalls == (
        *(Stall(op, 40, tensor, DEVICE, HOST) for op, tensor in ((1, 0), (2, 1), (3, 2))),
        *(Stall(op, 40, tensor, HOST, DEVICE) for op, tensor in ((7, 2), (8, 1), (9, 0))),
    )


@pytest.mark.parametrize("policy", ["greedy", "auto"])
def test_greedy_sends_out_the_longest_idle_one_and_hides_its_transfers(policy: str) -> None:
    plan, timeline = plan_with_timeline(_TRACE, _MACHINE, _BUDGET, policy)
    assert plan.policy == policy
    assert set(plan.residencies) == {
        Residency(0, DEVICE, 0, 2),
        Residency(0, HOST, 1, 10),
        Residency(0, DEVICE, 8, 10),
        Residency(1, DEVICE, 1, 9),
        Residency(2, DEVICE, 2, 8),
    }
    assert set(plan.transfers) == {Transfer(0, DEVICE, HOST, 1, 2, 0), Transfer(0, HOST, DEVICE, 8, 9, 0)}
    assert plan.peak_bytes == {DEVICE: 140, HOST: 40, Tier.NVME: 0}
    assert timeline.step_ns == 1000
    assert timeline.stalls == ()


def test_greedy_moves_nothing_when_everything_fits() -> None:
    plan = make_plan(_TRACE, _MACHINE, {**_BUDGET, DEVICE: 180}, "greedy")
    assert plan.moves_nothing
    assert plan.step_ns == 1000


def test_infeasible_error_names_op_bytes_and_the_budget_that_would_do() -> None:
    for policy in ("floor", "greedy"):
        with pytest.raises(InfeasiblePlanError, match=r"op 4 \(op4\) .* device budget of 60 bytes would do") as caught:
            make_plan(_TRACE, _MACHINE, {**_BUDGET, DEVICE: 59}, policy)
        assert (caught.value.op, caught.value.needed_bytes, caught.value.available_bytes) == ("op 4 (op4)", 60, 59)
        make_plan(_TRACE, _MACHINE, {**_BUDGET, DEVICE: 60}, policy)
