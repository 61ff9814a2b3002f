"""A profiled program as a trace: by hand on three operators, and every broken pair of files refused by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from tieroff.core.tensor import TensorClass
from tieroff.errors import CaptureError
from tieroff.study.profiles.execution_trace import read_execution_trace
from tieroff.study.profiles.files import load_trace
from tieroff.study.profiles.join import load_profile
from tieroff.study.profiles.kineto import read_profile
from tieroff.tracing import profile
from tieroff.tracing.profiling import record

Document = dict[str, Any]
WEIGHT, INPUT, OUT, NORM = 10, 20, 30, 40
"""Storages; the third is freed and used again."""

MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
ADD = "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"
FOREACH = "aten::_foreach_add_.List(Tensor(a!)[] self, Tensor[] other, *, Scalar alpha=1) -> ()"


def tensor(storage: int, elements: int, offset: int = 0) -> list[Any]:
    return [storage + 1, storage, offset, elements, 4, "cuda:0"]


def node(id_: int, name: str, inputs: list[Any], outputs: list[Any], schema: str = "", parent: int = 1) -> Document:
    fields = {"rf_id": id_, "tid": 1, "op_schema": schema}
    return {
        "id": id_,
        "name": name,
        "ctrl_deps": parent,
        "inputs": {"values": inputs},
        "outputs": {"values": outputs},
        "attrs": [{"name": key, "value": value} for key, value in fields.items()],
    }


def program() -> list[Document]:
    """A step: a product, freed after a sum in place; another one at the same address; an update of weight and state."""
    return [
        node(1, "[pytorch|profiler|execution_trace|process]", [], [], parent=1),
        node(2, "ProfilerStep#1", [], []),
        node(3, "aten::mm", [tensor(INPUT, 64), tensor(WEIGHT, 64)], [tensor(OUT, 64)], MM),
        node(4, "aten::add_", [tensor(OUT, 64), tensor(INPUT, 64)], [tensor(OUT, 64)], ADD),
        node(5, "aten::mm", [tensor(INPUT, 64), tensor(INPUT, 64)], [tensor(OUT, 16, offset=16)], MM),
        node(6, "nccl:all_reduce", [tensor(OUT, 16)], []),
        node(7, "Optimizer.step#SGD.step", [], []),
        node(8, "aten::_foreach_add_", [[tensor(WEIGHT, 64), tensor(NORM, 8)], [tensor(OUT, 16)]], [], FOREACH, parent=7),
    ]


def events(nodes: list[Document], streams: dict[int, int] | None = None, kernel: str = "k") -> list[Document]:
    """Each operator takes 10 us on the host, and its work 3 us on the GPU, 100 us later, one after the other."""
    found: list[Document] = []
    for position, entry in enumerate(nodes):
        if entry["name"].startswith("["):
            continue
        is_range = entry["name"].startswith(("ProfilerStep", "Optimizer"))
        number, ts = entry["id"], 1000.0 + 10 * position
        args = {"External id": number, "Record function id": number}
        category = "user_annotation" if is_range else "cpu_op"
        span = 1000 if entry["name"].startswith("ProfilerStep") else 9
        found.append({"ph": "X", "cat": category, "name": entry["name"], "tid": 7, "ts": ts, "dur": span, "args": args})
        if not is_range:
            work = {"External id": number, "correlation": number, "stream": (streams or {}).get(number, 5)}
            found.append({"ph": "X", "cat": "kernel", "name": kernel, "tid": 5, "ts": ts + 100, "dur": 3.25, "args": work})
    return found


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path, {"traceEvents": events(program())}, {"schema": "1.1.0-chakra.0.0.4", "nodes": program()})


def write(folder: Path, kineto: object, trace: object) -> tuple[Path, Path]:
    first, second = folder / "kineto.json.gz", folder / "et.json"
    first.write_bytes(gzip.compress(json.dumps(kineto).encode()))
    second.write_text(json.dumps(trace))
    return first, second


def test_join_follows_versions_of_an_address(files: tuple[Path, Path]) -> None:
    trace = load_profile(*files)
    names = [t.name for t in trace.tensors]
    assert [op.name for op in trace.ops] == ["aten::mm", "aten::add_", "aten::mm", "nccl:all_reduce", "aten::_foreach_add_"]
    uses = [([names[i] for i in op.reads], [names[i] for i in op.writes]) for op in trace.ops]
    assert uses == [
        (["storage 20.0", "storage 10.0"], ["storage 30.1"]),
        (["storage 30.1", "storage 20.0"], ["storage 30.1"]),
        (["storage 20.0"], ["storage 30.2"]),
        (["storage 30.2"], ["storage 30.2"]),
        (["storage 10.0", "storage 40.0", "storage 30.2"], ["storage 10.0", "storage 40.0"]),
    ]
    sizes = {t.name: (t.size_bytes, t.is_persistent) for t in trace.tensors}
    assert sizes == {
        "storage 20.0": (256, True),
        "storage 10.0": (256, True),
        "storage 40.0": (32, True),
        "storage 30.1": (256, False),
        "storage 30.2": (128, False),
    }
    assert [op.duration_ns for op in trace.ops] == [3250] * 5
    assert [op.phase for op in trace.ops] == ["forward"] * 4 + ["optimizer"]
    kinds = {t.name: t.kind for t in trace.tensors}
    assert kinds["storage 10.0"] is TensorClass.PARAMETER and kinds["storage 40.0"] is TensorClass.OPTIMIZER


def test_work_on_another_stream_takes_no_time_of_the_row_and_holds_its_tensors(tmp_path: Path) -> None:
    found = events(program(), streams={3: 9})
    work = next(e for e in found if e.get("cat") == "kernel" and e["args"]["correlation"] == 3)
    work["dur"] = 25.0  # until after the third op began
    trace = load_profile(*write(tmp_path, {"traceEvents": found}, {"nodes": program()}))
    assert [op.duration_ns for op in trace.ops] == [0, 3250, 3250, 3250, 3250]
    assert trace.meta["beside_ns"] == "25000"
    assert {t.name: t.holds for t in trace.tensors}["storage 30.1"] == ((0, 3),)


def test_collectives_run_beside_the_row_until_what_they_write_is_used(tmp_path: Path) -> None:
    found = events(program(), streams={6: 9}, kernel="ncclDevKernel_AllReduce_Sum_f32")
    trace = load_profile(*write(tmp_path, {"traceEvents": found}, {"nodes": program()}))
    assert [op.queue.value for op in trace.ops] == ["compute"] * 3 + ["communication", "compute"]
    assert [op.duration_ns for op in trace.ops] == [3250] * 5
    assert [op.awaits for op in trace.ops] == [-1, -1, -1, -1, 3]
    assert trace.ideal_ns == 5 * 3250  # nothing computes beside it


def test_collective_that_nothing_uses_is_awaited_at_the_end(tmp_path: Path) -> None:
    nodes = program()[:6]
    found = events(nodes, streams={6: 9}, kernel="ncclDevKernel_AllReduce_Sum_f32")
    trace = load_profile(*write(tmp_path, {"traceEvents": found}, {"nodes": nodes}))
    assert trace.communication and all(op.awaits < 0 for op in trace.ops)
    assert trace.done_at[trace.communication[0]] == len(trace.ops)


def test_what_an_operator_made_and_let_go_is_transient(tmp_path: Path) -> None:
    nodes = program()
    scratch = node(9, "aten::empty", [], [tensor(99, 1000)], "aten::empty(SymInt[] size) -> Tensor", parent=8)
    found = [event for event in events([*nodes, scratch]) if event["cat"] != "kernel" or event["args"]["correlation"] != 9]
    trace = load_profile(*write(tmp_path, {"traceEvents": found}, {"nodes": [*nodes, scratch]}))
    assert [op.transient_bytes for op in trace.ops] == [0, 0, 0, 0, 4000]


def test_profile_without_record_functions_is_matched_by_order(tmp_path: Path) -> None:
    found = events(program())
    for event in found:
        event["args"].pop("Record function id", None)
    trace = load_profile(*write(tmp_path, {"traceEvents": found}, {"nodes": program()}))
    assert len(trace.ops) == 5


def test_order_names_where_another_program_goes_apart(tmp_path: Path) -> None:
    found, nodes = events(program()), program()
    for event in found:
        event["args"].pop("Record function id", None)
    nodes[3]["name"] = "aten::sub_"
    with pytest.raises(CaptureError, match=r"operator \d of thread 7 is aten::add_ there and aten::sub_ here"):
        load_profile(*write(tmp_path, {"traceEvents": found}, {"nodes": nodes}))


def test_another_programs_execution_trace_is_refused(tmp_path: Path) -> None:
    nodes = program()
    nodes[2]["name"] = "aten::addmm"
    with pytest.raises(CaptureError, match="record function 3 is aten::mm there and aten::addmm here"):
        load_profile(*write(tmp_path, {"traceEvents": events(program())}, {"nodes": nodes}))


def test_execution_trace_of_fewer_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"3 operators that gave the GPU work are not in it, aten::mm"):
        load_profile(*write(tmp_path, {"traceEvents": events(program())}, {"nodes": program()[:4]}))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.97])
def test_cut_off_profile_is_refused(files: tuple[Path, Path], share: float) -> None:
    content = files[0].read_bytes()
    files[0].write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CaptureError, match=r"kineto.json.gz: expected the output of torch.profiler"):
        load_profile(*files)


def test_cut_off_execution_trace_is_refused(files: tuple[Path, Path]) -> None:
    files[1].write_bytes(files[1].read_bytes()[:-10])
    with pytest.raises(CaptureError, match=r"et.json: expected a PyTorch execution trace .* cut off"):
        load_profile(*files)


def test_files_that_are_swapped_are_refused(files: tuple[Path, Path]) -> None:
    with pytest.raises(CaptureError, match="got an execution trace: give it as --execution-trace"):
        load_profile(files[1], files[0])
    with pytest.raises(CaptureError, match="got the profiler's own output"):
        load_profile(files[0], files[0])


def test_profile_alone_is_refused_and_says_what_to_record(files: tuple[Path, Path]) -> None:
    with pytest.raises(CaptureError, match=r"expected an execution trace beside .* tieroff.tracing.profile\(model, step\)"):
        load_trace(files[0])


def test_profile_without_gpu_work_is_refused(tmp_path: Path) -> None:
    found = [event for event in events(program()) if event["cat"] != "kernel"]
    with pytest.raises(CaptureError, match=r"expected work of a GPU .* ProfilerActivity.CUDA"):
        load_profile(*write(tmp_path, {"traceEvents": found}, {"nodes": program()}))


def test_profile_without_operators_is_refused(tmp_path: Path) -> None:
    found = [event for event in events(program()) if event["cat"] == "kernel"]
    with pytest.raises(CaptureError, match="expected operators of the host"):
        load_profile(*write(tmp_path, {"traceEvents": found}, {"nodes": program()}))


def test_work_that_no_operator_gave_is_refused(tmp_path: Path) -> None:
    found = events(program())
    for event in found:
        if event["cat"] == "kernel" and event["args"]["correlation"] > 4:
            event["args"]["External id"] += 1000
    with pytest.raises(CaptureError, match="belong to none: the file is cut off"):
        load_profile(*write(tmp_path, {"traceEvents": found}, {"nodes": program()}))


def test_duration_below_zero_is_refused(tmp_path: Path) -> None:
    found = events(program())
    found[-1]["dur"] = -1
    with pytest.raises(CaptureError, match="an event cannot be read"):
        load_profile(*write(tmp_path, {"traceEvents": found}, {"nodes": program()}))


def test_execution_trace_without_tensors_is_refused(tmp_path: Path) -> None:
    nodes = program()
    for entry in nodes:
        entry["inputs"]["values"] = [[]]
    with pytest.raises(CaptureError, match="expected operators with tensors, but none of the 8 nodes has one"):
        load_profile(*write(tmp_path, {"traceEvents": events(program())}, {"nodes": nodes}))


@pytest.mark.parametrize("missing", ["id", "ctrl_deps", "inputs", "attrs"])
def test_node_without_a_field_is_refused(tmp_path: Path, missing: str) -> None:
    nodes = program()
    del nodes[4][missing]
    with pytest.raises(CaptureError, match="a node of schema '9' cannot be read"):
        load_profile(*write(tmp_path, {"traceEvents": events(program())}, {"schema": "9", "nodes": nodes}))


def test_step_that_is_not_there_is_refused(files: tuple[Path, Path]) -> None:
    assert load_profile(*files, step=0).ops
    with pytest.raises(CaptureError, match="expected a step from 0 to 0, got 1"):
        load_profile(*files, step=1)


def test_file_that_is_not_there_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"nothing.json: expected .* cannot be read"):
        load_profile(files[0], tmp_path / "nothing.json")


def test_document_of_another_kind_is_refused(files: tuple[Path, Path]) -> None:
    files[1].write_text("[1, 2]")
    with pytest.raises(CaptureError, match="which is a JSON object, got list"):
        load_profile(*files)
    files[1].write_text('{"nodes": []}')
    with pytest.raises(CaptureError, match="got no list of nodes"):
        load_profile(*files)


def test_model_on_the_host_is_not_profiled(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"expected a model on a GPU.* got one on the cpu"):
        profile(torch.nn.Linear(2, 2), lambda: None, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*Profiler.*:UserWarning")
def test_recorded_files_number_their_operators_alike(tmp_path: Path) -> None:
    layer = torch.nn.Linear(8, 8)
    written = record(lambda: layer(torch.ones(2, 8)).sum().backward(), [ProfilerActivity.CPU], tmp_path, 2)
    nodes = {found.record_id: found.name for found in read_execution_trace(written[1]) if found.is_operator}
    document = json.loads(gzip.decompress(written[0].read_bytes()))
    calls = {
        event["args"]["Record function id"]: event["name"]
        for event in document["traceEvents"]
        if event.get("cat") in ("cpu_op", "user_annotation")
    }
    assert calls == nodes
    assert sum(name.startswith("ProfilerStep#") for name in calls.values()) == 2
    with pytest.raises(CaptureError, match="expected work of a GPU"):
        read_profile(written[0])
