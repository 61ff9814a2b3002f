"""The update of one bucket: bring its tensors, run the optimizer's own step on them, send them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tieroff.core.tensor import TensorClass
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.items.gradient import GradientItem
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.residency import LOWER, ON_DEVICE
from tieroff.runtime.items.table import all_have_copies
from tieroff.runtime.optimizer.buckets import Buckets, Narrowed, raw_step
from tieroff.runtime.optimizer.shared import SharedValues
from tieroff.runtime.optimizer.slices.slices import Slices
from tieroff.runtime.optimizer.state import OptimizerState
from tieroff.runtime.settings import Settings
from tieroff.runtime.step.mode import PLANNED
from tieroff.runtime.step.quiet import NOTHING


class BucketUpdate:
    """Updates buckets of one optimizer, one at a time.

    Attributes:
        narrowed: its groups.
        slices: which are updated in slices.
        shared: plain values that its parameters share, while an update in parts runs.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Buckets,
        context: StepContext,
        state: OptimizerState,
        settings: Settings,
    ) -> None:
        self._optimizer, self._buckets, self._context, self._state = optimizer, buckets, context, state
        self.narrowed = Narrowed(optimizer)
        self.slices = Slices(optimizer, buckets, context, state, settings, self.narrowed)
        self.shared: SharedValues | None = None
        self._lifted: list[tuple[list[torch.Tensor], list[HomeItem]]] = []
        self._moving_in = NOTHING
        # Of that plan, by id of a bucket: its state, what moves of it all and what does not; and positions of its parameters.
        self._moving: dict[int, tuple[Sequence[HomeItem], list[HomeItem], list[HomeItem]]] = {}
        self._positions: dict[int, tuple[list[torch.Tensor], frozenset[int]]] = {}

    def run(
        self,
        bucket: list[torch.Tensor],
        step: Callable[[list[torch.Tensor]], Any],
        following: list[torch.Tensor],
        *,
        is_last: bool,
    ) -> Any:
        """Updates a bucket, whose tick began.

        Args:
            bucket: its parameters.
            step: updates them where they lie on the device.
            following: the parameters of the next bucket, which are brought up beside it.
            is_last: no other bucket is updated in this step.

        Returns:
            What `step` returned.
        """
        self.open(bucket)
        if self._context.on_demand.has_room:
            self._context.on_demand.fetch(self._items_of(following))
        self._context.clock.resume()
        try:
            return step(bucket)
        finally:
            self.close(is_last=is_last)

    def open(self, bucket: list[torch.Tensor]) -> None:
        """Brings everything to the device that the update of a bucket needs."""
        self._lifted.append((bucket, []))
        self._lift(bucket, self._lifted[-1][1])

    def close(self, *, is_last: bool = True) -> None:
        """What was brought for an update counts as written, and may leave; takes new state over."""
        context = self._context
        context.clock.pause()
        bucket, moved = self._lifted[-1]
        self._unmanage_replaced(moved)
        adopted = self._state.adopt(bucket, are_current=True)
        moved = moved + adopted
        moved = [item for item in moved if item.device is not None]  # but for state and gradients that are gone
        may_write_gradients = self.may_write_gradients
        for item in context.runner.not_resident(moved):
            # Fused kernels write without a trace in any version; only gradients are usually not written.
            if item.kind is not TensorClass.GRADIENT or may_write_gradients:
                item.touch(context.traffic)
            else:
                item.refresh(context.traffic)
        self._lifted.pop()
        if context.state.mode is not PLANNED:
            context.on_demand.release(*moved)
            for item in moved:
                context.state.record.bind(item)
            return
        if late := context.runner.strangers(adopted):  # the plan has no room for it
            context.runner.note_more()
            for item in late:
                item.leave(context.traffic)
            if not is_last:  # nor for that of the next buckets
                context.lower_all()
                context.clock.leave_plan()

    def _unmanage_replaced(self, moved: list[HomeItem]) -> None:
        """Lets go of items that are not where they were brought to: of one with `p.data = x` in `step`, x is the value.

        Where x is memory of the same form, which nothing else lies on, the item has it from here on.
        """
        context = self._context
        for item in context.runner.not_resident(moved) if self._buckets.is_read else moved:
            if item.is_current():
                continue
            item.refresh(context.traffic)
            if item.is_lifted and not item.is_current() and item.tensor is not None:
                context.runner.unassign(item)
                context.on_demand.forget(item)
                item.detach(context.traffic)
                context.homes.drop(item)

    def step_on(self, bucket: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the optimizer's own step on a subset of its parameters; the groups are the same objects meanwhile."""
        if self.slices.are_of(bucket):
            return self.slices.step(bucket[0], lambda: self._step(args, kwargs))
        try:
            self.narrowed.narrow(self._buckets.parts_of(bucket))
            return self._step(args, kwargs)
        finally:
            self.narrowed.restore()

    def step_each(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the optimizer's own step where nothing moves: on what is updated in slices one by one, then on all else."""
        self.begin_parts()
        try:
            buckets = self._buckets.all()
            for bucket in filter(self.slices.are_of, buckets):
                self.step_on(bucket, args, kwargs)
            rest = [param for bucket in buckets if not self.slices.are_of(bucket) for param in bucket]
            return self.step_on(rest, args, kwargs)
        finally:
            self.end_parts()

    def _step(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the optimizer's own step on what its groups hold now."""
        out = raw_step(self._optimizer)(self._optimizer, *args, **kwargs)
        if self.shared is not None:
            self.shared.take_back()
        return out

    def restore(self) -> None:
        """After an exception: what was lifted stays for whoever repairs, and the optimizer has its groups and values."""
        self.narrowed.restore()
        self.slices.restore()
        self.end_parts()
        self._lifted.clear()

    def begin_parts(self) -> None:
        """An update in parts begins: each finds the plain values that parameters share as they are now."""
        known = self._buckets.known
        self.shared = SharedValues(self._optimizer) if known is not None and known.counts_calls else None

    def end_parts(self) -> None:
        """All parts are done, or one failed: what they made of those values counts."""
        if self.shared is not None:
            self.shared.finish()
            self.shared = None

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the value of a parameter, gradient or state tensor on the device, wherever it lies now."""
        context, backend = self._context, self._context.traffic.backend
        for item in context.homes:
            if item.tensor is tensor:
                item.refresh(context.traffic)
                source = item.value if item.state in ON_DEVICE else item.lower
                if source is None:
                    return tensor.detach()
                value = source.detach().to(backend.device)
                return item.scaled(value) if isinstance(item, GradientItem) and not item.is_lifted else value
        return tensor.detach()

    @property
    def may_write_gradients(self) -> bool:
        """True when the optimizer's step may write gradients."""
        known = self._buckets.known
        return getattr(self._optimizer, "grad_scale", None) is not None or known is None or known.writes_gradients

    def moves_nothing(self, bucket: list[torch.Tensor]) -> bool:
        """True of a bucket that is known to need nothing of the engine: all of it is on the device for the whole step."""
        if self.slices.are_of(bucket):
            return False
        moving = self._moving_of(bucket)
        return moving is not None and not moving and not self._gradients_of(bucket)

    def _moving_of(self, bucket: list[torch.Tensor]) -> list[HomeItem] | None:
        """Returns the parameters and state of a bucket that the plan moves, where its state is as it was in a whole step.

        None where that is not known: in steps that are not quiet, see [Note: quiet events] in step/quiet.py, and of code that
        may give any of them other memory, which is to be followed at once.
        """
        quiet = self._context.runner.quiet
        if quiet is not self._moving_in:
            self._moving_in, self._moving, self._positions = quiet, {}, {}
        if quiet is NOTHING or not self._buckets.is_read:
            return None
        known, settled = self._moving.get(id(bucket)), self._state.settled(bucket)
        if settled is None:
            return None
        if known is None or known[0] is not settled:
            needed = self._items_of(bucket, with_gradients=False)
            moving = self._context.runner.not_resident(needed)
            ids = {id(item) for item in moving}
            known = self._moving[id(bucket)] = settled, moving, [item for item in needed if id(item) not in ids]
        # An evaluation before the update, or `tieroff.sleep`, sends below what the plan has on the device.
        if all_have_copies(known[2]):
            return known[1]
        return known[1] + [item for item in known[2] if item.device is None]

    def _items_of(self, bucket: list[torch.Tensor], *, with_gradients: bool = True) -> list[HomeItem]:
        """Returns the items that the update of a bucket needs."""
        moving = self._moving_of(bucket) if with_gradients else None
        if moving is not None:
            return moving + self._gradients_of(bucket)
        homes, gradients = self._context.homes.parameters, self._context.homes.gradients
        is_trusted, state = self._buckets.is_trusted, self._optimizer.state
        needed: list[HomeItem] = []
        for param in bucket:
            item = homes.get(id(param))
            # Without a gradient the update leaves the parameter alone, unless nobody knows what the update does.
            if item is None or (is_trusted and param.grad is None and not state.get(param)):
                continue
            needed.append(item)
            gradient = gradients.get(item.position) if with_gradients else None
            if gradient is not None:
                needed.append(gradient)
        # What is updated in slices is a bucket of its own, but for an optimizer that is stepped whole.
        is_alone = len(bucket) == 1
        return needed + [item for item in self._state.items_of(bucket) if not (is_alone and item.is_sliced)]

    def _gradients_of(self, bucket: list[torch.Tensor]) -> list[HomeItem]:
        """Returns the gradients of a bucket that are under the engine's care: few, where the plan leaves most alone."""
        known = self._positions.get(id(bucket))
        if known is None or known[0] is not bucket:
            items = [self._context.homes.parameter(param) for param in bucket]
            known = bucket, frozenset(item.position for item in items if item is not None)
            self._positions[id(bucket)] = known
        positions = known[1]
        return [gradient for position, gradient in self._context.homes.gradients.items() if position in positions]

    def _lift(self, bucket: list[torch.Tensor], lifted: list[HomeItem]) -> None:
        context = self._context
        needed = self._items_of(bucket)
        context.on_demand.claim(*needed)
        lifted += needed  # before the first is: an exception may come between any two lines
        left = context.runner.not_resident(needed)
        # All fetches begin before the first is awaited.
        for known in left:
            known.refresh(context.traffic)
            if known.state is LOWER and not known.stays_below:
                context.traffic.counts.faults += 1
                context.traffic.fetch(known)
        may_write_gradients, is_recorded = self.may_write_gradients, context.state.record.recorder is not None
        for known in left:
            known.lift(context.traffic)
            if known.kind is not TensorClass.GRADIENT or may_write_gradients:
                known.touch(context.traffic)  # from here on the device copy counts, wherever an exception may come
            elif known.leaving is not None:
                context.traffic.settle(known)  # the bucket grew since the plan; fused kernels are declared to write it
            if is_recorded:
                context.state.record.bind(known)
