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
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.offloaded import guarded, leaves, untouched, version_of
from tieroff.runtime.items.table import HomeTable
from tieroff.runtime.signal_safety import runs_user_code


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
