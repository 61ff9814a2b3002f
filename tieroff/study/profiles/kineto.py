"""The profiler's own output (Kineto): operators on the host, and the work that each gave the GPU."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tieroff.errors import CaptureError
from tieroff.study.profiles.documents import read_document

_WHAT = "the output of torch.profiler (export_chrome_trace)"
_HOST = ("cpu_op", "user_annotation")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime")
_STEP = "ProfilerStep#"
_NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel, a copy or a fill on one stream of the GPU; times in ns on the profiler's clock."""

    name: str
    stream: int
    start_ns: int
    duration_ns: int


@dataclass(eq=False, slots=True)
class Call:
    """An operator, or a range that the program named, on a thread of the host.

    Attributes:
        number: counts up in order of calls.
        record_id: number of the record function, -1 where the profiler did not write it.
        work: what it gave the GPU itself, not what operators called inside it did.
    """

    name: str
    number: int
    record_id: int
    thread: int
    start_ns: int
    stop_ns: int
    work: list[Work]


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profiler saw.

    Attributes:
        calls: in order.
        steps: the intervals of `profiler.step()`, in ns; empty where the program did not call it.
        device: the GPU's name, or "".
        path: the file, for messages.
    """

    calls: tuple[Call, ...]
    steps: tuple[tuple[int, int], ...]
    device: str
    path: str


def read_profile(path: str | Path) -> Profile:
    """Returns what the profiler wrote of a program on a GPU.

    Raises:
        CaptureError: the file is none, or cut off, has no operators, or no work of a GPU that belongs to one.
    """
    document = read_document(path, _WHAT)
    events = document.get("traceEvents")
    if not isinstance(events, list):
        found = "an execution trace: give it as --execution-trace" if "nodes" in document else "no list of traceEvents"
        raise CaptureError(f"{path}: expected {_WHAT}, got {found}")
    try:
        calls = _calls(events)
        orphans = _give_work(events, calls)
        steps = [(c.start_ns, c.stop_ns) for c in calls if c.name.startswith(_STEP)]
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureError(f"{path}: expected {_WHAT}, but an event cannot be read: {error!r}") from error
    if not calls:
        raise CaptureError(f"{path}: expected operators of the host: record with ProfilerActivity.CPU too")
    count = sum(len(call.work) for call in calls)
    if not count:
        raise CaptureError(
            f"{path}: expected work of a GPU that operators gave it, got none ({orphans} pieces of work without an operator): "
            "record with ProfilerActivity.CUDA and ProfilerActivity.CPU"
        )
    if orphans > count:
        raise CaptureError(
            f"{path}: expected to know of each piece of GPU work which operator gave it, but {orphans} of {orphans + count} "
            "belong to none: the file is cut off, or the profiler began in the middle of a step"
        )
    return Profile(tuple(calls), tuple(steps), _device_name(document), str(path))


def _calls(events: list[dict[str, Any]]) -> list[Call]:
    found = [
        Call(
            name=event["name"],
            number=int(event["args"]["External id"]),
            record_id=int(event["args"].get("Record function id", -1)),
            thread=int(event["tid"]),
            start_ns=_ns(event["ts"]),
            stop_ns=_ns(event["ts"]) + _duration_ns(event),
            work=[],
        )
        for event in events
        if event.get("cat") in _HOST and event.get("ph") == "X" and "External id" in event.get("args", {})
    ]
    return sorted(found, key=lambda call: (call.start_ns, call.number))


def _give_work(events: list[dict[str, Any]], calls: list[Call]) -> int:
    """Gives every piece of GPU work to the innermost operator that launched it; returns how many have none."""
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
    }
    by_number = {call.number: call for call in calls}
    by_thread: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        by_thread[call.thread].append(call)
    starts = {thread: [call.start_ns for call in found] for thread, found in by_thread.items()}
    orphans = 0
    for event in events:
        if event.get("cat") not in _DEVICE or event.get("ph") != "X":
            continue
        launch = launches.get(event["args"].get("correlation"))
        owner = by_number.get(event["args"].get("External id", -1))
        if launch is not None and (owner is None or not _holds(owner, _ns(launch["ts"]))):
            # Profilers before 2023 number work apart from operators: the one that runs when it is launched gave it.
            thread = int(launch["tid"])
            owner = _innermost(by_thread.get(thread, []), starts.get(thread, []), _ns(launch["ts"]))
        if owner is None:
            orphans += 1
            continue
        stream = int(event["args"].get("stream", event["tid"]))
        owner.work.append(Work(event["name"], stream, _ns(event["ts"]), _duration_ns(event)))
    return orphans


def _holds(call: Call, instant_ns: int) -> bool:
    return call.start_ns <= instant_ns <= call.stop_ns


def _innermost(calls: list[Call], starts: list[int], instant_ns: int) -> Call | None:
    """Returns the call that began last of those that run at an instant."""
    position = bisect_right(starts, instant_ns)
    return next((call for call in reversed(calls[:position]) if call.stop_ns >= instant_ns), None)


def _ns(microseconds: float) -> int:
    return round(microseconds * _NS_PER_US)


def _duration_ns(event: dict[str, Any]) -> int:
    duration_ns = _ns(event["dur"])
    if duration_ns < 0:
        raise ValueError(f"{event['name']} takes {event['dur']} us")
    return duration_ns


def _device_name(document: dict[str, Any]) -> str:
    devices = document.get("deviceProperties")
    return str(devices[0].get("name", "")) if isinstance(devices, list) and devices else ""
