"""The drawn parts of a run's page: lanes over time, bytes per tier over the ops, steps one after another, biggest tensors."""

from __future__ import annotations

import html
import importlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from tieroff.core.explain.describe import away_bytes
from tieroff.core.explain.words import named, op_words
from tieroff.core.io.run_folder import Run
from tieroff.core.tensor import Tier
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.errors import ConfigError
from tieroff.report.lanes import LANES, Span, coarsened, spans_of
from tieroff.units import GIB, KIB, MIB, NS_PER_S, format_bytes, format_seconds

COLORS = {
    "forward": "#8da0b3",
    "backward": "#5f7488",
    "optimizer": "#37474f",
    "recompute": "#b39ddb",
    "other": "#b0bec5",
    "d2h": "#1976d2",
    "h2d": "#4fc3f7",
    "nvme_write": "#e65100",
    "nvme_read": "#ffb300",
    "cpu": "#2e7d32",
    "peers": "#8e24aa",
    "rank": "#d81b60",
}
"""Of phases and links; a stall has the colour of the link, or of the other rank, that it waits for."""
_CAUSES = tuple(COLORS)
TIER_COLORS = {Tier.DEVICE: "#5f7488", Tier.HOST: "#1976d2", Tier.NVME: "#ef8f00"}
WORDS = {
    "compute": "compute",
    "stalls": "stalls",
    "d2h": "device → host",
    "h2d": "host → device",
    "nvme_write": "NVMe write",
    "nvme_read": "NVMe read",
    "cpu": "CPU updates",
    "peers": "communication",
    "rank": "another rank",
}

SPANS_MAX = 4000
"""A timeline of more spans is drawn with those merged that lie nearer than a 2000th of the step."""
GAPS_PER_STEP = 2000
_BIGGEST = 25
# Plotly reads a little HTML in its texts, and knows no &quot;
_escape = partial(html.escape, quote=False)
_NAME_CHARACTERS = 48
# Of a span that stands for many, and is hardly ever busy.
_PALEST = 0.2
_BUDGET_COLOR = "#c62828"
# A budget above this multiple of the used bytes is not drawn.
_FAR = 4


def graph_objects() -> Any:
    """Returns plotly's module of figures.

    Raises:
        ConfigError: plotly is not installed.
    """
    return _plotly("plotly.graph_objects")


def plotly_script() -> str:
    """Returns the text of plotly.js.

    Raises:
        ConfigError: plotly is not installed.
    """
    text: str = _plotly("plotly.offline").get_plotlyjs()
    return text


def _plotly(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"a page needs plotly: {error}; pip install 'tieroff[report]'") from error


def _rows_figure(titles: Sequence[str], heights: Sequence[float] | None = None) -> Any:
    subplots = _plotly("plotly.subplots")
    return subplots.make_subplots(
        rows=len(titles),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.12 / len(titles),
        subplot_titles=titles,
        row_heights=heights,
    )


def _finish(figure: Any, height: int) -> Any:
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 110, "r": 20, "t": 72, "b": 45},
        hovermode="closest",
        # Below plotly's own buttons, above the titles of the rows.
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1.0, "xanchor": "right", "traceorder": "normal"},
        font={"family": "system-ui, sans-serif", "size": 12},
    )
    figure.update_annotations(font_size=13, x=0, xanchor="left", selector={"xref": "paper"})
    return figure


def is_coarse(timeline: Timeline) -> bool:
    """True when a timeline has too many spans to draw each of them."""
    return len(timeline.ops) + len(timeline.transfers) + len(timeline.stalls) > SPANS_MAX


def lanes_figure(run: Run, predicted: Timeline | None) -> Any:
    """Returns lanes of the measured and the predicted step, one above the other on one axis of time."""
    ring = run.trace
    shown = [("measured", run.timeline)] if run.was_timed else []
    shown += [("predicted", predicted)] if predicted is not None else []
    end_ns = max((timeline.ops[-1].stop_ns for _, timeline in shown if timeline.ops), default=0)
    return lanes_of({name: _drawn(timeline, ring, end_ns) for name, timeline in shown}, end_ns, "from the start of the step")


def lanes_of(spans: dict[str, list[Span]], end_ns: int, since: str) -> Any:
    """Returns lanes of spans by title, one row above the other on one axis of time, of which `since` says where it begins."""
    unit_ns, unit = (NS_PER_S, "s") if end_ns >= NS_PER_S else (NS_PER_S // 1000, "ms")
    lanes = [lane for lane in LANES if any(span.lane == lane for own in spans.values() for span in own)]
    figure = _rows_figure(list(spans))
    named: set[str] = set()
    for row, own in enumerate(spans.values(), 1):
        groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in own:
            groups[span.lane, span.cause].append(span)
        for lane, cause in sorted(groups, key=lambda key: (LANES.index(key[0]), _CAUSES.index(key[1]))):
            group = groups[lane, cause]
            legend = cause if lane == "compute" else WORDS[cause]
            figure.add_bar(
                row=row,
                col=1,
                orientation="h",
                name=legend,
                legendgroup=legend,
                showlegend=legend not in named,
                base=[span.start_ns / unit_ns for span in group],
                x=[(span.stop_ns - span.start_ns) / unit_ns for span in group],
                y=[WORDS[lane]] * len(group),
                width=0.75,
                marker={
                    "color": COLORS[cause],
                    "line": {"width": 0},
                    "opacity": [_PALEST + (1 - _PALEST) * span.busy for span in group],
                },
                hovertext=[_hover(span) for span in group],
                hoverinfo="text",
            )
            named.add(legend)
        figure.update_yaxes(
            row=row,
            col=1,
            categoryorder="array",
            categoryarray=[WORDS[lane] for lane in reversed(lanes)],
            range=[-0.5, len(lanes) - 0.5],
        )
    figure.update_layout(barmode="overlay", bargap=0)
    figure.update_xaxes(range=[0, end_ns / unit_ns or 1])
    figure.update_xaxes(row=max(len(spans), 1), col=1, title_text=f"{unit} {since}")
    return _finish(figure, 140 + len(spans) * (50 + 30 * len(lanes)))


def _drawn(timeline: Timeline, ring: Trace, end_ns: int) -> list[Span]:
    spans = spans_of(timeline, ring)
    return coarsened(spans, end_ns // GAPS_PER_STEP) if is_coarse(timeline) else spans


def _hover(span: Span) -> str:
    took = format_seconds((span.stop_ns - span.start_ns) / NS_PER_S)
    what = f"waits for {span.name}" if span.lane == "stalls" else span.name
    return "<br>".join(_escape(line) for line in (what, span.detail, f"{WORDS[span.lane]}, {took}") if line)


def memory_figure(run: Run, predicted: Timeline | None) -> Any:
    """Returns bytes per tier over the ops, predicted and measured, with the budget as a line; a row per tier in use."""
    plan = run.plan
    ring = run.trace
    held = {"predicted": predicted.memory if predicted is not None else {}, "measured": run.timeline.memory}
    tiers = [
        tier
        for tier in Tier
        if tier is Tier.DEVICE or plan.budget_bytes.get(tier, 0) or any(any(of.get(tier, ())) for of in held.values())
    ]
    below = len(tiers) - 1
    figure = _rows_figure([tier.value for tier in tiers], [0.5] + [0.5 / below] * below if below else None)
    names = [_escape(named(op.name, words)) for op, words in zip(ring.ops, op_words(ring), strict=True)]
    for row, tier in enumerate(tiers, 1):
        lines = {name: of[tier] for name, of in held.items() if of.get(tier)}
        _add_tier(figure, row, tier, lines, plan.budget_bytes.get(tier, 0), names)
    figure.update_xaxes(row=len(tiers), col=1, title_text="op")
    return _finish(figure, 170 + 170 * len(tiers))


def _add_tier(
    figure: Any, row: int, tier: Tier, lines: dict[str, tuple[int, ...]], budget_bytes: int, names: list[str]
) -> None:
    most_bytes = max((max(line) for line in lines.values()), default=0)
    unit_bytes, unit = _unit(most_bytes)
    for name, line in lines.items():
        is_measured = name == "measured"
        figure.add_scatter(
            row=row,
            col=1,
            name=name,
            legendgroup=name,
            showlegend=row == 1,
            mode="lines",
            x=list(range(len(line))),
            y=[size / unit_bytes for size in line],
            customdata=names[: len(line)],
            line={
                "shape": "hv",
                "width": 1.5,
                "dash": "solid" if is_measured else "dot",
                "color": TIER_COLORS[tier] if is_measured else "#616161",
            },
            hovertemplate=f"%{{y:.3f}} {unit} {name}<br>op %{{x}}: %{{customdata}}<extra></extra>",
        )
    # A budget far above the used bytes would flatten the curves: then only the title names it.
    is_drawn = 0 < budget_bytes <= _FAR * max(most_bytes, 1)
    if is_drawn:
        figure.add_hline(
            row=row, col=1, y=budget_bytes / unit_bytes, line_dash="dash", line_color=_BUDGET_COLOR, line_width=1.5
        )
    figure.layout.annotations[row - 1].text = _tier_title(tier, budget_bytes, is_drawn=is_drawn)
    figure.update_yaxes(row=row, col=1, title_text=unit, rangemode="tozero")


def _unit(size_bytes: int) -> tuple[int, str]:
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    return next((pair for pair in units if size_bytes >= pair[0]), (1, "B"))


def _tier_title(tier: Tier, budget: int, *, is_drawn: bool) -> str:
    if not budget:
        return f"{tier.value}: no budget of its own"
    return f"{tier.value}: budget {format_bytes(budget)}" + (" (dashed)" if is_drawn else ", far above the used bytes")


def steps_figure(run: Run) -> Any:
    """Returns the time of every step by kind of work, with the predicted time as a line."""
    figure = graph_objects().Figure()
    numbers = [step.number for step in run.steps]
    hover = [f"step {step.number}, {step.phase}: {format_seconds(step.step_ns / NS_PER_S)}" for step in run.steps]
    parts = (
        ("compute", COLORS["backward"], [step.compute_ns for step in run.steps]),
        ("stalls", COLORS["nvme_read"], [step.stall_ns for step in run.steps]),
        ("the engine's own work", "#cfd8dc", [step.rest_ns for step in run.steps]),
    )
    for name, color, values in parts:
        figure.add_bar(
            name=name,
            x=numbers,
            y=[value / NS_PER_S for value in values],
            marker_color=color,
            hovertext=hover,
            hoverinfo="text+name",
        )
    if run.plan.step_ns:
        figure.add_hline(
            y=run.plan.step_ns / NS_PER_S,
            line_dash="dot",
            line_color="#424242",
            annotation_text="predicted",
            annotation_position="top right",
            annotation_bgcolor="rgba(255,255,255,0.8)",
        )
    figure.update_layout(barmode="stack", bargap=0.15, xaxis_title="step", yaxis_title="s")
    return _finish(figure, 320)


def biggest_figure(run: Run) -> Any:
    """Returns the biggest tensors as bars, coloured by the lowest tier that holds bytes of them."""
    ring = run.trace
    away = away_bytes(ring, run.plan)
    biggest = sorted(range(len(ring.tensors)), key=lambda i: (-ring.tensors[i].size_bytes, i))[:_BIGGEST]
    unit_bytes, unit = _unit(max((ring.tensors[i].size_bytes for i in biggest), default=0))
    figure = graph_objects().Figure()
    for tier in Tier:
        own = [i for i in biggest if max((Tier.DEVICE, *away.get(i, {})), key=list(Tier).index) is tier]
        if own:
            figure.add_bar(
                name="stays on the device" if tier is Tier.DEVICE else f"to {tier.value}",
                orientation="h",
                x=[ring.tensors[i].size_bytes / unit_bytes for i in own],
                y=[str(i) for i in own],
                marker_color=TIER_COLORS[tier],
                hovertext=[_place(ring, i, away.get(i, {})) for i in own],
                hoverinfo="text",
            )
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=[str(i) for i in reversed(biggest)],
        tickmode="array",
        tickvals=[str(i) for i in biggest],
        ticktext=[_escape(_short(ring.tensors[i].shown)) for i in biggest],
        automargin=True,
    )
    figure.update_layout(xaxis_title=unit, bargap=0.25)
    return _finish(figure, 130 + 22 * len(biggest))


def _short(name: str) -> str:
    return name if len(name) <= _NAME_CHARACTERS else f"…{name[1 - _NAME_CHARACTERS :]}"


def _place(ring: Trace, index: int, away: dict[Tier, int]) -> str:
    tensor = ring.tensors[index]
    places = ", ".join(f"{format_bytes(size)} to {tier.value}" for tier, size in away.items()) or "stays on the device"
    return _escape(f"{tensor.shown}: {tensor.kind.value}, {format_bytes(tensor.size_bytes)}; {places}")
