"""Traces, plans and timelines in files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tieroff.core.files import (
    load_plan,
    load_timeline,
    load_trace_json,
    save_plan,
    save_timeline,
    save_trace,
    validate_trace,
)
from tieroff.core.machine import Machine
from tieroff.core.plan import Plan
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Op, Trace
from tieroff.errors import CaptureError, InvalidPlanError
from tieroff.planner.auto import plan_with_timeline
from tieroff.tracing.files import load_trace

_TRACE = Trace(
    ops=(
        Op("a", 10, (), (0, 1), phase="forward", module="net.0"),
        Op("b", 20, (1,), (), transient_bytes=5),
        Op("c", 30, (0,), (2,)),
    ),
    tensors=(
        Tensor("x", 50, TensorClass.ACTIVATION),
        Tensor("y", 60, TensorClass.ACTIVATION, holds=((0, 2),)),
        Tensor("g", 7, TensorClass.GRADIENT, is_movable=False, owner=0, lives_until=3),
    ),
    name="net",
    origin="step",
    meta={"torch": "2.13"},
)


def _planned() -> tuple[Plan, Timeline]:
    machine = Machine(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)
    return plan_with_timeline(_TRACE, machine, {Tier.DEVICE: 110, Tier.HOST: 100}, "floor")


def test_trace_plan_and_timeline_come_back_equal(tmp_path: Path) -> None:
    plan, timeline = _planned()
    assert plan.transfers
    save_trace(_TRACE, tmp_path / "trace.json")
    save_plan(plan, tmp_path / "plan.json")
    save_timeline(timeline, tmp_path / "timeline.json")
    assert load_trace_json(tmp_path / "trace.json") == _TRACE
    assert load_trace(tmp_path / "trace.json").digest == _TRACE.digest
    assert load_plan(tmp_path / "plan.json") == plan
    assert load_timeline(tmp_path / "timeline.json") == timeline
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "timeline.json", "trace.json"]


def test_truncated_files_are_refused_at_every_length(tmp_path: Path) -> None:
    save_trace(_TRACE, tmp_path / "trace.json")
    save_plan(_planned()[0], tmp_path / "plan.json")
    for name, load, error in (
        ("trace.json", load_trace_json, CaptureError),
        ("plan.json", load_plan, InvalidPlanError),
    ):
        data = (tmp_path / name).read_bytes()
        for length in range(0, len(data) - 1, 41):
            (tmp_path / "cut").write_bytes(data[:length])
            with pytest.raises(error, match="cut"):
                load(tmp_path / "cut")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    save_trace(_TRACE, tmp_path / "trace.json")
    with pytest.raises(InvalidPlanError, match=r"tieroff\.trace"):
        load_plan(tmp_path / "trace.json")
    with pytest.raises(CaptureError, match="cannot be read"):
        load_trace_json(tmp_path / "none.json")
    for content in (b"[1, 2]", b"\x80\x81", b"null", b'{"format": "tieroff.trace", "version": 2}'):
        (tmp_path / "foreign").write_bytes(content)
        with pytest.raises(CaptureError, match="foreign"):
            load_trace_json(tmp_path / "foreign")


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        (("ops", 1, "duration_ns"), "10", r"ops\[1\]\.duration_ns"),
        (("ops", 1, "duration_ns"), -1, r"ops\[1\]"),
        (("ops", 0, "reads"), [9], r"ops\[0\]"),
        (("tensors", 1, "size_bytes"), -5, r"tensors\[1\]"),
        (("tensors", 1, "size_bytes"), True, r"tensors\[1\]\.size_bytes"),
        (("tensors", 1, "name"), "x", r"tensors\[1\]"),
        (("tensors", 1, "kind"), "weights", r"tensors\[1\]\.kind"),
        (("tensors", 1, "holds"), [[2, 1]], r"tensors\[1\]"),
        (("tensors", 1, "holds"), [[0, 9]], r"tensors\[1\]"),
        (("tensors", 1, "holds"), [[0]], r"tensors\[1\]\.holds\[0\]"),
        (("tensors", 1, "owner"), 3, r"tensors\[1\]"),
        (("tensors", 1, "lives_until"), 4, r"tensors\[1\]"),
        (("tensors", 1, "colour"), 4, "colour"),
        (("meta",), {"a": 1}, r"meta\.a"),
        (("ops",), [], "at least one op"),
    ],
)
def test_trace_with_a_wrong_value_is_refused_with_its_place(
    tmp_path: Path, path: tuple[str | int, ...], value: object, part: str
) -> None:
    save_trace(_TRACE, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (tmp_path / "trace.json").write_text(json.dumps(document))
    with pytest.raises(CaptureError, match=part):
        load_trace_json(tmp_path / "trace.json")


def test_missing_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": "tieroff.plan", "version": 1, "policy": "floor"}')
    with pytest.raises(InvalidPlanError, match="'budget_bytes' is missing"):
        load_plan(tmp_path / "plan.json")


def test_validate_trace_takes_a_sound_trace() -> None:
    validate_trace(_TRACE)


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_trace(_TRACE, tmp_path / "trace.json")

    def fail(descriptor: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        save_trace(replace(_TRACE, name="other"), tmp_path / "trace.json")
    assert load_trace_json(tmp_path / "trace.json") == _TRACE
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
