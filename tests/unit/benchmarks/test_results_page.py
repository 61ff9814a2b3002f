"""The tables of the documentation are those that the stored results give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pages import results_page


@pytest.mark.parametrize("page", results_page.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert results_page.fill(text) == text, "python benchmarks/pages/results_page.py"


def test_every_stored_result_is_shown() -> None:
    page = (results_page.ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    names = {path.stem for path in results_page.RESULTS.glob("*.json")}
    elsewhere = {"bench_policies", "bench_plan_moves"}  # in docs/policies.md, and in the table of bench_plan
    elsewhere |= {f"{kind}_{card}" for kind in ("expected", "gpu_evidence") for card in ("h100", "h200")}  # in docs/evidence.md
    assert {name for name in names if f"<!-- table: {name} -->" not in page} == elsewhere


def test_a_changed_figure_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (results_page.ROOT / "README.md").read_text(encoding="utf-8")
    real = results_page.load

    def doubled(name: str) -> results_page.Document:
        found = real(name)
        for row in found["rows"]:
            row["tokens_per_s"] *= 2
        return found

    monkeypatch.setattr(results_page, "load", doubled)
    assert results_page.fill(page) != page


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(KeyError, match="bench_nothing"):
        results_page.fill("<!-- table: bench_nothing -->\n<!-- end -->")


def test_measured_peaks_are_in_the_range_that_the_pages_claim() -> None:
    shares = []
    for path in results_page.RESULTS.glob("*gpt2*.json"):
        for row in json.loads(path.read_text())["rows"]:
            if row["budget_bytes"]:
                shares.append(row["peak_bytes"] / row["budget_bytes"])
    page = (results_page.ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert f"{min(shares):.0%} to {max(shares):.0%} of the budget".replace("%", " %") in page
