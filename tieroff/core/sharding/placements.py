"""A PlacementPlan: where a module's parameters, inputs and results lie on the devices of a mesh, and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tieroff.errors import ConfigError

FORMAT = "tieroff-partition-1"

Placements = tuple[int, ...]
"""A placement per mesh dimension, outermost first: a tensor's dimension, or REPLICATED."""


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Placements by name.

    Attributes:
        model: what was partitioned.
        mesh_shape: devices per mesh dimension; their product is the number of devices.
        parameters: of each parameter.
        inputs: of each tensor among the model's inputs, in order.
        modules: of what each module returns (dotted path; "" is the model).
        exchanged_bytes: what all devices exchange in a step, by mesh dimension, as planned.
    """

    model: str
    mesh_shape: tuple[int, ...]
    parameters: Mapping[str, Placements]
    inputs: tuple[Placements, ...]
    modules: Mapping[str, Placements]
    exchanged_bytes: tuple[int, ...] = ()


def save_placements(plan: PlacementPlan, path: str | Path) -> None:
    """Writes a plan that `load_placements` reads back as an equal one."""
    document = {
        "format": FORMAT,
        "model": plan.model,
        "mesh_shape": plan.mesh_shape,
        "exchanged_bytes": plan.exchanged_bytes,
        "parameters": dict(plan.parameters),
        "inputs": plan.inputs,
        "modules": dict(plan.modules),
    }
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


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
        )
    except KeyError as error:
        raise ConfigError(f"{path}: expected a partition, but the key {error} is missing") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: expected a partition, but {error}") from error


def _placements(found: Any, levels: int) -> Placements:
    placements = tuple(int(placement) for placement in found)
    if len(placements) != levels or min(placements, default=0) < -1:
        raise ValueError(f"{found!r} is no placement for each of {levels} mesh dimensions")
    return placements
