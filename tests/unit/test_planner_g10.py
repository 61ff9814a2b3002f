"""Published traces: reading them, planning them, and the rows that come out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tieroff.core.machine import Machine
from tieroff.core.tensor import TensorClass, Tier
from tieroff.errors import CaptureError, ConfigError
from tieroff.planner.auto import make_plan
from tieroff.planner.policies import find_policy
from tieroff.planner.rows import compare_rows, plan_row
from tieroff.tracing.files import load_trace
from tieroff.units import GIB

_FOLDER = Path(__file__).parent.parent / "data" / "g10"
_HOST_RATE = round(15.754 * GIB)
_MACHINE = Machine(
    name="g10",
    d2h_bytes_per_s=_HOST_RATE,
    h2d_bytes_per_s=_HOST_RATE,
    nvme_write_bytes_per_s=round(3.2 * GIB),
    nvme_read_bytes_per_s=round(3.2 * GIB),
    nvme_shares_host_link=True,
)
_BUDGET = {Tier.DEVICE: 40 * GIB, Tier.HOST: 128 * GIB, Tier.NVME: 0}


def test_folder_gives_a_trace_with_the_published_ideal_time() -> None:
    trace = load_trace(_FOLDER / "BERT_Base-b256")
    assert len(trace.ops) == 1369
    assert len(trace.tensors) == 1463
    assert trace.ideal_ns == pytest.approx(7.2855e9, rel=1e-4)
    kinds = {(t.kind, t.is_persistent, t.is_movable) for t in trace.tensors}
    assert kinds == {(TensorClass.PARAMETER, True, True), (TensorClass.ACTIVATION, False, True)}


def test_workspace_cannot_move(tmp_path: Path) -> None:
    (tmp_path / "tensors.csv").write_text("tensor,bytes,kind\n5,4,workspace\n")
    (tmp_path / "kernels.csv").write_text("kernel,name,ms,reads,writes\n0,a,0.25,5,5\n")
    trace = load_trace(tmp_path)
    assert [(t.name, t.is_movable, t.is_persistent) for t in trace.tensors] == [("5", False, False)]
    assert trace.ops[0].duration_ns == 250_000


@pytest.mark.parametrize("name", ["BERT_Base-b256", "VIT-b1024"])
def test_greedy_is_near_the_ideal_and_floor_is_feasible(name: str) -> None:
    trace = load_trace(_FOLDER / name)
    floor, greedy = (r.row for r in compare_rows(trace, _MACHINE, _BUDGET, ("floor", "greedy")))
    assert floor.status == greedy.status == "ok"
    assert greedy.step_s is not None and greedy.ideal_s is not None and greedy.bound_s is not None
    assert floor.step_s is not None
    assert greedy.ideal_s <= greedy.bound_s <= greedy.step_s <= 1.03 * greedy.ideal_s
    assert greedy.step_s <= floor.step_s
    assert greedy.peak_device_bytes is not None and greedy.peak_device_bytes <= 40 * GIB


def test_row_of_an_infeasible_policy_has_no_times_and_a_reason() -> None:
    trace = load_trace(_FOLDER / "VIT-b1024")
    result = plan_row(trace, _MACHINE, {**_BUDGET, Tier.DEVICE: GIB}, "floor")
    row = result.row.as_dict()
    assert ",".join(row) == (
        "policy,status,step_s,ideal_s,bound_s,stall_s,peak_device_bytes,peak_host_bytes,peak_nvme_bytes,d2h_bytes,"
        "h2d_bytes,nvme_write_bytes,nvme_read_bytes,recompute_s,plan_s"
    )
    assert (row["policy"], row["status"]) == ("floor", "infeasible")
    assert all(value is None for key, value in row.items() if key not in ("policy", "status"))
    assert "would do" in result.reason


def test_compare_gives_auto_the_best_row_and_keeps_the_order() -> None:
    trace = load_trace(_FOLDER / "VIT-b1024")
    results = compare_rows(trace, _MACHINE, {**_BUDGET, Tier.DEVICE: 30 * GIB}, ("auto", "floor"))
    assert [r.row.policy for r in results] == ["auto", "floor"]
    assert results[0].plan is not None and results[0].plan.policy == "auto"
    assert (results[0].row.step_s or 0) <= (results[1].row.step_s or 0)


def test_unknown_policy_and_effort_are_refused() -> None:
    with pytest.raises(ConfigError, match="'greedy'"):
        find_policy("greddy")
    trace = load_trace(_FOLDER / "VIT-b1024")
    with pytest.raises(ConfigError, match="effort"):
        make_plan(trace, _MACHINE, _BUDGET, effort="medium")


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        ("kernels.csv", "kernel,name\n", "missing"),
        ("kernels.csv", "kernel,name,ms,reads,writes\n", "at least one"),
        ("kernels.csv", "kernel,name,ms,reads,writes\n0,a,soon,0,\n", "line 2: expected ms"),
        ("kernels.csv", "kernel,name,ms,reads,writes\n0,a,-1,0,\n", "line 2: expected ms"),
        ("kernels.csv", "kernel,name,ms,reads,writes\n0,a,nan,0,\n", "line 2: expected ms"),
        ("kernels.csv", "kernel,name,ms,reads,writes\n0,a,1,7,\n", "line 2: tensor 7"),
        ("kernels.csv", "kernel,name,ms,reads,writes\n0,a,1\n", "line 2: .*cut off"),
        ("tensors.csv", "tensor,bytes,kind\n0,-4,local\n", "line 2: expected bytes"),
        ("tensors.csv", "tensor,bytes,kind\n0,4,remote\n", "line 2: expected kind"),
        ("tensors.csv", "tensor,bytes,kind\n0,4,local\n0,4,local\n", "line 3: .*twice"),
    ],
)
def test_folder_with_a_wrong_line_is_refused_with_its_place(tmp_path: Path, file: str, content: str, part: str) -> None:
    (tmp_path / "tensors.csv").write_text("tensor,bytes,kind\n0,4,local\n")
    (tmp_path / "kernels.csv").write_text("kernel,name,ms,reads,writes\n0,a,1,0,0\n")
    assert len(load_trace(tmp_path).ops) == 1
    (tmp_path / file).write_text(content)
    with pytest.raises(CaptureError, match=part):
        load_trace(tmp_path)
