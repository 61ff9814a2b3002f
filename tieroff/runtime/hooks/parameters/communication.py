"""FSDP2's collectives as events of the step, so that they are ops of communication in its trace.

[Note: collectives as events]
FSDP2 sends and receives by objects that it lets people replace (`set_custom_all_gather`, `set_custom_reduce_scatter`). Those
that it gets here call the ones that were there, between events of the step. The first event begins an op of communication.
Most collectives of the host are over when the call returns: then the second event begins an op that waits for it. One that goes
on beside compute (`unshard(async_op=True)`) has an event when the call returns, which begins compute beside it, and another
when FSDP2 has waited for it. A collective takes as long as this rank has to wait for it: also for ranks that come to it late.

On an accelerator collectives run on streams, and end when neither the host nor compute's stream knows: there communication
is part of the op that waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tieroff.runtime.execution.autograd import training_phase
from tieroff.runtime.execution.clock import Beside, StepTimes
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.hooks.parameters.fsdp2 import communicating
from tieroff.runtime.step.communication import BESIDE, OVER, Kind
from tieroff.runtime.step.mode import DEMAND, PLANNED

Call = Callable[[], Any]

if TYPE_CHECKING:
    from tieroff.runtime.hooks.parameters.pending import Pending

_STEPS = (DEMAND, PLANNED)


class Begun(NamedTuple):
    """Where a collective began: in which step, at which op and when."""

    times: StepTimes
    op: int
    at_ns: int


class Watched:
    """What FSDP2 makes one kind of collective of one group of parameters with; it calls what was there before.

    Attributes:
        inner: what makes it.
        kind: which collective.
        number, name: of the module that the group belongs to, for people.
    """

    def __init__(self, inner: Any, kind: Kind, number: int, name: str, run: Callable[[Watched, Call], Any]) -> None:
        self.inner, self.kind, self.number, self.name = inner, kind, number, name
        self._run = run

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Makes memory for it."""
        memory: torch.Tensor = self.inner.allocate(*args, **kwargs)
        return memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes it; returns what FSDP2 waits for, None where it is over."""
        return self._run(self, partial(self.inner, *args, **kwargs))


class Communication:
    """The collectives of one model.

    Args:
        context: of its steps.
        is_in_step: tells whether what runs now is part of one.
    """

    def __init__(self, context: StepContext, is_in_step: Callable[[], bool]) -> None:
        self._context, self._is_in_step = context, is_in_step

    def watch(self, model: torch.nn.Module) -> None:
        """From now on they are events."""
        if self._context.traffic.backend.device.type != "cpu":
            return  # see [Note: collectives as events]
        for number, (path, one) in enumerate(communicating(model).items()):
            name = path or "root"
            one.replace(
                Watched(one.gather, Kind.GATHER, number, name, self._run),
                Watched(one.reduce, Kind.REDUCE, number, name, self._run),
            )

    def close(self, model: torch.nn.Module) -> None:
        """They are as they were, but for those that somebody has replaced meanwhile."""
        for one in communicating(model).values():
            one.replace(*(c.inner if isinstance(c, Watched) else c for c in (one.gather, one.reduce)))

    def _run(self, watched: Watched, call: Call) -> Any:
        """Makes a collective, as events of the step that runs."""
        is_reduced = watched.kind is Kind.REDUCE
        if self._context.state.mode not in _STEPS or not (is_reduced or self._is_in_step()):
            return call()
        clock = self._context.clock
        clock.tick((watched.kind, watched.number), lambda: f"{watched.kind}:{watched.name}", self._phase(watched))
        begun = Begun(clock.times, clock.times.last, time.monotonic_ns())
        work = call()
        if work is None:
            self._tick(OVER, watched)
            return None
        self._tick(BESIDE, watched)
        from tieroff.runtime.hooks.parameters.pending import Pending  # torch.distributed is there by now

        pending = Pending(work, lambda wait: self._await(watched, begun, pending, wait))
        clock.under_way.append(pending)
        return pending

    def _await(self, watched: Watched, begun: Begun, pending: Pending, wait: Callable[[], bool]) -> bool:
        """Waits for a collective that went on beside compute."""
        clock, times = self._context.clock, begun.times
        if clock.times is not times or self._context.state.mode not in _STEPS:
            return wait()  # the step that began it is over
        clock.under_way = [one for one in clock.under_way if one is not pending]
        pending.look()
        clock.pause()
        wait_ns = time.monotonic_ns()
        result = wait()
        waited_ns = 0 if pending.over_ns else time.monotonic_ns() - wait_ns
        self._tick(OVER, watched)
        over_ns = pending.over_ns or wait_ns + waited_ns
        times.communicated.append(Beside(begun.op, times.last, begun.at_ns, over_ns, waited_ns))
        return result

    def _tick(self, event: str, watched: Watched) -> None:
        key = f"{event} {watched.kind}"
        self._context.clock.tick((key, watched.number), lambda: f"{key}:{watched.name}", self._phase(watched))

    def _phase(self, watched: Watched) -> str:
        # FSDP2 reduces its last gradients in a callback at the end of backward.
        return "backward" if watched.kind is Kind.REDUCE else training_phase()
