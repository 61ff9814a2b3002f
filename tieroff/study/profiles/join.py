"""A profile and an execution trace of one program, joined to the trace of one step.

An op of the trace is an operator that itself gave the GPU work, in order of its work's start. Its duration is that of the
work alone, without the host's time between.

[Note: other streams]
A trace has one queue of compute and one of communication. Work on another stream than that of most kernels runs beside it.
Where kernels of a library of collectives do it, its op is one of communication. What awaits it is the first op of compute
that uses what it writes or writes what it uses, or the end of the step: a profile does not say for which event a stream
waited, and the row leaves out the host's time, in which communication goes on. Other work (a copy from a loader) takes no
time of the row, and its tensors are held on the device until the first op that begins after it ended. `meta["beside_ns"]`
has the sum of all such work.

[Note: what a step leaves]
Nobody wrote down when memory is freed: a tensor ends with its last use. Two kinds are known to stay. A gradient stays until
`zero_grad` clears it, or its address is given to another tensor; where neither is seen, to the end of the step. State that
an optimizer makes within the step, as it does in its first one, was there before in all others, so it is persistent.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tieroff.core.lifetime import merge_intervals
from tieroff.core.tensor import Tensor, TensorClass
from tieroff.core.trace import Op, Queue, Trace, validate, with_waits
from tieroff.errors import CaptureError
from tieroff.study.profiles.execution_trace import Node, read_execution_trace
from tieroff.study.profiles.kineto import Call, Profile, read_profile
from tieroff.study.profiles.matching import match
from tieroff.study.profiles.storages import Version, follow_storages

_BACKWARD = "autograd::engine::evaluate_function"
_UPDATE = "Optimizer.step"
_CLEAR = "Optimizer.zero_grad"
_STATE_MAKERS = frozenset(
    f"aten::{name}" for name in ("zeros_like", "zeros", "empty_like", "empty", "full_like", "full", "ones_like", "clone")
)
_COLLECTIVES = ("nccl", "rccl", "oneccl", "msccl")
"""Kernels of communication have one of these in their names."""


def load_profile(profile_path: str | Path, execution_trace_path: str | Path, step: int | None = None) -> Trace:
    """Returns the trace of one step from the two files that PyTorch's profiler writes.

    Args:
        profile_path: what `torch.profiler.profile.export_chrome_trace` wrote.
        execution_trace_path: what an `ExecutionTraceObserver` wrote in the same run, or in one of the same program.
        step: which step of the profile, from 0; None: the one in the middle.

    Raises:
        CaptureError: a file is broken, the two are not of one program, or there is no such step.
    """
    profile = read_profile(profile_path)
    nodes = read_execution_trace(execution_trace_path)
    found = match(profile, nodes, str(execution_trace_path))
    rows = _rows(profile, found, step)
    measured = f"measured by torch's profiler on {profile.device or 'a GPU'}"
    trace = Join(nodes, rows, str(profile_path)).trace(Path(profile_path).name.split(".")[0], measured)
    validate(trace, str(profile_path))
    return trace


@dataclass(frozen=True, slots=True)
class Row:
    """One op of the trace to be."""

    node: Node
    start_ns: int
    stop_ns: int
    duration_ns: int
    is_beside: bool
    is_communication: bool = False


def _rows(profile: Profile, found: dict[Call, Node], step: int | None) -> list[Row]:
    """Returns the ops of one step in order of their work's start."""
    calls = [call for call in profile.calls if call.work]
    steps = profile.steps or ((calls[0].start_ns, calls[-1].stop_ns),)
    number = len(steps) // 2 if step is None else step
    if not 0 <= number < len(steps):
        raise CaptureError(f"{profile.path}: expected a step from 0 to {len(steps) - 1}, got {step}")
    start_ns, stop_ns = steps[number]
    chosen = [call for call in calls if start_ns <= call.start_ns < stop_ns or call.start_ns == start_ns]
    if not chosen:
        raise CaptureError(f"{profile.path}: expected work of the GPU in step {number}, got none: record a step more")
    streams = Counter(work.stream for call in chosen for work in call.work)
    row_stream = streams.most_common(1)[0][0]
    rows = []
    for call in chosen:
        own = [work for work in call.work if work.stream == row_stream]
        works = own or call.work
        rows.append(
            Row(
                node=found[call],
                start_ns=min(work.start_ns for work in works),
                stop_ns=max(work.start_ns + work.duration_ns for work in works),
                duration_ns=sum(work.duration_ns for work in works),
                is_beside=not own,
                is_communication=not own and any(name in work.name.lower() for work in works for name in _COLLECTIVES),
            )
        )
    return sorted(rows, key=lambda row: (row.start_ns, row.node.id))


class Join:
    """Ops and tensors of one step; every version of a storage that an op uses is a tensor."""

    def __init__(self, nodes: Sequence[Node], rows: list[Row], where: str) -> None:
        self._rows, self._nodes = rows, {node.id: node for node in nodes}
        self._uses = follow_storages(nodes, _device(rows, where))
        self._first_id = min(row.node.id for row in rows)
        self._last_id = max(row.node.id for row in rows)
        self._phases = [self._phase(row.node) for row in rows]
        self._index: dict[Version, int] = {}
        self._last_use: dict[Version, int] = {}
        for row in rows:
            own = self._uses[row.node.id]
            # What communication alone needs has a place for as long as that is under way: it is no transient of one op.
            scratch = own.made if row.is_communication else ()
            for version in (*own.reads, *own.writes, *scratch):
                self._index.setdefault(version, len(self._index))
        self._verbs = self._count_uses()
        self._later = {version for id_, own in self._uses.items() if id_ > self._last_id for version in own.reads}
        self._clears = [node.id for node in nodes if node.name.startswith(_CLEAR)]
        self._makers: dict[int, list[int]] = defaultdict(list)  # per address, who made tensors at it
        for version in {version for own in self._uses.values() for version in own.made}:
            self._makers[version.storage].append(version.maker)

    def trace(self, name: str, durations: str) -> Trace:
        """Returns the trace; `durations` says where those of its ops come from."""
        ops = with_waits(self._op(number, row) for number, row in enumerate(self._rows))
        holds = self._holds()
        tensors = tuple(self._tensor(version, holds) for version in self._index)
        beside_ns = sum(row.duration_ns for row in self._rows if row.is_beside)
        meta = {"durations": durations, "beside_ns": str(beside_ns)}
        return Trace(ops, tensors, name=name, origin="file", meta=meta)

    def _op(self, number: int, row: Row) -> Op:
        own = self._uses[row.node.id]
        return Op(
            name=row.node.name,
            duration_ns=0 if row.is_beside and not row.is_communication else row.duration_ns,
            reads=tuple(self._index[version] for version in own.reads),
            writes=tuple(dict.fromkeys(self._index[v] for v in (*own.writes, *(own.made if row.is_communication else ())))),
            transient_bytes=sum(version.size_bytes for version in own.made if version not in self._index),
            phase=self._phases[number],
            queue=Queue.COMMUNICATION if row.is_communication else Queue.COMPUTE,
        )

    def _holds(self) -> dict[Version, list[tuple[int, int]]]:
        """Returns the intervals in which work beside the row needs its tensors; see [Note: other streams]."""
        holds: dict[Version, list[tuple[int, int]]] = defaultdict(list)
        starts = [row.start_ns for row in self._rows]
        for number, row in enumerate(self._rows):
            is_held = row.is_beside and not row.is_communication
            stop = max(bisect_left(starts, row.stop_ns), number + 1) if is_held else 0
            if stop > number + 1:
                own = self._uses[row.node.id]
                for version in {**own.reads, **own.writes}:
                    holds[version].append((number, stop))
        return holds

    def _tensor(self, version: Version, holds: dict[Version, list[tuple[int, int]]]) -> Tensor:
        is_persistent = (
            version.maker < self._first_id or version in self._later or makes_state(self._nodes[version.maker], self._nodes)
        )
        kind = self._kind(version, is_persistent)
        return Tensor(
            name=version.name,
            size_bytes=version.size_bytes,
            kind=kind,
            is_persistent=is_persistent,
            holds=merge_intervals(holds[version]) if version in holds else (),
            lives_until=self._cleared_at(version) if kind is TensorClass.GRADIENT and not is_persistent else -1,
        )

    def _cleared_at(self, version: Version) -> int:
        """Returns the op before which a gradient is freed; see [Note: what a step leaves]."""
        begins = [self._first_op(id_) for id_ in (*self._clears, *self._makers[version.storage]) if id_ > version.maker]
        return min((begin for begin in begins if begin > self._last_use[version]), default=len(self._rows))

    def _first_op(self, id_: int) -> int:
        """Returns the first op of a node that was called after another."""
        return next((number for number, row in enumerate(self._rows) if row.node.id > id_), len(self._rows))

    def _kind(self, version: Version, is_persistent: bool) -> TensorClass:
        """Returns a tensor's class, by the phases that read and write it."""
        uses = self._verbs[version]
        if not is_persistent:
            is_gradient = uses["write backward"] and uses["read optimizer"]
            return TensorClass.GRADIENT if is_gradient else TensorClass.ACTIVATION
        if uses["write backward"]:
            return TensorClass.GRADIENT
        is_state = uses["write optimizer"] and not uses["read forward"] and not uses["read backward"]
        return TensorClass.OPTIMIZER if is_state else TensorClass.PARAMETER

    def _count_uses(self) -> dict[Version, Counter[str]]:
        """Returns per version how many ops of each phase read and write it."""
        found: dict[Version, Counter[str]] = defaultdict(Counter)
        for number, (row, phase) in enumerate(zip(self._rows, self._phases, strict=True)):
            own = self._uses[row.node.id]
            for verb, versions in (("read", own.reads), ("write", own.writes)):
                for version in versions:
                    found[version][f"{verb} {phase}"] += 1
                    self._last_use[version] = number
        return found

    def _phase(self, node: Node) -> str:
        for name in _outwards(node, self._nodes):
            if name.startswith(_UPDATE):
                return "optimizer"
            if name.startswith(_BACKWARD):
                return "backward"
        return "forward"


def makes_state(node: Node, nodes: Mapping[int, Node]) -> bool:
    """Returns whether a call makes state of an optimizer, as its first step does; see [Note: what a step leaves].

    Args:
        node: the call.
        nodes: all, by id.
    """
    chain = list(_outwards(node, nodes))
    return any(a in _STATE_MAKERS and b.startswith(_UPDATE) for a, b in itertools.pairwise(chain))


def _outwards(node: Node | None, nodes: Mapping[int, Node]) -> Iterator[str]:
    """Yields the names of a call and of those that it was made in, innermost first."""
    while node is not None:
        yield node.name
        node = nodes.get(node.parent) if node.parent != node.id else None


def _device(rows: list[Row], where: str) -> str:
    """Returns the device that most tensors of the step's work are on."""
    views = (view for row in rows for views in (*row.node.arguments, row.node.outputs) for view in views)
    devices = Counter(view.device for view in views if view.device != "cpu")
    if not devices:
        raise CaptureError(f"{where}: expected tensors on a GPU in the execution trace, got none")
    return devices.most_common(1)[0][0]
