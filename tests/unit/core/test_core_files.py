"""Traces, plans and timelines in files."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieroff.core.io.json_files import load_plan, load_timeline, load_trace_json, save_plan, save_timeline, save_trace
from tieroff.core.plan import Allocation, AllocationKind, HostUpdate, Plan, Repeat, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.timeline import OpSpan, Stall, Timeline, TransferSpan
from tieroff.core.trace import Op, Trace
from tieroff.errors import CaptureError, InvalidPlanError
from tieroff.study.profiles.files import load_trace

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


_PLAN = Plan(
    policy="hand",
    trace_digest=_TRACE.digest,
    op_count=3,
    budget_bytes={Tier.DEVICE: 120, Tier.HOST: 100},
    peak_bytes={Tier.DEVICE: 115, Tier.HOST: 50},
    residencies=(
        Residency(0, Tier.DEVICE, 0, 3),
        Residency(0, Tier.HOST, 1, 3),
        Residency(1, Tier.DEVICE, 0, 2),
        Residency(2, Tier.DEVICE, 2, 3),
    ),
    transfers=(Transfer(0, Tier.DEVICE, Tier.HOST, 1, 2, 0),),
)
_TIMELINE = Timeline(
    ops=(OpSpan(0, 10), OpSpan(10, 30), OpSpan(40, 70)),
    transfers=(TransferSpan(0, Tier.DEVICE, Tier.HOST, 10, 40, 50),),
    stalls=(Stall(2, 10, 0, Tier.DEVICE, Tier.HOST),),
    memory={Tier.DEVICE: (110, 115, 57), Tier.HOST: (0, 50, 50)},
    step_ns=70,
)


def test_trace_plan_and_timeline_come_back_equal(tmp_path: Path) -> None:
    save_trace(_TRACE, tmp_path / "trace.json")
    save_plan(_PLAN, tmp_path / "plan.json")
    save_timeline(_TIMELINE, tmp_path / "timeline.json")
    assert load_trace_json(tmp_path / "trace.json") == _TRACE
    assert load_trace(tmp_path / "trace.json").digest == _TRACE.digest
    assert load_plan(tmp_path / "plan.json") == _PLAN
    assert load_timeline(tmp_path / "timeline.json") == _TIMELINE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "timeline.json", "trace.json"]


def test_truncated_files_are_refused_at_every_length(tmp_path: Path) -> None:
    save_trace(_TRACE, tmp_path / "trace.json")
    save_plan(_PLAN, tmp_path / "plan.json")
    for name, load, error in (("trace.json", load_trace_json, CaptureError), ("plan.json", load_plan, InvalidPlanError)):
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
    for content in (b"[1, 2]", b"\x80\x81", b"null", b'{"format": "tieroff.trace", "version": 3}'):
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
        (("tensors", 1, "owner"), 1, r"tensors\[1\].*owns itself"),
        (("tensors", 0, "owner"), 2, r"tensors\[0\].*without a cycle"),
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


def test_values_that_are_their_defaults_are_left_out(tmp_path: Path) -> None:
    save_plan(_PLAN, tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["version"] == 2
    assert not {"repeats", "allocation"} & document.keys()
    assert set(document["residencies"][0]) == {"tensor", "tier", "start", "stop"}


def test_files_of_version_1_are_read(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(
        '{"format":"tieroff.plan","version":1,"policy":"floor","trace_digest":"d","op_count":3,"budget_bytes":{"device":9},'
        '"peak_bytes":{"device":8},"residencies":[{"tensor":0,"tier":"device","start":0,"stop":3}],"transfers":[{"tensor":0,'
        '"source":"device","target":"host","issue_at":1,"ready_by":2,"rank":0}],"recompute":["net.0"],"bucket_order":[],'
        '"skipped":{"small":2},"step_ns":5,"period":1}'
    )
    assert load_plan(tmp_path / "plan.json") == Plan(
        policy="floor",
        trace_digest="d",
        op_count=3,
        budget_bytes={Tier.DEVICE: 9},
        peak_bytes={Tier.DEVICE: 8},
        residencies=(Residency(0, Tier.DEVICE, 0, 3),),
        transfers=(Transfer(0, Tier.DEVICE, Tier.HOST, 1, 2, 0),),
        recompute=("net.0",),
        skipped={"small": 2},
        step_ns=5,
    )
    (tmp_path / "trace.json").write_text(
        '{"format":"tieroff.trace","version":1,"ops":[{"name":"a","duration_ns":1,"reads":[],"writes":[0],'
        '"transient_bytes":0,"phase":"","module":""}],"tensors":[{"name":"x","size_bytes":2,"kind":"activation",'
        '"is_persistent":false,"is_movable":true,"holds":[],"owner":-1,"lives_until":-1}],"name":"","origin":"file","meta":{}}'
    )
    trace = Trace((Op("a", 1, (), (0,)),), (Tensor("x", 2, TensorClass.ACTIVATION),))
    assert load_trace_json(tmp_path / "trace.json") == trace


_numbers = st.integers(-(2**70), 2**70)
_tiers = st.sampled_from(Tier)
_bytes_per_tier = st.dictionaries(_tiers, _numbers)
_names = st.text(max_size=5).filter(lambda text: text.isprintable())
_plans = st.builds(
    Plan,
    policy=_names,
    trace_digest=_names,
    op_count=_numbers,
    budget_bytes=_bytes_per_tier,
    peak_bytes=_bytes_per_tier,
    residencies=st.lists(
        st.builds(Residency, _numbers, _tiers, _numbers, _numbers, st.just(0) | _numbers, st.just(0) | _numbers), max_size=3
    ).map(tuple),
    transfers=st.lists(
        st.builds(Transfer, _numbers, _tiers, _tiers, _numbers, _numbers, _numbers, st.just(0) | _numbers), max_size=3
    ).map(tuple),
    recompute=st.lists(_names, max_size=2).map(tuple),
    repeats=st.lists(st.builds(Repeat, _numbers, _numbers), max_size=2).map(tuple),
    host_updates=st.lists(st.builds(HostUpdate, _numbers, _numbers, _numbers, _numbers), max_size=2).map(tuple),
    allocation=st.just(Allocation())
    | st.builds(Allocation, st.sampled_from(AllocationKind), st.lists(_numbers, max_size=3).map(tuple)),
    skipped=st.dictionaries(_names, _numbers, max_size=2),
    step_ns=_numbers,
)


@given(plan=_plans)
def test_any_plan_comes_back_equal(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any-plan.json"
    save_plan(plan, path)
    found = load_plan(path)
    assert found == plan


@given(data=st.data())
def test_any_sound_trace_comes_back_equal_with_its_digest(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    count = data.draw(st.integers(1, 4))
    length = data.draw(st.integers(1, 4))
    some = st.lists(st.integers(0, count - 1), max_size=3).map(tuple)
    size = st.integers(0, 2**70)
    ops = [
        data.draw(st.builds(Op, _names, size, some, some, size, st.sampled_from(("", "optimizer")), _names))
        for _ in range(length)
    ]
    holds = st.sampled_from(((), ((0, length),), ((length - 1, length),)))
    tensors = [
        data.draw(
            st.builds(
                Tensor,
                st.just(f"t{i}"),
                size.map(lambda value: value + 1),
                st.sampled_from(TensorClass),
                st.booleans(),
                st.booleans(),
                holds,
                st.integers(-1, i - 1),
                st.integers(-1, length),
            )
        )
        for i in range(count)
    ]
    trace = Trace(tuple(ops), tuple(tensors), data.draw(_names), "step", data.draw(st.dictionaries(_names, _names, max_size=2)))
    path = tmp_path_factory.getbasetemp() / "any-trace.json"
    save_trace(trace, path)
    found = load_trace_json(path)
    assert found == trace
    assert found.digest == trace.digest


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"segment": [0, 2]}, r"'segment' is no longer supported: expected None, got \[0, 2\]; plan again"),
        ({"period": 2}, r"'period' is no longer supported: expected 1, got 2"),
        ({"bucket_order": [1, 0]}, r"'bucket_order' is no longer supported"),
        ({"phases": 1}, r"top level: unknown key 'phases'"),
        ({"allocation": {"kind": "heap"}}, r"allocation\.kind: expected one of bytes, addresses"),
        ({"host_updates": [{"op": 1}]}, r"host_updates\[0\]: 'duration_ns' is missing"),
        ({"repeats": [{"op": 1, "at": "2"}]}, r"repeats\[0\]\.at: expected an integer"),
        ({"residencies": [[1]]}, r"residencies\[0\]: expected an object"),
    ],
)
def test_plan_with_a_wrong_value_is_refused_with_its_place(tmp_path: Path, change: dict[str, object], part: str) -> None:
    save_plan(_PLAN, tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(InvalidPlanError, match=part) as caught:
        load_plan(tmp_path / "plan.json")
    assert caught.value.rule == "file"


def test_missing_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": "tieroff.plan", "version": 1, "policy": "floor"}')
    with pytest.raises(InvalidPlanError, match="'budget_bytes' is missing"):
        load_plan(tmp_path / "plan.json")


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_trace(_TRACE, tmp_path / "trace.json")

    def fail(descriptor: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        save_trace(replace(_TRACE, name="other"), tmp_path / "trace.json")
    assert load_trace_json(tmp_path / "trace.json") == _TRACE
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_link_planted_beside_the_file_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of unfinished files cannot be guessed; even one that was is opened exclusively."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f".trace.json.{os.getpid()}.part").symlink_to(tmp_path / "victim")
    save_trace(_TRACE, tmp_path / "trace.json")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    (tmp_path / f".trace.json.{os.getpid()}.guessed.part").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        save_trace(_TRACE, tmp_path / "trace.json")
    assert (tmp_path / f".trace.json.{os.getpid()}.guessed.part").is_symlink()
    assert (tmp_path / "victim").read_text() == "precious"
    assert load_trace_json(tmp_path / "trace.json") == _TRACE
