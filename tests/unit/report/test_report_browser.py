"""The page in a real browser: it draws, no script fails, no name becomes code, and the search finds rows.

Left out where no Chromium is on PATH.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from tests.unit.report.browser import BROWSER, body_of, dom_of
from tests.unit.report.report_samples import hostile, idle, sample
from tieroff.core.io.run_folder import Run
from tieroff.planner.predict import predict
from tieroff.report.page import write_page

pytest.importorskip("plotly")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")


def rendered(run: Run, folder: Path, fragment: str = "") -> str:
    """Returns the DOM of a run's page after its scripts have run."""
    page = folder / "report.html"
    write_page(page, run, *predict(run))
    return dom_of(page, fragment)


def found_rows(dom: str) -> list[str]:
    """Returns the first column of the table of decisions."""
    [table] = re.findall(r'<table id="decision-table">(.*?)</table>', dom, re.DOTALL)
    return [unescape(name) for name in re.findall(r"<tr><td>(.*?)</td>", table, re.DOTALL)]


def test_page_draws_lanes_memory_steps_and_tensors_without_an_error(tmp_path: Path) -> None:
    dom = rendered(sample(), tmp_path)
    assert body_of(dom) == {"errors": "0", "drawn": "4"}
    lanes = dom[dom.index('id="figure-lanes"') : dom.index('id="memory"')]
    for lane in ("compute", "stalls", "NVMe write", "NVMe read", "measured", "predicted"):
        assert f">{lane}</text>" in lanes
    assert lanes.count('<g class="point">') == 2 * (4 + 2 + 2)  # spans of compute, stalls and transfers, of both steps
    memory = dom[dom.index('id="figure-memory"') : dom.index('id="steps"')]
    assert "device: budget 7.00 MiB (dashed)" in memory
    assert found_rows(dom) == ["a", "b", "w"]


@pytest.mark.parametrize(("search", "found"), [("activation+use+b", ["a"]), ("nothing", [])])
def test_search_finds_rows_that_have_all_words(tmp_path: Path, search: str, found: list[str]) -> None:
    dom = rendered(sample(), tmp_path, f"#search={search}")
    assert body_of(dom)["errors"] == "0"
    assert found_rows(dom) == found
    assert f'<span id="count">{len(found)} of 3</span>' in dom


def test_names_that_are_code_are_shown_and_not_run(tmp_path: Path) -> None:
    run = hostile()
    dom = rendered(run, tmp_path)
    assert body_of(dom) == {"errors": "0", "drawn": "4"}  # and no data-pwned
    assert found_rows(dom) == [tensor.name for tensor in run.trace.tensors]


def test_run_in_which_nothing_moved_is_drawn(tmp_path: Path) -> None:
    dom = rendered(idle(), tmp_path)
    assert body_of(dom) == {"errors": "0", "drawn": "4"}
    assert "Nothing moved, because everything fits" in dom
