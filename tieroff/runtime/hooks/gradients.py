"""The gradients of moved parameters: where they go when they arrive, and that they are there when more is added."""

from __future__ import annotations

from dataclasses import replace

import torch

from tieroff.core.seams import Subject
from tieroff.core.tensor import TensorClass
from tieroff.runtime.execution.autograd import current_graph_task
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.hooks.parameters.sharded import Shards
from tieroff.runtime.items.gradient import GradientItem
from tieroff.runtime.items.parameter import ParameterItem, ShardItem, part_gradient
from tieroff.runtime.movable import why_unmovable
from tieroff.runtime.settings import Settings
from tieroff.runtime.step.mode import DEMAND, IDLE, PASS, PLANNED
from tieroff.runtime.step.quiet import NOTHING, Quiet


class Gradients:
    """What happens to the gradients of moved parameters; the items are those of `HomeTable.gradients`.

    Attributes:
        quiet: ids of parameters whose gradients stay as they come; see [Note: quiet events] in step/quiet.py.
    """

    def __init__(self, context: StepContext, settings: Settings, shards: Shards) -> None:
        self._context, self._shards = context, shards
        self._state, self._clock = context.state, context.clock
        self._items = context.homes.gradients
        self._are_covered = TensorClass.GRADIENT in settings.covers
        self._reduced: list[GradientItem] = []  # pinned: see `_keep_until_reduced`
        self._resident: list[torch.Tensor] = []  # parameters whose gradients are resident in the plan that runs
        self.quiet: frozenset[int] = frozenset()
        self._quiet_of: tuple[Quiet, frozenset[int]] = NOTHING, frozenset()
        self._older: list[Subject] = []  # those that were there before the step that is recorded
        context.clock.at_divergence.append(self)
        context.clock.at_backward_begin.append(self.sweep)  # those that were cleared since make room for those that come

    def arrived(self, item: ParameterItem) -> None:
        """A gradient reached the home of a moved parameter."""
        context, state = self._context, self._context.state
        state.saw_backward = state.saw_gradient = True
        if state.mode is IDLE or state.mode is PASS:
            return
        if not isinstance(item, ShardItem):
            self._took_place(item)
            return
        backend = context.traffic.backend
        if self._are_covered and item.leaf is not None:
            with context.state.lock:
                part_gradient(item.leaf, backend.copied)
                backend.wrote_elsewhere()
        with backend.computing():  # FSDP2 reduces under a stream of its own
            self._took_place(item)

    def _took_place(self, item: ParameterItem) -> None:
        context = self._context
        context.clock.watch_backward()
        if item.position not in context.runner.quiet.gradients:
            context.clock.tick(("grad", item.position), lambda: f"grad:{item.name}", "backward")
        leaf = item.leaf
        if leaf is not None and item.position in context.runner.resident_gradients and item.position not in self._items:
            self._resident.append(leaf)
            if context.traffic.tell_held is not None and item.grad is not None:
                context.traffic.register_memory(item.grad)
            return
        with context.state.lock:
            if not self._are_covered:
                return
            grad = item.grad
            if grad is None:  # frozen since the forward: none is made
                context.runner.passed(("gradient", item.position))
                return
            known = self._items.get(item.position)
            if known is not None and known.tensor is grad:
                known.refresh(context.traffic)
            else:
                known = self._take(item, grad)
            is_reduced = isinstance(item, ShardItem)  # by FSDP2, which is done with it
            if known is not None and not known.is_shown_below and not is_reduced and _may_be_reduced():
                self._keep_until_reduced(known)
                context.state.record.bind(known)
            elif known is not None and context.state.mode is DEMAND:
                known.leave(context.traffic)  # at once: hooks of users run next, and may write it
                context.state.record.bind(known)
            context.clock.resume()

    def arrived_quietly(self, home: torch.Tensor) -> None:
        """A gradient reached a parameter of `quiet`."""
        state, clock = self._state, self._clock
        state.saw_backward = state.saw_gradient = True
        if not clock.is_backward_open:
            clock.watch_backward()
        self._resident.append(home)
        if self._context.traffic.tell_held is not None and home.grad is not None:
            self._context.traffic.register_memory(home.grad)

    def left_plan(self) -> None:
        """The step goes on without its plan: what was resident moves like all others."""
        self.quiet = frozenset()
        for known in self._taken_over():
            known.leave(self._context.traffic)

    def note_unseen(self) -> None:
        """The model is about to sleep: gradients that came while nothing moved, which no hook saw, leave with the others."""
        if self._are_covered:
            leaves = [item.leaf for item in self._context.homes.parameters.values() if item.position not in self._items]
            known = set(map(id, self._resident))
            self._resident += [leaf for leaf in leaves if leaf is not None and leaf.grad is not None and id(leaf) not in known]

    def begin(self) -> None:
        """A step begins; gradients are left of one whose plan left them alone where it did not clear them."""
        self._taken_over()

    def begin_planned(self) -> None:
        """The plan of a step, if it has one, begins."""
        quiet = self._context.runner.quiet
        if quiet is not self._quiet_of[0]:
            items = [item for item in self._context.homes.parameters.values() if item.position in quiet.gradients]
            self._quiet_of = quiet, frozenset(id(item.leaf) for item in items)
        # One that was there before is added to, and may have been moved.
        self.quiet = self._quiet_of[1] if not self._items else frozenset()

    def end(self) -> None:
        """The step's last op is over."""
        self.quiet = frozenset()

    def resident(self) -> list[torch.Tensor]:
        """Returns the gradients that are resident and not cleared."""
        items = [(home, self._context.homes.parameter(home)) for home in self._resident]
        grads = [
            item.grad if item is not None else home.grad
            for home, item in items
            if item is None or item.position not in self._items
        ]
        # One that was applied in backward is of another type, and has no memory.
        return [grad for grad in grads if type(grad) is torch.Tensor]

    def _taken_over(self) -> list[GradientItem]:
        taken = list[GradientItem]()
        if not [home for home in self._resident if home.grad is not None]:
            self._resident.clear()  # as a rule all were cleared
        while self._resident:
            item = self._context.homes.parameter(self._resident[-1])  # it stays until it is dealt with
            grad = item.grad if item is not None and item.position not in self._items else None
            known = self._take(item, grad) if item is not None and grad is not None else None
            if known is not None:
                taken.append(known)
            self._resident.pop()
        return taken

    def stays(self, home: torch.Tensor) -> None:
        """A gradient reached a parameter that does not move. FSDP2's would keep the memory of all that came with it."""
        state = self._context.state
        state.saw_backward = state.saw_gradient = True
        if home in self._shards and state.mode in (DEMAND, PLANNED) and self._are_covered:
            part_gradient(home, self._context.traffic.backend.copied)

    def _keep_until_reduced(self, known: GradientItem) -> None:
        """Keeps a gradient up until its backward is over and DDP's reducer has read and written it.

        The reducer, no code of Python's, copies it into a bucket after our hook, and back in a callback at the end of backward.
        """
        if not self._reduced:
            engine = torch.autograd.Variable._execution_engine
            # The reducer's callback may come after the first of these, and before what that one queues.
            engine.queue_callback(lambda: engine.queue_callback(self._end_of_reduction))
        if known not in self._reduced:
            known.pins += 1
            self._reduced.append(known)

    def _end_of_reduction(self) -> None:
        with self._context.state.lock:
            kept = self._release_reduced()
            for known in kept:
                runner = self._context.runner
                is_left = known.device is None or known.tensor is None or runner.keeps(known)
                if not is_left and not runner.stays_for_update(known):
                    known.touch(self._context.traffic)  # the reducer writes behind every version
                    known.leave(self._context.traffic)

    def forget_reduction(self) -> None:
        """The backward broke off: no reducer will write the gradients that were kept for it."""
        self._release_reduced()

    def _release_reduced(self) -> list[GradientItem]:
        kept, self._reduced = self._reduced, []
        for known in kept:
            known.pins -= 1
        return kept

    def _take(self, item: ParameterItem, grad: torch.Tensor) -> GradientItem | None:
        context = self._context
        old = self._items.pop(item.position, None)
        if old is not None:
            context.runner.unassign(old)
            old.detach(context.traffic)
        if why_unmovable(grad):
            return None  # sparse, or a view of somebody's bucket (DDP): it stays as it is
        known = GradientItem(item, grad, context.traffic.spill.tier_for(grad.numel() * grad.element_size()))
        known.is_part_of(item.leaf.grad if item.leaf is not None else None, grad)
        self._items[item.position] = known
        context.runner.born(known)
        known.adopt(context.traffic)
        if context.state.record.recorder is not None:
            context.state.record.bind(known, is_new=False)
            context.state.record.add(Subject(known.key, known.name, known.size_bytes, known.kind, owner=item.key))
        context.runner.copy_if_due(known, wait_ticks=1)  # hooks of users run next, and may write it
        return known

    def about_to_accumulate(self, item: ParameterItem) -> None:
        """Backward has a gradient for a moved home: an earlier one that left comes back to be added to."""
        known = self._items.get(item.position)
        if known is None or known.tensor is None or item.grad is not known.tensor:
            return
        self._context.clock.tick(("accumulate", item.position), lambda: f"accumulate:{item.name}", "backward")
        with self._context.state.lock:
            self._context.on_demand.claim(known)
            known.refresh(self._context.traffic)
            known.lift(self._context.traffic)
            self._context.state.record.bind(known)
            self._context.clock.resume()

    def sweep(self) -> None:
        """Ends the care for gradients that were cleared or replaced."""
        self._release_reduced()  # of a backward that broke off
        if not self._items:
            return
        homes = {item.position: item for item in self._context.homes.parameters.values()}
        for position, known in list(self._items.items()):
            home = homes.get(position)
            if known.tensor is None:
                self._context.traffic.end(known)
            elif home is None or home.grad is not known.tensor or not known.is_current():
                known.detach(self._context.traffic)
            else:
                continue
            del self._items[position]
            self._context.on_demand.forget(known)
            self._context.runner.unassign(known)
            self._context.state.record.died(known.key)

    def begin_recording(self) -> None:
        """A step begins that is recorded."""
        self._older = self._subjects()

    def recorded_subjects(self) -> list[Subject]:
        """Returns the activations and gradients of the step that was recorded.

        A gradient that was there before it, or was not cleared before the next forward, is persistent: it wraps round the step.
        One whose parameter is not under the engine's care any more, as its memory is shared since, stays.
        """
        lasting = [*self._older, *self._subjects()]
        keys = {subject.key for subject in lasting}
        unique = {subject.key: subject for subject in (*lasting, *self._context.state.record.subjects)}
        owners = {None, *(item.key for item in self._context.homes.parameters.values())}
        found = [s if s.owner in owners else replace(s, owner=None, is_movable=False) for s in unique.values()]
        return [replace(s, is_persistent=True) if s.key in keys else s for s in found]

    def _subjects(self) -> list[Subject]:
        """Returns the gradients that there are now."""
        return [
            Subject(known.key, known.name, known.size_bytes, known.kind, owner=("param", position))
            for position, known in self._items.items()
        ]


def _may_be_reduced() -> bool:
    """True where a backward runs and there may be other ranks to sum gradients with."""
    distributed = torch.distributed
    return current_graph_task() != -1 and distributed.is_available() and distributed.is_initialized()
