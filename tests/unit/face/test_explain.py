"""`explain()`: five lines that a person understands, and details on demand."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.report.report_samples import DEVICE, HOST, NVME, PLAN, TRACE, figures
from tieroff.core.explain.describe import Explained, explain
from tieroff.core.plan import HostUpdate, Residency, Transfer
from tieroff.core.tensor import TensorClass
from tieroff.units import MIB

FITS = replace(
    PLAN,
    residencies=(Residency(0, DEVICE, 0, 4), Residency(1, DEVICE, 1, 3), Residency(2, DEVICE, 0, 4)),
    transfers=(),
    peak_bytes={DEVICE: 7 * MIB, HOST: 0, NVME: 0},
    skipped={},
)


def test_five_lines_say_fit_moves_cost_exactness_and_what_was_left_alone() -> None:
    step = Explained(TRACE, PLAN, figures(3), {"smaller than min_bytes": ["x", "y", "z", "last"]})
    assert explain(step) == [
        "It fits: the device holds at most 7.00 MiB of 7.00 MiB; with nothing moved it would be 7.00 MiB.",
        "Moved: 1 of 3 tensors, for a part of the step: activation 4.00 MiB to nvme. "
        "Host memory is there and unused, because NVMe was enough.",
        "Predicted step 48.0 ms, of which compute 40.0 ms; the last one (planned) took 57.0 ms: compute 42.0 ms, "
        "waiting for transfers 12.0 ms, the engine's own work 3.0 ms (750 us for each of 4 ticks).",
        "Numbers are those of the plain run, bit for bit: nothing is rounded or reordered.",
        "Left alone: 1 by rule 'small'; smaller than min_bytes: x, y, z and 1 more.",
    ]


def test_a_budget_that_was_raised_is_no_fit() -> None:
    assert "of 7.00 MiB, raised from 10%; with" in explain(Explained(TRACE, PLAN, raised_from="10%"))[0]
    assert explain(Explained(TRACE, FITS, raised_from="1.00 KiB"))[:2] == [
        "Nothing moved, because no plan needs less: the device holds at most 7.00 MiB of 7.00 MiB, raised from 1.00 KiB.",
        "Moved: none of 3 tensors. Host memory is there and unused, because no plan needs less of the device with it. "
        "NVMe is there and unused, because no plan needs less of the device with it.",
    ]


def test_the_engines_work_is_told_per_tick_where_it_is_something() -> None:
    whole = replace(figures(3), compute_ns=figures(3).step_ns - figures(3).stall_ns)  # as where ops have no times of their own
    assert explain(Explained(TRACE, PLAN, whole))[2].endswith("the engine's own work 0 us.")


def test_a_step_that_was_planned_again_says_why() -> None:
    again = Explained(TRACE, PLAN, figures(3), planned=(3, "compute takes 2.00 s, planned were 1.00 s"))
    assert explain(again)[2].endswith(" It was planned again, 3 times in all: compute takes 2.00 s, planned were 1.00 s.")
    assert "planned again" not in explain(Explained(TRACE, PLAN, figures(3)))[2]


def test_updates_in_backward_are_named_where_they_would_help() -> None:
    waiting = figures(3)
    assert "update_in_backward" in explain(Explained(TRACE, PLAN, waiting, may_update_in_backward=True))[2]
    assert "update_in_backward" not in explain(Explained(TRACE, PLAN, waiting))[2]
    quick = replace(waiting, stall_ns=waiting.step_ns // 25)
    assert "update_in_backward" not in explain(Explained(TRACE, PLAN, quick, may_update_in_backward=True))[2]


def test_a_step_that_the_engine_holds_up_is_told_so_with_what_each_transfer_takes() -> None:
    moving = replace(PLAN, transfers=PLAN.transfers[:1] * 10)
    slow = replace(figures(3), step_ns=100_000_000, compute_ns=40_000_000, stall_ns=10_000_000)
    line = explain(Explained(TRACE, moving, slow))[2]
    assert "The host limits this step: 10 transfers take it 5.0 ms each" in line
    assert "min_bytes" in line
    assert "The host limits" not in explain(Explained(TRACE, moving, figures(3)))[2]
    assert "The host limits" not in explain(Explained(TRACE, FITS, slow))[2]


def test_a_device_that_waits_for_the_host_is_told_by_how_far_that_is_ahead() -> None:
    waited_for = replace(figures(3), ahead_ns=5_000)
    assert "The host limits this step: it was 5 us ahead of the device" in explain(Explained(TRACE, PLAN, waited_for))[2]
    for ahead_ns in (None, waited_for.step_ns // 20):
        assert "The host limits" not in explain(Explained(TRACE, PLAN, replace(waited_for, ahead_ns=ahead_ns)))[2]
    assert "The host limits" not in explain(Explained(TRACE, FITS, waited_for))[2]
    assert waited_for.scalars()["tieroff/host_ahead_s"] == 5e-6 and "tieroff/host_ahead_s" not in figures(3).scalars()


def test_nothing_moved_because_everything_fits() -> None:
    lines = explain(Explained(TRACE, FITS))
    assert lines[0] == "Nothing moved, because everything fits: the device holds at most 7.00 MiB of 7.00 MiB."
    assert lines[1] == (
        "Moved: none of 3 tensors. Host memory is there and unused, because everything fits without it. "
        "NVMe is there and unused, because everything fits without it."
    )
    assert lines[2].endswith("none was measured yet.")
    assert lines[4] == "Left alone: nothing that could move."


def test_nvme_is_unused_because_host_memory_was_enough() -> None:
    held = (Residency(0, HOST, 2, 4), *(r for r in PLAN.residencies if r.tier is not NVME))
    moves = (Transfer(0, DEVICE, HOST, 2, 2, 0), Transfer(0, HOST, DEVICE, 3, 3, 0))
    plan = replace(PLAN, residencies=held, transfers=moves, peak_bytes={DEVICE: 7 * MIB, HOST: 4 * MIB, NVME: 0})
    assert explain(Explained(TRACE, plan))[1].endswith("NVMe is there and unused, because host memory was enough.")


def test_tier_without_a_budget_is_not_said_to_be_unused() -> None:
    assert "unused" not in explain(Explained(TRACE, replace(FITS, budget_bytes={DEVICE: 8 * MIB})))[1]


def test_updates_by_the_cpu_are_said_to_be_proven_by_a_training() -> None:
    plan = replace(PLAN, host_updates=(HostUpdate(3, 3, 4, 1000),))
    assert "does so only where its first updates show that they are the device's" in explain(Explained(TRACE, plan))[3]
    told = explain(Explained(TRACE, plan, updates="The CPU's updates are those of the device."))[3]
    assert "The CPU's updates are those of the device." in told


def test_sums_of_user_code_over_gradients_below_are_told_where_the_host_computes_them() -> None:
    gradient = replace(TRACE.tensors[0], kind=TensorClass.GRADIENT)
    trace = replace(TRACE, tensors=(gradient, *TRACE.tensors[1:]))
    assert "clip_grad_norm_" in explain(Explained(trace, PLAN, is_cpu=False))[3]
    assert "clip_grad_norm_" not in explain(Explained(trace, PLAN))[3]
    assert "clip_grad_norm_" not in explain(Explained(TRACE, PLAN, is_cpu=False))[3]


def test_details_come_after_the_five_lines_on_demand() -> None:
    step = Explained(TRACE, PLAN)
    lines = explain(step, detail=True)
    assert lines[:5] == explain(step)
    assert "  activation: 6.00 MiB in all; 4.00 MiB to nvme." in lines
    assert "Bytes per step: device to nvme 4.00 MiB, nvme to device 4.00 MiB." in lines
    assert "nvme holds at most 4.00 MiB of 64.00 MiB." in lines
    assert "Biggest that move: a (4.00 MiB) to nvme." in lines


def test_explain_says_what_to_set_where_the_devices_memory_lies_in_pieces() -> None:
    def lines(reserved_bytes: int, lent_bytes: int) -> list[str]:
        return explain(Explained(TRACE, PLAN, is_cpu=False, allocator=(reserved_bytes, lent_bytes)))

    assert len(lines(4096 * MIB, 3500 * MIB)) == len(lines(300 * MIB, 100 * MIB)) == len(explain(Explained(TRACE, PLAN))) == 5
    told = lines(4096 * MIB, 3000 * MIB)[5]
    assert "expandable_segments:True" in told
    assert "4.00 GiB" in told and "leave 1.07 GiB" in told
