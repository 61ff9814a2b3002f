"""The update of one bucket: bring its tensors, run the optimizer's own step on them, send them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tieroff.core.tensor import TensorClass
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.residency import Event, State
from tieroff.runtime.optimizer.buckets import PER_PARAMETER
from tieroff.runtime.optimizer.splitting import raw_step
from tieroff.runtime.optimizer.state import OptimizerState
from tieroff.runtime.step.mode import Mode


class BucketUpdate:
    """Updates buckets of one optimizer, one at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer, context: StepContext, state: OptimizerState) -> None:
        self._optimizer, self._context, self._state = optimizer, context, state

    def run(
        self, bucket: list[torch.Tensor], step: Callable[[list[torch.Tensor]], None], following: list[torch.Tensor]
    ) -> None:
        """Updates a bucket, whose tick began.

        Args:
            bucket: its parameters.
            step: updates them where they lie on the device.
            following: the parameters of the next bucket.
        """
        context = self._context
        moved = self._lift(bucket)
        context.on_demand.fetch(self._items_of(following))
        context.clock.resume()
        try:
            step(bucket)
        finally:
            context.clock.pause()
            moved += self._state.adopt(bucket)
            moved = [item for item in moved if item.device is not None]  # but for state and gradients that are gone
            for item in moved:
                # Fused kernels write without a trace in any version; only gradients are usually left alone.
                if item.kind is not TensorClass.GRADIENT or self.may_write_gradients:
                    item.touch(context.traffic)
                else:
                    item.refresh(context.traffic)
            if context.state.mode is not Mode.PLANNED:
                context.on_demand.release(*moved)
                for item in moved:
                    context.state.record.bind(item)

    def step_on(self, bucket: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        """Runs the optimizer's own step on a subset of its parameters; groups without any are left out meanwhile."""
        optimizer = self._optimizer
        wanted = {id(p) for p in bucket}
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = [p for p in params if id(p) in wanted]
            optimizer.param_groups = [group for group in groups if group["params"]]
            raw_step(optimizer)(optimizer, *args, **kwargs)
        finally:
            optimizer.param_groups = groups
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    @property
    def may_write_gradients(self) -> bool:
        """True when the optimizer's step may write gradients."""
        optimizer = self._optimizer
        return getattr(optimizer, "grad_scale", None) is not None or type(optimizer).__name__ not in PER_PARAMETER

    def _items_of(self, bucket: list[torch.Tensor]) -> list[HomeItem]:
        """Returns the items that the update of a bucket needs."""
        homes = self._context.homes
        needed: list[HomeItem] = []
        for param in bucket:
            item = homes.parameter(param)
            # Without a gradient the update leaves the parameter alone.
            if item is None or (param.grad is None and not self._optimizer.state.get(param)):
                continue
            gradient = homes.gradients.get(item.position)
            needed += [item] if gradient is None else [item, gradient]
        return needed + self._state.items_of(bucket)

    def _lift(self, bucket: list[torch.Tensor]) -> list[HomeItem]:
        context = self._context
        needed = self._items_of(bucket)
        context.on_demand.claim(*needed)
        # All fetches begin before the first is awaited.
        for known in needed:
            known.refresh(context.traffic)
            if known.state is State.LOWER:
                context.traffic.counts.faults += 1
                context.traffic.send(known, Event.FETCH)
        for known in needed:
            known.lift(context.traffic)
            context.state.record.bind(known)
        return needed
