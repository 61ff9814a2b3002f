"""Which updates are made in slices, and their state, which stays below.

[Note: what slices are for]
An update has a parameter, its gradient, its state and what its kernels take for themselves on the device at once: six times the
bytes of the parameter for AdamW, op by op. Of a large embedding no other op of the step has as much. Where a budget in bytes
does not hold that, the update is made in slices: parameter and gradient are there, and of the rest what belongs to a few rows.
Its state never moves as a whole: it is no tensor of the trace, what it takes below comes off the budgets of plans, and the
copies of its rows are a part of the update's time. So where there is room for all, plans that move state ahead are faster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import Any

import torch

from tieroff.core.buckets import SLICED_AT_LEAST_BYTES, SMALLEST_SLICED_BYTES, slice_bytes
from tieroff.core.tensor import TensorClass, Tier
from tieroff.device_budget import DeviceBudget
from tieroff.runtime.backend.place import HomePlace
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.offloaded import own_class, owners_of
from tieroff.runtime.optimizer.buckets import Buckets, Narrowed, raw_step
from tieroff.runtime.optimizer.shared import is_plain
from tieroff.runtime.optimizer.slices.proof import Trial, Verdict
from tieroff.runtime.optimizer.slices.rows import RowsOfState, slices_of, step_in_slices
from tieroff.runtime.optimizer.state import OptimizerState
from tieroff.runtime.settings import Settings
from tieroff.storage.host.pool import HostHome

log = logging.getLogger("tieroff")

# Of the bytes of a parameter, more than any update is known to need with its state: no trial is made where so much fits.
_MOST_TIMES = 8


class Slices:
    """The parameters of one optimizer that are updated in slices."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Buckets,
        context: StepContext,
        state: OptimizerState,
        settings: Settings,
        narrowed: Narrowed,
    ) -> None:
        self._optimizer, self._buckets, self._context, self._state = optimizer, buckets, context, state
        self._limit_bytes = _limit_of(settings.device_budget) if TensorClass.OPTIMIZER in settings.covers else 0
        self._is_least = settings.device_budget is not None and settings.device_budget.is_least
        self._narrowed = narrowed
        self._verdicts: dict[tuple[Any, ...], Verdict] = {}
        self._decided: dict[int, torch.Tensor] = {}  # by id; torch swaps no tensor that is held weakly
        self._rows: _RowsBelow | None = None

    def are_of(self, bucket: list[torch.Tensor]) -> bool:
        """True for a bucket that is one parameter which is updated in slices; without a gradient nothing of it is updated."""
        return len(bucket) == 1 and id(bucket[0]) in self._state.sliced and bucket[0].grad is not None

    def keep_only(self, parameters: Container[int]) -> None:
        """Forgets parameters that are none of these, by id."""
        self._decided = {key: parameter for key, parameter in self._decided.items() if key in parameters}

    def decide(self, bucket: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decides, before its first update, whether a bucket is updated in slices.

        Args:
            bucket: its parameters, wherever they lie.
            args: of the optimizer's step.
            kwargs: of it.
        """
        if not (self._limit_bytes or self._is_least) or len(bucket) != 1:
            return
        parameter = bucket[0]
        if self._decided.get(id(parameter)) is parameter or parameter.grad is None:
            return
        self._decided[id(parameter)] = parameter
        size_bytes = parameter.numel() * parameter.element_size()
        may_be = self._buckets.is_split and self._context.homes.parameter(parameter) is not None and _is_plain(parameter)
        if not may_be or not self._is_wanted(size_bytes, _MOST_TIMES * size_bytes) or len(_slices(parameter)) == 1:
            return
        verdict = self._verdict_of(parameter, args, kwargs)
        if verdict.why_not:
            if self._is_wanted(size_bytes, 2 * size_bytes):
                name = self._context.homes.names.get(id(parameter), "a parameter")
                log.info("%s is updated whole, since an update in slices would not be the same: %s", name, verdict.why_not)
            return
        needed_bytes = 2 * size_bytes + parameter.numel() * (verdict.state_bytes + verdict.own_bytes)
        if self._is_wanted(size_bytes, needed_bytes) and needed_bytes > 2 * size_bytes:
            self._state.slice(parameter)

    def _is_wanted(self, size_bytes: int, needed_bytes: int) -> bool:
        """True where the update of a parameter of this size does not fit the budget whole, needing so much."""
        if self._is_least:
            return size_bytes >= SLICED_AT_LEAST_BYTES
        return size_bytes >= SMALLEST_SLICED_BYTES and needed_bytes > self._limit_bytes

    def _verdict_of(self, parameter: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict:
        group = next(i for i, one in enumerate(self._optimizer.param_groups) if any(p is parameter for p in one["params"]))
        alike = (group, parameter.dtype, parameter.dim(), bool(self._optimizer.state.get(parameter)))
        if alike not in self._verdicts:
            step = raw_step(self._optimizer)
            self._verdicts[alike] = Trial(self._optimizer, parameter, self._first_rows, step, args, kwargs).verdict()
        return self._verdicts[alike]

    def _first_rows(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        device = self._context.traffic.backend.device
        for item in self._context.homes:
            if item.tensor is tensor:
                self._context.traffic.settle(item)
                item.refresh(self._context.traffic)
                source = item.value if item.device is not None else item.lower
                if source is not None:
                    return source.detach()[:rows].to(device)
        return tensor.detach()[:rows]

    def step(self, parameter: torch.Tensor, step: Callable[[], Any]) -> Any:
        """Updates a parameter, which is on the device with its gradient, slice by slice.

        Args:
            parameter: `are_of` is true of it.
            step: runs the optimizer's step on what its groups hold.
        """
        self._rows = rows = _RowsBelow(self._optimizer, parameter, self._context, self._state)
        out = step_in_slices(self._optimizer, parameter, _slices(parameter), step, rows, self._narrowed)
        rows.close()
        self._rows = None
        return out

    def restore(self) -> None:
        """After an exception: the optimizer's state is of its own parameters, and nothing is left that it does not have."""
        if self._rows is not None:
            self._rows.give_up()
            self._rows = None


class _RowsBelow(RowsOfState):
    """The state of one parameter, in lower tiers but for the rows that are updated."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, context: StepContext, state: OptimizerState
    ) -> None:
        self._context, self._state = context, state
        self._items: dict[str, HomeItem] = {}
        super().__init__(optimizer, parameter)

    def values_of(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        item, traffic = self._context.homes.states.get((id(self._parameter), key)), self._context.traffic
        if item is None or item.tensor is not tensor:
            return super().values_of(key, tensor)
        self._items[key] = item
        traffic.settle(item)
        item.refresh(traffic)
        if item.device is not None:
            item.leave(traffic)
        if item.device is not None or item.lower is None:  # somebody holds it there
            item.lift(traffic)
            return item.valid_value
        if isinstance(item.place, HomePlace) and isinstance(item.place.home, HostHome):
            item.place.end_transfers()
        if not item.is_shown_below and owners_of(item.lower) > 1:
            self._part_with_lent(item)
        return item.lower

    def _part_with_lent(self, item: HomeItem) -> None:
        """What a state dict was given stays as it is: the item goes on in another place, with the same value."""
        traffic, old = self._context.traffic, item.lower
        place = HomePlace(traffic.stores[item.tier], item.size_bytes)
        traffic.register_memory(new := item.lie_in(place))
        item.place = place
        if old is not None:
            new.copy_(old)

    def load(self, values: torch.Tensor) -> torch.Tensor:
        device = self._context.traffic.backend.device
        if values.device == device:
            return values  # memory of the host, where that is the device
        self._count("h2d", values)
        return values.to(device)

    def store(self, key: str, values: torch.Tensor, updated: torch.Tensor) -> None:
        super().store(key, values, updated)
        if values.device != updated.device:
            self._count("d2h", values)
        item = self._items.get(key)
        if item is not None and item.place is not None and item.place.tier is Tier.NVME:
            self._context.traffic.stores[Tier.NVME].give_back(values.data_ptr(), values.numel() * values.element_size())

    def _count(self, link: str, values: torch.Tensor) -> None:
        counts, size_bytes = self._context.traffic.counts, values.numel() * values.element_size()
        counts.moved_bytes[link] += size_bytes
        counts.by_class[TensorClass.OPTIMIZER.value] += size_bytes

    def make(self, key: str, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensor, item = self._state.make_below(self._parameter, key, like.dtype)
        self._items[key] = item
        assert item.lower is not None
        return tensor, item.lower

    def close(self) -> None:
        """The update is over: what was written counts."""
        torch.autograd.graph.increment_version([item.living for item in self._items.values()])  # as an update of the whole does
        for item in self._items.values():
            item.touch(self._context.traffic)
            item.note()

    def give_up(self) -> None:
        """The update broke off."""
        self.take_back()
        for key in self.made:
            if key not in (self._optimizer.state.get(self._parameter) or {}):
                self._state.drop(self._parameter, key)
        for item in self._items.values():
            item.touch(self._context.traffic)


def _limit_of(budget: DeviceBudget | None) -> int:
    return (budget.size_bytes or 0) if budget is not None else 0


def _slices(parameter: torch.Tensor) -> list[range]:
    return slices_of(parameter, slice_bytes(parameter.numel() * parameter.element_size()))


def _is_plain(parameter: torch.Tensor) -> bool:
    gradient: Any = parameter.grad
    are_dense = all(one.layout is torch.strided and one.dim() > 0 and one.is_contiguous() for one in (parameter, gradient))
    is_known = own_class(parameter) in (torch.Tensor, torch.nn.Parameter) and parameter.is_floating_point()
    are_dense = are_dense and all(map(is_plain, vars(parameter).values()))  # the program may hang what it likes on it
    return are_dense and is_known and gradient.dtype is parameter.dtype and gradient.shape == parameter.shape
