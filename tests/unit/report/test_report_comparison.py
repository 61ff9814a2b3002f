"""The page of `tieroff compare --plot`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tieroff.cli import app
from tieroff.core.tensor import Tier
from tieroff.core.timeline import OpSpan, Timeline
from tieroff.errors import ConfigError
from tieroff.study.compare.page import Compared, memory_figure, step_figure, write_comparison
from tieroff.units import GIB, NS_PER_S

TIMELINE = Timeline(
    ops=(OpSpan(0, NS_PER_S), OpSpan(3 * NS_PER_S, 4 * NS_PER_S)),
    transfers=(),
    stalls=(),
    memory={Tier.DEVICE: (2 * GIB, GIB), Tier.HOST: (0, GIB), Tier.NVME: (0, 0)},
    step_ns=4 * NS_PER_S,
)
COMPARED = (Compared("slow & <safe>", 2.0, 8.0, 3.0), Compared("none", 2.0), Compared("best", 2.0, 4.0, 3.0, TIMELINE))


def test_bars_are_step_over_ideal_with_the_bounds_as_a_line() -> None:
    bars, line = step_figure(COMPARED).data
    assert (bars.type, line.type) == ("bar", "scatter")
    assert list(bars.x) == list(line.x) == ["slow & <safe>", "none", "best"]
    assert list(bars.y) == [4.0, 0.0, 2.0]
    assert list(bars.text) == ["8.00 s, 4.000", "infeasible", "4.00 s, 2.000"]
    assert list(line.y) == [1.5, None, 1.5]


def test_faithful_times_are_marks_beside_the_bars_and_only_where_there_are_some() -> None:
    *_, marks = step_figure((*COMPARED, Compared("paged", 2.0, 4.0, 3.0, None, 9.0))).data
    assert (marks.type, marks.mode, list(marks.x), list(marks.y)) == ("scatter", "markers", ["paged"], [4.5])
    assert len(step_figure(COMPARED).data) == 2


def test_memory_is_held_from_op_to_op_beside_the_budget() -> None:
    figure = memory_figure(3 * GIB, COMPARED)
    [memory] = figure.data
    assert memory.name == "best"
    assert list(memory.x) == [0.0, 3.0, 4.0]
    assert list(memory.y) == [2.0, 1.0, 1.0]
    assert memory.line.shape == "hv"
    [budget] = figure.layout.shapes
    assert budget.y0 == budget.y1 == 3.0
    assert figure.layout.annotations[0].text == "budget 3.00 GiB"


def test_page_is_one_file_that_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plot.html"
    write_comparison(path, "a < b", 3 * GIB, COMPARED)
    text = path.read_text()
    assert "<title>a &lt; b</title>" in text
    assert text.count("Plotly.newPlot(") == 2
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=.https?:", text)
    write_comparison(tmp_path / "again.html", "a < b", 3 * GIB, COMPARED)
    assert (tmp_path / "again.html").read_text() == text


def test_step_without_any_time_has_a_page(tmp_path: Path) -> None:
    write_comparison(tmp_path / "plot.html", "zero", GIB, [Compared("auto", 0.0, 0.0, 0.0)])
    assert (tmp_path / "plot.html").stat().st_size > 0


@pytest.mark.parametrize(("path", "told"), [("plot.json", "ends with .html"), ("nowhere/plot.html", "nowhere does not exist")])
def test_path_that_cannot_take_a_page_is_refused(tmp_path: Path, path: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        write_comparison(tmp_path / path, "steps", GIB, COMPARED)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Options of `compare`: two activations of a GiB, of which the second op needs one, and a machine with two tiers."""
    folder = tmp_path / "pair"
    folder.mkdir()
    (folder / "tensors.csv").write_text(f"tensor,bytes,kind\na,{GIB},local\nb,{GIB},local\n")
    (folder / "kernels.csv").write_text(
        "kernel,name,ms,reads,writes\n0,one,100,,a\n1,two,100,,b\n2,three,100,b,\n3,four,100,a,\n"
    )
    (tmp_path / "machine.toml").write_text(
        'name = "test"\nhost_bytes = "8GiB"\nd2h_bytes_per_s = "4GiB"\nh2d_bytes_per_s = "4GiB"\n'
        'nvme_bytes = "64GiB"\nnvme_write_bytes_per_s = "1GiB"\nnvme_read_bytes_per_s = "1GiB"\n'
    )
    return ["compare", "--trace", str(folder), "--machine", str(tmp_path / "machine.toml"), "--device-budget", "1GiB"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_compare_draws_its_rows_and_prints_them_all_the_same(options: list[str], tmp_path: Path) -> None:
    plot = tmp_path / "plot.html"
    status, text = run(*options, "--policies", "floor,auto", "--plot", str(plot), "--json")
    assert status == 0
    assert [row["policy"] for row in json.loads(text)] == ["floor", "auto"]
    page = plot.read_text()
    assert "pair on test, device budget 1.00 GiB" in page
    assert '"floor"' in page and '"auto"' in page


def test_compare_draws_what_is_infeasible(options: list[str], tmp_path: Path) -> None:
    plot = tmp_path / "plot.html"
    options[-1] = "1MiB"
    assert run(*options, "--policies", "floor", "--plot", str(plot))[0] == 0
    assert '"infeasible"' in plot.read_text()


def test_compare_takes_an_nvme_budget(options: list[str]) -> None:
    status, text = run(*options, "--policies", "floor", "--host-budget", "0", "--nvme-budget", "2GiB", "--json")
    [row] = json.loads(text)
    assert (status, row["status"]) == (0, "ok")
    assert row["nvme_write_bytes"] > 0
    _, text = run(*options, "--policies", "floor", "--host-budget", "0", "--nvme-budget", "0", "--json")
    assert json.loads(text)[0]["status"] == "infeasible"


def test_compare_without_plotly_says_how_to_get_it_before_it_plans(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    monkeypatch.setattr("tieroff.study.compare.rows.compare_rows", lambda *_: pytest.fail("planned before it looked"))
    status, text = run(*options, "--plot", str(tmp_path / "plot.html"))
    assert status == 1
    assert "pip install 'tieroff[report]'" in text
    status, text = run(*options, "--plot", str(tmp_path / "plot.html"), "--json")
    assert (status, json.loads(text)["error"]["type"]) == (1, "ConfigError")
