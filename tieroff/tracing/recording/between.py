"""What user code does between a backward and whatever comes next; see [Note: what an op costs] in recorder.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tieroff.parts import is_wrapper, parts_of
from tieroff.tracing.recording.life import End, Life

PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class _Made:
    """A storage that an op has made which is not the step's.

    Attributes:
        storage: itself.
        birth: the instant, and the op of the trace that ran.
        beside_bytes: of what the op used and such ops had made.
    """

    storage: weakref.ref[torch.UntypedStorage]
    birth: tuple[int, int]
    beside_bytes: int


class Between:
    """The ops after a backward, until the next forward, backward or update begins.

    Attributes:
        is_now: they run.
        used_gradients: they used a gradient.
        gradients: returns the gradients that there are.
    """

    def __init__(self, scratch: dict[int, int]) -> None:
        """Takes what ops took for themselves, by the instant at which they ended."""
        self.is_now = self.used_gradients = False
        self._scratch = scratch
        self._made: dict[int, _Made] = {}  # by address
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

    def note(self, storage: torch.UntypedStorage, birth: tuple[int, int], inputs: Iterable[tuple[torch.Tensor, bool]]) -> None:
        """An op that is not the step's has made a storage, at this instant and op of the trace, of these."""
        plain = (tensor for tensor, _ in inputs if type(tensor) in PLAIN and tensor.layout is torch.strided)
        others = {other._cdata: other for tensor in plain if (other := tensor.untyped_storage())._cdata != storage._cdata}
        beside_bytes = sum(other.nbytes() for other in others.values() if self._made_of(other) is not None)
        self._made[storage._cdata] = _Made(weakref.ref(storage), birth, beside_bytes)

    def birth_of(self, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        """Returns instant and op of the birth of a storage that such an op made, which the step uses.

        What it was made of, by such an op too (`h.abs()` in `grad.div_(h.abs() + 1)`), was beside it then, and is the step's
        where the step uses it at once. A batch that is loaded now is not.
        """
        made = self._made_of(storage)
        if made is None:
            return None
        instant, _ = made.birth
        if made.beside_bytes and self.is_now:
            self._scratch[instant] = max(self._scratch.get(instant, 0), made.beside_bytes)
        return made.birth

    def _made_of(self, storage: torch.UntypedStorage) -> _Made | None:
        """Returns what is known of a storage; another may have its address by now."""
        made = self._made.get(storage._cdata)
        return made if made is not None and made.storage() is storage else None

    def look(self, inputs: Iterable[tuple[torch.Tensor, bool]]) -> None:
        """An op is about to use these."""
        if self.used_gradients or not self._left:
            return
        for tensor, _ in inputs:
            # A wrapper may have no storage of its own: its inner tensors are seen by themselves.
            if type(tensor) in PLAIN and tensor.layout is torch.strided:
                self.used_gradients |= tensor.untyped_storage()._cdata in self._left
