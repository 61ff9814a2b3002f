"""The life of a storage, from its first sight to its death, as the recorder follows it.

[Note: the ring closes]
The step is a ring: what is alive as it ends is there as the next one begins. A subject's tensor says so by itself. Of
everything else, what stands (state that is not moved, buffers) is there all the time, whenever in the recorded step it was
made. What user code still holds, its last outputs say, is there until the next step has made its like, and beside that for a
moment: a name is given its new value before the old one goes.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tieroff.core.tensor import allocated_bytes


class Life:
    """One storage from its first sight to its death. It has two keys when autograd saved it once more after a write.

    Attributes:
        is_next: it is the next step's, whose like the recorded step had too: its inputs.
    """

    __slots__ = ("birth", "birth_op", "death", "death_op", "is_below", "is_next", "keys", "reads", "size_bytes", "writes")

    def __init__(self, storage: torch.UntypedStorage, now: int, op: int) -> None:
        self.size_bytes = storage.nbytes()
        self.birth, self.birth_op = now, op
        self.death, self.death_op = -1, -1
        self.keys: list[Hashable] = []
        self.is_below = self.is_next = False
        self.reads: set[int] = set()
        self.writes: set[int] = set()

    def held(self, count: int) -> list[tuple[int, int]]:
        """Returns the op intervals, of `count` ops, in which the program itself keeps the storage on the device."""
        start = min(self.birth_op, count - 1)
        stop = count if self.death < 0 else min(self.death_op + 1, count)
        return [(start, max(stop, start + 1))]


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


def transient_bytes(
    lives: Iterable[Life],
    subjects: Collection[Hashable],
    starts: Sequence[int],
    scratch: Mapping[int, int],
    now: int,
    device_type: str,
) -> list[int]:
    """Returns per op the peak of live bytes that belong to no subject.

    Args:
        lives: of all storages of the step.
        subjects: the keys of those that count by themselves.
        starts: the instant at which each op begins.
        scratch: what ops took for themselves, by the instant at which they ended.
        now: the last instant.
        device_type: whose allocator gave the memory.
    """
    born, dead = defaultdict[int, int](int), defaultdict[int, int](int)
    for life in lives:
        if life.is_below or any(key in subjects for key in life.keys):
            continue
        size_bytes = allocated_bytes(life.size_bytes, device_type)
        born[life.birth] += size_bytes
        if life.death >= 0:
            dead[life.death] += size_bytes
        elif life.birth > 0 and not life.is_next:  # see [Note: the ring closes]
            born[0] += size_bytes
            dead[life.birth] += size_bytes
    peaks = [0] * len(starts)
    total, op = 0, 0
    for instant in range(now + 1):
        while op + 1 < len(starts) and instant >= starts[op + 1]:
            op += 1
            peaks[op] = total
        # An op's results exist before its arguments are released.
        total += born.get(instant, 0)
        peaks[op] = max(peaks[op], total + scratch.get(instant, 0))
        total -= dead.get(instant, 0)
    return peaks
