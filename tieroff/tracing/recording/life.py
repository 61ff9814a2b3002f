"""The life of a storage, from its first sight to its death, as the recorder follows it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch


class Life:
    """One storage from its first sight to its death. It has two keys when autograd saved it once more after a write."""

    __slots__ = ("birth", "birth_op", "death", "death_op", "is_below", "keys", "reads", "size_bytes", "writes")

    def __init__(self, storage: torch.UntypedStorage, now: int, op: int) -> None:
        self.size_bytes = storage.nbytes()
        self.birth, self.birth_op = now, op
        self.death, self.death_op = -1, -1
        self.keys: list[Hashable] = []
        self.is_below = False
        self.reads: set[int] = set()
        self.writes: set[int] = set()


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
