"""The page of a run as text: what is on it, that it needs nothing else, and that no name can become code."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.unit.report.browser import check_scripts
from tests.unit.report.report_samples import HOSTILE, MS, NVME, PLAN, TIMELINE, TRACE, figures, hostile, idle, sample
from tieroff.core.explain.wear import wear_of
from tieroff.core.io.run_folder import Run
from tieroff.core.plan import HostUpdate, Repeat
from tieroff.core.timeline import OpSpan, RunSpan, Stall, Timeline
from tieroff.errors import ConfigError
from tieroff.planner.predict import predict
from tieroff.report import figures as drawn
from tieroff.report.lanes import Span, coarsened, packed, spans_of
from tieroff.report.page import page, write_page
from tieroff.report.tables import comparison, decisions, longest_stalls, ops_that_differ
from tieroff.units import MIB

pytest.importorskip("plotly")


@pytest.fixture(autouse=True)
def _without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five megabytes of script make these tests slow to read; the browser's test has them."""
    monkeypatch.setattr("tieroff.report.figures.plotly_script", lambda: "/* plotly */")


class _Reader(HTMLParser):
    """Reads elements as a browser does, so far as scripts go."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def read(text: str) -> _Reader:
    reader = _Reader()
    reader.feed(text)
    return reader


def rows_of(text: str) -> list[list[Any]]:
    [found] = re.findall(r'id="decision-rows">(.*?)</script>', text)
    rows: list[list[Any]] = json.loads(found)
    return rows


def test_page_has_its_parts_and_loads_nothing() -> None:
    run = sample()
    predicted, note = predict(run)
    text = page(run, predicted, note)
    for key in ("compared", "lanes", "memory", "steps", "biggest", "decisions"):
        assert f'<h2 id="{key}">' in text
    for key in ("lanes", "memory", "steps", "biggest"):
        assert text.count(f'id="figure-{key}"') == 1
    assert read(text).loads == []
    assert "default-src 'none'" in text
    assert "<li>five</li>" in text and "six &lt;b&gt;" in text and "<b>six" not in text
    assert page(run, predicted, note) == text


def test_names_that_end_a_script_stay_text() -> None:
    run = hostile()
    plain, text = page(sample(), *predict(sample())), page(run, *predict(run))
    assert len(read(text).scripts) == len(read(plain).scripts)
    assert read(text).handlers == []
    assert HOSTILE not in text
    assert rows_of(text)[0][0] == f"a{HOSTILE}"


@pytest.mark.parametrize("make", [sample, hostile])
def test_scripts_of_a_page_are_programs_and_its_data_can_be_read(make: Callable[[], Run], tmp_path: Path) -> None:
    run = make()
    write_page(tmp_path / "run.html", run, *predict(run))
    assert check_scripts(tmp_path / "run.html") == len(rows_of((tmp_path / "run.html").read_text(encoding="utf-8")))


def test_run_in_which_everything_fits_says_so_and_draws_the_prediction() -> None:
    run = idle()
    text = page(run, *predict(run))
    assert "Nothing moved, because everything fits" in text
    assert 'id="figure-lanes"' in text
    assert "written to drives" not in text


def test_run_without_a_machine_says_that_there_is_no_prediction() -> None:
    run = replace(sample(), machine=None)
    predicted, note = predict(run)
    assert predicted is None
    assert note in page(run, predicted, note)
    text = page(replace(idle(), machine=None), None, note)
    assert 'id="figure-lanes"' not in text
    assert 'id="figure-biggest"' in text


def test_prediction_for_another_machine_is_marked() -> None:
    run = sample()
    assert "The plan itself predicts a step of 48.0 ms; simulated again" not in predict(run)[1]
    slower = replace(run, plan=replace(PLAN, step_ns=60 * MS))
    assert "predicts a step of 60.0 ms; simulated again on the run's machine it is 48.0 ms" in predict(slower)[1]
    assert run.machine is not None
    without = replace(run, machine=replace(run.machine, nvme_write_bytes_per_s=0))
    assert "gives no bandwidth from device to nvme" in predict(without)[1]


def test_wear_is_given_per_step_day_and_life() -> None:
    text = page(sample())
    day_bytes = 4 * MIB / 0.057 * 86400
    wear = wear_of(4 * MIB, 0.057, 10**15)
    assert wear is not None and wear.day_bytes == pytest.approx(day_bytes)
    assert wear.life_days == pytest.approx(10**15 / day_bytes)
    assert f"<b>{wear.life}</b><span>life of the drives" in text
    assert wear_of(0, 1.0) is None and wear_of(1, 0.0) is None
    assert "not known" in str(wear_of(1, 1.0))


def test_lanes_have_waits_by_cause_where_they_were() -> None:
    spans = spans_of(TIMELINE, TRACE)
    stalls = [(span.cause, span.start_ns, span.stop_ns, span.name) for span in spans if span.lane == "stalls"]
    assert stalls == [("nvme_write", 22 * MS, 29 * MS, "a"), ("nvme_read", 40 * MS, 45 * MS, "a")]
    assert [span.cause for span in spans if span.lane == "compute"] == ["forward", "forward", "backward", "backward"]
    figure = drawn.lanes_figure(sample(), None)
    colors = {bar.marker.color for bar in figure.data if bar.y[0] == "stalls"}
    assert colors == {drawn.COLORS["nvme_write"], drawn.COLORS["nvme_read"]}


def test_waits_of_one_op_follow_each_other_and_updates_have_a_lane() -> None:
    stalls = (Stall(2, 3 * MS, 0, *_ends()), Stall(2, MS, -1, _ends()[1], _ends()[1], update=3), Stall(4, MS, -1, *_ends()))
    timeline = replace(TIMELINE, stalls=stalls, repeats=(RunSpan(0, 29 * MS, 30 * MS),), host_updates=(RunSpan(3, 0, MS),))
    spans = spans_of(timeline, TRACE)
    drawn = [span for span in spans if span.lane == "stalls"]
    assert [(span.start_ns, span.stop_ns) for span in drawn] == [(22 * MS, 25 * MS), (25 * MS, 26 * MS), (56 * MS, 57 * MS)]
    assert [span.name for span in drawn] == ["a", "use a", "a tensor outside the trace"]
    assert drawn[-1].detail.startswith("before the end of the step")
    assert {span.cause for span in spans} >= {"recompute", "cpu"}


def _ends() -> tuple[Any, Any]:
    return TIMELINE.stalls[0].source, TIMELINE.stalls[0].target


def test_many_spans_are_drawn_as_few_that_cover_the_same_time() -> None:
    spans = [Span("compute", "forward", 2 * i, 2 * i + 1, f"op{i}") for i in range(5000)]
    [one] = coarsened(spans, 1)
    assert (one.start_ns, one.stop_ns, one.name) == (0, 9999, "5000 from op0 to op4999")
    assert one.busy == pytest.approx(5000 / 9999)
    overlapping = [Span("h2d", "h2d", 0, 10, "x"), Span("h2d", "h2d", 5, 8, "y"), Span("h2d", "h2d", 30, 40, "z")]
    assert [span.busy for span in coarsened(overlapping, 20)] == [0.5]
    assert coarsened(spans, 0) == spans
    timeline = Timeline(tuple(OpSpan(i, i + 1) for i in range(drawn.SPANS_MAX + 1)), (), ())
    assert drawn.is_coarse(timeline) and not drawn.is_coarse(TIMELINE)


def test_overlapping_spans_of_a_lane_get_rows_of_their_own() -> None:
    spans = [Span("h2d", "h2d", *ends, "x") for ends in ((0, 10), (5, 8), (8, 12), (10, 11))]
    assert [[(s.start_ns, s.stop_ns) for s in row] for row in packed(spans)["h2d"]] == [[(0, 10), (10, 11)], [(5, 8), (8, 12)]]


def test_memory_has_predicted_measured_and_the_budget_of_each_tier() -> None:
    run = sample()
    figure = drawn.memory_figure(run, predict(run)[0])
    by_name = {(line.name, line.yaxis): list(line.y) for line in figure.data}
    assert by_name["measured", "y"] == [5, 7, 3, 5]
    assert by_name["measured", "y3"] == [0, 0, 4, 4]
    assert ("predicted", "y3") in by_name
    assert [shape.y0 for shape in figure.layout.shapes] == [7]  # 64 MiB would flatten 4 MiB, and the host is empty
    assert "nvme: budget 64.00 MiB, far above the used bytes" in [note.text for note in figure.layout.annotations]


def test_comparison_has_predicted_beside_measured() -> None:
    run = sample()
    rows = {row[0]: row[1:] for row in comparison(run, predict(run)[0]).rows}
    assert rows["step"] == ("48.0 ms", "57.0 ms", "+18.8%")
    assert rows["waiting for transfers"] == ("8.0 ms", "12.0 ms", "+50.0%")
    assert rows["the engine's own work"] == ("-", "3.0 ms", "")
    assert rows["peak on nvme"] == ("4.00 MiB", "4.00 MiB", "none")
    assert rows["written to NVMe, per step"] == ("4.00 MiB", "4.00 MiB", "none")
    assert "peak on host" not in rows
    unmeasured = {row[0]: row[1:] for row in comparison(replace(run, steps=(), timeline=Timeline((), (), ())), None).rows}
    assert unmeasured["step"] == ("48.0 ms", "-", "")


def test_decisions_say_where_when_and_what_it_costs() -> None:
    first, second, third = decisions(sample(), predict(sample())[0])
    assert (first.name, first.kind, first.where, first.moved_bytes) == ("a", "activation", "device + nvme", 8 * MIB)
    assert first.moves == "nvme_write at 2 use b; nvme_read at 3 use a"
    assert (first.predicted_stall_ns, first.measured_stall_ns) == (8 * MS, 12 * MS)
    assert (second.name, second.where, second.moves) == ("b", "device", "")
    assert (third.name, third.predicted_stall_ns) == ("w", 0)
    assert decisions(idle(), None)[0].measured_stall_ns is None


def test_decisions_name_ops_that_run_otherwise() -> None:
    plan = replace(PLAN, repeats=(Repeat(0, 3),), host_updates=(HostUpdate(3, 3, 4, MS),), recompute=("blocks.0",))
    rows = decisions(replace(sample(), plan=plan), None)[3:]
    assert [(row.name, row.kind, row.where) for row in rows] == [
        ("make a", "op", "device"),
        ("use a", "op", "run by the CPU"),
        ("blocks.0", "module", "recomputed"),
    ]
    assert rows[0].moves == "runs again before op 3 use a"
    assert rows[1].moves == "from 3 use a, by the step's end"


def test_longest_stalls_and_ops_that_differ_are_in_order() -> None:
    assert longest_stalls(TIMELINE, TRACE).rows == (
        ("7.0 ms", "a", "nvme_write", "2 use b"),
        ("5.0 ms", "a", "nvme_read", "3 use a"),
    )
    assert [row[0] for row in ops_that_differ(sample()).rows] == ["0 make a", "1 make b"]


@pytest.mark.parametrize(
    ("path", "told"),
    [("page.json", "ends with .html"), ("nowhere/page.html", "nowhere does not exist"), ("d.html", "is a folder")],
)
def test_path_that_cannot_take_a_page_is_refused(tmp_path: Path, path: str, told: str) -> None:
    (tmp_path / "d.html").mkdir()
    with pytest.raises(ConfigError, match=told):
        write_page(tmp_path / path, sample())


def test_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tieroff.core.io.json_files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_page(path, sample())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_page_without_plotly_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ConfigError, match=r"pip install 'tieroff\[report\]'"):
        write_page(tmp_path / "page.html", sample())


def test_figures_of_nvme_are_those_of_the_plan() -> None:
    assert max(TIMELINE.memory[NVME]) == PLAN.peak_bytes[NVME]
    assert figures(1).moved_bytes["nvme_write"] == 4 * MIB
