"""The page of a run: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from tieroff.core.explain.describe import Explained, explain
from tieroff.core.explain.wear import wear_of
from tieroff.core.io.json_files import write_whole
from tieroff.core.io.run_folder import Run
from tieroff.core.tensor import Tier
from tieroff.core.timeline import Timeline
from tieroff.errors import ConfigError
from tieroff.report import figures
from tieroff.report.tables import Table, comparison, decisions, longest_stalls, ops_that_differ
from tieroff.units import NS_PER_S, format_bytes, format_seconds

_LINES_FIRST = 5
_DECISION_WORDS = "A row per tensor; click a head to sort. Rows are found that have all words of the search."
# The page may run its own scripts and styles, and load nothing from anywhere.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def check_page(path: Path) -> None:
    """Returns when a page can be written to a path.

    Raises:
        ConfigError: plotly is not installed, or the path names no .html file in a folder that exists.
    """
    figures.graph_objects()
    if path.suffix != ".html":
        raise ConfigError(f"{path}: the page needs a file name that ends with .html")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ConfigError(f"{path}: this is a folder; name a file for the page")


def write_page(path: Path, run: Run, predicted: Timeline | None = None, note: str = "") -> None:
    """Writes the page of a run.

    Args:
        path: see `check_page`; a file that is there is replaced as a whole.
        run: the run to show.
        predicted: the simulator's timeline of the run's plan, if there is one.
        note: what to say about the prediction.

    Raises:
        ConfigError: see `check_page`.
        OSError: the file cannot be written; the previous one is unchanged.
    """
    check_page(path)
    write_whole(path, page(run, predicted, note))


def page(run: Run, predicted: Timeline | None = None, note: str = "") -> str:
    """Returns the text of the page; every text that comes from the run is escaped."""
    title = f"{run.trace.name or 'step'} within {format_bytes(run.plan.budget_bytes.get(Tier.DEVICE, 0))}"
    body = (*_summary(run, note), *_tiles(run, predicted), *_drawn_parts(run, predicted), *_decision_part(run, predicted))
    return document(title, (*body, *_texts(run)), _resource("page.js"))


def document(title: str, body: Iterable[str], script: str = "") -> str:
    """Returns the text of a page.

    Args:
        title: not escaped yet.
        body: what stands below it, as HTML.
        script: what runs when all is there.
    """
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{_resource('page.css')}</style>",
            # First of all scripts, so that the page counts the errors of the others.
            f"<script>{_resource('errors.js')}</script>",
            f"<script>{figures.plotly_script()}</script>",
            "</head>",
            '<body data-errors="0" data-drawn="0">',
            "<main>",
            f"<h1>{html.escape(title)}</h1>",
            *body,
            "</main>",
            f"<script>{script}</script>",
            "</body>",
            "</html>\n",
        ]
    )


def _resource(name: str) -> str:
    return files("tieroff.report").joinpath(name).read_text(encoding="utf-8")


def _summary(run: Run, note: str) -> Iterator[str]:
    lines = run.explanation.splitlines() or explain(Explained(run.trace, run.plan, run.last_planned), detail=True)
    yield '<ul class="summary">'
    yield from (f"<li>{html.escape(line)}</li>" for line in lines[:_LINES_FIRST])
    yield "</ul>"
    if lines[_LINES_FIRST:]:
        text = html.escape("\n".join(lines[_LINES_FIRST:]))
        yield f"<details><summary>In detail</summary><pre>{text}</pre></details>"
    if note:
        yield f'<p class="note" id="note">{html.escape(note)}</p>'


def _tiles(run: Run, predicted: Timeline | None) -> Iterator[str]:
    step = run.last_planned
    step_ns = step.step_ns if step is not None else run.plan.step_ns
    tiles = [("step, measured" if step is not None else "step, predicted", format_seconds(step_ns / NS_PER_S))]
    if run.plan.step_ns and step is not None:
        tiles.append(("step, predicted", format_seconds(run.plan.step_ns / NS_PER_S)))
    tiles.append(("compute alone", format_seconds(run.trace.ideal_ns / NS_PER_S)))
    peak, budget = (of.get(Tier.DEVICE, 0) for of in (run.plan.peak_bytes, run.plan.budget_bytes))
    tiles.append(("device peak of budget", f"{format_bytes(peak)} of {format_bytes(budget)}"))
    tiles.append(("with nothing moved", format_bytes(run.trace.peak_bytes)))
    if step is not None:
        moved = step.moved_bytes
        written_bytes = moved.get("nvme_write", 0)
        tiles.append(("moved per step", format_bytes(sum(moved.values()))))
    else:
        written_bytes = predicted.moved_bytes["nvme_write"] if predicted is not None else 0
    tiles += _wear_tiles(run, written_bytes, step_ns)
    if "losses_equal" in run.result:
        tiles.append(("losses, beside the plain run", "equal" if run.result["losses_equal"] else "DIFFERENT"))
    yield '<div class="tiles">'
    yield from (f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>' for name, value in tiles)
    yield "</div>"


def _wear_tiles(run: Run, written_bytes: int, step_ns: int) -> Iterator[tuple[str, str]]:
    endurance_bytes = run.machine.nvme_endurance_bytes if run.machine is not None else 0
    wear = wear_of(written_bytes, step_ns / NS_PER_S, endurance_bytes)
    if wear is None:
        return
    yield "written to drives per step", format_bytes(wear.step_bytes)
    yield "written to drives per day", format_bytes(wear.day_bytes)
    yield "life of the drives at this rate", wear.life or "not known (nvme_endurance_bytes)"


def _drawn_parts(run: Run, predicted: Timeline | None) -> Iterator[str]:
    ring = run.trace
    timelines = {"measured": run.timeline if run.was_timed else None, "predicted": predicted}
    shown = {name: timeline for name, timeline in timelines.items() if timeline is not None}
    yield from section_html("Predicted against measured", "compared")
    yield table_html(comparison(run, predicted))
    if shown:
        coarse = any(figures.is_coarse(timeline) for timeline in shown.values())
        words = "Stalls have the colour of the link waited for. Compute's gaps without a stall are the engine's own work."
        if coarse:
            words += " There are too many spans to draw each: neighbours are drawn as one, the paler the less it is busy."
        yield from section_html("The step in time", "lanes", words)
        yield figure_html(figures.lanes_figure(run, predicted), "figure-lanes")
        for name, timeline in shown.items():
            stalls = longest_stalls(timeline, ring)
            if stalls.rows:
                yield f"<h3>Longest stalls, {name}</h3>"
                yield table_html(stalls)
        yield from section_html("Memory per tier", "memory", "Bytes follow the clock of ops, so both steps share one axis.")
        yield figure_html(figures.memory_figure(run, predicted), "figure-memory")
    differing = ops_that_differ(run)
    if differing.rows:
        yield "<h3>Ops whose time differs most from the planned one</h3>"
        yield table_html(differing)
    if run.steps:
        yield from section_html("Steps", "steps", "The first two are traced and measured with everything moved out.")
        yield figure_html(figures.steps_figure(run), "figure-steps")
    yield from section_html("Biggest tensors and where they went", "biggest")
    yield figure_html(figures.biggest_figure(run), "figure-biggest")


def section_html(title: str, key: str, words: str = "") -> Iterator[str]:
    """Yields the head of a part of a page, with words on it."""
    yield f'<h2 id="{key}">{html.escape(title)}</h2>'
    if words:
        yield f"<p>{html.escape(words)}</p>"


def figure_html(figure: Any, key: str) -> str:
    """Returns a figure of plotly's as an element of this id."""
    options = {"displaylogo": False, "responsive": True}
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, div_id=key, config=options)
    return text


def table_html(table: Table) -> str:
    """Returns a table, escaped."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in table.heads)
    rows = "\n".join(_row(row) for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"


def _row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _decision_part(run: Run, predicted: Timeline | None) -> Iterator[str]:
    rows = [list(asdict(decision).values()) for decision in decisions(run, predicted)]
    yield from section_html("Decisions", "decisions", _DECISION_WORDS)
    yield '<p><input id="search" type="search" placeholder="search: a name, a class, a tier, an op" autocomplete="off">'
    yield '<span id="count"></span></p>'
    heads = (
        "tensor",
        "class",
        "size",
        "where",
        "when it moves",
        "moved per step",
        "waited for it, predicted",
        "waited for it, measured",
    )
    head = "".join(f'<th data-column="{column}">{text}</th>' for column, text in enumerate(heads))
    yield f'<table id="decision-table"><thead><tr>{head}</tr></thead><tbody></tbody></table>'
    yield f'<script type="application/json" id="decision-rows">{_json_in_html(rows)}</script>'


def _json_in_html(value: object) -> str:
    """Returns JSON in which no text can end the element that it stands in."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _texts(run: Run) -> Iterator[str]:
    if run.config_toml.strip():
        yield f"<details><summary>Config</summary><pre>{html.escape(run.config_toml)}</pre></details>"
    if run.result:
        text = html.escape(json.dumps(run.result, indent=2))
        yield f"<details><summary>Result, measured from outside</summary><pre>{text}</pre></details>"
