"""Offloaded tensors: what people hold while its bytes lie below a device.

[Note: offloaded leaves]
A parameter of a model on an accelerator stays one leaf on that device for its whole life, so that gradients, hooks, DDP's
reducer and `autograd.grad` find what they find without tieroff. While its bytes lie below it is offloaded: its storage has the
true size and no memory, and any access of its data raises; and its class is one of the two here, whose `__torch_function__`
has the engine bring the bytes up for the call. So user code may do with it what it likes, at any time, and sees a tensor of
the device.
Gradients and optimizer state are treated alike. Of a `DTensor` both objects have such a class: the local tensor, on which the
engine works, and the `DTensor` itself, whose functions reach its local tensor without asking anybody. While something holds its
memory besides the engine (a view, an alias, a `state_dict()`), a tensor is not lowered: what people hold stays theirs.

`type(p) is torch.nn.Parameter` is False while it lies below; code of PyTorch that asks so runs in calls, in which the class is
the tensor's own.

[Note: watched parameters]
A write through `.data` moves no version. Of a parameter that has a copy below and one on the device it makes one of them old,
and whoever holds the parameter may do it at any line of a step. So for as long as there are two, on every device, its class is
`WatchedParameter`, whose `data` tells the guard before it answers: one that is up counts as written, and what was brought
up of one that is used below is dropped. `swap_tensors` may give class and memory to another tensor for a while, so what is told
is the item whose memory it is. Its functions are a parameter's own, at their speed. Where nobody but PyTorch sees it (an
update, compiled code), and where a step is recorded, which sees every write, its class is its own.

[Note: transforms]
`vmap`, `grad` and their like (`torch.func`) compute with wrappers of the tensors that they are given. A wrapper is of no class
of ours and holds the tensor, not its memory: its functions ask nobody, and nothing shows that it is there. PyTorch makes it by
functions that ask no class either. So these are replaced: a tensor that gets a wrapper comes up, and stays up until the next
step, as one does whose address was asked for.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol
from weakref import _remove_dead_weakref  # type: ignore[attr-defined]  # in one piece, which no public call is

import torch
from torch._functorch import eager_transforms, vmap
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes

from tieroff.runtime.items.data_functions import asks_no_data
from tieroff.runtime.movable import local_of, package_of
from tieroff.runtime.signal_safety import runs_user_code
from tieroff.runtime.tensors import is_storage_held, owners_by, storage_of
from tieroff.uncompiled import uncompiled

# Inside of it no subclass's `__torch_function__` runs: the engine touches its own tensors.
untouched = torch._C.DisableTorchFunctionSubclass
_DATA: Any = torch.Tensor.data  # itself, whatever a class makes of it


class SubclassCalls:
    """Whether functions of tensor subclasses run in the thread of the steps, as when the model was wrapped.

    An exception before the last instruction of a `with untouched()` leaves them off, and then every subclass of the user's,
    too, is an ordinary tensor.
    """

    def __init__(self) -> None:
        with torch._C._EnableTorchFunction():
            self._back_on = untouched()  # leaving it sets what was when it was entered
            self._back_on.__enter__()
            self._back_on.__exit__(None, None, None)
        self._are_on = torch._C._is_torch_function_enabled()

    def restore(self) -> None:
        """Switches them on again if an exception left them off."""
        if self._are_on and not torch._C._is_torch_function_enabled():
            self._back_on.__exit__(None, None, None)


class Guarded(Protocol):
    """What is known of a tensor that may be offloaded: its item."""

    @property
    def tensor(self) -> torch.Tensor | None: ...

    @property
    def outer(self) -> torch.Tensor | None: ...

    @property
    def others(self) -> tuple[torch.Tensor, ...]: ...

    @property
    def guard(self) -> Guard | None: ...

    @property
    def is_shown_below(self) -> bool: ...


class Guard(Protocol):
    """Who is asked when a function gets a tensor whose bytes may lie below."""

    saved_outside: weakref.WeakSet[Any]  # items of parameters that autograd saved outside of the model's forward

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function, with everything of ours among its arguments on the device."""

    def value_on_host(self, item: Any) -> torch.Tensor:
        """Returns the value of an item's tensor as memory of the host: where it lies below, or a copy."""

    def watches(self, item: Any) -> bool:
        """True when functions that get this gradient while it is shown below are to go through the guard."""

    def leaves(self, item: Any) -> None:
        """A gradient is about to be copied out."""

    def multiplying(self) -> AbstractContextManager[None]:
        """Inside, a gradient that came up is multiplied in the place of the program."""

    def user_code_begins(self, movable: Iterable[Any] = ()) -> None:
        """User code runs next; `movable`: items that the step which runs may move."""

    def assigned(self, item: Any) -> None:
        """User code gave a watched parameter other memory."""

    def pass_ended(self) -> None:
        """A backward, or the update, is over and user code runs next."""

    def reaches_data(self, item: Any) -> None:
        """User code is about to reach a watched parameter's memory through `.data`; see [Note: watched parameters]."""


class _ByTensor:
    """Items by the ids of their tensors, held weakly.

    A `WeakValueDictionary` runs code in Python whenever an item dies, in the midst of a step: an exception that comes there
    (Ctrl-C) is lost. Here the dead are forgotten now and then.
    """

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._most = _REFS_AT_FIRST

    def of(self, tensor: object) -> Any:
        """Returns the item that was put last for what has this tensor's id, or None if it died."""
        ref = self._refs.get(id(tensor))
        return ref() if ref is not None else None

    def put(self, tensor: object, item: Any) -> None:
        if len(self._refs) >= self._most:
            for key in [key for key, ref in self._refs.copy().items() if ref() is None]:
                _remove_dead_weakref(self._refs, key)  # another thread may have put a living one there by now
            self._most = 2 * len(self._refs) + _REFS_AT_FIRST
        self._refs[id(tensor)] = weakref.ref(item)

    def living(self) -> list[Any]:
        return [item for ref in self._refs.copy().values() if (item := ref()) is not None]


_REFS_AT_FIRST = 256
_items = _ByTensor()


def guarded(tensor: object) -> Any:
    """Returns the item of a tensor of a guarded class, or None; ids alone are reused."""
    item = _items.of(tensor)
    if item is None or item.guard is None:  # its model was unwrapped
        return None
    is_one = item.tensor is tensor or item.outer is tensor or any(one is tensor for one in item.others)
    return item if is_one else None


class _Offloaded:
    """The `__torch_function__` of both classes."""

    @classmethod
    @uncompiled  # compiled code breaks its graph here: where bytes lie is no part of it
    @runs_user_code  # a backward, which calls hooks
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if asks_no_data(func):
            with untouched():
                return func(*args, **kwargs)
        # Each guard sees to what it looks after, and the function comes here again for what others do.
        below = (leaf for leaf in leaves((args, kwargs)) if is_offloaded(leaf))
        found = next((item for leaf in below if (item := guarded(leaf)) is not None), None)
        if found is None:  # nobody looks after it any more
            with untouched():
                return func(*args, **kwargs)
        return found.guard.call(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Not with the memo as an argument: it holds all that was copied before, which would come up, too.
        item = guarded(self)
        copy = _copy_apart if item is not None and item.device is None else own_class(self).__deepcopy__
        return self.__torch_function__(functools.partial(copy, memo=memo), (), (self,))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__torch_function__(own_class(self).__reduce_ex__, (), (self, protocol))


def _copy_apart(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Copies a tensor that came up for this, and leaves nothing in the memo that has its bytes stay up.

    The memo keeps storages, so that copies share memory as their originals do. Nothing shares what lay below.
    """
    storage = local_of(tensor).untyped_storage()
    copied = own_class(tensor).__deepcopy__(tensor, memo)
    storages: Any = memo.get("torch", {})  # type: ignore[call-overload]
    storages.pop(storage._cdata, None)
    kept: Any = memo.get(id(memo), [])
    for place in reversed(range(len(kept))):
        if isinstance(kept[place], torch.UntypedStorage) and kept[place]._cdata == storage._cdata:
            memo.pop(id(kept.pop(place)), None)
            break
    return copied


class OffloadedParameter(_Offloaded, torch.nn.Parameter):
    """The class of a parameter whose bytes lie below, or that only user code has brought up."""


class OffloadedTensor(_Offloaded, torch.Tensor):
    """The same for a gradient or a tensor of optimizer state."""


class WatchedParameter(torch.nn.Parameter):
    """The class of a parameter of which there are two copies; see [Note: watched parameters]."""

    @property
    def data(self) -> torch.Tensor:
        item = _watched_on(self)
        if item is not None and item.guard is not None:
            item.guard.reaches_data(item)
        return data_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _DATA.__set__(self, value)
        item = _watched.of(self)
        if item is not None and item.tensor is self and item.guard is not None:
            item.guard.assigned(item)  # else seen by its address, before the parameter is used or moved

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._as_parameter("__deepcopy__", memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_parameter("__reduce_ex__", protocol)

    def _as_parameter(self, name: str, given: Any) -> Any:
        """A copy or a pickle is a parameter's."""
        unwatch(self)
        try:
            return getattr(self, name)(given)
        finally:
            watch(self)


_new: Any = torch.nn.Parameter.__new__


@functools.wraps(_new)
def _new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    """Makes a parameter of a tensor, which shares its memory: of one of ours as of a tensor that is up.

    `Parameter.__new__` asks for the tensor's class before it calls any function of it. Weight norm does this, for one.
    """
    if isinstance(data, _Offloaded):
        return data.__torch_function__(functools.partial(_new, cls), (), (data, requires_grad))
    if type(data) is WatchedParameter:
        data = data.data  # whoever has the new one may write
    return _new(cls, data, requires_grad)


torch.nn.Parameter.__new__ = staticmethod(_new_parameter)  # type: ignore[method-assign]


def _keeping_up(wrap: Any) -> Any:
    """Returns a function of torch's that wraps a tensor for a transform; see [Note: transforms]."""

    @functools.wraps(wrap)
    def wrapped(tensor: Any, *args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return wrap(tensor, *args)
        item = guarded(tensor)
        if item is None or item.is_shown_below:
            return wrap(tensor, *args)
        return item.guard.call(wrap, (tensor, *args), {})

    return wrapped


for _module, _name in ((vmap, "_add_batch_dim"), (eager_transforms, "_wrap_for_grad")):
    setattr(_module, _name, _keeping_up(getattr(_module, _name)))

_watched = _ByTensor()


def _watched_on(tensor: torch.Tensor) -> Any:
    """Returns the item whose memory a tensor of the watched class lies on, or None."""
    item = _watched.of(tensor)
    if item is not None and item.tensor is tensor:
        return item
    address = address_of(tensor)  # `swap_tensors` gave another tensor the class and the memory, perhaps for a while
    below_and_up = ((item, memory) for item in _watched.living() for memory in (item.device, item.lower))
    return next((item for item, memory in below_and_up if memory is not None and address_of(memory) == address), None)


# Classes without a `__torch_function__` of anybody's.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, WatchedParameter})
_OFFLOADED: dict[type, type] = {
    torch.nn.Parameter: OffloadedParameter,
    WatchedParameter: OffloadedParameter,
    torch.Tensor: OffloadedTensor,
}
_OWN: dict[type, Any] = {
    OffloadedParameter: torch.nn.Parameter,
    WatchedParameter: torch.nn.Parameter,
    OffloadedTensor: torch.Tensor,
}
_taken_in_lists: list[Any] = _foreach_utils._foreach_supported_types


def _take_in_lists(kind: type) -> None:
    """Has torch give such tensors to functions of lists, as it gives those that are up, and as it does with DTensors.

    Clipping asks for the class first. By itself, the norm of a tensor has other last bits on a GPU than in a list.
    """
    if kind not in _taken_in_lists:
        _taken_in_lists.append(kind)


_take_in_lists(OffloadedTensor)


def _offloaded_class(kind: type) -> type | None:
    """Returns the class of such a tensor while its bytes lie below; None for a class of somebody else's."""
    if kind not in _OFFLOADED:
        distributed = sys.modules.get("torch.distributed.tensor")
        is_known = distributed is not None and kind is distributed.DTensor
        is_known = is_known or bool(package_of(kind)) or hasattr(kind, "__tensor_flatten__")
        if not is_known or issubclass(kind, _Offloaded):
            return None
        # Libraries tell their classes by name.
        _OFFLOADED[kind] = type(
            kind.__name__, (_Offloaded, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        )
        _OWN[_OFFLOADED[kind]] = kind
        _take_in_lists(_OFFLOADED[kind])
    return _OFFLOADED[kind]


def own_class(tensor: Any) -> Any:
    """Returns the class that a tensor has when its bytes are up."""
    return _OWN.get(type(tensor), type(tensor))


def is_offloaded(tensor: object) -> bool:
    """True for a tensor whose functions go through a guard."""
    return isinstance(tensor, _Offloaded)


def may_be_watched(item: Guarded) -> None:
    """This item's tensor may be a watched parameter from here on."""
    _watched.put(item.tensor, item)


def watch(tensor: Any) -> None:
    """There are two copies of a tensor: if it is a parameter, an access of its `.data` is noticed."""
    if type(tensor) is torch.nn.Parameter:
        tensor.__class__ = WatchedParameter


def unwatch(tensor: Any) -> None:
    """There is one copy again, or nobody but PyTorch uses the tensor."""
    kind: type = type(tensor)
    if kind is WatchedParameter:
        tensor.__class__ = torch.nn.Parameter


def leaves(values: Any) -> list[Any]:
    """Returns the leaves of a nested structure."""
    return torch.utils._pytree.tree_leaves(values)


def guard_class(item: Guarded) -> None:
    """From now on, functions that get this item's tensor go through its guard."""
    tensor: Any
    for tensor in (item.tensor, item.outer, *item.others):
        below = _offloaded_class(type(tensor))
        if below is not None:
            _items.put(tensor, item)
            tensor.__class__ = below


def restore_class(item: Guarded) -> None:
    """The bytes of this item's tensor are up, and its user needs nobody's help."""
    tensor: Any
    for tensor in (item.tensor, item.outer, *item.others):
        if type(tensor) in _OWN:
            tensor.__class__ = _OWN[type(tensor)]


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`, whatever its class, and unseen by whoever records the step."""
    with untouched(), _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        _DATA.__set__(tensor, value)


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor.data`, and tells nobody."""
    data: torch.Tensor = _DATA.__get__(tensor)
    return data


def owners_of(tensor: torch.Tensor) -> int:
    """Returns how many tensors (and other owners) share a tensor's memory."""
    with untouched():
        return owners_by(storage_of(tensor)) + is_storage_held(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """Returns a tensor's version, whatever its class."""
    if type(tensor) in PLAIN:
        return tensor._version
    with untouched():
        return tensor._version


def address_of(tensor: torch.Tensor) -> int:
    """Returns where a tensor's first element lies, whatever the tensor's class."""
    if type(tensor) in PLAIN:
        return tensor.data_ptr()
    with untouched():
        return tensor.data_ptr()


def lies_on(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True when two tensors share one storage."""
    with untouched():
        return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)
