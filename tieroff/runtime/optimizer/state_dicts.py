"""State dicts of a model and an optimizer whose tensors lie in several tiers: whole, and all on the CPU.

Where the device is the CPU they are so anyway. On a GPU, what lies below is handed out there, as memory of the host; what the
plan keeps on the device is copied, so that a checkpoint never depends on the plan of the moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from tieroff.errors import StateError
from tieroff.runtime.at_work import is_interrupting
from tieroff.runtime.hooks.forward.slot import ForwardSlot
from tieroff.runtime.items.hollow import guarded
from tieroff.runtime.movable import with_local


class Handle(Protocol):
    """What registering a hook gives."""

    def remove(self) -> None:
        """Takes the hook away."""


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


def install_on_optimizer(optimizer: torch.optim.Optimizer) -> Handle:
    """Has `optimizer.state_dict()` give CPU tensors."""
    return optimizer.register_state_dict_post_hook(optimizer_state_to_cpu)


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
        return with_local(value, item.guard.value_on_host(item))
    return value if value.device.type in ("cpu", "meta") else value.detach().cpu()
