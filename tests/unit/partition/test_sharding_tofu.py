"""Tofu's recursion, schemes beside it, and what is left for each device."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support import sharded
from tieroff.cli import app
from tieroff.core.machine import save_machine
from tieroff.core.sharding.graph import PARTIAL, REPLICATED, OpSplit, ShardedOp, ShardedTensor, StepGraph, moved_bytes
from tieroff.core.sharding.placements import load_placements
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import validate
from tieroff.errors import ConfigError
from tieroff.study.sharding.capture import capture_step
from tieroff.study.sharding.local_trace import local_trace
from tieroff.study.sharding.partition_model import partition_model
from tieroff.study.sharding.tofu import SCHEMES, TENSOR_PARALLEL, TOFU, ZERO3, Partition, Scheme, partition_step


@functools.cache
def layer() -> StepGraph:
    return capture_step(sharded.layer_of_width_1024, sharded.MACHINE)


@functools.cache
def gpt() -> StepGraph:
    return capture_step(sharded.small_gpt, sharded.MACHINE)


def placements(partition: Partition, name: str) -> tuple[int, ...]:
    names = [tensor.name for tensor in partition.graph.tensors]
    return partition.placements(names.index(name))


def product(rows: int, inner: int, columns: int) -> StepGraph:
    """One product of two inputs, with the three ways to split it, and whole."""
    tensors = (
        ShardedTensor("input.0", (rows, inner), 4 * rows * inner, "input"),
        ShardedTensor("w", (inner, columns), 4 * inner * columns, "parameter"),
        ShardedTensor("mm", (rows, columns), 4 * rows * columns, "activation"),
    )
    whole = OpSplit((REPLICATED, REPLICATED), (REPLICATED,))
    splits = (OpSplit((0, REPLICATED), (0,)), OpSplit((REPLICATED, 1), (1,)), OpSplit((1, 0), (PARTIAL,)), whole)
    return StepGraph("product", (ShardedOp("aten.mm.default", (0, 1), (2,), splits),), tensors)


@pytest.mark.parametrize("sizes", [(8, 4, 64), (64, 4, 8), (4, 64, 4), (6, 10, 14)])
def test_one_halving_is_the_best_of_all(sizes: tuple[int, int, int]) -> None:
    graph = product(*sizes)
    size = [tensor.size_bytes for tensor in graph.tensors]
    cheapest = min(
        sum(moved_bytes(size[t], p, w) for t, p, w in zip((0, 1), chosen, split.inputs, strict=False))
        + moved_bytes(size[2], split.outputs[0], chosen[2])
        for split in graph.ops[0].splits
        for chosen in itertools.product((0, 1), repeat=3)
    )
    assert partition_step(graph, 2).exchanged_bytes == cheapest


def test_dimensions_that_do_not_divide_are_left_whole() -> None:
    graph = product(7, 6, 5)
    found = partition_step(graph, 4)
    assert [found.placements(i) for i in range(3)] == [(1, REPLICATED), (0, REPLICATED), (REPLICATED, REPLICATED)]


def test_a_number_of_devices_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ConfigError, match="devices, got 6"):
        partition_step(product(8, 8, 8), 6)


def test_layer_of_width_1024_is_split_as_by_megatron() -> None:
    """The first weight by columns and the second by rows; torch keeps weights transposed."""
    found = partition_step(layer(), 8)
    assert placements(found, "up.weight") == (0, 0, 0)
    assert placements(found, "down.weight") == (1, 1, 1)
    pinned = {"query.weight": 0, "key.weight": 0, "value.weight": 0, "out.weight": 1, "up.weight": 0, "down.weight": 1}

    def megatron(graph: StepGraph, tensor: int, dims: list[int]) -> list[int]:
        name = graph.tensors[tensor].name
        return [pinned[name]] if name in pinned else dims or [REPLICATED]

    assert found.exchanged_bytes <= partition_step(layer(), 8, Scheme("megatron", megatron)).exchanged_bytes


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_tofu_exchanges_no_more_than_zero3(devices: int) -> None:
    for graph in (layer(), gpt()):
        tofu, zero3 = (partition_step(graph, devices, scheme).exchanged_bytes for scheme in (TOFU, ZERO3))
        assert 0 < tofu <= zero3


def test_schemes_hold_what_their_names_say() -> None:
    graph = gpt()
    held = {scheme.name: partition_step(graph, 4, scheme).held_share() for scheme in SCHEMES}
    assert held == {"tofu": 0.25, "zero-3": 0.25, "tensor parallel": 0.25, "data parallel": 1.0}
    batch = partition_step(graph, 4, TENSOR_PARALLEL)
    assert placements(batch, "input.0") == (REPLICATED, REPLICATED)


def test_a_device_holds_its_share_and_what_it_does_is_a_sound_trace() -> None:
    whole = local_trace(partition_step(gpt(), 1), sharded.MACHINE, 0)
    for devices in (2, 4):
        step = local_trace(partition_step(gpt(), devices), sharded.MACHINE, 0)
        validate(step)
        assert step.peak_bytes <= whole.peak_bytes / devices * 1.02 + 4096
        weights = [sum(t.size_bytes for t in s.tensors if t.kind is TensorClass.PARAMETER) for s in (whole, step)]
        assert weights[1] * devices == weights[0]


def test_time_of_exchange_is_that_of_the_links() -> None:
    found = partition_step(gpt(), 2)
    slow, fast = (
        local_trace(found, replace(sharded.MACHINE, peer_bytes_per_s=rate), 0).ideal_ns for rate in (10**9, 2 * 10**9)
    )
    expected_ns = found.exchanged_bytes / 2
    assert slow - fast == pytest.approx(expected_ns / 2, abs=len(gpt().ops))
    with pytest.raises(ConfigError, match="peer_bytes_per_s"):
        local_trace(found, replace(sharded.MACHINE, peer_bytes_per_s=0), 0)


def test_each_mesh_dimension_has_the_time_of_its_link() -> None:
    found = partition_step(gpt(), 4)
    outer, inner = found.level_bytes
    assert outer and inner

    def ideal_ns(*rates: int) -> int:
        return local_trace(found, replace(sharded.MACHINE, peer_bytes_per_s=rates), 0).ideal_ns

    base = ideal_ns(10**9, 10**9)
    assert base == local_trace(found, replace(sharded.MACHINE, peer_bytes_per_s=10**9), 0).ideal_ns == ideal_ns(10**9)
    assert ideal_ns(5 * 10**8, 10**9) - base == pytest.approx(outer / 4, abs=len(gpt().ops))
    assert ideal_ns(10**9, 5 * 10**8) - base == pytest.approx(inner / 4, abs=len(gpt().ops))


def test_a_step_refused_on_one_device_is_planned_on_two() -> None:
    found = partition_model(layer(), sharded.MACHINE, 2, lambda step: {Tier.DEVICE: step.peak_bytes * 22 // 100}, "greedy")
    one, two = found.devices
    assert one.plan.status == "infeasible"
    assert two.plan.status == "ok" and (two.plan.d2h_bytes or 0) > 0
    assert found.fastest == 2


def test_command_writes_placements_that_can_be_read(tmp_path: Path) -> None:
    save_machine(sharded.MACHINE, tmp_path / "machine.toml")
    arguments = ["partition", "--model", "tests.support.sharded:small_mlp", "--devices", "4", "--device-budget", "100%"]
    arguments += ["--machine", str(tmp_path / "machine.toml"), "--out", str(tmp_path / "plan.json"), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [row["scheme"] for row in document["schemes"]] == ["tofu", "zero-3", "tensor parallel", "data parallel"]
    assert [row["devices"] for row in document["devices"]] == [1, 2, 4]
    plan = load_placements(tmp_path / "plan.json")
    assert plan.mesh_shape == (2, 2)
    assert {name: list(found) for name, found in plan.parameters.items()} == document["parameters"]
    assert set(plan.modules) == {"up", "down", ""}


@pytest.mark.parametrize(
    ("text", "told"), [("{}", "'format' is missing"), ('{"format": "x"}', "its format is 'x'"), ("", "but")]
)
def test_a_file_that_is_no_partition_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_placements(tmp_path / "plan.json")
