"""State dicts of a model and an optimizer whose tensors lie in several tiers: whole, and all on the CPU.

Where the device is the CPU they are so anyway. On a GPU, what lies below is handed out there, as memory of the host; what the
plan keeps on the device is copied, so that a checkpoint never depends on the plan of the moment.

[Note: given out]
A plain state dict gives out the tensors themselves, and programs write into them: `model.state_dict()[name].copy_(value)`.
Where one lay on the device it was copied, so what was given is kept, and looked at before the tensors are used next: a version
that has moved tells of a write, also of one through a dict that is gone by then.

[Note: loaded state]
`optimizer.load_state_dict` puts all of the state on the device before anybody can send a part of it below: of Adam twice the
bytes of the parameters at once. So tensors of the host get a class, for the call, whose `to` leaves them there, as copies of
the type that was asked for. After it the state goes over the device to its tier, parameter by parameter, as that of a resumed
run does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from tieroff.errors import StateError
from tieroff.runtime.hooks.forward.slot import ForwardSlot
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.joined.joint import apart
from tieroff.runtime.items.offloaded import guarded, own_class, untouched
from tieroff.runtime.movable import is_wrapper, plain_parts, with_parts
from tieroff.runtime.signal_safety import is_interrupting
from tieroff.runtime.tensors import storage_of


class Handle(Protocol):
    """What registering a hook gives."""

    def remove(self) -> None:
        """Takes the hook away."""


class GivenOut:
    """The values that state dicts of one model and its optimizer gave out since they were used; see [Note: given out]."""

    def __init__(self) -> None:
        # State is not held: what a load replaced would come up to the device, where it would wait to be taken back. Parameters
        # are: torch swaps none that is held weakly.
        self._given: list[tuple[Callable[[], torch.Tensor | None], torch.Tensor, int]] = []

    def note(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """A tensor's value was given out as this one; a wrapper of other tensors is not followed."""
        if value is not tensor and own_class(value) is torch.Tensor and not value.is_inference():
            # An alias counts on with it, and does not keep what people hang on theirs.
            held = functools.partial(_itself, tensor) if isinstance(tensor, torch.nn.Parameter) else weakref.ref(tensor)
            self._given.append((held, value.detach(), value._version))

    def take_back(self) -> None:
        """The tensors are used next: what was written into their values is theirs."""
        if not self._given:
            return
        given, self._given = self._given, []
        for ref, value, version in given:
            if value._version != version and (tensor := ref()) is not None:
                with torch.no_grad():
                    tensor.copy_(value)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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


def install(model: torch.nn.Module, given: GivenOut) -> Handle:
    """Has `model.state_dict()` give CPU tensors; with `keep_vars=True` it gives the parameters themselves, as ever."""
    register: Callable[[Any], Handle] = model.register_state_dict_post_hook
    return register(_ToCpu(given))


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
    optimizer: torch.optim.Optimizer, device: torch.device, items: Callable[[], Iterable[HomeItem]], given: GivenOut
) -> Handle:
    """Has `optimizer.state_dict()` give CPU tensors, and parts on storages of their own."""
    hook = _Apart(items) if device.type == "cpu" else _ToCpu(given)
    return optimizer.register_state_dict_post_hook(hook)


def load_below(
    optimizer: torch.optim.Optimizer, device: torch.device, may_begin: Callable[[], bool], take_over: Callable[[], None]
) -> list[Handle]:
    """Has `optimizer.load_state_dict()` put state below without all of it on an accelerator: see [Note: loaded state].

    Args:
        optimizer: of a wrapped model.
        device: where that computes.
        may_begin: no step runs, so that state may be taken over.
        take_over: puts what was loaded below.
    """
    if device.type == "cpu":
        return []  # a state dict lies where it would be loaded to
    load = _Load(device, may_begin, take_over)
    after = optimizer.register_load_state_dict_post_hook(load.end)
    hooks: Any = optimizer._optimizer_load_state_dict_post_hooks
    hooks.move_to_end(after.id, last=False)  # those of other people find state on the device
    return [optimizer.register_load_state_dict_pre_hook(load.begin), after]


class _Load:
    """The hooks round `load_state_dict()`. A copy or a pickle of them, in a copied optimizer, does nothing."""

    def __init__(
        self,
        device: torch.device | None = None,
        may_begin: Callable[[], bool] | None = None,
        take_over: Callable[[], None] | None = None,
    ) -> None:
        self._device, self._may_begin, self._take_over = device, may_begin, take_over

    def begin(self, _optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Returns what is loaded in place of a state dict; the dict itself stays as it is."""
        if self._may_begin is None or not self._may_begin():
            return None
        state = {
            key: {name: self._staying(name, value) for name, value in entries.items()} if type(entries) is dict else entries
            for key, entries in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def end(self, _optimizer: torch.optim.Optimizer) -> None:
        """What was loaded goes below."""
        if self._may_begin is not None and self._take_over is not None and self._may_begin():
            self._take_over()

    def _staying(self, name: Any, value: Any) -> Any:
        # A counter may belong on the host: it goes where the optimizer puts it.
        if type(value) is not torch.Tensor or value.device.type != "cpu" or name == "step":
            return value
        staying = value.detach().as_subclass(_Staying)
        staying.away = self._device
        return staying

    def __deepcopy__(self, memo: dict[int, Any]) -> _Load:
        return _Load()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Load, ()


class _Staying(torch.Tensor):
    """A tensor of the host that stays there, as a copy, where it is sent to one device.

    Attributes:
        away: that device.
    """

    away: torch.device | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs everything else on the plain tensor."""
        plain, named = tree_map_only(_Staying, lambda tensor: tensor.as_subclass(torch.Tensor), (args, kwargs or {}))
        if func is torch.Tensor.to and isinstance(args[0], _Staying) and named.get("device") == args[0].away:
            return plain[0].to(dtype=named.get("dtype"), copy=True)
        return func(*plain, **named)


class _RefuseInChild:
    """A hook before `state_dict()`. A copy or a pickle of it, in a copied model, refuses nothing.

    Attributes:
        engine: whose model has this hook; None in a copy, and on an optimizer.
    """

    def __init__(self, is_readable: Callable[[], bool] | None = None, engine: object = None) -> None:
        self._is_readable, self.engine = is_readable, engine

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


def refuse_in_child(owner: Any, is_readable: Callable[[], bool], engine: object = None) -> Handle:
    """Has `state_dict()` of a model or optimizer raise where this process cannot read what lies below: in a forked child.

    Args:
        owner: has `register_state_dict_pre_hook`.
        is_readable: whether this process can.
        engine: that of the owner, if it is a model.
    """
    register: Callable[[Any], Handle] = owner.register_state_dict_pre_hook
    return register(_RefuseInChild(is_readable, engine))


def engine_by_hooks(model: torch.nn.Module) -> object:
    """Returns the engine that has hooks on a model's `state_dict()`, if one has: its `forward` may have been replaced since."""
    hooks = getattr(model, "__dict__", {}).get("_state_dict_pre_hooks", {}).values()
    return next((hook.engine for hook in hooks if isinstance(hook, _RefuseInChild) and hook.engine is not None), None)


class _ToCpu:
    """A hook after `state_dict()`: memory of the host in the place of what is an accelerator's.

    A copy or a pickle of the hook, in a copied model, does nothing: that model is plain.
    """

    def __init__(self, given: GivenOut | None = None) -> None:
        self._given = given

    def __call__(self, owner: Any, state_dict: dict[str, Any], prefix: str | None = None, _metadata: Any = None) -> Any:
        """Replaces them, of a model in place; of an optimizer, whose own dicts stay as they are, it returns another one."""
        if self._given is None:
            return None if prefix is not None else state_dict
        return self._of_optimizer(state_dict) if prefix is None else self._of_model(owner, state_dict, prefix)

    def _of_model(self, model: torch.nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        own = dict((*model.named_parameters(prefix.rstrip("."), remove_duplicate=False), *_buffers_of(model, prefix)))
        kept = {id(tensor) for tensor in own.values()}  # given out as they are: keep_vars
        shown: dict[int, torch.Tensor] = {}  # a tensor of several names lies once, as in a plain dict
        for name, value in state_dict.items():
            if name.startswith(prefix) and isinstance(value, torch.Tensor) and id(value) not in kept:
                tensor = own.get(name)
                first = shown.get(id(tensor)) if tensor is not None else None
                state_dict[name] = given = first.detach() if first is not None else self._on_cpu(tensor, value)
                shown.setdefault(id(tensor), given)

    def _of_optimizer(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {
            key: {name: self._on_cpu(value, value) for name, value in entries.items()} if isinstance(entries, dict) else entries
            for key, entries in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def _on_cpu(self, tensor: Any, value: Any) -> Any:
        shown = _on_cpu(value)
        if self._given is not None and isinstance(tensor, torch.Tensor) and tensor.device.type not in ("cpu", "meta"):
            self._given.note(tensor, shown)
        return shown

    def __deepcopy__(self, memo: dict[int, Any]) -> _ToCpu:
        return _ToCpu()

    def __reduce__(self) -> tuple[Any, ...]:
        return _ToCpu, ()


def _buffers_of(model: torch.nn.Module, prefix: str) -> Iterable[tuple[str, torch.Tensor]]:
    return model.named_buffers(prefix.rstrip("."), remove_duplicate=False)


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    item = guarded(value)
    if item is not None and item.guard is not None:
        held: torch.Tensor = item.on_memory(value, item.guard.value_on_host(item))
        return held
    return value if value.device.type in ("cpu", "meta") else value.detach().cpu()
