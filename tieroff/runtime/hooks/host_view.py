"""The host's view: parameters, gradients and buffers of a model as memory of the host, all of them at once.

Inside, a function that gets some of them runs on the host with their values: where they lie below, or copies. What it writes
in place is theirs afterwards. They stay the tensors of the device that they are, so hooks and graphs are not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tieroff.runtime.items.data_functions import asks_no_data, assigns_data
from tieroff.runtime.items.gradient import GradientItem
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.offloaded import guarded, leaves, untouched, version_of
from tieroff.runtime.items.residency import BOTH, DEVICE, LOWER
from tieroff.runtime.items.table import HomeTable
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.signal_safety import runs_user_code
from tieroff.runtime.tensors import bytes_of, view_of


class HostView(TorchFunctionMode):
    """Functions that get tensors of a model compute on the host."""

    def __init__(self, model: torch.nn.Module, homes: HomeTable, value_of: Callable[[HomeItem], torch.Tensor]) -> None:
        super().__init__()
        self._model, self._homes, self._value_of = model, homes, value_of

    @runs_user_code
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if asks_no_data(func) or assigns_data(func):
            return func(*args, **kwargs)
        shown: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # by id: the tensor, its value, and the value's version
        own = self._own()
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and id(leaf) in own and id(leaf) not in shown:
                value = self._host_value(leaf)
                shown[id(leaf)] = leaf, value, value._version
        if not shown:
            return func(*args, **kwargs)

        def to_host(leaf: Any) -> Any:
            return shown[id(leaf)][1] if id(leaf) in shown else leaf

        out = func(*tree_map(to_host, args), **tree_map(to_host, kwargs))
        for tensor, value, version in shown.values():
            if value._version != version:
                with torch.no_grad():
                    tensor.copy_(value)
        back = {id(value): tensor for tensor, value, _ in shown.values()}
        return back.get(id(out), out)

    def _own(self) -> set[int]:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        with untouched():
            tensors += [grad for p in self._model.parameters() if (grad := p.grad) is not None]
        return {id(tensor) for tensor in tensors if tensor.device.type not in ("cpu", "meta")}

    def _host_value(self, tensor: torch.Tensor) -> torch.Tensor:
        item = guarded(tensor) or self._homes.parameter(tensor)
        if item is not None and version_of(tensor) == item.version:
            return self._value_of(item)
        return tensor.detach().cpu()


def value_on_host(item: HomeItem, traffic: Traffic) -> torch.Tensor:
    """Returns the tensor's value as memory of the host: where it lies below, or a copy."""
    traffic.settle(item)
    if item.state in (BOTH, LOWER) and item.lower is not None and not item.was_written():
        traffic.flush()
        below = item.lower.detach()
        return item.scaled(below) if isinstance(item, GradientItem) and not item.is_lifted else below
    with untouched():
        is_hidden = item.state is DEVICE and not item.is_lifted  # it began to leave, and could not
        value = item.valid_value if is_hidden else item.living
        if not item.others:
            return value.detach().cpu()
        return view_of(bytes_of(value).cpu(), item.dtype, item.size, item.stride, 0)  # with those of the others
