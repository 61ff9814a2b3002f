"""The optimizer's state: tensors that it made, moved bucket by bucket."""

from __future__ import annotations

from typing import Any

import torch

from tieroff.core.tensor import TensorClass
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.movable import local_of, why_unmovable
from tieroff.runtime.optimizer.buckets import Buckets, local_bytes
from tieroff.runtime.settings import Settings
from tieroff.storage.nvme.pages import MappedFiles


class OptimizerState:
    """What of an optimizer's state is under the engine's care; the items are those of `HomeTable.states`."""

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: Buckets, context: StepContext, settings: Settings) -> None:
        self._optimizer, self._buckets, self._context = optimizer, buckets, context
        self._min_bytes = max(settings.min_bytes, 1)
        self._is_covered = TensorClass.OPTIMIZER in settings.covers
        self._items = context.homes.states
        self._taken_over: Any = None

    def tensors_of(self, bucket: list[torch.Tensor]) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
        """Returns (parameter, key, tensor) of the state tensors of a bucket; of a sharded one, this rank's shard."""
        state = self._optimizer.state
        return [
            (param, key, local_of(value))
            for param in bucket
            if param in state
            for key, value in state[param].items()
            if isinstance(value, torch.Tensor)
        ]

    def items_of(self, bucket: list[torch.Tensor]) -> list[HomeItem]:
        """Returns the items of a bucket's state tensors."""
        found = []
        for param, key, tensor in self.tensors_of(bucket):
            known = self._items.get((id(param), key))
            if known is not None and known.tensor is tensor:
                found.append(known)
        return found

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
            for param, key, tensor in self.tensors_of(bucket):
                # A counter of steps may stay on the host; everything else goes where its parameter is updated.
                is_updated_there = id(param) in context.homes.parameters or param.device == device
                if tensor.device != device and is_updated_there and key != "step":
                    tensor.data = tensor.data.to(device)
            for item in self.adopt(bucket):
                item.settle_below(context.traffic, mapped)

    def forget_strangers(self) -> None:
        """Ends the care for state of parameters that left the optimizer; those that only left the model are named so."""
        self._buckets.all()  # positions of those that it has now
        is_traced = self._context.state.record.recorder is not None
        for (param, key), item in list(self._items.items()):
            if param in self._buckets.position:
                if is_traced:
                    item.name = self._name_of(param, key)
            else:
                item.detach(self._context.traffic)
                del self._items[param, key]

    def adopt(self, bucket: list[torch.Tensor]) -> list[HomeItem]:
        """Takes state tensors that are new, or were replaced, under the engine's care; returns their items."""
        context = self._context
        if not self._is_covered:
            return []
        adopted: list[HomeItem] = []
        device = context.traffic.backend.device
        for param, key, tensor in self.tensors_of(bucket):
            known = self._items.get((id(param), key))
            if known is not None and known.tensor is tensor and known.is_current():
                continue
            if known is not None:
                known.detach(context.traffic)
                del self._items[id(param), key]
            size_bytes = local_bytes(tensor)
            if size_bytes < self._min_bytes or tensor.device != device or why_unmovable(tensor):
                continue
            tier = context.traffic.spill.tier_for(size_bytes)
            name = self._name_of(id(param), key)
            item = HomeItem(("state", id(param), key), name, TensorClass.OPTIMIZER, tensor, tier, context.guard)
            item.is_part_of(self._optimizer.state[param][key])
            context.runner.assign(item)
            item.adopt(context.traffic)
            self._items[id(param), key] = item
            context.state.record.bind(item, is_new=False)
            adopted.append(item)
        return adopted

    def _name_of(self, param: int, key: str) -> str:
        owner = self._context.homes.names.get(param)
        return f"{key} of {owner or f'parameter {self._buckets.position[param]} of the optimizer, outside the model'}"

    def lower(self) -> None:
        """Sends state that was updated in backward to its lower tier, because user code runs next."""
        for item in self._items.values():
            if item.device is not None and item.is_lifted and not self._context.runner.keeps(item):
                item.leave(self._context.traffic)

    def bring_home(self) -> None:
        """Makes every state tensor ordinary memory again."""
        for item in self._items.values():
            item.bring_home(self._context.traffic)
        self._items.clear()
