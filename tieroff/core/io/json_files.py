"""Traces, plans and timelines as JSON files: `{"format": "tieroff.trace", "version": 2, ...}`.

A file is written beside its place, flushed to the disk and renamed, so a reader sees the old one or the new one. What
is read is checked down to each value against the types of the classes; the error says where in the file it is. Fields
that have their default are left out. Version 1 wrote all fields and knew fewer of them, so one reader does for both.
Fields that no longer exist (`_REMOVED`) are accepted with the value that meant nothing, and refused with any other.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tieroff.core.history import History
from tieroff.core.plan import Plan
from tieroff.core.ranks.collectives import Collectives
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace, validate
from tieroff.errors import CaptureError, InvalidPlanError, TieroffError

_VERSION = 2
_READABLE = (1, 2)
_REMOVED: dict[type, dict[str, Any]] = {Plan: {"bucket_order": [], "period": 1, "segment": None}, Timeline: {"period": 1}}
"""Fields of older files by class, each with its default of then."""

_RUN = "tieroff.engine(model).save_run(FOLDER)"
_WRITERS = {"tieroff.plan": "`tieroff plan --out FILE`"}
_MISFIT = "a file of another kind, or one that was cut off"

Parse = Callable[[Any, str], Any]
T = TypeVar("T")


class _Misfit(Exception):
    """A value that the format does not allow, with its place."""


def save_trace(trace: Trace, path: str | Path) -> None:
    """Writes a trace; see the module for what holds if that fails."""
    _save("tieroff.trace", trace, path)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Writes a plan; see the module for what holds if that fails."""
    _save("tieroff.plan", plan, path)


def save_timeline(timeline: Timeline, path: str | Path) -> None:
    """Writes a timeline; see the module for what holds if that fails."""
    _save("tieroff.timeline", timeline, path)


def save_steps(history: History, path: str | Path) -> None:
    """Writes the figures of steps; see the module for what holds if that fails."""
    _save("tieroff.steps", history, path)


def save_collectives(collectives: Collectives, path: str | Path) -> None:
    """Writes the collectives that a rank called; see the module for what holds if that fails."""
    _save("tieroff.collectives", collectives, path)


def load_trace_json(path: str | Path) -> Trace:
    """Returns the trace in a file that `save_trace` wrote.

    Raises:
        CaptureError: the file is missing, cut off or of another kind, or the trace in it is not sound.
    """
    trace: Trace = _load("tieroff.trace", Trace, path, CaptureError)
    validate(trace, str(path))
    return trace


def load_plan(path: str | Path) -> Plan:
    """Returns the plan in a file that `save_plan` wrote; `tieroff.core.check.plan.check` checks it against a trace.

    Raises:
        InvalidPlanError: the file is missing, cut off or of another kind; `rule` is "file".
    """
    plan: Plan = _load("tieroff.plan", Plan, path, _plan_error)
    return plan


def load_timeline(path: str | Path) -> Timeline:
    """Returns the timeline in a file that `save_timeline` wrote.

    Raises:
        InvalidPlanError: the file is missing, cut off or of another kind; `rule` is "file".
    """
    timeline: Timeline = _load("tieroff.timeline", Timeline, path, _plan_error)
    return timeline


def load_steps(path: str | Path) -> History:
    """Returns the figures in a file that `save_steps` wrote.

    Raises:
        CaptureError: the file is missing, cut off or of another kind.
    """
    history: History = _load("tieroff.steps", History, path, CaptureError)
    return history


def load_collectives(path: str | Path) -> Collectives:
    """Returns the collectives in a file that `save_collectives` wrote.

    Raises:
        CaptureError: the file is missing, cut off or of another kind.
    """
    collectives: Collectives = _load("tieroff.collectives", Collectives, path, CaptureError)
    return collectives


def _plan_error(message: str) -> InvalidPlanError:
    return InvalidPlanError(message, rule="file")


@cache
def _defaults(cls: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass in order, with their defaults; MISSING for a field without."""
    made = {f.name: f.default_factory for f in fields(cls) if f.default_factory is not MISSING}
    return {f.name: made[f.name]() if f.name in made else f.default for f in fields(cls)}


# Most of what a trace holds: asked before each call of `_encode`, since a request to plan is written while a step waits.
_AS_IT_IS = frozenset({int, str, float, bool, type(None)})


def _encode(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [item if type(item) in _AS_IT_IS else _encode(item) for item in value]
    if is_dataclass(value):
        cls: Any = type(value)
        document = {}
        for name, default in _defaults(cls).items():
            content = getattr(value, name)
            if default is MISSING or content != default:
                document[name] = content if type(content) in _AS_IT_IS else _encode(content)
        return document
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {_encode(key): _encode(item) for key, item in value.items()}
    return value


def to_document(value: Any) -> dict[str, Any]:
    """Returns an object of the package's data classes as values of JSON, to travel between two processes of one run."""
    document: dict[str, Any] = _encode(value)
    return document


def from_document(cls: type[T], document: Any) -> T:
    """Returns the object of a class that `to_document` made a document of.

    Raises:
        ValueError: it is no such document.
    """
    try:
        parse: Parse = _object(cls)  # type: ignore[arg-type]  # a class is hashable
        found: T = parse(document, "")
    except _Misfit as error:
        raise ValueError(f"{cls.__name__}: {error}") from None
    return found


def _save(kind: str, value: Any, path: str | Path) -> None:
    write_whole(path, json.dumps({"format": kind, "version": _VERSION, **_encode(value)}, separators=(",", ":")) + "\n")


def write_whole(path: str | Path, text: str) -> None:
    """Writes a text file beside its place, flushes it to the disk and renames it: a reader sees the old one or the new one.

    Raises:
        OSError: it cannot be written; the previous file is unchanged.
    """
    path = Path(path)
    # A random name, opened exclusively: in a shared folder a link planted at it is not followed.
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}.part")
    file = part.open("x", encoding="utf-8")
    try:
        with file:
            file.write(text)
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


def _load(kind: str, cls: Any, path: str | Path, error_of: Callable[[str], TieroffError]) -> Any:
    writes = f"{_WRITERS.get(kind, _RUN)} writes one"
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise error_of(f"{path}: expected a {kind} file, but it cannot be read: {error.strerror or error}; {writes}") from error
    except UnicodeDecodeError as error:
        raise error_of(f"{path}: expected a {kind} file, got {_MISFIT}: no text at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise error_of(
            f"{path}: expected a {kind} file, got {_MISFIT}: line {error.lineno}, column {error.colno}: {error.msg}; {writes}"
        ) from error
    except RecursionError as error:
        raise error_of(f"{path}: expected a {kind} file, got {_MISFIT}: nested too deep") from error
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if found != kind:
        raise error_of(f"{path}: expected format {kind!r}, got {found!r}; {writes}")
    if document.get("version") not in _READABLE:
        raise error_of(f"{path}: expected version {_VERSION} or older of {kind}, got {document.get('version')!r}")
    body = {key: value for key, value in document.items() if key not in ("format", "version")}
    for key, default in _REMOVED.get(cls, {}).items():
        value = body.pop(key, default)
        if value != default:
            raise error_of(f"{path}: {key!r} is no longer supported: expected {default!r}, got {value!r:.60}; plan again")
    try:
        return _object(cls)(body, "")
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


@cache
def _object(cls: Any) -> Parse:
    required = sorted(name for name, default in _defaults(cls).items() if default is MISSING)
    types = get_type_hints(cls)
    spec = {f.name: _parse_of(types[f.name]) for f in fields(cls)}

    def parse(value: Any, where: str) -> Any:
        at = where or "top level"
        if not isinstance(value, dict):
            raise _Misfit(f"{at}: expected an object, got {value!r:.60}")
        for name in value.keys() - spec.keys():
            raise _Misfit(f"{at}: unknown key {name!r}")
        for name in required:
            if name not in value:
                raise _Misfit(f"{at}: {name!r} is missing")
        prefix = f"{where}." if where else ""
        return cls(**{name: spec[name](entry, prefix + name) for name, entry in value.items()})

    return parse


def _parse_of(annotation: Any) -> Parse:
    """Returns what reads a value of a field's type."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    if origin is UnionType and NoneType in args:
        inner = _parse_of(next(arg for arg in args if arg is not NoneType))
        return lambda value, where: None if value is None else inner(value, where)
    if annotation == tuple[int, int]:
        return _pair
    if origin is tuple:
        return _tuple_of(_parse_of(args[0]))
    if origin is dict:
        return _mapping_of(_parse_of(args[0]), _parse_of(args[1]))
    return _one_of(annotation) if issubclass(annotation, Enum) else _object(annotation)


_SIMPLE: dict[Any, Parse] = {int: _integer, str: _text, bool: _flag}
