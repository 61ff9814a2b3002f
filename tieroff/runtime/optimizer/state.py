"""The optimizer's state: tensors that it made, moved bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch

from tieroff.core.tensor import TensorClass
from tieroff.runtime.backend.place import HomePlace
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.joined.items import JoinedState
from tieroff.runtime.items.table import all_have_copies, bring_home, settle_below
from tieroff.runtime.movable import is_alone, tensors_in, why_kept
from tieroff.runtime.optimizer.buckets import Buckets, local_bytes
from tieroff.runtime.optimizer.slices.item import SlicedState
from tieroff.runtime.settings import Settings
from tieroff.storage.nvme.pages import MappedFiles


class _Settled:
    """One parameter's state tensors and their items, as they were when all of them were last known.

    Whether they still are takes a look at each, and no search.
    """

    __slots__ = ("_known", "items", "values")

    def __init__(self, values: dict[Any, Any], items: tuple[HomeItem, ...]) -> None:
        self.values, self.items = values, items
        self._known = _tensors_in(values)

    def holds(self, values: Any) -> bool:
        """True while the optimizer has the same tensors of it, and they have the same items."""
        if values is not self.values:
            return False
        known = self._known
        # Without a line of Python for each, where all that it has are tensors.
        now = values if len(values) == len(known) else _tensors_in(values)
        if len(now) != len(known) or not all(map(is_, now.values(), known.values())):
            return False
        # Of one with neither, the engine's care has ended.
        return not [item for item in self.items if item.device is None and item.place is None]

    def has_only_tensors(self, values: Any) -> bool:
        """True when these are the values that were known, and all of them tensors."""
        return type(values) is dict and values is self.values and len(values) == len(self._known)


class _SettledBucket:
    """The same of a whole bucket of which all that each parameter has are tensors: one look at all of them."""

    __slots__ = ("_bucket", "_known", "_values", "items")

    def __init__(self, bucket: list[torch.Tensor], values: list[dict[Any, Any]], items: list[HomeItem]) -> None:
        self._bucket, self._values, self.items = bucket, values, items
        self._known = [*chain.from_iterable(map(_VALUES, values))]

    def holds(self, state: Any) -> bool:
        """True while the optimizer has the same tensors of it, and they have the same items."""
        values, known = [*map(state.get, self._bucket)], self._values
        if len(values) != len(known) or not all(map(is_, values, known)):
            return False
        now = [*chain.from_iterable(map(_VALUES, values))]
        if len(now) != len(self._known) or not all(map(is_, now, self._known)):
            return False
        return all_have_copies(self.items) or not [item for item in self.items if item.device is None and item.place is None]


_VALUES = methodcaller("values")


def _is_of(item: HomeItem, parts: list[torch.Tensor]) -> bool:
    """True for the item of these tensors."""
    return len(parts) == item.sharers and all(map(is_, (item.tensor, *item.others), parts))


def _tensors_in(values: dict[Any, Any]) -> dict[Any, torch.Tensor]:
    return {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}


class OptimizerState:
    """What of an optimizer's state is under the engine's care; the items are those of `HomeTable.states`.

    Attributes:
        sliced: ids of parameters whose updates use their state where it lies below.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: Buckets, context: StepContext, settings: Settings) -> None:
        self._optimizer, self._buckets, self._context = optimizer, buckets, context
        self._min_bytes = max(settings.min_bytes, 1)
        self._is_covered = TensorClass.OPTIMIZER in settings.covers
        self._items = context.homes.states
        self._taken_over: Any = None
        self.sliced: set[int] = set()
        self._settled: dict[int, _Settled] = {}  # by id of the parameter
        self._buckets_settled: dict[int, _SettledBucket] = {}  # by id of the bucket, one of `Buckets.current`
        self._positions: dict[int, int] | None = None  # as `forget_strangers` last saw them

    def tensors_of(self, bucket: list[torch.Tensor]) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
        """Returns (parameter, key, tensor) of a bucket's state: of a sharded one this rank's shard, else the first part."""
        state = self._optimizer.state
        return [
            (param, key, parts[0])
            for param in bucket
            if param in state
            for key, value in state[param].items()
            if (parts := tensors_in(value))
        ]

    def items_of(self, bucket: list[torch.Tensor]) -> list[HomeItem]:
        """Returns the items of a bucket's state tensors."""
        found: list[HomeItem] = []
        state = self._optimizer.state
        whole = self.settled(bucket)
        if whole is not None:
            return whole
        for param in bucket:
            settled = self._settled.get(id(param))
            if settled is not None and settled.holds(state.get(param)):
                found += settled.items
                continue
            for _, key, tensor in self.tensors_of([param]):
                known = self._items.get((id(param), key))
                if known is not None and known.tensor is tensor:
                    found.append(known)
        return found

    def settled(self, bucket: list[torch.Tensor]) -> list[HomeItem] | None:
        """Returns the items of a bucket's state, if that is what it was when it was last looked at whole; None: it is not."""
        whole = self._buckets_settled.get(id(bucket))
        return whole.items if whole is not None and whole.holds(self._optimizer.state) else None

    def take_over(self) -> None:
        """Puts state that exists already below: that of a resumed run, or what `load_state_dict` put in its place.

        State that the optimizer makes in a step is taken over bucket by bucket in that step.
        """
        state = self._optimizer.state
        if state is self._taken_over:
            return
        self._taken_over = state
        mapped = MappedFiles()
        context, device = self._context, self._context.traffic.backend.device
        for bucket in self._buckets.all():
            for param in bucket:  # of which each may have as much as the device has room for
                is_updated_there = id(param) in context.homes.parameters or param.device == device
                for _, key, tensor in self.tensors_of([param]):
                    # A counter of steps may stay on the host; everything else goes where its parameter is updated.
                    if tensor.device != device and is_updated_there and key != "step" and tensor is state[param][key]:
                        tensor.data = tensor.data.to(device)
                for item in self.adopt([param]):
                    settle_below(item, context.traffic, mapped)
            self._settle(bucket)

    def forget_strangers(self) -> None:
        """Ends the care for state of parameters that left the optimizer; those that only left the model are named so."""
        self._buckets.all()  # positions of those that it has now
        is_traced = self._context.state.record.recorder is not None
        if self._positions is self._buckets.position and not is_traced:
            return
        self._positions = self._buckets.position
        self._forget_settled()
        self.sliced &= self._buckets.position.keys()
        for (param, key), item in list(self._items.items()):
            if param in self._buckets.position:
                if is_traced:
                    item.name = self._name_of(param, key)
            else:
                item.detach(self._context.traffic)
                del self._items[param, key]

    def adopt(self, bucket: list[torch.Tensor], *, are_current: bool = False) -> list[HomeItem]:
        """Takes state tensors that are new, or were replaced, under the engine's care; returns their items.

        Args:
            bucket: the parameters.
            are_current: those that have an item are known to lie where it put them.
        """
        if not self._is_covered:
            return []
        adopted: list[HomeItem] = []
        state = self._optimizer.state
        whole = self._buckets_settled.get(id(bucket))
        if whole is not None and whole.holds(state) and (are_current or all(item.is_current() for item in whole.items)):
            return []
        for param in bucket:
            values, settled = state.get(param), self._settled.get(id(param))
            is_same = settled is not None and settled.holds(values)
            if settled is not None and is_same and (are_current or all(item.is_current() for item in settled.items)):
                continue
            adopted += self._adopt(param)
            items = [self._items.get((id(param), key)) for key in values or ()]
            if values and all(type(value) is torch.Tensor or not tensors_in(value) for value in values.values()):
                self._settled[id(param)] = _Settled(values, tuple(item for item in items if item is not None))
        self._settle(bucket)
        return adopted

    def _settle(self, bucket: list[torch.Tensor]) -> None:
        """Remembers a bucket of which each parameter is remembered, and has nothing but tensors."""
        self._buckets_settled.pop(id(bucket), None)
        settled = [self._settled.get(id(param)) for param in bucket]
        values = [self._optimizer.state.get(param) for param in bucket]
        whole = [one for one, value in zip(settled, values, strict=True) if one is not None and one.has_only_tensors(value)]
        if len(whole) == len(bucket) and any(bucket is one for one in self._buckets.current):
            items = [item for one in whole for item in one.items]
            self._buckets_settled[id(bucket)] = _SettledBucket(bucket, [one.values for one in whole], items)

    def _forget_settled(self) -> None:
        self._settled.clear()
        self._buckets_settled.clear()

    def _adopt(self, param: torch.Tensor) -> list[HomeItem]:
        context, adopted = self._context, list[HomeItem]()
        device = context.traffic.backend.device
        for _, key, tensor in self.tensors_of([param]):
            known, value = self._items.get((id(param), key)), self._optimizer.state[param][key]
            parts = tensors_in(value)
            if known is not None and _is_of(known, parts) and known.is_current():
                continue
            if known is not None:
                known.detach(context.traffic)
                del self._items[id(param), key]
            size_bytes = sum(map(local_bytes, parts))
            if tensor.device != device or self._why_kept(value, parts):
                continue
            tier, name = context.traffic.spill.tier_for(size_bytes), self._name_of(id(param), key)
            of = ("state", id(param), key)
            if isinstance(value, torch.Tensor) and is_alone(value, parts):
                item = HomeItem(of, name, TensorClass.OPTIMIZER, tensor, tier, context.guard)
            else:
                item = JoinedState(of, name, parts, tier, context.guard)
            item.is_part_of(value if isinstance(value, torch.Tensor) else None, tensor)
            item.is_sliced = id(param) in self.sliced and tensor.shape == param.shape
            context.runner.assign(item)
            item.adopt(context.traffic)
            self._items[id(param), key] = item
            context.state.record.bind(item, is_new=False)
            adopted.append(item)
        return adopted

    def slice(self, param: torch.Tensor) -> None:
        """From here on updates of a parameter use its state where it lies below."""
        self.sliced.add(id(param))
        for key, value in (self._optimizer.state.get(param) or {}).items():
            item = self._items.get((id(param), key))
            if item is not None:
                item.is_sliced = value.shape == param.shape

    def make_below(self, param: torch.Tensor, key: str, dtype: torch.dtype) -> tuple[torch.Tensor, HomeItem]:
        """Makes a state tensor of a parameter's shape that lies below, and is not in the optimizer's state yet.

        Raises:
            StoreError: no lower tier has room.
        """
        traffic, size_bytes = self._context.traffic, param.numel() * dtype.itemsize
        tier = traffic.spill.tier_for(size_bytes)
        place = HomePlace(traffic.stores[tier], size_bytes)
        like = torch.empty_strided(param.size(), param.stride(), dtype=dtype, device="meta")
        item = SlicedState(("state", id(param), key), self._name_of(id(param), key), like, tier, self._context.guard)
        tensor = item.begin(traffic, place)
        self._context.runner.assign(item)
        self._context.state.record.bind(item, is_new=False)
        self._items[id(param), key] = item
        return tensor, item

    def drop(self, param: torch.Tensor, key: str) -> None:
        """Ends the care for a state tensor that the optimizer's state does not have."""
        item = self._items.pop((id(param), key), None)
        if item is not None:
            item.forsake(self._context.traffic)

    def unmanaged(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yields (name, why, tensor) of the state on the device that is not under the engine's care."""
        bucket = [param for group in self._optimizer.param_groups for param in group["params"]]
        self._buckets.all()  # positions, for names
        for param, key, tensor in self.tensors_of(bucket):
            known = self._items.get((id(param), key))
            if known is None or known.tensor is not tensor:
                value = self._optimizer.state[param][key]
                parts = tensors_in(value)
                name, why = self._name_of(id(param), key), self._why_kept(value, parts) or "not under the engine's care now"
                yield from ((name, why, part) for part in parts)

    def _why_kept(self, value: object, parts: list[torch.Tensor]) -> str:
        """Returns why an entry of these parts stays on the device, or "" where it can move."""
        if not self._is_covered:
            return "optimizer state is not covered"
        return "smaller than min_bytes" if sum(map(local_bytes, parts)) < self._min_bytes else why_kept(value, parts)

    def _name_of(self, param: int, key: str) -> str:
        owner = self._context.homes.names.get(param)
        return f"{key} of {owner or f'parameter {self._buckets.position[param]} of the optimizer, outside the model'}"

    def lower(self) -> None:
        """Sends state that was updated in backward to its lower tier, or on its way there, because user code runs next."""
        for item in self._items.values():
            if item.device is not None and item.is_lifted and not self._context.runner.keeps(item):
                self._context.runner.lower(item)

    def bring_home(self) -> None:
        """Makes every state tensor ordinary memory again."""
        for item in self._items.values():
            bring_home(item, self._context.traffic)
        self._items.clear()
        self._forget_settled()
