"""`tieroff report`: the page, the Perfetto trace and TensorBoard's scalars from a run folder."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.report.report_samples import TIMELINE, idle, sample
from tieroff.cli import app
from tieroff.core.io.run_folder import Run, save_run
from tieroff.core.timeline import TransferSpan
from tieroff.errors import ConfigError, StateError
from tieroff.planner.predict import predict
from tieroff.report.perfetto import write_perfetto
from tieroff.report.tensorboard import write_scalars


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout if result.exit_code == 0 else result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_run(sample(), tmp_path / "run")
    return tmp_path / "run"


def test_report_writes_a_page_into_the_folder(folder: Path) -> None:
    status, text = run("report", folder)
    assert (status, text) == (0, f"written to {folder / 'report.html'}\n")
    assert "<title>sample within 7.00 MiB</title>" in (folder / "report.html").read_text()


def test_report_writes_what_is_asked_for_and_prints_one_document(folder: Path, tmp_path: Path) -> None:
    status, text = run("report", folder, "--perfetto", tmp_path / "p.json", "--json")
    assert status == 0
    assert json.loads(text) == {"report": None, "perfetto": str(tmp_path / "p.json"), "tensorboard": None}
    assert not (folder / "report.html").exists()
    assert json.loads((tmp_path / "p.json").read_text())["traceEvents"]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_unfinished_run_is_an_error_and_the_old_page_stays(folder: Path, tmp_path: Path, form: tuple[str, ...]) -> None:
    page = tmp_path / "report.html"
    page.write_text("old")
    (folder / "timeline.json").unlink()
    status, text = run("report", folder, "-o", page, *form)
    assert status == 1
    told = json.loads(text)["error"]["message"] if form else text
    assert "no timeline.json" in told
    assert page.read_text() == "old"


def test_wrong_paths_are_errors(folder: Path, tmp_path: Path) -> None:
    status, text = run("report", tmp_path / "nowhere")
    assert status == 1 and "nowhere: expected a run folder" in text
    status, text = run("report", folder, "-o", tmp_path / "nowhere" / "page.html")
    assert status == 1 and "page.html: the folder" in text and "does not exist" in text
    status, text = run("report", folder, "--perfetto", tmp_path / "nowhere" / "p.json")
    assert status == 1 and "p.json: the folder" in text and "does not exist" in text


def events(of: Run, path: Path) -> list[dict[str, Any]]:
    write_perfetto(path, of, predict(of)[0])
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_perfetto_has_a_process_per_timeline_and_a_thread_per_lane(tmp_path: Path) -> None:
    found = events(sample(), tmp_path / "p.json")
    processes = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert processes == {1: "measured: sample", 2: "predicted: sample"}
    threads = {e["args"]["name"] for e in found if e["name"] == "thread_name" and e["pid"] == 1}
    assert threads == {"compute", "stalls", "nvme_write", "nvme_read"}
    spans = [e for e in found if e["ph"] == "X" and e["pid"] == 1 and e["cat"] == "nvme_read"]
    [wait] = [e for e in spans if "before" in e["args"]["detail"]]
    assert (wait["ts"], wait["dur"], wait["name"]) == (40_000.0, 5_000.0, "a")
    counts = [e["args"]["bytes"] for e in found if e["ph"] == "C" and e["pid"] == 1 and e["name"] == "device bytes"]
    assert counts == list(TIMELINE.memory[next(iter(TIMELINE.memory))])


def test_perfetto_threads_never_overlap(tmp_path: Path) -> None:
    first = TIMELINE.transfers[0]
    crossing = TransferSpan(1, first.source, first.target, first.start_ns + 1, first.stop_ns + 1, 1)
    of = replace(sample(), timeline=replace(TIMELINE, transfers=(first, crossing)))
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events(of, tmp_path / "p.json"):
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert all(a[1] <= b[0] + 1e-6 for spans in threads.values() for a, b in pairwise(sorted(spans)))
    assert "nvme_write 2" in {e["args"]["name"] for e in events(of, tmp_path / "p.json") if e["name"] == "thread_name"}


def test_perfetto_without_any_timeline_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this run has no timeline"):
        write_perfetto(tmp_path / "p.json", replace(idle(), machine=None))
    assert list(tmp_path.iterdir()) == []


def test_scalars_are_read_back_by_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        assert write_scalars(tmp_path / "logs", sample()) == 3
        read = EventAccumulator(str(tmp_path / "logs"))
        read.Reload()
    scalars = read.Scalars("tieroff/stall_s")
    assert [e.step for e in scalars] == [1, 2, 3]
    assert [e.value for e in scalars] == pytest.approx([0.012] * 3)
    assert "tieroff/moved_bytes/nvme_read" in read.Tags()["scalars"]


def test_scalars_need_figures_a_folder_and_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match=r"steps\.json"):
        write_scalars(tmp_path, replace(sample(), steps=()))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        write_scalars(tmp_path / "file", sample())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'tieroff\[tensorboard\]'"):
        write_scalars(tmp_path / "logs", sample())
