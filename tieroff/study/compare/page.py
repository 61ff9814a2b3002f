"""The page of `tieroff compare --plot`: step times of policies beside the bound, and device memory over the step."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tieroff.core.io.json_files import write_whole
from tieroff.core.tensor import Tier
from tieroff.core.timeline import Timeline
from tieroff.report.figures import graph_objects
from tieroff.report.page import check_page
from tieroff.units import GIB, NS_PER_S, format_bytes, format_seconds


@dataclass(frozen=True)
class Compared:
    """One policy's result; `step_s` and `timeline` are None where it found no plan, `bound_s` where none is known.

    `faithful_s` is the step under the policy's own options, None where it has none.
    """

    policy: str
    ideal_s: float
    step_s: float | None = None
    bound_s: float | None = None
    timeline: Timeline | None = None
    faithful_s: float | None = None


def write_comparison(path: Path, title: str, device_bytes: int, compared: Sequence[Compared]) -> None:
    """Writes one HTML file that needs nothing else, not even a network.

    Args:
        path: see `check_page`.
        title: of the planned step.
        device_bytes: the device's budget.
        compared: the results, in the order to show.

    Raises:
        ConfigError: see `check_page`.
        OSError: the file cannot be written.
    """
    check_page(path)
    figures = (step_figure(compared), memory_figure(device_bytes, compared))
    parts = [
        figure.to_html(full_html=False, include_plotlyjs=index == 0, div_id=f"figure{index}")
        for index, figure in enumerate(figures)
    ]
    head = f"<!DOCTYPE html>\n<html>\n<head><meta charset='utf-8'><title>{html.escape(title)}</title></head>\n<body>\n"
    write_whole(path, "\n".join([f"{head}<h1>{html.escape(title)}</h1>", *parts, "</body>\n</html>\n"]))


def step_figure(compared: Sequence[Compared]) -> Any:
    """Bars of step over ideal and the line of bounds, which is lower where a plan does what others may not.

    Marks show what a policy takes under its own options; they are not to be compared with other bars.
    """
    figure = graph_objects().Figure()
    names = [one.policy for one in compared]
    shares = [one.step_s / one.ideal_s if one.step_s is not None and one.ideal_s else None for one in compared]
    texts = ["infeasible" if one.step_s is None else format_seconds(one.step_s) for one in compared]
    figure.add_bar(
        name="step",
        x=names,
        y=[share or 0.0 for share in shares],
        text=[f"{text}, {share:.3f}" if share is not None else text for text, share in zip(texts, shares, strict=True)],
        textposition="outside",
    )
    bounds = [one.bound_s / one.ideal_s if one.bound_s is not None and one.ideal_s else None for one in compared]
    figure.add_scatter(
        name="lower bound", x=names, y=bounds, mode="lines+markers", line_shape="hvh", line_dash="dash", connectgaps=True
    )
    own = [one for one in compared if one.faithful_s is not None and one.ideal_s]
    if own:
        figure.add_scatter(
            name="under options of its own",
            x=[one.policy for one in own],
            y=[(one.faithful_s or 0.0) / one.ideal_s for one in own],
            mode="markers",
            marker_symbol="diamond-open",
        )
    figure.update_layout(title="step time over the ideal, predicted", yaxis_title="step / ideal", xaxis_type="category")
    return figure


def memory_figure(device_bytes: int, compared: Sequence[Compared]) -> Any:
    """Lines of the bytes on the device over the step, one per policy, under the line of the budget."""
    figure = graph_objects().Figure()
    for one in compared:
        if one.timeline is None:
            continue
        starts = [op.start_ns for op in one.timeline.ops]
        held = one.timeline.memory[Tier.DEVICE]
        figure.add_scatter(
            name=one.policy,
            x=[start / NS_PER_S for start in (*starts, *(op.stop_ns for op in one.timeline.ops[-1:]))],
            y=[size / GIB for size in (*held, *held[-1:])],
            mode="lines",
            line_shape="hv",
        )
    figure.add_hline(
        y=device_bytes / GIB, line_dash="dash", line_color="red", annotation_text=f"budget {format_bytes(device_bytes)}"
    )
    figure.update_layout(title="device memory over the step, predicted", xaxis_title="s", yaxis_title="GiB", showlegend=True)
    return figure
