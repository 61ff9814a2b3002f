"""Orders, questions, answers and errors as documents of JSON.

The thread that trains writes requests, and a trace has thousands of rows: they go as columns, one list for each field, which
takes a few calls instead of several for each row. The planner's process makes rows of them again.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from tieroff import errors
from tieroff.core.io.json_files import from_document, to_document
from tieroff.core.machine import Machine
from tieroff.core.plan import Capabilities, Plan
from tieroff.core.seams import Made
from tieroff.core.tensor import Tensor, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import StateError, TieroffError
from tieroff.planner.beside.work import Order, Question

Document = dict[str, Any]

# Attributes of errors that are more than their text.
_FIELDS = {
    "InfeasiblePlanError": ("op", "needed_bytes", "available_bytes", "is_proven", "why", "helps"),
    "InvalidPlanError": ("rule",),
}


def write_request(request: Order | Question) -> Document:
    """Returns a request as a document."""
    machine = {field.name: getattr(request.machine, field.name) for field in fields(Machine)}
    if isinstance(request, Question):
        return {"plan": to_document(request.plan), "trace": _write_trace(request.trace), "machine": machine}
    return {
        "traces": [_write_trace(trace) for trace in request.traces],
        "machine": machine,
        "budget": {tier.value: size for tier, size in request.budget.items()},
        "policy": request.policy,
        "effort": request.effort,
        "capabilities": to_document(request.capabilities),
        "recompute": list(request.recompute),
        "chooses_layers": request.chooses_layers,
    }


def read_request(document: Document) -> Order | Question:
    """Returns the request that a document holds."""
    machine = _machine(document["machine"])
    if "plan" in document:
        return Question(from_document(Plan, document["plan"]), _read_trace(document["trace"]), machine)
    return Order(
        traces=tuple(map(_read_trace, document["traces"])),
        machine=machine,
        budget={Tier(tier): size for tier, size in document["budget"].items()},
        policy=document["policy"],
        effort=document["effort"],
        capabilities=from_document(Capabilities, document["capabilities"]),
        recompute=tuple(document["recompute"]),
        chooses_layers=document["chooses_layers"],
    )


def _write_trace(trace: Trace) -> Document:
    rest = to_document(replace(trace, ops=(), tensors=()))
    return {"rest": rest, "ops": _columns(trace.ops), "tensors": _columns(trace.tensors)}


def _read_trace(document: Document) -> Trace:
    rows = {name: _rows(document[name]) for name in ("ops", "tensors")}
    return from_document(Trace, {**document["rest"], **rows})


def _columns(rows: Sequence[Op] | Sequence[Tensor]) -> Document:
    """Returns the values of each field, in the order of the rows, without fields that have their default in all."""
    if not rows:
        return {}
    columns = {field.name: (field.default, list(map(attrgetter(field.name), rows))) for field in fields(rows[0])}
    return {name: column for name, (default, column) in columns.items() if column.count(default) < len(rows)}


def _rows(columns: Document) -> list[Document]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _machine(values: Document) -> Machine:
    peers = values["peer_bytes_per_s"]
    return Machine(**{**values, "peer_bytes_per_s": tuple(peers) if isinstance(peers, list) else peers})


def write_answer(found: Made | tuple[int, int]) -> Document:
    """Returns what was found as a document."""
    if isinstance(found, Made):
        return {"index": found.index, "plan": to_document(found.plan), "forecast": found.forecast}
    return {"forecast": found}


def write_error(error: Exception) -> Document:
    """Returns an error as a document; of one that tieroff does not raise on purpose, where it came from too."""
    if isinstance(error, MemoryError):
        error = StateError("no plan could be made: the process that plans has no memory left; free some, or raise its limit")
    kind = type(error).__name__
    if not isinstance(error, TieroffError):
        return {"error": "", "text": "".join(traceback.format_exception(error)), "fields": {}}
    return {"error": kind, "text": str(error), "fields": {name: getattr(error, name) for name in _FIELDS.get(kind, ())}}


def read_answer(document: Document) -> Made | tuple[int, int]:
    """Returns what a planner answered.

    Raises:
        TieroffError: the planner raised it, and it has the same class, text and attributes.
        StateError: the planner failed in another way, which is a bug.
    """
    if "error" in document:
        kind = getattr(errors, document["error"], None)
        if kind is None:
            raise StateError(f"planning failed, which is a bug in tieroff:\n{document['text']}")
        raise kind(document["text"], **document["fields"])
    step_ns, bound_ns = document["forecast"]
    if "plan" not in document:
        return step_ns, bound_ns
    return Made(document["index"], from_document(Plan, document["plan"]), (step_ns, bound_ns))
