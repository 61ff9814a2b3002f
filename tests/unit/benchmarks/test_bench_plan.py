"""The planner's benchmark: the published cells, its arguments, its rows, and traces that it records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bench_plan
from bench_plan import geometric_mean, known_bounds, main, parse_arguments, summaries
from harness import g10_cells, own_traces
from harness.data import OWN_FOLDER
from tests.support.outside import needs_outside_data
from tieroff.core.io.json_files import load_trace_json, save_trace
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.planner.problem.problem import live_bytes
from tieroff.units import GIB

# Published cells.


@needs_outside_data("g10")
def test_published_table_has_15_cells_and_agrees_with_the_sweep() -> None:
    cells, times = g10_cells.published_cells(), g10_cells.published_times()
    assert len(cells) == 15
    assert len(times) == 76 + 15 - 8  # eight cells of the table are in the sweep as well
    assert times["BERT_Base-b1024", 128 * GIB] == 39.2176
    assert times["VIT-b1280", 0] == 14.9582
    with (g10_cells.FOLDER / "published_host_memory_sweep.csv").open() as file:
        lines = [line.strip().split(",") for line in file][1:]
    swept = {(f"{model}-b{batch}", int(host) * GIB): float(step) for model, batch, host, step in lines}
    assert {key: times[key] for key in swept} == swept


@needs_outside_data("g10")
def test_every_published_cell_has_its_trace() -> None:
    cells = g10_cells.all_cells()
    assert len(cells) == 19
    folders = {path.name for path in (g10_cells.FOLDER / "traces").iterdir()}
    assert set(cells) == folders
    for name in cells:
        assert {path.name for path in g10_cells.trace_folder(name).iterdir()} == {"kernels.csv", "tensors.csv"}


def test_published_time_is_rounded_to_four_decimals() -> None:
    assert not g10_cells.is_slower(2.124912, 2.1249)
    assert not g10_cells.is_slower(2.12494, 2.1249)
    assert g10_cells.is_slower(2.12496, 2.1249)


def test_machine_is_the_published_one() -> None:
    machine = g10_cells.MACHINE
    assert machine.d2h_bytes_per_s == machine.h2d_bytes_per_s == round(15.754 * GIB)
    assert machine.nvme_write_bytes_per_s == machine.nvme_read_bytes_per_s == round(3.2 * GIB)
    assert machine.nvme_shares_host_link
    assert g10_cells.budget_of(32 * GIB)[Tier.DEVICE] == 40 * GIB


# Figures.


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0, 1.0]) == pytest.approx(1.0)
    assert geometric_mean([]) is None


def row_of(cell: str, step_s: float | None, g10_s: float | None) -> dict[str, Any]:
    ideal_s = 1.0
    share = None if step_s is None else ideal_s / step_s
    return {
        "cell": cell,
        "host_bytes": 0,
        "g10_s": g10_s,
        "step_s": step_s,
        "ideal_s": ideal_s,
        "ideal_share": share,
        "above_bound": None if step_s is None else step_s - 1,
        "plan_s": 0.1,
    }


def test_summary_takes_each_mean_over_its_own_cells() -> None:
    rows = [row_of("a", 1.0, 2.0), row_of("b", 4.0, 2.0), row_of("c", 16.0, None), row_of("d", None, 2.0)]
    [found] = summaries(rows, ["a", "c", "d"])
    assert found["ideal_share"] == pytest.approx(1 / 4)
    assert found["table_ideal_share"] == pytest.approx(1 / 4)
    assert found["published_ideal_share"] == found["g10_ideal_share"] == pytest.approx(1 / 2)
    assert found["slower_than_g10"] == ["b"]
    assert (found["cells"], found["table_cells"], found["published_cells"], found["infeasible"]) == (3, 2, 2, 1)
    assert found["above_bound_max"] == 15.0


# Arguments.


@needs_outside_data("g10")
def test_arguments_have_the_stated_defaults() -> None:
    found = parse_arguments([])
    assert (found.parts, found.effort, found.bound, found.repeat) == (["g10", "own"], "fast", "cheap", 1)
    assert found.host == [0, 32 * GIB, 128 * GIB]
    assert parse_arguments(["--host", "16GiB", "0"]).host == [16 * GIB, 0]
    assert all(path.is_file() for path in found.machine)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--repeat", "0"], "--repeat"),
        (["--slots", "30", "0"], "--slots"),
        (["--cells", "VIT-b7"], "VIT-b7"),
        (["--host", "much"], "expected bytes"),
        (["--parts", "all"], "--parts"),
    ],
)
@needs_outside_data("g10")
def test_arguments_that_cannot_be_used_are_named(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(given)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


# Runs.


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with one published cell: four activations of 16 GiB, of which two fit."""
    folder = tmp_path / "g10"
    (folder / "Tiny-b4").mkdir(parents=True)
    header = "model,batch,uvm_lru_s,flashneuron_s,deepum_s,g10_s,ideal_s\n"
    (folder / "published_times.csv").write_text(header + "Tiny,4,90,,80,60.0000,16\n")
    (folder / "published_host_memory_sweep.csv").write_text("model,batch,host_gib,g10_s\nTiny,4,0,70\n")
    tensors = ["tensor,bytes,kind", *(f"{i},{16 * GIB},local" for i in range(4))]
    order = [*range(4), *reversed(range(4))]
    kernels = ["kernel,name,ms,reads,writes"]
    kernels += [f"{i},k{i},2000,{t if i >= 4 else ''},{t if i < 4 else ''}" for i, t in enumerate(order)]
    (folder / "Tiny-b4" / "tensors.csv").write_text("\n".join(tensors) + "\n")
    (folder / "Tiny-b4" / "kernels.csv").write_text("\n".join(kernels) + "\n")
    return folder


def test_run_prints_a_table_and_writes_json(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    given = ["--parts", "g10", "noise", "--data", str(data), "--host", "0", "128GiB", "--json", str(out)]
    assert main(given) == 0
    shown = capsys.readouterr()
    assert "Tiny-b4" in shown.out
    assert "The model leaves out" in shown.out
    assert shown.err.splitlines() == ["1 of 2: Tiny-b4", "2 of 2: Tiny-b4, noise"]
    found = json.loads(out.read_text())
    assert found["command"] == "python benchmarks/bench_plan.py " + " ".join(given)
    assert found["machine"]["nvme_shares_host_link"]
    small, large = found["rows"]
    assert (small["g10_s"], large["g10_s"]) == (70.0, 60.0)
    assert 16.0 <= large["bound_s"] <= large["step_s"] <= small["step_s"]
    assert small["ideal_share"] == 16.0 / small["step_s"]
    assert small["nvme_write_bytes"] > 0
    assert [row["noise"] for row in found["noise"]] == list(bench_plan.NOISE_SHARES)
    assert found["noise"][0]["step_over_ideal"] == pytest.approx(large["step_s"] / 16.0)
    assert [one["host_bytes"] for one in found["summary"]] == [0, 128 * GIB]


def test_bounds_of_the_linear_program_are_used_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def solve(problem: Any, *_: Any, **__: Any) -> int:
        asked.append(problem.budget[Tier.HOST])
        return int(problem.starts_ns[-1]) + 5

    monkeypatch.setattr(bench_plan, "relaxed_bound_ns", solve)
    out = tmp_path / "found.json"
    given = ["--parts", "g10", "--data", str(data), "--bound", "lp", "--json", str(out)]
    assert main([*given, "--host", "0", "128GiB"]) == 0
    assert asked == [0, 128 * GIB]
    first = json.loads(out.read_text())["rows"]
    assert [row["lp_bound_s"] for row in first] == [16.000000005] * 2
    assert all(row["bound_s"] >= row["lp_bound_s"] for row in first)
    assert len(known_bounds(out)) == 2
    assert main([*given, "--host", "0", "32GiB"]) == 0
    assert asked == [0, 128 * GIB, 32 * GIB]
    assert len(known_bounds(out)) == 3  # what a narrower run does not need is kept
    assert main([*given, "--host", "0", "--slots", "12"]) == 0
    assert asked == [0, 128 * GIB, 32 * GIB, 0]
    assert main([*given, "--host", "0", "--fresh"]) == 0
    assert asked == [0, 128 * GIB, 32 * GIB, 0, 0]
    assert len(known_bounds(out)) == 1


def test_what_was_found_before_an_interruption_is_kept(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_plan, "noisy_rows", interrupt)
    out = tmp_path / "found.json"
    with pytest.raises(KeyboardInterrupt):
        main(["--parts", "g10", "noise", "--data", str(data), "--host", "0", "--json", str(out)])
    assert len(json.loads(out.read_text())["rows"]) == 1


def test_moves_alone_recomputes_nothing(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert main(["--parts", "g10", "--data", str(data), "--host", "0", "--moves-alone", "--json", str(out)]) == 0
    [row] = json.loads(out.read_text())["rows"]
    assert row["recompute_s"] == 0.0
    assert row["nvme_write_bytes"] > 0


def test_infeasible_cell_has_a_row(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (data / "Tiny-b4" / "tensors.csv").read_text()
    (data / "Tiny-b4" / "tensors.csv").write_text(text.replace(f"0,{16 * GIB}", f"0,{41 * GIB}"))
    assert main(["--parts", "g10", "--data", str(data), "--host", "0"]) == 0
    assert "infeasible" in capsys.readouterr().out


def test_trace_that_cannot_be_read_is_told(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "Tiny-b4" / "kernels.csv").write_text("kernel\n")
    assert main(["--parts", "g10", "--data", str(data)]) == 1
    assert "bench_plan: " in capsys.readouterr().err


@needs_outside_data("g10")
def test_own_traces_are_planned_for_both_executors_at_every_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_trace(load_trace_json(OWN_FOLDER / "lstm.json"), tmp_path / "lstm.json")
    out = tmp_path / "found.json"
    assert main(["--parts", "own", "--own", str(tmp_path), "--machine", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["own"]
    assert [(row["executor"], row["share"]) for row in rows] == [
        (executor, share) for executor in ("runtime", "ideal") for share in bench_plan.SHARES
    ]
    for executor in ("runtime", "ideal"):
        steps = [row["step_s"] for row in rows if row["executor"] == executor and row["step_s"] is not None]
        assert steps == sorted(steps)
        assert len(steps) >= 3
    assert "lstm" in capsys.readouterr().out


# Own traces.


@pytest.mark.parametrize("name", sorted(own_traces.SUBJECTS))
def test_shipped_trace_is_small_and_of_a_whole_step(name: str) -> None:
    path = OWN_FOLDER / f"{name}.json"
    assert path.stat().st_size < 10**6
    trace = load_trace_json(path)
    assert (trace.name, trace.origin) == (name, "step")
    assert {op.phase for op in trace.ops} >= {"forward", "backward", "optimizer"}
    kinds = {tensor.kind for tensor in trace.tensors}
    assert kinds >= {TensorClass.ACTIVATION, TensorClass.PARAMETER, TensorClass.GRADIENT, TensorClass.OPTIMIZER}
    assert trace.ideal_ns > 0
    assert int(live_bytes(trace).max()) > 50 * 2**20


def test_shipped_traces_are_all_those_that_are_recorded() -> None:
    assert {path.stem for path in OWN_FOLDER.glob("*.json")} == set(own_traces.SUBJECTS)


@needs_outside_data("g10")
def test_record_writes_a_trace_per_subject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tiny() -> own_traces.Subject:
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        x = torch.randn(256, 64)
        return own_traces.Subject(model, torch.optim.AdamW, lambda net: net(x).square().mean())

    monkeypatch.setattr(own_traces, "SUBJECTS", {"tiny": tiny})
    assert main(["--record", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'tiny.json'}\n"
    trace: Trace = load_trace_json(tmp_path / "new" / "tiny.json")
    assert trace.ideal_ns > 0
    assert "0.weight" in {tensor.name for tensor in trace.tensors}
