"""`tieroff report` on all ranks: who waited for whom is found in real runs, and what limits that is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.parity.shards.launched import launch
from tests.parity.shards.slow import KINDS, SLEEP_S
from tests.unit.report.report_samples import HOSTILE, MS, TIMELINE, TRACE, figures, hostile, idle, sample
from tieroff.cli import app
from tieroff.core.io.rank_folders import has_ranks, load_ranks
from tieroff.core.io.run_folder import Run, load_run, save_run
from tieroff.core.ranks.collectives import Call, Collectives
from tieroff.core.tensor import Tier
from tieroff.core.timeline import OpSpan, Stall
from tieroff.core.trace import Op, Queue
from tieroff.errors import ConfigError, StateError
from tieroff.report.ranks.page import longest_awaited, notes_on, ranks_figure, ranks_page, waits_table
from tieroff.report.ranks.steps import steps_of

pytest.importorskip("plotly")

BEGAN_NS = 1_795_610_639_907_531_188
SLEEP_NS = round(SLEEP_S * 1e9)


def of_rank(rank: int, *calls_ms: float, world: int = 2, machine: str = "a", run: Run | None = None, at_ms: int = 0) -> Run:
    """Returns a run whose rank called collectives so many ms after `BEGAN_NS`; the first one lies before the step."""
    run = run if run is not None else sample()
    began_ns = BEGAN_NS + at_ms * MS
    calls = tuple(
        Call("0", number, "all_gather", "8x4 Float", BEGAN_NS + round(at * MS)) for number, at in enumerate((-50, *calls_ms))
    )
    steps = (*run.steps[:-1], replace(run.steps[-1], began_ns=began_ns))
    timeline = replace(run.timeline, began_ns=began_ns)
    return replace(run, steps=steps, timeline=timeline, collectives=Collectives(rank, world, machine, calls))


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    done = launch(project, folder, 2, tuple(KINDS), "slow")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_rank_that_sleeps_is_named_with_about_the_time_that_it_slept(launched: Path, kind: str) -> None:
    folder = launched / kind
    first, second = steps_of(load_ranks(folder))
    assert first.run.last_planned is not None
    assert first.run.last_planned.phase == ("nothing moved" if kind == "nothing moved" else "planned")
    assert 0.8 * SLEEP_NS <= first.waited_ns()[1] <= first.step_ns
    assert second.waited_ns().get(0, 0) < 0.5 * SLEEP_NS
    assert second.step_ns >= SLEEP_NS
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert (result.exit_code, result.stdout) == (0, f"written to {folder / 'report.html'}\n")
    text = (folder / "report.html").read_text()
    assert "The others waited longest for rank 1: rank 0 for up to " in text
    assert "<td>0</td>" in text and "<td>rank 1</td>" in text


def test_every_rank_has_lanes_and_waits_have_a_cause_of_their_own() -> None:
    steps = steps_of({0: of_rank(0, 23, 44), 1: of_rank(1, 28, 41, at_ms=10)})
    [first], [second] = (step.waits for step in steps)
    assert (first.start_ns - BEGAN_NS, first.stop_ns - BEGAN_NS, first.awaited) == (23 * MS, 28 * MS, 1)
    assert (second.start_ns - BEGAN_NS, second.stop_ns - BEGAN_NS, second.awaited) == (41 * MS, 44 * MS, 0)
    figure = ranks_figure(steps)
    assert [note.text for note in figure.layout.annotations] == ["rank 0", "rank 1"]
    waits = [bar for bar in figure.data if bar.name == "another rank"]
    assert [(bar.y[0], bar.base[0], bar.x[0]) for bar in waits] == [("stalls", 23, 5), ("stalls", 41, 3)]
    assert waits[0].hovertext[0].startswith("waits for rank 1<br>all_gather 1 8x4 Float")
    assert [bar.base[0] for bar in figure.data if bar.name == "forward"] == [0, 10]
    assert waits_table(steps).rows == (
        ("0", "56.0 ms", "rank 1", "5.0 ms", "8.9%", "1", "5.0 ms in all_gather 1 8x4 Float"),
        ("1", "56.0 ms", "rank 0", "3.0 ms", "5.4%", "1", "3.0 ms in all_gather 2 8x4 Float"),
    )
    assert longest_awaited(steps) == "The others waited longest for rank 1: rank 0 for up to 5.0 ms, 9% of its step."
    assert list(notes_on(steps)) == []


def test_part_of_a_wait_for_communication_in_which_a_rank_was_late_has_that_ranks_name() -> None:
    run = sample()
    ops = (*TRACE.ops[:2], Op("gather:a", 10 * MS, queue=Queue.COMMUNICATION), replace(TRACE.ops[3], awaits=2))
    spans = (*TIMELINE.ops[:2], OpSpan(22 * MS, 32 * MS), OpSpan(32 * MS, 42 * MS))
    stalls = (Stall(3, 10 * MS, -1, Tier.DEVICE, Tier.DEVICE, communication=2),)
    timeline = replace(TIMELINE, ops=spans, stalls=stalls, communication=(2,), transfers=())
    run = replace(run, trace=replace(TRACE, ops=ops), timeline=timeline)
    figure = ranks_figure(steps_of({0: of_rank(0, 23, run=run), 1: of_rank(1, 28)}))
    bars = [bar for bar in figure.data if bar.y[0] == "stalls" and bar.yaxis == figure.data[0].yaxis]
    seen = {bar.name: list(zip(bar.base, bar.x, strict=True)) for bar in bars}
    assert seen == {"communication": [(22, 1), (28, 4)], "another rank": [(23, 5)]}
    assert [bar.name for bar in figure.data if bar.y[0] == "communication"] == ["communication"]


def test_host_that_went_on_after_its_call_did_not_wait() -> None:
    """An op of the first rank ends at 22 ms: it did not wait from its call at 15 ms on. A device's time says nothing of it."""
    runs = {0: of_rank(0, 15), 1: of_rank(1, 28)}
    [wait] = steps_of(runs)[0].waits
    assert wait.start_ns - BEGAN_NS == 22 * MS
    runs[0] = replace(runs[0], timeline=replace(runs[0].timeline, host_ns=(-MS, 17 * MS, 40 * MS)))
    [wait] = steps_of(runs)[0].waits
    assert wait.start_ns - BEGAN_NS == 17 * MS


def test_waits_are_cut_to_the_step() -> None:
    waited = steps_of({0: of_rank(0, -20, 40), 1: of_rank(1, 5, 40)})[0].waits
    assert [(wait.start_ns - BEGAN_NS, wait.stop_ns - BEGAN_NS) for wait in waited] == [(0, 5 * MS)]


def test_what_limits_the_waits_is_said() -> None:
    def notes(*runs: Run) -> str:
        return "\n".join(notes_on(steps_of(dict(enumerate(runs)))))

    assert "ranks 2, 3 of 4 not in this folder" in notes(of_rank(0, 5, world=4), of_rank(1, 9, world=4))
    assert "clocks are taken as they are" in notes(of_rank(0, 5), of_rank(1, 9, machine="b"))
    silent = replace(of_rank(1), collectives=Collectives(1, 2, "a"))
    assert "No collective is known of rank 1:" in notes(of_rank(0, 5), silent)
    cut = of_rank(1, 9)
    assert cut.collectives is not None
    cut = replace(cut, collectives=replace(cut.collectives, calls=cut.collectives.calls[1:]))
    assert "first collectives of the step are not known of rank 1:" in notes(of_rank(0, 5), cut)
    assert "Nothing moved on ranks 0, 1," in notes(of_rank(0, 5, run=idle()), of_rank(1, 9, run=idle()))


def test_page_without_waits_says_so_and_no_name_becomes_code() -> None:
    runs = {rank: of_rank(rank, run=hostile()) for rank in range(2)}
    assert "No rank was seen to wait for another one." in ranks_page(runs)
    collectives = Collectives(0, 2, HOSTILE, (Call(HOSTILE, 0, HOSTILE, HOSTILE, BEGAN_NS + MS),))
    runs[0] = replace(runs[0], collectives=collectives)
    late = replace(collectives.calls[0], at_ns=BEGAN_NS + 9 * MS)
    runs[1] = replace(runs[1], collectives=replace(collectives, rank=1, calls=(late,)))
    text = ranks_page(runs)
    assert "rank 0 for up to 8.0 ms" in text
    assert HOSTILE not in text


def test_steps_that_lie_apart_or_have_no_time_are_refused() -> None:
    with pytest.raises(StateError, match=r"rank 1 began 4\.0 ms after that of rank 0 had ended: [^,]*$"):
        steps_of({0: of_rank(0), 1: of_rank(1, at_ms=60)})
    with pytest.raises(StateError, match="or the clocks of their machines differ"):
        steps_of({0: of_rank(0), 1: of_rank(1, at_ms=60, machine="b")})
    with pytest.raises(StateError, match="rank 1: its run does not say when"):
        steps_of({0: of_rank(0), 1: replace(of_rank(1), timeline=TIMELINE)})
    with pytest.raises(StateError, match="rank 0: its run does not say when"):
        steps_of({0: replace(of_rank(0, run=idle()), steps=(figures(1, "nothing moved"),))})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in range(2):
        save_run(of_rank(rank, 5 + rank), tmp_path / f"rank-{rank}")
    return tmp_path


def as_of(folder: Path, change: Callable[[Collectives], Collectives | None]) -> None:
    run = load_run(folder)
    assert run.collectives is not None
    save_run(replace(run, collectives=change(run.collectives)), folder)


def test_folder_of_ranks_is_found_and_read_in_their_order(folder: Path) -> None:
    assert has_ranks(folder) and not has_ranks(folder / "rank-0")
    shutil.copytree(folder / "rank-0", folder / "rank-2")
    shutil.rmtree(folder / "rank-0")  # the run says which rank it is of, not its folder
    assert list(load_ranks(folder)) == [0, 1]


def test_runs_of_other_launches_are_told(folder: Path) -> None:
    as_of(folder / "rank-1", lambda own: replace(own, rank=0))
    with pytest.raises(ConfigError, match=r"rank-1: .*another folder beside it has rank 0 too"):
        load_ranks(folder)
    as_of(folder / "rank-1", lambda own: replace(own, rank=1, world=4))
    with pytest.raises(ConfigError, match="the ranks of one launch, but found rank-0 of 2 ranks, rank-1 of 4 ranks"):
        load_ranks(folder)
    as_of(folder / "rank-1", lambda own: None)
    with pytest.raises(StateError, match=r"rank-1: .*there is no collectives\.json"):
        load_ranks(folder)


def test_other_outputs_want_one_rank(folder: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(folder), "--perfetto", str(folder / "p.json")])
    assert result.exit_code == 1 and "expected the run of one rank" in result.output
    assert not (folder / "p.json").exists()
