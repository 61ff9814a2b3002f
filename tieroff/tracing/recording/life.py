"""The life of a storage, from its first sight to its death, as the recorder follows it.

[Note: the ring closes]
The step is a ring: what is alive as it ends is there as the next one begins. A subject's tensor says so by itself. Of
everything else, what stands (state that is not moved, buffers) is there all the time, whenever in the recorded step it was
made. What user code still holds, its last outputs say, is there until the next step has made its like, and beside that for a
moment: a name is given its new value before the old one goes. What a forward returns gets its name as it ends, whenever
in it that was made, and what a loss holds as its backward begins. So are activations that user code holds: beside those of the
next step.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tieroff.core.lifetime import merge_intervals
from tieroff.core.seams import Subject
from tieroff.core.tensor import Tensor, allocated_bytes
from tieroff.core.trace import LARGEST_CALL, Call


class Life:
    """One storage from its first sight to its death.

    Attributes:
        keys: of the subjects that it was, each with the op in which it became that. It has several when autograd saved it once
            more: after a write, or in each of several recomputations that read what user code holds all the time.
        is_next: it is the next step's, whose like the recorded step had too: its inputs.
        is_copy: the engine made it, of a tensor that was elsewhere.
        is_foreign: of a parameter, until somebody says whose it is.
        named: the instant at which a forward or a backward returned it, or the backward of a loss that holds it began; -1 else.
    """

    __slots__ = (
        "birth",
        "birth_op",
        "death",
        "death_op",
        "is_below",
        "is_copy",
        "is_foreign",
        "is_next",
        "keys",
        "named",
        "reads",
        "size_bytes",
        "writes",
    )

    def __init__(self, storage: torch.UntypedStorage, now: int, op: int) -> None:
        self.size_bytes = storage.nbytes()
        self.birth, self.birth_op = now, op
        self.death, self.death_op, self.named = -1, -1, -1
        self.keys: dict[Hashable, int] = {}
        self.is_below = self.is_copy = self.is_foreign = self.is_next = False
        self.reads: set[int] = set()
        self.writes: set[int] = set()

    def until(self, now: int, op: int) -> Life:
        """Returns what of it is over."""
        past = Life.__new__(Life)
        for name in Life.__slots__:
            setattr(past, name, getattr(self, name))
        past.keys, past.reads, past.writes = {}, set(self.reads), set(self.writes)
        past.death, past.death_op = now, op
        return past

    def held(self, count: int) -> list[tuple[int, int]]:
        """Returns the op intervals, of `count` ops, in which the program itself keeps the storage on the device."""
        start = min(self.birth_op, count - 1)
        stop = count if self.death < 0 else min(self.death_op + 1, count)
        return [(start, max(stop, start + 1))]

    def turns(
        self, known: Container[Hashable], deaths: Mapping[Hashable, int], count: int
    ) -> Iterator[tuple[Hashable, int, int]]:
        """Yields each key and the ops, of `count`, in which the storage counts as its: its bytes are there once.

        A key whose subject died before the next one came has its turn until then, and the next from there; subjects that live
        beside each other have the storage's whole life each.
        """
        came = [(key, op) for key, op in self.keys.items() if key in known]
        start = 0
        for (key, _), (_, next_op) in itertools.pairwise([*came, (None, count)]):
            is_over = deaths.get(key, count) <= next_op
            yield key, start, next_op if is_over else count
            start = next_op if is_over else 0


def is_of_parameter(tensor: torch.Tensor) -> bool:
    """True for a parameter as its module has it, or a view of it."""
    return type(tensor._base if tensor._is_view() else tensor) is torch.nn.Parameter


class End(weakref.ref[torch.UntypedStorage]):
    """Tells when a storage is freed, whoever held it last: torch keeps its Python object alive for as long as itself."""

    __slots__ = ("key", "life")

    key: int
    life: Life

    @classmethod
    def of(cls, storage: torch.UntypedStorage, life: Life, tell: Callable[[Any], None]) -> End:
        """Returns the end of a storage, which is told when it comes."""
        end = cls(storage, tell)
        end.key, end.life = storage._cdata, life
        return end


class UserCalls:
    """When user code had tensors that came up for it alone, and what there was by then.

    Args:
        device_type: whose allocator gives the memory.

    Attributes:
        most_bytes: op -> the most of what is no subject's, or a subject's that the op has made; `transient_bytes` fills it.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._began: list[tuple[int, Mapping[Hashable, int]]] = []  # of the calls that are under way
        self._instants: dict[int, Mapping[Hashable, int]] = {}  # what user code had then of what the engine moves
        self.most_bytes: dict[int, int] = {}
        self._most = Call(0, 0)
        self._kept: Collection[Hashable] = ()

    def meta(self, index: Mapping[Hashable, int]) -> dict[str, str]:
        """Returns what a trace's `meta` says of the call that needed most, by the numbers of the trace's tensors."""
        if not self._kept:
            return {}
        tensors = tuple(sorted(index[key] for key in self._kept if key in index))
        return {LARGEST_CALL: replace(self._most, tensors=tensors).written()}

    def begin(self, now: int, kept: Mapping[Hashable, int]) -> None:
        """A call begins; `kept`: what it uses, or the program holds, with the bytes of each."""
        self._began.append((now, kept))

    def end(self, now: int) -> None:
        """The call that began last is over."""
        began, kept = self._began.pop()
        for instant in range(began, now + 1):
            self._instants[instant] = max(self._instants.get(instant, {}), kept, key=lambda one: sum(one.values()))

    def given(self, life: Life, now: int, op: int) -> Life:
        """User code gives a subject memory that it made: its life is the subject's from here; returns that before, nobody's."""
        for instant in range(life.birth, now + 1):  # what the subject lay on may have come up for this
            self._instants.setdefault(instant, {})
        past = life.until(now, op)
        life.birth = now + 1
        return past

    def note(self, instant: int, op: int, size_bytes: int) -> None:
        """There were so many bytes at an instant of an op."""
        if instant in self._instants:
            self.most_bytes[op] = max(self.most_bytes.get(op, 0), size_bytes)
            kept = self._instants[instant]
            needed_bytes = sum(allocated_bytes(one, self._device_type) for one in kept.values()) + size_bytes
            if kept and needed_bytes > self._most.size_bytes:
                self._most, self._kept = Call(op, needed_bytes), kept


class Losses:
    """Leaves behind a loss that are no parameters: a loop has them until it has its next loss, whose backward then begins."""

    def __init__(self) -> None:
        self.lives: list[Life] = []

    def event(self, phase: str, now: int) -> None:
        """An op of this phase begins."""
        if phase == "backward":
            for life in self.lives:
                life.named = now
            self.lives = []


def uses_of(
    lives: Iterable[Life],
    index: Mapping[Hashable, int],
    deaths: Mapping[Hashable, int],
    count: int,
    held: Callable[[Life, int], list[tuple[int, int]]],
) -> tuple[list[list[tuple[int, int]]], list[set[int]], list[set[int]]]:
    """Returns per subject the intervals in which the program held it, and per op what it reads and writes.

    Args:
        lives: of storages on the device.
        index: key of a subject -> its number.
        deaths: key of a subject that died -> the op in which it did.
        count: of the step's ops.
        held: gives the intervals of one.
    """
    holds: list[list[tuple[int, int]]] = [[] for _ in index]
    reads: list[set[int]] = [set() for _ in range(count)]
    writes: list[set[int]] = [set() for _ in range(count)]
    for life in lives:
        intervals = held(life, count)
        for key, start, stop in life.turns(index, deaths, count):
            tensor = index[key]
            holds[tensor] += [(max(a, start), min(b, stop)) for a, b in intervals if max(a, start) < min(b, stop)]
            for per_op, ops in ((reads, life.reads), (writes, life.writes)):
                for op in ops:
                    if start <= op < stop:
                        per_op[op].add(tensor)
    return holds, reads, writes


def tensor_of(
    subject: Subject, index: Mapping[Hashable, int], holds: list[tuple[int, int]], death: int, count: int, device_type: str
) -> Tensor:
    """Returns a subject as the trace, of `count` ops, lists it."""
    return Tensor(
        subject.name,
        allocated_bytes(subject.size_bytes, device_type),
        subject.kind,
        subject.is_persistent,
        subject.is_movable,
        merge_intervals(holds),
        index[subject.owner] if subject.owner is not None else -1,
        min(death + 1, count),  # it was there for a part of the op in which it died
        subject.label,
    )


def transient_bytes(
    lives: Iterable[Life],
    subjects: Mapping[Hashable, bool],
    ends: tuple[Sequence[int], int],
    scratch: Mapping[int, int],
    device_type: str,
    user_calls: UserCalls,
) -> list[int]:
    """Returns per op the peak of live bytes that belong to no subject.

    Args:
        lives: of all storages of the step on the device.
        subjects: the keys of those that count by themselves, and which of them are activations.
        ends: the instant at which each op begins, and the last instant.
        scratch: what ops took for themselves, by the instant at which they ended.
        device_type: whose allocator gave the memory.
        user_calls: is told what there was at each instant.
    """
    starts, now = ends
    born, dead, made = defaultdict[int, int](int), defaultdict[int, int](int), defaultdict[int, int](int)
    for life in lives:
        size_bytes = allocated_bytes(life.size_bytes, device_type)
        kinds = [subjects[key] for key in life.keys if key in subjects]
        if kinds and not life.is_copy:
            made[life.birth] += size_bytes
        if not kinds:
            born[life.birth] += size_bytes
            if life.death >= 0:
                dead[life.death] += size_bytes
        # See [Note: the ring closes].
        if life.death < 0 and life.birth > 0 and not life.is_next and not (kinds and life.is_copy) and all(kinds):
            born[0] += size_bytes
            dead[max(life.birth, life.named)] += size_bytes
    for old, new in _replaced(lives, subjects):
        size_bytes = allocated_bytes(old.size_bytes, device_type)
        born[new.birth] += size_bytes
        dead[old.death] += size_bytes
    peaks = [0] * len(starts)
    total, op, made_bytes = 0, 0, 0
    for instant in range(now + 1):
        while op + 1 < len(starts) and instant >= starts[op + 1]:
            op, made_bytes = op + 1, 0
            peaks[op] = total
        # An op's results exist before its arguments are released.
        total += born.get(instant, 0)
        peaks[op] = max(peaks[op], total + scratch.get(instant, 0))
        made_bytes += made.get(instant, 0) if instant else 0  # what is there as the step begins is made by no op
        user_calls.note(instant, op, total + scratch.get(instant, 0) + made_bytes)
        total -= dead.get(instant, 0)
    return peaks


def _replaced(lives: Iterable[Life], subjects: Container[Hashable]) -> Iterator[tuple[Life, Life]]:
    """Yields pairs of which the program made the second in the place of the first while that was there: both take room then."""
    last: dict[Hashable, Life] = {}
    for life in lives:
        for key in life.keys:
            old = last.get(key)
            if key in subjects and old is not None and not life.is_copy and life.birth <= old.death:
                yield old, life
            last[key] = life
