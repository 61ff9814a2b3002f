"""What layers cost to run again, the step that is left, and when it is worth it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tests.support.oracles.simulate import simulate_reference
from tieroff.core.machine import Machine
from tieroff.core.plan import RUNTIME_EXECUTOR
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Queue, Trace
from tieroff.planner.layers import choose_modules, layer_runs, run_again
from tieroff.planner.make_plan import make_plan
from tieroff.planner.simulate.simulator import simulate
from tieroff.study.compare.rows import plan_row

MS = 1_000_000
MB = 10**6
LAYERS = 3
SLOW = Machine(name="slow", nvme_bytes=10**9, nvme_write_bytes_per_s=50 * MB, nvme_read_bytes_per_s=50 * MB)
CAN = replace(RUNTIME_EXECUTOR, tiers=(Tier.NVME,), min_bytes=0, granule_bytes=1)


def _trace() -> Trace:
    """Each layer reads x (1 MB), saves a (4 MB) and b (4 MB), and makes the next one's x after the last saved one."""
    tensors: list[Tensor] = []

    def tensor(name: str, size_bytes: int) -> int:
        tensors.append(Tensor(name, size_bytes, TensorClass.ACTIVATION))
        return len(tensors) - 1

    x = tensor("x", MB)
    ops = [Op("forward", MS, (), (x,), phase="forward")]
    saved: list[tuple[int, int, int]] = []
    for number in range(LAYERS):
        a, b, out = tensor(f"a{number}", 4 * MB), tensor(f"b{number}", 4 * MB), tensor(f"x{number}", MB)
        path = f"layers.{number}"
        ops += [
            Op(f"first {number}", 10 * MS, (x,), (a,), phase="forward", module=path),
            Op(f"second {number}", 20 * MS, (a,), (b,), phase="forward", module=path),
            Op(f"third {number}", 30 * MS, (b,), (out,), phase="forward", module=path),
        ]
        saved.append((x, a, b))
        x = out
    ops.append(Op("loss", MS, (x,), (), phase="forward"))
    for number, (given, a, b) in reversed(list(enumerate(saved))):
        ops += [Op(f"back b {number}", 10 * MS, (b,), (), phase="backward")]
        ops += [Op(f"back a {number}", 10 * MS, (a, given), (), phase="backward")]
    return Trace(tuple(ops), tuple(tensors))


def test_price_is_the_time_of_the_layers_forward() -> None:
    runs = layer_runs(_trace())
    assert [run.path for run in runs] == ["layers.0", "layers.1", "layers.2"]
    assert [run.cost_ns for run in runs] == [60 * MS] * LAYERS
    saved = [[_trace().tensors[tensor].name for tensor in run.saved] for run in runs]
    assert saved == [["a0", "b0"], ["a1", "b1"], ["a2", "b2"]]
    assert [_trace().ops[run.at].name for run in runs] == ["back b 0", "back b 1", "back b 2"]


def test_layers_beside_collectives_may_run_again_unless_one_is_theirs_or_goes_on_beside_compute() -> None:
    """Op 0 is before all layers, op 4 the first of layer 1."""
    for collective, paths in ((0, ["layers.0", "layers.1", "layers.2"]), (4, ["layers.0", "layers.2"])):
        trace = _trace()
        ops = list(trace.ops)
        ops[collective] = replace(ops[collective], queue=Queue.COMMUNICATION)
        ops[collective + 1] = replace(ops[collective + 1], awaits=collective)
        assert [run.path for run in layer_runs(replace(trace, ops=tuple(ops)))] == paths
        ops[collective + 1] = replace(ops[collective + 1], awaits=-1)
        assert layer_runs(replace(trace, ops=tuple(ops))) == []


def test_step_that_is_left_pays_in_backward_and_keeps_nothing_between() -> None:
    trace = _trace()
    runs = layer_runs(trace)
    ring = run_again(trace, runs[:1])
    assert ring.ideal_ns == trace.ideal_ns + 60 * MS
    assert ring.ops[runs[0].at].duration_ns == 10 * MS + 60 * MS
    assert ring.peak_bytes == trace.peak_bytes - 8 * MB
    assert {tensor.name for tensor in ring.tensors if not tensor.is_movable} == {"a0", "b0", "a0@1", "b0@1"}


def test_layers_run_again_where_links_are_slow_and_only_there() -> None:
    trace = _trace()
    for machine, expected in ((SLOW, 1), (replace(SLOW, nvme_write_bytes_per_s=10**11, nvme_read_bytes_per_s=10**11), 0)):
        make = partial(make_plan, machine=machine, budget={Tier.DEVICE: 20 * MB, Tier.NVME: 10**9}, capabilities=CAN)
        plan = make(trace)
        chosen = choose_modules(trace, plan, make)
        assert (len(chosen) > 0) == expected
        if chosen:
            left = make(run_again(trace, [run for run in layer_runs(trace) if run.path in chosen]))
            assert left.step_ns < 0.95 * plan.step_ns


def test_simulator_counts_ops_that_run_modules_again() -> None:
    trace = _trace()
    again = tuple(replace(op, phase="recompute") if op.name.startswith("back b") else op for op in trace.ops)
    trace = replace(trace, ops=again)
    budget = {Tier.DEVICE: 20 * MB, Tier.NVME: 10**9}
    result = plan_row(trace, SLOW, budget, capabilities=CAN)
    assert result.plan is not None
    for timeline in (simulate(result.plan, trace, SLOW), simulate_reference(result.plan, trace, SLOW)):
        assert timeline.recompute_ns == LAYERS * 10 * MS
    assert result.row.recompute_s == LAYERS * 0.01
    assert result.row.step_s is not None
    assert result.row.stall_s == (result.plan.step_ns - trace.ideal_ns) / 1e9
