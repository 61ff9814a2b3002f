"""An execution trace alone as a trace: by hand on a few operators, beside the join of both files, and broken files."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from tests.support.outside import outside
from tieroff.cli import app
from tieroff.core.machine import Machine, load_machine
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import CaptureError, ConfigError
from tieroff.planner.policies import all_policies
from tieroff.planner.problem.problem import live_bytes
from tieroff.study.compare.rows import compare_rows
from tieroff.study.profiles.alone import load_execution_trace
from tieroff.study.profiles.files import load_trace
from tieroff.study.profiles.join import load_profile
from tieroff.tracing.dry import DryModel, dry_trace

Document = dict[str, Any]
WEIGHT, INPUT, OUT, GRADIENT, STATE, SCRATCH = 10, 20, 30, 40, 50, 60
SIDE = 128
MATRIX_BYTES = SIDE * SIDE * 4

MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
MATMUL = "aten::matmul(Tensor self, Tensor other) -> Tensor"
VIEW = "aten::t(Tensor(a) self) -> Tensor(a)"
ZEROS = "aten::zeros_like(Tensor self, *, ScalarType? dtype=None) -> Tensor"
ZERO = "aten::zero_(Tensor(a!) self) -> Tensor(a!)"
FILL = "aten::fill_.Scalar(Tensor(a!) self, Scalar value) -> Tensor(a!)"
SQRT = "aten::sqrt(Tensor self) -> Tensor"
ADD = "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"
UNKNOWN = "mine::scan(Tensor self) -> Tensor"

GPU = Machine(name="a GPU", fp32_flops_per_s=1e12, device_memory_bytes_per_s=10**11)


def matrix(storage: int, device: str = "cuda:0") -> list[Any]:
    return [storage + 1, storage, 0, SIDE * SIDE, 4, device]


def node(id_: int, name: str, inputs: list[int], outputs: list[int], schema: str = "", parent: int = 2) -> Document:
    def side(storages: list[int]) -> Document:
        shapes, types = [[SIDE, SIDE]] * len(storages), ["Tensor(float)"] * len(storages)
        return {"values": [matrix(storage) for storage in storages], "shapes": shapes, "types": types}

    fields = {"rf_id": id_, "tid": 1, "op_schema": schema}
    attributes = [{"name": key, "value": value} for key, value in fields.items()]
    return {"id": id_, "name": name, "ctrl_deps": parent, "inputs": side(inputs), "outputs": side(outputs), "attrs": attributes}


BACKWARD = "autograd::engine::evaluate_function: MmBackward0"
UPDATE = "Optimizer.step#Adam.step"


def program() -> list[Document]:
    """A first step: a product, its gradient, an update that makes its state and drops a scratch tensor."""
    return [
        node(1, "[pytorch|profiler|execution_trace|process]", [], [], parent=1),
        node(2, "[pytorch|profiler|execution_trace|thread]", [], [], parent=1),
        node(3, "Optimizer.zero_grad#Adam.zero_grad", [], []),
        node(4, "aten::matmul", [INPUT, WEIGHT], [OUT], MATMUL),
        node(5, "aten::t", [WEIGHT], [WEIGHT], VIEW, parent=4),
        node(6, "aten::mm", [INPUT, WEIGHT], [OUT], MM, parent=4),
        node(7, BACKWARD, [], []),
        node(8, "aten::mm", [INPUT, OUT], [GRADIENT], MM, parent=7),
        node(9, UPDATE, [], []),
        node(10, "aten::zeros_like", [WEIGHT], [STATE], ZEROS, parent=9),
        node(11, "aten::zero_", [STATE], [STATE], ZERO, parent=10),
        node(12, "aten::fill_", [STATE], [STATE], FILL, parent=11),
        node(13, "aten::add_", [STATE, GRADIENT], [STATE], ADD, parent=9),
        node(14, "aten::sqrt", [STATE], [SCRATCH], SQRT, parent=9),
        node(15, "aten::add_", [WEIGHT, SCRATCH], [WEIGHT], ADD, parent=9),
    ]


def written(folder: Path, nodes: list[Document]) -> Path:
    path = folder / "et.json"
    path.write_text(json.dumps({"schema": "1.1.0-chakra.0.0.4", "nodes": nodes}))
    return path


def test_kernels_are_the_innermost_calls_with_work(tmp_path: Path) -> None:
    trace = load_execution_trace(written(tmp_path, program()), GPU)
    assert [(op.name, op.phase) for op in trace.ops] == [
        ("aten::mm", "forward"),
        ("aten::mm", "backward"),
        ("aten::add_", "optimizer"),
        ("aten::sqrt", "optimizer"),
        ("aten::add_", "optimizer"),
    ]
    assert all(op.duration_ns > 2 * MATRIX_BYTES * 1e9 / GPU.device_memory_bytes_per_s for op in trace.ops)
    assert trace.meta["durations"].startswith("estimated")
    low, high = map(float, trace.meta["interval"].split())
    assert low < 1.0 < high


def test_state_that_the_first_update_makes_was_there_before(tmp_path: Path) -> None:
    found = {t.name: t for t in load_execution_trace(written(tmp_path, program()), GPU).tensors}
    state, scratch = found[f"storage {STATE}.1"], found[f"storage {SCRATCH}.1"]
    assert state.is_persistent and state.kind is TensorClass.OPTIMIZER
    assert not scratch.is_persistent and scratch.kind is TensorClass.ACTIVATION


def gradient_of(nodes: list[Document], folder: Path) -> Tensor:
    return next(t for t in load_execution_trace(written(folder, nodes), GPU).tensors if t.kind is TensorClass.GRADIENT)


def test_gradient_stays_until_it_is_cleared_or_its_address_is_given_away(tmp_path: Path) -> None:
    assert gradient_of(program(), tmp_path).lives_until == 5  # to the end of the step
    again = node(16, "aten::sqrt", [WEIGHT], [GRADIENT], SQRT)
    last = node(17, "aten::sqrt", [GRADIENT], [SCRATCH], SQRT)
    assert gradient_of([*program(), again, last], tmp_path).lives_until == 6
    cleared = node(16, "Optimizer.zero_grad#Adam.zero_grad", [], [])
    assert gradient_of([*program(), cleared, node(17, "aten::sqrt", [WEIGHT], [SCRATCH], SQRT)], tmp_path).lives_until == 5


def test_step_in_the_middle_is_taken(tmp_path: Path) -> None:
    marked: list[Document] = []
    for number in range(3):
        marked.append(node(100 * number + 90, f"ProfilerStep#{number}", [], []))
        calls = [node(100 * number + 91 + i, "aten::sqrt", [INPUT], [OUT], SQRT) for i in range(number + 1)]
        marked += calls
    path = written(tmp_path, [*program()[:2], *marked])
    assert [len(load_execution_trace(path, GPU, step).ops) for step in (None, 0, 2)] == [2, 1, 3]
    with pytest.raises(CaptureError, match="expected a step from 0 to 2, got 3"):
        load_execution_trace(path, GPU, 3)


def test_operator_that_nobody_knows_takes_its_traffic(tmp_path: Path) -> None:
    trace = load_execution_trace(written(tmp_path, [*program(), node(16, "mine::scan", [INPUT], [SCRATCH], UNKNOWN)]), GPU)
    assert trace.ops[-1].name == "mine::scan"
    assert trace.ops[-1].duration_ns == next(op.duration_ns for op in trace.ops if op.name == "aten::sqrt")


def test_plan_takes_an_execution_trace_alone(tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    links = 'd2h_bytes_per_s = "50GB"\nh2d_bytes_per_s = "50GB"\nhost_bytes = "1GB"\n'
    machine.write_text(f'fp32_flops_per_s = 1e12\ndevice_memory_bytes_per_s = "100GB"\n{links}')
    plain = written(tmp_path, program())
    packed = tmp_path / "et.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        args = ["plan", "--trace", str(path), "--machine", str(machine), "--device-budget", "90%", "--json"]
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0, result.output
        row = json.loads(result.stdout)
        assert row["status"] == "ok" and row["interval_s"] is not None and "not measured" in row["explain"]


Break = Callable[[list[Document]], list[Document]]


def without_shapes(nodes: list[Document]) -> list[Document]:
    return [{**n, "inputs": {"values": n["inputs"]["values"]}, "outputs": {"values": n["outputs"]["values"]}} for n in nodes]


def on_the_host(nodes: list[Document]) -> list[Document]:
    moved: list[Document] = json.loads(json.dumps(nodes).replace("cuda:0", "cpu"))
    return moved


BROKEN: dict[str, tuple[Break, str]] = {
    "no shapes": (without_shapes, r"expected the shapes of what each call takes.* aten::matmul \(node 4\) has none"),
    "no GPU": (on_the_host, "expected calls with tensors on a GPU, got none"),
    "collective": (
        lambda nodes: [*nodes, node(16, "nccl:all_reduce", [GRADIENT], [])],
        r"expected a step of one GPU.* nccl:all_reduce \(node 16\)",
    ),
    "arguments of another operator": (
        lambda nodes: [*nodes, node(16, "aten::mm", [INPUT], [SCRATCH], MM)],
        r"aten::mm \(node 16\) cannot be read",
    ),
    "a schema that is none": (
        lambda nodes: [*nodes, node(16, "aten::mm", [INPUT, WEIGHT], [SCRATCH], "aten::mm of two")],
        r"aten::mm \(node 16\) cannot be read",
    ),
    "no operators": (lambda nodes: nodes[:3], "expected operators with tensors, but none of the 3 nodes has one"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_execution_trace_is_refused_by_name(tmp_path: Path, case: str) -> None:
    change, message = BROKEN[case]
    path = written(tmp_path, change(program()))
    with pytest.raises(CaptureError, match=f"et.json.*{message}"):
        load_execution_trace(path, GPU)


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_cut_off_execution_trace_is_refused(tmp_path: Path, share: float) -> None:
    whole = written(tmp_path, program()).read_bytes()
    for data, name in ((whole, "cut.json"), (gzip.compress(whole), "cut.json.gz")):
        path = tmp_path / name
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(CaptureError, match=rf"{name}.*(cut off|cannot be read to its end)"):
            load_trace(path, machine=GPU)


def test_times_need_a_machine_and_its_figures(tmp_path: Path) -> None:
    path = written(tmp_path, program())
    with pytest.raises(CaptureError, match="expected a machine to estimate op times for"):
        load_trace(path)
    with pytest.raises(ConfigError, match="fp32_flops_per_s"):
        load_trace(path, machine=Machine())


COLLECTIVE = ("c10d::", "record_param_comms", "nccl:")
WHOLE = {"aten::convolution": "aten::cudnn_convolution"}


def uses(trace: Trace) -> list[tuple[str, list[int], list[int]]]:
    def sizes(indices: tuple[int, ...]) -> list[int]:
        return sorted(trace.tensors[index].size_bytes for index in indices)

    ops: list[Op] = [op for op in trace.ops if not op.name.startswith(COLLECTIVE)]
    return [(WHOLE.get(op.name, op.name), sizes(op.reads), sizes(op.writes)) for op in ops]


def test_resnet_alone_has_the_ops_of_both_files(tmp_path: Path, project: Path) -> None:
    """What the rule finds without a profiler is what the profiler saw on the GPU, op by op."""
    source = outside("gpu/kineto/resnet_1gpu_et.json.gz")
    document = json.loads(gzip.decompress(source.read_bytes()))
    document["nodes"] = [entry for entry in document["nodes"] if not entry["name"].startswith(COLLECTIVE)]
    path = tmp_path / "resnet.json"
    path.write_text(json.dumps(document))
    alone = load_trace(path, machine=load_machine(project / "configs/machines/a100_40gb.toml"))
    both = load_profile(outside("gpu/kineto/nccl_data.json.gz"), source)
    assert uses(alone) == uses(both)
    assert alone.peak_bytes == pytest.approx(both.peak_bytes, rel=0.01)


PARAMETERS, MASKS = 774_030_080, 36 * 1024 * 1024
"""Of GPT-2 large; each layer has a causal mask of 1,024 x 1,024 bytes."""


@pytest.fixture(scope="module")
def gpt2_large(project: Path) -> Trace:
    machine = load_machine(project / "configs/machines/a100_40gb.toml")
    return load_trace(outside("gpu/kineto/hf_GPT2_et.json.tar.gz"), machine=machine)


def test_gpt2_large_has_the_peak_of_its_adam_step(gpt2_large: Trace) -> None:
    """Parameters, gradients, two moments and a root of one of them at once, in fp32."""
    by_class = Counter[TensorClass]()
    for tensor in gpt2_large.tensors:
        by_class[tensor.kind] += tensor.size_bytes
    assert by_class[TensorClass.OPTIMIZER] == 2 * 4 * PARAMETERS
    assert by_class[TensorClass.GRADIENT] == 4 * PARAMETERS
    assert gpt2_large.peak_bytes == pytest.approx(5 * 4 * PARAMETERS + MASKS, rel=0.01)


def test_gpt2_large_has_the_live_bytes_of_the_same_model_on_fake_tensors(gpt2_large: Trace, project: Path) -> None:
    """Up to the update, which tieroff makes in buckets, while the program that was traced made it at once."""

    def factory() -> DryModel:
        sizes = {"n_layer": 36, "n_embd": 1280, "n_head": 20, "loss_type": "ForCausalLM"}
        model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, attn_implementation="eager"))
        tokens = torch.zeros((1, 512), dtype=torch.long)
        inputs = {"input_ids": tokens, "labels": tokens}
        return DryModel(model.train(), inputs, lambda out: out.loss, lambda params: torch.optim.Adam(params, foreach=True))

    machine = load_machine(project / "configs/machines/a100_40gb.toml")
    dry = dry_trace(factory, machine, kernels="cuda", min_bytes=0)
    for phase in ("forward", "backward"):
        assert most_bytes(gpt2_large, phase) == pytest.approx(most_bytes(dry, phase) + MASKS, rel=0.01)


def most_bytes(trace: Trace, phase: str) -> int:
    return max(live for live, op in zip(live_bytes(trace).tolist(), trace.ops, strict=True) if op.phase == phase)


def test_gpt2_large_is_planned(gpt2_large: Trace, project: Path) -> None:
    check_plans(gpt2_large, project, ["greedy", "g10", "auto"], least=3)


@pytest.mark.long
def test_every_policy_takes_gpt2_large(gpt2_large: Trace, project: Path) -> None:
    """Its peak is in the update, so policies that move activations alone say what they would need."""
    check_plans(gpt2_large, project, sorted(all_policies()), least=20)


def check_plans(trace: Trace, project: Path, policies: list[str], least: int) -> None:
    machine = load_machine(project / "configs/machines/a100_40gb.toml")
    budget = {Tier.DEVICE: trace.peak_bytes * 19 // 20}
    found = compare_rows(trace, machine, budget, policies)
    planned = [result.plan.peak_bytes[Tier.DEVICE] for result in found if result.plan is not None]
    assert len(planned) >= least and max(planned) <= budget[Tier.DEVICE]
    assert all("would do" in result.row.reason for result in found if result.plan is None)
