"""PyTorch's execution trace: every operator of a program with the storages that it takes and gives.

The format is that of `torch.profiler.ExecutionTraceObserver`: schema 1.0.1 has an operator's fields side by side, later
ones (1.0.3-chakra and on) nest them. A tensor is [id, storage, offset, elements, bytes per element, device].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tieroff.errors import CaptureError
from tieroff.study.profiles.documents import read_document

_WHAT = "a PyTorch execution trace (torch.profiler.ExecutionTraceObserver)"
_TENSOR_FIELDS = 6
_WRITTEN = re.compile(r"\(\w+!")


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of an operator: a part of a storage.

    Attributes:
        storage: its number, an address that is used again once the storage is freed.
        stop_bytes: where the part ends, counted from the storage's start.
        device: such as "cuda:0".
    """

    storage: int
    stop_bytes: int
    device: str


@dataclass(frozen=True, slots=True)
class Described:
    """What a node takes, or what it gives, as the file has it: per argument its value, shape and type.

    Attributes:
        values: tensors as lists of six, all else as it was called.
        shapes: of tensors; where `values` has a list, a list.
        types: such as "Tensor(float)", "GenericList[Tensor(float)]" or "Int".
    """

    values: tuple[Any, ...] = ()
    shapes: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """One call of an operator, or a range that the program named.

    Attributes:
        id: counts up in order of calls.
        parent: the node that it was called in.
        name: such as "aten::mm".
        record_id: number of the record function, which the profiler's output has too.
        thread: number of the thread.
        arguments: per argument the tensors in it.
        outputs: the tensors that it returns.
        written: per argument, whether the schema says that it is written; empty where there is no schema.
        schema: of the operator, "" where there is none.
        taken, given: arguments and results with their shapes.
    """

    id: int
    parent: int
    name: str
    record_id: int
    thread: int
    arguments: tuple[tuple[View, ...], ...]
    outputs: tuple[View, ...]
    written: tuple[bool, ...]
    schema: str = ""
    taken: Described = Described()
    given: Described = Described()

    @property
    def is_operator(self) -> bool:
        """False for the roots that the observer adds itself."""
        return not self.name.startswith("[")


def read_execution_trace(path: str | Path) -> list[Node]:
    """Returns the nodes of an execution trace in order of their calls.

    Raises:
        CaptureError: the file is none, or cut off, or says nothing of storages.
    """
    document = read_document(path, _WHAT)
    entries = document.get("nodes")
    if not isinstance(entries, list) or not entries:
        found = "the profiler's own output" if "traceEvents" in document else "no list of nodes"
        raise CaptureError(f"{path}: expected {_WHAT}, got {found}")
    try:
        nodes = sorted((_node(entry) for entry in entries), key=lambda node: node.id)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CaptureError(
            f"{path}: expected {_WHAT}, but a node of schema {document.get('schema')!r} cannot be read: {error!r}"
        ) from error
    if not any(views for node in nodes for views in node.arguments):
        raise CaptureError(f"{path}: expected operators with tensors, but none of the {len(nodes)} nodes has one")
    return nodes


def _node(entry: dict[str, Any]) -> Node:
    if "ctrl_deps" in entry:
        fields = {item["name"]: item["value"] for item in entry["attrs"]}
        parent, taken, given = entry["ctrl_deps"], _described(**entry["inputs"]), _described(**entry["outputs"])
    else:
        fields, parent = entry, entry["parent"]
        taken, given = (
            _described(entry[f"{side}s"], entry.get(f"{side}_shapes", ()), entry.get(f"{side}_types", ()))
            for side in ("input", "output")
        )
    schema = str(fields.get("op_schema", ""))
    return Node(
        id=int(entry["id"]),
        parent=int(parent),
        name=str(entry["name"]),
        record_id=int(fields["rf_id"]),
        thread=int(fields["tid"]),
        arguments=tuple(tuple(_views(value)) for value in taken.values),
        outputs=tuple(_views(list(given.values))),
        written=_written(schema),
        schema=schema,
        taken=taken,
        given=given,
    )


def _described(values: Sequence[Any], shapes: Sequence[Any] = (), types: Sequence[Any] = (), **_: object) -> Described:
    return Described(tuple(values), tuple(shapes), tuple(map(str, types)))


def is_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor, as the format has it."""
    is_like_one = isinstance(value, list) and len(value) == _TENSOR_FIELDS and isinstance(value[-1], str)
    return is_like_one and all(isinstance(field, int) for field in value[:-1])


def _views(value: Any) -> Iterator[View]:
    """Yields the tensors in a value; one without a storage (number 0) has no memory."""
    if not isinstance(value, list):
        return
    if not is_tensor(value):
        for part in value:
            yield from _views(part)
    elif value[1]:
        _, storage, offset, elements, element_bytes, device = value
        yield View(storage, (offset + elements) * element_bytes, device)


def _written(schema: str) -> tuple[bool, ...]:
    """Returns per argument of a schema whether it is written, as "(a!)" says; () without a schema."""
    if "(" not in schema or ") ->" not in schema:
        return ()
    text = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    arguments = [""]
    depth = 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            arguments.append("")
        else:
            arguments[-1] += letter
    return tuple(bool(_WRITTEN.search(argument)) for argument in arguments if argument.strip() not in ("", "*"))
