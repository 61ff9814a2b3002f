"""The folder of a run: what is written is read back, and what is missing, cut off or of another run is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.report.report_samples import PLAN, TIMELINE, figures, idle, sample
from tieroff.core.io.run_folder import Run, load_run, save_run
from tieroff.core.ranks.collectives import Call, Collectives
from tieroff.errors import CaptureError, ConfigError, InvalidPlanError, StateError, TraceMismatchError

FILES = {"config.toml", "trace.json", "plan.json", "timeline.json", "steps.json", "planned_machine.toml", "explain.txt"}

COLLECTIVES = Collectives(1, 2, "a machine", (Call("0", 7, "all_gather", "8x4 Float", 1_795_610_639_907_531_188),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_run(sample(), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("run", [sample(), idle()])
def test_run_is_read_back_as_it_was(tmp_path: Path, run: Run) -> None:
    save_run(run, tmp_path / "new" / "run")
    assert {path.name for path in (tmp_path / "new" / "run").iterdir()} == FILES
    assert load_run(tmp_path / "new" / "run") == run


def test_result_and_files_of_older_runs_are_optional(folder: Path) -> None:
    for name in ("steps.json", "planned_machine.toml", "explain.txt"):
        (folder / name).unlink()
    assert load_run(folder) == replace(sample(), steps=(), machine=None, explanation="")
    (folder / "result.json").write_text('{"losses_equal": true}')
    assert load_run(folder).result == {"losses_equal": True}


def test_collectives_of_a_rank_are_read_back_and_do_not_outlive_their_run(tmp_path: Path) -> None:
    save_run(replace(sample(), collectives=COLLECTIVES), tmp_path)
    assert load_run(tmp_path).collectives == COLLECTIVES
    text = (tmp_path / "collectives.json").read_text()
    (tmp_path / "collectives.json").write_text(text[:-20])
    with pytest.raises(CaptureError, match=r"collectives\.json.*cut off"):
        load_run(tmp_path)
    save_run(sample(), tmp_path)
    assert load_run(tmp_path).collectives is None


def test_run_that_is_saved_again_leaves_a_persons_machine_file_alone(folder: Path) -> None:
    (folder / "machine.toml").write_text("mine")
    save_run(replace(sample(), machine=None), folder)
    assert (folder / "machine.toml").read_text() == "mine"


@pytest.mark.parametrize("make", ["nothing", "file"])
def test_path_that_is_no_folder_is_told(tmp_path: Path, make: str) -> None:
    path = tmp_path / "run"
    if make == "file":
        path.write_text("")
    with pytest.raises(ConfigError, match="expected a run folder"):
        load_run(path)


def test_unfinished_run_is_told_with_what_is_missing(folder: Path) -> None:
    (folder / "timeline.json").unlink()
    (folder / "plan.json").unlink()
    with pytest.raises(StateError, match=r"there is no plan\.json, no timeline\.json: the run has not ended"):
        load_run(folder)


@pytest.mark.parametrize("name", ["trace.json", "plan.json", "timeline.json", "steps.json", "result.json"])
def test_file_that_was_cut_off_is_told_by_name(folder: Path, name: str) -> None:
    (folder / "result.json").write_text('{"losses_equal": true}')
    text = (folder / name).read_text()
    (folder / name).write_text(text[: len(text) // 2])
    with pytest.raises((CaptureError, InvalidPlanError, ConfigError), match=rf"{name}.*(cut off|truncated)"):
        load_run(folder)


@pytest.mark.parametrize(("name", "told"), [("config.toml", "text file"), ("planned_machine.toml", "machine.toml")])
def test_text_that_is_none_is_told_by_name(folder: Path, name: str, told: str) -> None:
    (folder / name).write_bytes(b"\xff\xfe\x00 = =")
    with pytest.raises(ConfigError, match=rf"{name}: expected a {told}"):
        load_run(folder)


def test_result_that_is_no_object_is_told(folder: Path) -> None:
    (folder / "result.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"result\.json: expected a JSON object, got list"):
        load_run(folder)


def test_files_of_two_runs_are_told(folder: Path) -> None:
    save_run(replace(sample(), plan=replace(PLAN, trace_digest="another")), folder)
    with pytest.raises(TraceMismatchError, match="got one for another"):
        load_run(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"op_count": 5},
        {"residencies": (replace(PLAN.residencies[0], tensor=3),)},
        {"residencies": (replace(PLAN.residencies[0], stop=9),)},
        {"transfers": (replace(PLAN.transfers[0], issue_at=-1),)},
    ],
)
def test_plan_that_points_outside_of_its_trace_is_told(folder: Path, change: dict[str, object]) -> None:
    save_run(replace(sample(), plan=replace(PLAN, **change)), folder)  # type: ignore[arg-type]
    with pytest.raises(InvalidPlanError, match="expected ops and tensors of the trace beside it"):
        load_run(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"ops": TIMELINE.ops * 2},
        {"stalls": (replace(TIMELINE.stalls[0], op=5),)},
        {"transfers": (replace(TIMELINE.transfers[0], tensor=3),)},
    ],
)
def test_timeline_of_another_step_is_told(folder: Path, change: dict[str, object]) -> None:
    save_run(replace(sample(), timeline=replace(TIMELINE, **change)), folder)  # type: ignore[arg-type]
    with pytest.raises(TraceMismatchError, match=r"timeline\.json: expected a timeline of the trace"):
        load_run(folder)


def test_file_that_cannot_be_written_leaves_the_old_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (folder / "plan.json").read_text()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tieroff.core.io.json_files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_run(replace(sample(), plan=replace(PLAN, policy="other")), folder)
    assert (folder / "plan.json").read_text() == before
    assert {path.name for path in folder.iterdir()} == FILES


def test_scalars_have_names_and_seconds() -> None:
    scalars = figures(3).scalars()
    assert scalars["tieroff/step_s"] == pytest.approx(0.057)
    assert scalars["tieroff/moved_bytes/nvme_read"] == 4 * 2**20
    assert figures(3).rest_ns == 3_000_000
    assert json.loads(json.dumps(scalars)) == scalars
