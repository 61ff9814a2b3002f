"""What user code does between a backward and whatever comes next; see [Note: what an op costs] in recorder.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)


class Between:
    """The ops after a backward, until the next forward, backward or update begins.

    Attributes:
        is_now: they run.
        used_gradients: they used a gradient.
        gradients: returns the gradients that there are.
    """

    def __init__(self) -> None:
        self.is_now = self.used_gradients = False
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], tuple[int, int]]] = {}  # by address
        self.gradients: Callable[[], Iterable[torch.Tensor]] = tuple
        self._left = set[int]()

    def begin(self) -> None:
        """A backward is over."""
        self.is_now = True
        plain = (tensor for tensor in self.gradients() if type(tensor) in PLAIN and tensor.layout is torch.strided)
        self._left = {tensor.untyped_storage()._cdata for tensor in plain}

    def note(self, storage: torch.UntypedStorage, instant: int, op: int) -> None:
        """An op that is not the step's has made a storage."""
        self._made[storage._cdata] = weakref.ref(storage), (instant, op)

    def birth_of(self, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        """Returns instant and op of the birth of a storage that such an op made; another may have its address by now."""
        known, birth = self._made.get(storage._cdata, (None, None))
        return birth if known is not None and known() is storage else None

    def look(self, inputs: Iterable[tuple[torch.Tensor, bool]]) -> None:
        """An op is about to use these."""
        if self.used_gradients or not self._left:
            return
        for tensor, _ in inputs:
            # A wrapper may have no storage of its own: its inner tensors are seen by themselves.
            if type(tensor) in PLAIN and tensor.layout is torch.strided:
                self.used_gradients |= tensor.untyped_storage()._cdata in self._left
