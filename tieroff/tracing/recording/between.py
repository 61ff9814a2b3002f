"""What user code does between a backward and whatever comes next; see [Note: what an op costs] in recorder.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from tieroff.parts import is_wrapper, parts_of
from tieroff.tracing.recording.life import End, Life

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
        self._is_backward, self._began = False, 0
        self._results: list[Life] = []  # of this backward, or of several in a row

    def event(self, phase: str, now: int) -> None:
        """An op of this phase begins."""
        self.is_now = False
        if phase == "backward" and not self._is_backward:
            self._is_backward, self._began = True, now
        elif phase not in ("backward", "recompute"):
            self._results = []

    def begin(self, alive: Iterable[End], now: int) -> None:
        """A backward is over. What it made and is there (`alive`) but no gradient of a parameter's, it returns now.

        So a loop has the results of `autograd.grad` from the step before until all new ones are there: of several losses in a
        row those of the last, as in `a, b = (grad(loss, ...) for loss in losses)`.
        """
        self.is_now, self._is_backward = True, False
        gradients = [*self.gradients()]
        plain = (tensor for tensor in gradients if type(tensor) in PLAIN and tensor.layout is torch.strided)
        self._left = {tensor.untyped_storage()._cdata for tensor in plain}
        parts = (part for tensor in gradients if is_wrapper(tensor) for _, part in parts_of(tensor))
        kept = self._left | {part.untyped_storage()._cdata for part in parts if part.layout is torch.strided}
        made = (end for end in [*alive] if end.life.birth > self._began and not end.life.keys)
        self._results += [end.life for end in made if end.key not in kept]
        for life in self._results:
            life.named = now

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
