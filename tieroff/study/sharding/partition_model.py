"""A model's step over several devices: partitions beside each other, and the offload plan for what each device holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tieroff.core.machine import Machine
from tieroff.core.sharding.graph import PARTIAL, REPLICATED, ShardedTensor, StepGraph
from tieroff.core.sharding.placements import OpPlacement, PlacementPlan
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.study.compare.rows import Row, plan_row
from tieroff.study.sharding.local_trace import local_trace
from tieroff.study.sharding.tofu import SCHEMES, TOFU, Partition, partition_step

MIN_BYTES = 64 << 10
"""Smaller tensors of a device's step are not listed."""


@dataclass(frozen=True, slots=True)
class SchemeRow:
    """What one scheme exchanges in a step, and what each device holds.

    Attributes:
        exchanged_bytes: of all devices, outermost level first.
        held_share: of the parameters, by one device.
        peak_bytes: of one device, with nothing moved off it.
    """

    scheme: str
    exchanged_bytes: tuple[int, ...]
    held_share: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class DevicesRow:
    """Tofu's partition over so many devices, and the offload plan of one of them."""

    devices: int
    exchanged_bytes: int
    peak_bytes: int
    plan: Row


@dataclass(frozen=True, slots=True)
class Partitioned:
    """What `tieroff partition --model` tells.

    Attributes:
        unknown_ops: ops that nobody gives ways to split: each device runs them whole.
        schemes: a row per scheme, for all devices.
        devices: a row per number of devices.
        fastest: of the numbers of devices whose plan keeps the budget, or 0 where none does.
        placements: Tofu's, for all devices.
    """

    unknown_ops: tuple[str, ...]
    schemes: tuple[SchemeRow, ...]
    devices: tuple[DevicesRow, ...]
    fastest: int
    placements: PlacementPlan


def partition_model(
    graph: StepGraph, machine: Machine, device_count: int, budget_of: Callable[[Trace], dict[Tier, int]], policy: str = "auto"
) -> Partitioned:
    """Returns partitions of a step over up to `device_count` devices.

    Args:
        graph: the step.
        machine: one device's, with `peer_bytes_per_s`.
        device_count: a power of two.
        budget_of: from the step on one device to each device's budget per tier.
        policy: who plans what is moved off a device.

    Raises:
        ConfigError: the number of devices is no power of two, or the machine gives no bandwidth between devices.
    """
    schemes = []
    for scheme in SCHEMES:
        found = partition_step(graph, device_count, scheme)
        peak = local_trace(found, machine, MIN_BYTES).peak_bytes
        schemes.append(SchemeRow(scheme.name, found.level_bytes, found.held_share(), peak))
    budget = budget_of(local_trace(partition_step(graph, 1), machine, MIN_BYTES))
    rows = []
    for count in (1 << level for level in range(device_count.bit_length())):
        found = partition_step(graph, count, TOFU)
        step = local_trace(found, machine, MIN_BYTES)
        row = plan_row(step, machine, budget, policy).row
        rows.append(DevicesRow(count, found.exchanged_bytes, step.peak_bytes, row))
    fitting = [row for row in rows if row.plan.step_s is not None]
    fastest = min(fitting, key=lambda row: row.plan.step_s or 0.0).devices if fitting else 0
    return Partitioned(graph.unknown_ops, tuple(schemes), tuple(rows), fastest, placements_of(found))


def placements_of(partition: Partition) -> PlacementPlan:
    """Returns a partition's placements by name. Where a module's result is a sum to be, it is whole."""
    graph, tensors = partition.graph, partition.graph.tensors

    def whole(index: int) -> tuple[int, ...]:
        return tuple(REPLICATED if p == PARTIAL else p for p in partition.placements(index))

    return PlacementPlan(
        model=partition.graph.name,
        mesh_shape=(2,) * len(partition.levels),
        parameters={t.name: whole(i) for i, t in enumerate(tensors) if _is_held(t)},
        inputs=tuple(whole(i) for i, t in enumerate(tensors) if t.kind == "input" and not _is_held(t)),
        modules={name: whole(index) for name, index in graph.outputs_of},
        exchanged_bytes=partition.level_bytes,
        ops=tuple(_op(partition, position) for position, op in enumerate(graph.ops) if op.is_run),
        first_backward=sum(op.is_run for op in graph.ops[: graph.first_backward]),
        unknown_ops=graph.unknown_ops,
    )


def _is_held(tensor: ShardedTensor) -> bool:
    return tensor.kind == "parameter" or (tensor.kind == "input" and not tensor.name.startswith("input."))


def _op(partition: Partition, position: int) -> OpPlacement:
    op, tensors = partition.graph.ops[position], partition.graph.tensors
    return OpPlacement(
        name=op.name,
        shapes=tuple(tensors[t].shape for t in op.inputs),
        reads=partition.reads(position),
        makes=partition.makes(position),
        places=tuple(partition.placements(t) for t in op.outputs),
        is_direct=op.is_direct,
    )


def as_document(found: Partitioned) -> dict[str, Any]:
    """Returns what `--json` prints."""
    return {
        "unknown_ops": list(found.unknown_ops),
        "schemes": [
            {
                "scheme": row.scheme,
                "exchanged_bytes": sum(row.exchanged_bytes),
                "exchanged_bytes_by_level": list(row.exchanged_bytes),
                "held_share": row.held_share,
                "peak_device_bytes": row.peak_bytes,
            }
            for row in found.schemes
        ],
        "devices": [
            {"devices": row.devices, "exchanged_bytes": row.exchanged_bytes, "peak_bytes": row.peak_bytes, **row.plan.as_dict()}
            for row in found.devices
        ],
        "fastest": found.fastest or None,
        "parameters": {name: list(placements) for name, placements in found.placements.parameters.items()},
        "modules": {name: list(placements) for name, placements in found.placements.modules.items()},
    }
