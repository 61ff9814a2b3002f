"""Traces, plans and timelines as JSON files: `{"format": "tieroff.trace", "version": 1, ...}`.

A file is written beside its place, flushed to the disk and renamed, so a reader sees the old one or the new one. What
is read is checked down to each value; the error says where in the file it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from tieroff.core.plan import Plan, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.timeline import OpSpan, Stall, Timeline, TransferSpan
from tieroff.core.trace import Op, Trace
from tieroff.errors import CaptureError, InvalidPlanError, TieroffError

_VERSION = 1
_MISFIT = "a file of another kind, or one that was cut off"

T = TypeVar("T")
Parse = Callable[[Any, str], Any]


class _Misfit(Exception):
    """A value that is not what the format says, with the place of it."""


def save_trace(trace: Trace, path: str | Path) -> None:
    """Writes a trace; see the module for what holds if that fails."""
    _save("tieroff.trace", trace, path)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Writes a plan; see the module for what holds if that fails."""
    _save("tieroff.plan", plan, path)


def save_timeline(timeline: Timeline, path: str | Path) -> None:
    """Writes a timeline; see the module for what holds if that fails."""
    _save("tieroff.timeline", timeline, path)


def load_trace_json(path: str | Path) -> Trace:
    """Returns the trace in a file that `save_trace` wrote.

    Raises:
        CaptureError: the file is missing, cut off or of another kind, or the trace in it is not sound.
    """
    trace: Trace = _load("tieroff.trace", Trace, _TRACE, path, CaptureError)
    validate_trace(trace, str(path))
    return trace


def load_plan(path: str | Path) -> Plan:
    """Returns the plan in a file that `save_plan` wrote; `tieroff.core.check.check` says whether it fits a trace.

    Raises:
        InvalidPlanError: the file is missing, cut off or of another kind; `rule` is "file".
    """
    plan: Plan = _load("tieroff.plan", Plan, _PLAN, path, _plan_error)
    return plan


def load_timeline(path: str | Path) -> Timeline:
    """Returns the timeline in a file that `save_timeline` wrote.

    Raises:
        InvalidPlanError: the file is missing, cut off or of another kind; `rule` is "file".
    """
    timeline: Timeline = _load("tieroff.timeline", Timeline, _TIMELINE, path, _plan_error)
    return timeline


def validate_trace(trace: Trace, where: str = "trace") -> None:
    """Returns when a trace is sound in itself.

    Raises:
        CaptureError: no ops, an unknown tensor, a size or a duration out of range, a name used twice, or holds that
            are not sorted, disjoint and inside the step.
    """
    op_count, tensor_count = len(trace.ops), len(trace.tensors)
    if not op_count:
        raise CaptureError(f"{where}: expected at least one op, got none")
    for index, op in enumerate(trace.ops):
        at = f"{where}: ops[{index}] ({op.name})"
        if op.duration_ns < 0 or op.transient_bytes < 0:
            raise CaptureError(f"{at}: expected duration_ns and transient_bytes >= 0")
        for tensor in (*op.reads, *op.writes):
            if not 0 <= tensor < tensor_count:
                raise CaptureError(f"{at}: expected tensors 0 to {tensor_count - 1}, got {tensor}")
    names: set[str] = set()
    for index, tensor_ in enumerate(trace.tensors):
        at = f"{where}: tensors[{index}] ({tensor_.name})"
        if tensor_.name in names:
            raise CaptureError(f"{at}: expected names that are unique, this one is there twice")
        names.add(tensor_.name)
        if tensor_.size_bytes <= 0:
            raise CaptureError(f"{at}: expected size_bytes > 0, got {tensor_.size_bytes}")
        if not -1 <= tensor_.owner < tensor_count:
            raise CaptureError(f"{at}: expected owner to be -1 or a tensor below {tensor_count}, got {tensor_.owner}")
        if not -1 <= tensor_.lives_until <= op_count:
            raise CaptureError(f"{at}: expected lives_until to be -1 or at most {op_count}, got {tensor_.lives_until}")
        end = 0
        for start, stop in tensor_.holds:
            if not end <= start < stop <= op_count:
                raise CaptureError(f"{at}: expected holds sorted, disjoint and within 0 to {op_count}")
            end = stop


def _plan_error(message: str) -> InvalidPlanError:
    return InvalidPlanError(message, rule="file")


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {_encode(key): _encode(item) for key, item in value.items()}
    return value


def _save(kind: str, value: Any, path: str | Path) -> None:
    path = Path(path)
    text = json.dumps({"format": kind, "version": _VERSION, **_encode(value)}, separators=(",", ":"))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the rename itself survives a power loss
    finally:
        os.close(folder)


def _load(
    kind: str, cls: type[T], spec: Mapping[str, Parse], path: str | Path, error_of: Callable[[str], TieroffError]
) -> T:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise error_of(f"{path}: expected a {kind} file, but it cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise error_of(f"{path}: expected a {kind} file, got {_MISFIT}: no text at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise error_of(
            f"{path}: expected a {kind} file, got {_MISFIT}: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except RecursionError as error:
        raise error_of(f"{path}: expected a {kind} file, got {_MISFIT}: nested too deep") from error
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if found != kind:
        raise error_of(f"{path}: expected format {kind!r}, got {found!r}")
    if document.get("version") != _VERSION:
        raise error_of(f"{path}: expected version {_VERSION} of {kind}, got {document.get('version')!r}")
    body = {key: value for key, value in document.items() if key not in ("format", "version")}
    try:
        return _object(cls, spec)(body, "")  # type: ignore[no-any-return]
    except _Misfit as error:
        raise error_of(f"{path}: {error}") from None


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Misfit(f"{where}: expected an integer, got {value!r:.60}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _Misfit(f"{where}: expected text, got {value!r:.60}")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _Misfit(f"{where}: expected true or false, got {value!r:.60}")
    return value


def _one_of(enum: type[Enum]) -> Parse:
    def parse(value: Any, where: str) -> Enum:
        for member in enum:
            if member.value == value:
                return member
        raise _Misfit(f"{where}: expected one of {', '.join(m.value for m in enum)}, got {value!r:.60}")

    return parse


def _tuple_of(item: Parse) -> Parse:
    def parse(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Misfit(f"{where}: expected a list, got {value!r:.60}")
        return tuple(item(entry, f"{where}[{index}]") for index, entry in enumerate(value))

    return parse


def _pair(value: Any, where: str) -> tuple[int, int]:
    pair = _tuple_of(_integer)(value, where)
    if len(pair) != 2:
        raise _Misfit(f"{where}: expected two integers, got {len(pair)}")
    return pair[0], pair[1]


def _mapping_of(key: Parse, item: Parse) -> Parse:
    def parse(value: Any, where: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise _Misfit(f"{where}: expected an object, got {value!r:.60}")
        return {key(name, where): item(entry, f"{where}.{name}") for name, entry in value.items()}

    return parse


def _object(cls: type[Any], spec: Mapping[str, Parse]) -> Parse:
    required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}

    def parse(value: Any, where: str) -> Any:
        at = where or "top level"
        if not isinstance(value, dict):
            raise _Misfit(f"{at}: expected an object, got {value!r:.60}")
        for name in value.keys() - spec.keys():
            raise _Misfit(f"{at}: unknown key {name!r}")
        for name in sorted(required - value.keys()):
            raise _Misfit(f"{at}: {name!r} is missing")
        prefix = f"{where}." if where else ""
        return cls(**{name: spec[name](entry, prefix + name) for name, entry in value.items()})

    return parse


_TIER = _one_of(Tier)
_INTEGERS = _tuple_of(_integer)
_OP: dict[str, Parse] = {
    "name": _text,
    "duration_ns": _integer,
    "reads": _INTEGERS,
    "writes": _INTEGERS,
    "transient_bytes": _integer,
    "phase": _text,
    "module": _text,
}
_TENSOR: dict[str, Parse] = {
    "name": _text,
    "size_bytes": _integer,
    "kind": _one_of(TensorClass),
    "is_persistent": _flag,
    "is_movable": _flag,
    "holds": _tuple_of(_pair),
    "owner": _integer,
    "lives_until": _integer,
}
_TRACE: dict[str, Parse] = {
    "ops": _tuple_of(_object(Op, _OP)),
    "tensors": _tuple_of(_object(Tensor, _TENSOR)),
    "name": _text,
    "origin": _text,
    "meta": _mapping_of(_text, _text),
}
_RESIDENCY: dict[str, Parse] = {"tensor": _integer, "tier": _TIER, "start": _integer, "stop": _integer}
_ENDS: dict[str, Parse] = {"tensor": _integer, "source": _TIER, "target": _TIER}
_TRANSFER: dict[str, Parse] = {**_ENDS, "issue_at": _integer, "ready_by": _integer, "rank": _integer}
_PLAN: dict[str, Parse] = {
    "policy": _text,
    "trace_digest": _text,
    "op_count": _integer,
    "budget_bytes": _mapping_of(_TIER, _integer),
    "peak_bytes": _mapping_of(_TIER, _integer),
    "residencies": _tuple_of(_object(Residency, _RESIDENCY)),
    "transfers": _tuple_of(_object(Transfer, _TRANSFER)),
    "recompute": _tuple_of(_text),
    "bucket_order": _INTEGERS,
    "skipped": _mapping_of(_text, _integer),
    "step_ns": _integer,
    "period": _integer,
}
_SPAN: dict[str, Parse] = {"start_ns": _integer, "stop_ns": _integer}
_TIMELINE: dict[str, Parse] = {
    "ops": _tuple_of(_object(OpSpan, _SPAN)),
    "transfers": _tuple_of(_object(TransferSpan, {**_ENDS, **_SPAN, "size_bytes": _integer})),
    "stalls": _tuple_of(_object(Stall, {**_ENDS, "op": _integer, "duration_ns": _integer})),
    "memory": _mapping_of(_TIER, _INTEGERS),
    "step_ns": _integer,
}
