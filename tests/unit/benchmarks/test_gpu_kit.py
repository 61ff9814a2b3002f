"""The kit of evidence on a GPU: rows, limits, what is left when a case dies, and predictions for every measured row."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import gpu_evidence
from gpu_kit import exact
from gpu_kit.expected import WAYS as PREDICTED_WAYS
from gpu_kit.places import RESULTS
from gpu_kit.rows import CASES, ROWS
from gpu_kit.subjects import SUBJECTS, TINY_SUBJECTS
from gpu_kit.ways import WAYS

SLEEPS = "import time\ntime.sleep(600)\n"
DIES = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
MEASURES = """import json, sys
out, key = sys.argv[sys.argv.index("--out") + 1], sys.argv[sys.argv.index("--row") + 1]
open(out, "w").write(json.dumps({"key": key, "status": "ok", "step_s": 1.0}))
"""


def sitting(tmp_path: Path, minutes: float = 5.0) -> gpu_evidence.Sitting:
    return gpu_evidence.Sitting(gpu_evidence_options(tmp_path, minutes))


def gpu_evidence_options(tmp_path: Path, minutes: float) -> Any:
    class Options:
        out, tiny = tmp_path, False

    Options.minutes = minutes  # type: ignore[attr-defined]
    return Options()


def written(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def has_ended(process: int) -> bool:
    """Waits for the end of a process that was killed and that nobody may have collected yet."""
    try:
        child = psutil.Process(process)
        for _ in range(300):
            if child.status() == psutil.STATUS_ZOMBIE:
                return True
            time.sleep(0.1)
    except psutil.NoSuchProcess:
        return True
    return False


def test_rows_name_a_model_and_a_way_that_exist() -> None:
    for row in ROWS.values():
        assert row.subject in SUBJECTS and row.subject in TINY_SUBJECTS and row.way in WAYS
    assert len(ROWS) == sum(len(case.rows) for case in CASES), "expected a name of its own for every row"


def test_a_run_that_dies_leaves_the_rows_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nif 'trainstream' in ' '.join(sys.argv):\n    " + DIES.replace("\n", "\n    ") + "\n" + MEASURES
    )
    monkeypatch.setattr(gpu_evidence, "TRAIN", script)
    run = sitting(tmp_path)
    run.run(gpu_evidence.chosen(["full"], ["full/3b-full/plain", "trainstream", "fsdp2"]))
    found = {row["key"]: row["status"] for row in written(tmp_path)}
    assert found == {"full/3b-full/plain": "ok", "full/3b-full/trainstream": "failed", "full/3b-full/fsdp2": "ok"}


def test_a_run_is_ended_at_its_limit_with_its_children(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, sys, pathlib\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    ran = gpu_evidence.run_limited([str(script)], 3.0, {"PATH": "/usr/bin"})
    assert ran.status == "out of time" and 3.0 <= ran.took_s < 6.0
    assert has_ended(int((tmp_path / "child").read_text()))


def test_what_does_not_fit_into_the_minutes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(SLEEPS)
    monkeypatch.setattr(gpu_evidence, "TRAIN", script)
    monkeypatch.setattr(gpu_evidence, "LEAST_S", 3)
    run = sitting(tmp_path, minutes=5 / 60)
    run.run(gpu_evidence.chosen(["full", "tests"], ["full/3b-full/plain", "fsdp2"]))
    found = {row["key"]: row["status"] for row in written(tmp_path)}
    assert found == {"full/3b-full/plain": "out of time", "full/3b-full/fsdp2": "no time left", "tests": "no time left"}
    assert run.left_s() > -0.1 * 5


def test_a_library_that_does_not_build_ends_the_kit_before_any_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        gpu_evidence, "run_limited", lambda arguments, *_: gpu_evidence.Ran("failed", f"from {arguments[0]}", 1.0)
    )
    assert gpu_evidence.main(["--tiny", "--minutes", "1", "--out", str(tmp_path)]) == 1
    assert "to build" in capsys.readouterr().err and not (tmp_path / "rows.jsonl").exists()


def test_every_row_of_tieroff_has_a_prediction_with_an_interval() -> None:
    """Each file of predictions has the rows that can be predicted, and no other; a measured row stands beside one."""
    wanted = {row.key for row in ROWS.values() if row.way in PREDICTED_WAYS}
    for name in gpu_evidence.EXPECTED.values():
        rows = {row["key"]: row for row in json.loads((RESULTS / name).read_text())["rows"]}
        assert set(rows) == wanted, name
        for row in rows.values():
            if row["status"] == "ok":
                low, high = row["interval_s"]
                assert 0 < low < row["step_s"] < high
            else:
                assert row["reason"]


def test_every_measured_row_of_tieroff_was_predicted_before() -> None:
    for card, name in (("h100", "NVIDIA H100"), ("h200", "NVIDIA H200")):
        measured = json.loads((RESULTS / f"gpu_evidence_{card}.json").read_text())
        expected = json.loads((RESULTS / f"expected_{card}.json").read_text())
        predicted = {row["key"] for row in expected["rows"] if row["status"] == "ok"}
        assert measured["gpu"].startswith(name) and expected["date"] <= measured["date"]
        wanted = {row["key"] for row in measured["rows"] if row["key"] in ROWS and ROWS[row["key"]].way in PREDICTED_WAYS}
        assert wanted <= predicted


def test_a_measured_row_says_whether_it_lies_in_the_interval() -> None:
    expected = {"a": {"key": "a", "step_s": 2.0, "interval_s": [1.5, 2.5]}}
    inside = gpu_evidence.with_expected({"key": "a", "step_s": 1.6}, expected)
    assert inside["of_expected"] == 0.8 and inside["is_in_interval"]
    assert not gpu_evidence.with_expected({"key": "a", "step_s": 2.6}, expected)["is_in_interval"]
    assert gpu_evidence.with_expected({"key": "b", "step_s": 1.0}, expected) == {"key": "b", "step_s": 1.0}


def test_rounds_of_a_subject_add_up_to_an_update() -> None:
    subject = TINY_SUBJECTS["8b-4096-few"]
    batches = subject.batches(torch.device("cpu"))
    assert [len(rounds) for rounds in batches] == [subject.rounds] * 4
    assert sum(batch.numel() for batch in batches[0]) == subject.tokens
    assert not torch.equal(batches[0][0], batches[0][1])


def test_exactness_tells_variants_apart(tmp_path: Path) -> None:
    assert exact.main(["--device", "cpu", "--elements", "2048", "--json", str(tmp_path / "exact.json")]) == 0
    rows = json.loads((tmp_path / "exact.json").read_text())["rows"]
    assert all(row["equal_shares"] == [1.0] * exact.UPDATES for row in rows if row["device"] == row["cpu"])
    # In float32 they are equal on some CPUs, whose square roots are those of the other kernel.
    halves = [row for row in rows if row["dtype"] == "bfloat16" and row["device"] == "fused" and row["cpu"] == "foreach"]
    assert halves and all(min(row["equal_shares"]) < 1.0 for row in halves)


@pytest.mark.long
@pytest.mark.alone
def test_every_case_runs_to_its_end_in_small(tmp_path: Path) -> None:
    assert gpu_evidence.main(["--tiny", "--minutes", "12", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "evidence.json").read_text())
    rows = {row["key"]: row for row in document["rows"]}
    assert set(rows) == {*ROWS, *(case.name for case in CASES if not case.rows)}
    wrong = {key: row for key, row in rows.items() if row["status"] not in ("ok", "absent")}
    assert not wrong, "\n".join(f"{key}: {row['status']}: {row['reason']}" for key, row in wrong.items())
    for key, row in ROWS.items():
        if row.way == "tieroff" and rows[key]["status"] == "ok":
            assert rows[key]["phase"] in ("planned", "nothing moved"), key
