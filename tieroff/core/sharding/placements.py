"""A PlacementPlan: where a module's parameters, inputs and results lie on the devices of a mesh, and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tieroff.errors import ConfigError

FORMAT = "tieroff-partition-2"

Placements = tuple[int, ...]
"""A placement per mesh dimension, outermost first: a tensor's dimension, or REPLICATED."""


@dataclass(frozen=True, slots=True)
class OpPlacement:
    """How one op of the step runs.

    Attributes:
        name: of the operator, with its overload.
        shapes: of the whole tensors that it reads; what a run does is told by name and shapes.
        reads: where they are brought for it.
        makes: where its results come to lie.
        places: where its results are brought.
        is_direct: each device runs it on its parts as they are, without DTensor's rules.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    reads: tuple[Placements, ...]
    makes: tuple[Placements, ...]
    places: tuple[Placements, ...]
    is_direct: bool = False


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Placements by name.

    Attributes:
        model: what was partitioned.
        mesh_shape: devices per mesh dimension; their product is the number of devices.
        parameters: of each parameter and buffer.
        inputs: of each tensor among the model's inputs, in order.
        modules: of what each module returns (dotted path; "" is the model).
        exchanged_bytes: what all devices exchange in a step, by mesh dimension, as planned.
        ops: of the model's forward and backward, in order.
        first_backward: index of the first of its backward.
        unknown_ops: names of those that every device runs whole, because nobody says how they can be split.
    """

    model: str
    mesh_shape: tuple[int, ...]
    parameters: Mapping[str, Placements]
    inputs: tuple[Placements, ...]
    modules: Mapping[str, Placements]
    exchanged_bytes: tuple[int, ...] = ()
    ops: tuple[OpPlacement, ...] = ()
    first_backward: int = 0
    unknown_ops: tuple[str, ...] = ()


def save_placements(plan: PlacementPlan, path: str | Path) -> None:
    """Writes a plan that `load_placements` reads back as an equal one."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "model": plan.model,
        "mesh_shape": plan.mesh_shape,
        "exchanged_bytes": plan.exchanged_bytes,
        "parameters": dict(plan.parameters),
        "inputs": plan.inputs,
        "modules": dict(plan.modules),
        "first_backward": plan.first_backward,
        "unknown_ops": plan.unknown_ops,
        "ops": [asdict(op) for op in plan.ops],
    }
    # A line per key, and one per op: thousands of ops would else take a hundred lines each.
    rows = {key: json.dumps(value) for key, value in document.items() if key != "ops"}
    lines = [f" {json.dumps(key)}: {text}," for key, text in rows.items()]
    ops = ",\n".join(f"  {json.dumps(op)}" for op in document["ops"])
    Path(path).write_text("\n".join(["{", *lines, ' "ops": [', ops, " ]", "}", ""]), encoding="utf-8")


def load_placements(path: str | Path) -> PlacementPlan:
    """Returns the plan that a file holds.

    Raises:
        ConfigError: the file cannot be read, or is no such plan.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}, not {FORMAT!r}")
        mesh_shape = tuple(int(size) for size in document["mesh_shape"])
        levels = len(mesh_shape)
        return PlacementPlan(
            model=str(document["model"]),
            mesh_shape=mesh_shape,
            parameters={str(name): _placements(found, levels) for name, found in document["parameters"].items()},
            inputs=tuple(_placements(found, levels) for found in document["inputs"]),
            modules={str(name): _placements(found, levels) for name, found in document["modules"].items()},
            exchanged_bytes=tuple(int(size) for size in document["exchanged_bytes"]),
            ops=tuple(_op(found, levels) for found in document["ops"]),
            first_backward=int(document["first_backward"]),
            unknown_ops=tuple(map(str, document["unknown_ops"])),
        )
    except KeyError as error:
        raise ConfigError(f"{path}: expected a partition, but the key {error} is missing") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: expected a partition, but {error}") from error


def _op(found: Any, levels: int) -> OpPlacement:
    return OpPlacement(
        name=str(found["name"]),
        shapes=tuple(tuple(map(int, shape)) for shape in found["shapes"]),
        reads=tuple(_placements(placements, levels, -2) for placements in found["reads"]),
        makes=tuple(_placements(placements, levels, -2) for placements in found["makes"]),
        places=tuple(_placements(placements, levels) for placements in found["places"]),
        is_direct=bool(found["is_direct"]),
    )


def _placements(found: Any, levels: int, least: int = -1) -> Placements:
    placements = tuple(int(placement) for placement in found)
    if len(placements) != levels or min(placements, default=0) < least:
        raise ValueError(f"{found!r} is no placement for each of {levels} mesh dimensions")
    return placements
