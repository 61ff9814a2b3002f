"""Fetches: parameters that a module or backward reads, brought to the device."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from tieroff.runtime.execution.autograd import modes_here, training_phase, unseen_by_the_program
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.items.offloaded import is_offloaded, restore_class, untouched
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.items.residency import ARRIVING, BOTH, LOWER, Event
from tieroff.runtime.step.kinds import Measuring, Planned, StepKind, Unplanned
from tieroff.runtime.step.mode import DEMAND, IDLE, PASS, PLANNED
from tieroff.runtime.tensors import outside_inference


class ParameterFetch:
    """Brings a parameter to the device for whoever reads it; each read is an event of the step."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._written: frozenset[Hashable] = frozenset()
        self._written_by_plan: frozenset[Hashable] = frozenset()

    def begin(self, kind: StepKind) -> None:
        """A step of this kind begins."""
        self._written = kind.recorded.written if kind.recorded is not None else frozenset()
        self._written_by_plan = kind.stage.recorded.written if isinstance(kind.stage, Planned) else self._written

    def home(self, item: ParameterItem) -> torch.Tensor:
        """Lifts the home itself to the device, and returns it."""
        if not modes_here():
            return self._home(item)
        with unseen_by_the_program():
            return self._home(item)

    def _home(self, item: ParameterItem) -> torch.Tensor:
        context = self._context
        if item.position not in context.runner.quiet.reads:
            if torch.is_inference_mode_enabled():
                context.clock.tick_in_inference(item.key, lambda: f"param:{item.name}")
            else:
                context.clock.tick(item.key, lambda: f"param:{item.name}", None)
        if context.runner.is_resident(item):
            home = item.living  # as a rule it is there
            if is_offloaded(home):  # by its class alone: see [Note: saved outside] in hooks/user_access.py
                restore_class(item)
            return home
        if context.state.mode is PLANNED and not torch.is_inference_mode_enabled():
            return self._home_by_plan(item)
        with context.state.lock, outside_inference():
            self._lift(item)
            context.on_demand.used(item.key)
            context.clock.resume()
            return item.living

    def _lift(self, item: ParameterItem) -> None:
        """Lifts a home that no plan cares for just now, for whoever uses it here."""
        context = self._context
        self._refresh(item)
        item.lift(context.traffic)
        item.may_be_written = self._may_be_written(item)
        context.state.record.bind(item)
        if context.state.mode is not PLANNED and context.state.mode is not PASS:
            context.clock.watch_backward()
            context.on_demand.keep_read(item)
        else:
            context.on_demand.forget_read(item)  # the plan says when it leaves

    def _home_by_plan(self, item: ParameterItem) -> torch.Tensor:
        """The same in a step that follows its plan, which says when it leaves."""
        context = self._context
        may_be_written = item.key in self._written_by_plan
        with context.state.lock:
            if may_be_written:
                self._refresh(item)
            else:
                item.refresh(context.traffic)
            item.lift(context.traffic)
            item.may_be_written = may_be_written
            context.on_demand.forget_read(item)
            context.clock.resume()
            return item.living

    def again(self, item: ParameterItem) -> None:
        """Lifts a home again for a node in backward, unless the engine's care has ended: then it lies where it is used."""
        if item.device is None and item.place is None:
            return
        self._context.state.inside += 1  # not in a `finally`: see `StepState.inside`
        self.home(item)
        self._context.state.inside -= 1

    def up_again(self, item: ParameterItem) -> None:
        """Lifts a home again that the plan has on the device all the time, and that an evaluation in the step sent below."""
        context = self._context
        context.state.inside += 1  # not in a `finally`: see `StepState.inside`
        with context.state.lock, outside_inference():
            item.refresh(context.traffic)
            item.lift(context.traffic)
            context.on_demand.forget_read(item)
            context.clock.resume()
        context.state.inside -= 1

    def note_use(self, item: ParameterItem) -> None:
        """Forward used a parameter that was lifted without an event of its own."""
        item.may_be_written = self._may_be_written(item)

    def saved(self, item: ParameterItem) -> torch.Tensor:
        """Returns the device value of a parameter that autograd saved and backward asks for."""
        if not modes_here():
            return self._saved(item)
        with unseen_by_the_program():
            return self._saved(item)

    def _saved(self, item: ParameterItem) -> torch.Tensor:
        context = self._context
        if item.position not in context.runner.quiet.saved:
            context.clock.tick(("saved", item.position), lambda: f"saved:{item.name}", "backward")
        if context.runner.is_resident(item):
            return item.valid_value
        value = self._valid(item)
        context.on_demand.wanted(item)
        return value

    def saved_leaf(self, item: ParameterItem) -> torch.Tensor:
        """Lifts the parameter itself, which a Function saved and backward asks for, and returns it."""
        if not modes_here():
            return self._saved_leaf(item)
        with unseen_by_the_program():
            return self._saved_leaf(item)

    def _saved_leaf(self, item: ParameterItem) -> torch.Tensor:
        context = self._context
        if item.position not in context.runner.quiet.saved:
            context.clock.tick(("saved", item.position), lambda: f"saved:{item.name}", "backward")
        if context.runner.is_resident(item) or (item.device is None and item.place is None):
            return item.living
        if context.state.mode is PLANNED:
            return self._home_by_plan(item)
        with context.state.lock, outside_inference():
            self._lift(item)
            context.on_demand.wanted(item)
            context.clock.resume()
            return item.living

    def shard(self, item: ParameterItem) -> torch.Tensor:
        """Returns the device value of a shard that its rank is about to send to the others."""
        context = self._context
        phase = training_phase()
        context.clock.tick(("shard", item.position), lambda: f"shard:{item.name}", phase)
        value = self._valid(item)
        if phase == "forward":
            context.on_demand.used(item.key)
        return value

    def outside(self, item: ParameterItem) -> torch.Tensor:
        """Returns the device value of a parameter that is used outside of the step: no plan knows of it."""
        state = self._context.state
        mode, state.mode = state.mode, IDLE
        try:
            return self._valid(item)
        finally:
            state.mode = mode

    def dismiss(self, item: ParameterItem) -> None:
        """The device copy is not used any more, by whoever fetched it last."""
        self._context.on_demand.release_read(item)

    def _valid(self, item: ParameterItem) -> torch.Tensor:
        context = self._context
        with context.state.lock, outside_inference():
            if item.device is None and item.place is None:  # given back while a graph still needs it
                return item.living.detach()
            self._refresh(item)
            if item.stays_below:
                item.lift(context.traffic)  # drops what was fetched
            if item.is_lifted or (item.state is LOWER and item.stays_below):
                context.clock.resume()
                with untouched():
                    return item.living.detach()
            device = context.traffic.want(item)
            context.state.record.bind_copy(device, item.key, is_new=True)
            if context.state.mode is not PLANNED:
                context.clock.watch_backward()
                context.on_demand.keep_read(item)
            context.clock.resume()
            return item.valid_value

    def _refresh(self, item: ParameterItem) -> None:
        """What was written since the last copy counts, also through `.data` while a copy of it was brought up ahead."""
        item.refresh(self._context.traffic)
        is_copy = item.state in (BOTH, ARRIVING) and not item.is_lifted and item.is_shown_below
        if is_copy and self._may_be_written(item):
            self._context.traffic.send(item, Event.DROP)

    def _may_be_written(self, item: ParameterItem) -> bool:
        """True when the step may write this parameter through `.data`, which no version shows.

        A trace shows it; while there is none that holds, every parameter counts as written.
        """
        state = self._context.state
        if state.kind is None or state.mode is IDLE:
            return item.key in self._written
        stage = state.kind.stage
        if isinstance(stage, Measuring) or (isinstance(stage, Planned) and state.mode is not DEMAND):
            return item.key in stage.recorded.written
        return not isinstance(stage, Unplanned) or item.key not in self._context.on_demand.experience.clean
