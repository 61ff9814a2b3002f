"""State dicts of a model and an optimizer whose tensors lie in several tiers: whole, and all on the CPU.

Where the device is the CPU they are so anyway. On a GPU, what lies below is handed out there, as memory of the host; what the
plan keeps on the device is copied, so that a checkpoint never depends on the plan of the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any, Protocol

import torch

from tieroff.errors import StateError
from tieroff.runtime.at_work import is_interrupting
from tieroff.runtime.hooks.forward.slot import ForwardSlot
from tieroff.runtime.items.hollow import guarded, untouched
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.joined.joint import apart
from tieroff.runtime.movable import is_wrapper, plain_parts, with_parts
from tieroff.runtime.tensors import storage_of


class Handle(Protocol):
    """What registering a hook gives."""

    def remove(self) -> None:
        """Takes the hook away."""


class _Apart:
    """A hook after `state_dict()` on the host: parts that lie in one memory become tensors with storages of their own on it.

    `torch.save` refuses several types in one storage. A copy or a pickle of the hook, in a copied model, does nothing.
    """

    def __init__(self, items: Callable[[], Iterable[HomeItem]] | None = None) -> None:
        self._items = items

    def __call__(self, owner: Any, state_dict: dict[str, Any], prefix: str | None = None, _metadata: Any = None) -> Any:
        """Replaces them, of a model in place; of an optimizer, whose own dicts stay as they are, it returns another one."""
        return self._of_optimizer(state_dict) if prefix is None else self._of_model(owner, state_dict, prefix)

    def _of_model(self, model: torch.nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        joint = self._storages()
        if joint:
            own = {id(tensor) for tensor in model.parameters()}  # given out as they are: keep_vars
            for name, value in state_dict.items():
                if name.startswith(prefix) and id(value) not in own:
                    state_dict[name] = _apart(value, joint)

    def _of_optimizer(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        joint = self._storages()
        if not joint:
            return state_dict
        state = {
            key: {name: _apart(value, joint) for name, value in entries.items()} if isinstance(entries, dict) else entries
            for key, entries in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def _storages(self) -> frozenset[int]:
        items = self._items() if self._items is not None else ()
        memory = (one for item in items if item.others for one in (item.value, item.lower) if one is not None)
        return frozenset(map(storage_of, memory))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Apart:
        return _Apart()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Apart, ()


def part_model(model: torch.nn.Module, items: Callable[[], Iterable[HomeItem]]) -> Handle:
    """Has `model.state_dict()` give parts on storages of their own, on the host."""
    register: Callable[[Any], Handle] = model.register_state_dict_post_hook
    return register(_Apart(items))


def _apart(value: Any, joint: frozenset[int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if is_wrapper(value):
        parts = plain_parts(value)
        new = [_apart(part, joint) for part in parts]
        return value if all(map(is_, new, parts)) else with_parts(value, iter(new))
    with untouched():
        if value.layout is not torch.strided or storage_of(value) not in joint:
            return value
        return apart(value)


def install(model: torch.nn.Module) -> Handle:
    """Has `model.state_dict()` give CPU tensors; with `keep_vars=True` it gives the parameters themselves, as ever."""
    register: Callable[[Any], Handle] = model.register_state_dict_post_hook
    return register(model_state_to_cpu)


def copy_in_handlers(model: torch.nn.Module) -> Handle:
    """Has `model.state_dict()` give copies in a signal handler that interrupted the engine; see [Note: handlers]."""
    register: Callable[[Any], Handle] = model.register_state_dict_post_hook
    return register(_copied_in_handlers)


def _copied_in_handlers(model: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    if not isinstance(model.__dict__.get("forward"), ForwardSlot) or not is_interrupting():
        return
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}  # given out as they are: keep_vars
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, torch.Tensor) and id(value) not in own:
            state_dict[name] = value.clone()


def install_on_optimizer(
    optimizer: torch.optim.Optimizer, device: torch.device, items: Callable[[], Iterable[HomeItem]]
) -> Handle:
    """Has `optimizer.state_dict()` give CPU tensors, and parts on storages of their own."""
    hook = _Apart(items) if device.type == "cpu" else optimizer_state_to_cpu
    return optimizer.register_state_dict_post_hook(hook)


class _RefuseInChild:
    """A hook before `state_dict()`. A copy or a pickle of it, in a copied model, refuses nothing."""

    def __init__(self, is_readable: Callable[[], bool] | None = None) -> None:
        self._is_readable = is_readable

    def __call__(self, *_arguments: Any) -> None:
        if self._is_readable is not None and not self._is_readable():
            raise StateError(
                "expected state_dict() in the process that wrapped the model, got it in a forked child, which has nothing of "
                "what lies on NVMe or in pinned memory; call state_dict() before the fork and clone what it returns"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _RefuseInChild, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _RefuseInChild:
        return _RefuseInChild()


def refuse_in_child(owner: Any, is_readable: Callable[[], bool]) -> Handle:
    """Has `state_dict()` of a model or optimizer raise where this process cannot read what lies below: in a forked child.

    Args:
        owner: has `register_state_dict_pre_hook`.
        is_readable: whether this process can.
    """
    register: Callable[[Any], Handle] = owner.register_state_dict_pre_hook
    return register(_RefuseInChild(is_readable))


def model_state_to_cpu(model: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Replaces what lies on a device by copies, in place; a copy of a wrapped model, which is plain, is left alone."""
    if not isinstance(model.__dict__.get("forward"), ForwardSlot):
        return
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}  # given out as they are: keep_vars
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, torch.Tensor) and id(value) not in own:
            state_dict[name] = _on_cpu(value)


def optimizer_state_to_cpu(_optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dict with copies of what lies on a device; the optimizer's own dicts stay as they are."""
    state = {
        key: {name: _on_cpu(value) for name, value in entries.items()} if isinstance(entries, dict) else entries
        for key, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    item = guarded(value)
    if item is not None and item.guard is not None:
        held: torch.Tensor = item.on_memory(value, item.guard.value_on_host(item))
        return held
    return value if value.device.type in ("cpu", "meta") else value.detach().cpu()
