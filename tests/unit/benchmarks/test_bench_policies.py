"""The benchmark of all policies: its rows, what it refuses to pass over, and that the page shows what the file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import bench_policies
from harness import policy_tables
from tests.support.outside import needs_outside_data
from tieroff.planner.policies import all_policies

ROOT = Path(__file__).resolve().parents[3]
BEGIN, END = policy_tables.BEGIN, policy_tables.END


def row(policy: str, step_s: float | None, cpu_s: float = 1.0, **more: Any) -> dict[str, Any]:
    head = {"part": "g10", "cell": "VIT-b256", "share": None, "policy": policy}
    times = {"step_s": step_s, "ideal_s": 1.0, "bound_s": 1.0, "faithful_step_s": step_s, "plan_cpu_s": cpu_s}
    return {**head, **times, **more}


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"date": "2026-01-01", "command": "made up", "effort": "fast", "rows": list(rows)}


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs/results/bench_policies.json").read_text())
    return found


def test_page_shows_what_the_file_holds(stored: dict[str, Any]) -> None:
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    assert policy_tables.with_tables(page, stored) == page
    assert (ROOT / "docs/policies.svg").read_text(encoding="utf-8") == policy_tables.figure(stored)


def test_page_has_a_paragraph_for_every_published_policy() -> None:
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    text = page[: page.index(policy_tables.BEGIN)]
    assert [name for name, policy in all_policies().items() if policy.is_published and f"`{name}`" not in text] == []


def test_stored_rows_hold_what_the_planner_promises(stored: dict[str, Any]) -> None:
    """`auto` is at most every row under the common model, no row is below its bound, and none took long to plan."""
    rows = stored["rows"]
    assert policy_tables.broken(rows, plan_s_max=bench_policies.PLAN_S_MAX) == []
    policies = {one["policy"] for one in rows}
    assert {name for name, policy in all_policies().items() if policy.is_published} <= policies and "auto" in policies
    assert sum(one["part"] == "own" for one in rows) == 6 * len(policies)
    for one in rows:
        if one["step_s"] is not None:
            assert one["step_s"] >= one["bound_s"] * (1 - 1e-9)


def test_row_that_is_faster_than_auto_or_planned_too_slowly_is_named() -> None:
    rows = [row("auto", 2.0, 99.0), row("g10", 2.0), row("teraio", 1.5), row("demand", None), row("capuchin", 3.0, 31.0)]
    faster, slow = policy_tables.broken(rows, 30.0)
    assert faster == "teraio takes 1.5 s on ViT 256, less than auto with 2.0 s"
    assert slow == "capuchin planned ViT 256 in 31.0 s, more than 30 s"
    [missing] = policy_tables.broken([row("auto", None), row("g10", 2.0)], 30.0)
    assert "less than auto with None s" in missing


def test_tables_show_shares_dashes_and_how_far_off_published_times_are() -> None:
    beside = row("g10", None, published_s=2.0), row("demand", 3.0, published_s=2.0)
    text = policy_tables.tables(document(row("auto", 1.25), *beside))
    assert "| `auto` | - | static | common | - | 1 of 1 | 0.800 | 1.0 |" in text
    assert "| `g10` | Zhang et al., MICRO 2023 | static | clean bytes written | faults, pages | 0 of 1 | - | 1.0 |" in text
    assert "| `demand` | 3.000 |" in text and "| bound | 1.000 |" in text
    assert "| `demand` | ViT 256 | 3.0000 | 2.0000 | +50.0% |" in text
    assert "| `g10` | ViT 256 | does not fit | 2.0000 |  |" in text


@pytest.mark.parametrize("page", ["none", f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}"])
def test_page_without_its_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="once each and in this order"):
        policy_tables.with_tables(page, document())


def test_figure_has_a_dot_per_step_that_is_met() -> None:
    image = ElementTree.fromstring(policy_tables.figure(document(row("auto", 1.25), row("g10", None), row("demand", 3.0))))
    tags = [element.tag.rpartition("}")[2] for element in image]
    assert tags.count("circle") == 2
    assert {"auto", "demand", "g10", "0 of 1 met"} <= {element.text for element in image}


@needs_outside_data("g10")
def test_steps_in_the_file_are_not_planned_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page, image = tmp_path / "found.json", tmp_path / "page.md", tmp_path / "figure.svg"
    page.write_text(f"before\n{policy_tables.BEGIN}\nold\n{policy_tables.END}\nafter\n")
    arguments = ["--cells", "--own", "gpt", "--policies", "demand", "floor", "zero-offload", "--json", str(path)]
    assert bench_policies.main([*arguments, "--page", str(page), "--figure", str(image)]) == 0
    assert "6 rows; 0 that should not be" in capsys.readouterr().out
    first = json.loads(path.read_text())["rows"]
    assert [(one["cell"], one["share"], one["policy"]) for one in first] == [
        ("gpt", share, policy) for share in (0.5, 0.25) for policy in ("demand", "zero-offload", "floor")
    ]
    assert page.read_text().startswith("before\n") and "old" not in page.read_text() and "`floor`" in page.read_text()
    assert image.read_text().startswith("<svg")
    assert all(one["plan_cpu_s"] > 0 for one in first)
    assert bench_policies.main(arguments) == 0
    assert json.loads(path.read_text())["rows"] == first


@needs_outside_data("g10")
def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option, name in (("--cells", "VIT-b1"), ("--own", "mlp"), ("--policies", "best")):
        with pytest.raises(SystemExit) as caught:
            bench_policies.main([option, name])
        assert caught.value.code == 2
        assert f"got {name}" in capsys.readouterr().err


@needs_outside_data("g10")
def test_published_times_are_those_of_the_file() -> None:
    times = bench_policies.published()
    assert times["BERT_Base-b768", "flashneuron"] is None
    assert times["BERT_Base-b256", "demand"] == 19.6501
    assert len(times) == 15 * 4
