"""The modules that run again in backward, as a plan says."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from tieroff.errors import TraceMismatchError
from tieroff.runtime.execution.clock import Clock
from tieroff.runtime.hooks.forward.slot import ForwardSlot
from tieroff.runtime.hooks.parameters.reads import ParameterReads
from tieroff.runtime.hooks.recompute.rerun import recompute


class Recomputation:
    """The modules that run again in backward.

    Attributes:
        slots: dotted path of a module -> its forward's stand-in.
        spent_ns: compute of their second runs in this step, without waits and the engine's own work.
    """

    def __init__(self, model: torch.nn.Module, reads: ParameterReads, clock: Clock) -> None:
        self._model, self._reads, self._clock = model, reads, clock
        self.slots: dict[str, ForwardSlot] = {}
        self.spent_ns = 0

    def begin(self, paths: Collection[str]) -> bool:
        """Makes these modules run again from the next forward on; returns True when one of them did not before.

        Raises:
            TraceMismatchError: the model has no such module: the plan was made for another one.
        """
        wanted = sorted(set(paths) - self.slots.keys())
        modules = dict(self._model.named_modules()) if wanted else {}
        if missing := [path for path in wanted if path not in modules]:
            raise TraceMismatchError(f"the plan has {missing[0]} run again, and the model has no module of that name")
        for path in wanted:
            self.slots[path] = recompute(modules[path], self._reads, partial(self._timed, path))
        return bool(wanted)

    @contextmanager
    def _timed(self, path: str) -> Iterator[None]:
        """Round a second run, which has ops of its own."""
        clock = self._clock
        starts_ns, stops_ns = clock.times.host_starts_ns, clock.times.host_stops_ns
        first, begun_ns = len(starts_ns), time.monotonic_ns()
        clock.tick(("again", path), lambda: f"again:{path}", "backward")
        has_ops = len(starts_ns) > first
        try:
            yield
        finally:
            wall_ns = time.monotonic_ns() - begun_ns
            clock.tick(("resumed", path), lambda: f"resumed:{path}", "backward")
            spans = zip(starts_ns[first:-1], stops_ns[first:], strict=True) if has_ops else ()
            self.spent_ns += sum(stop - start for start, stop in spans) if has_ops else wall_ns
