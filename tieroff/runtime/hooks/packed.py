"""Packed tensors: what autograd is given in the place of a tensor that it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tieroff.errors import StateError
from tieroff.runtime.execution.autograd import functorch_is_active, unseen_by_the_program
from tieroff.runtime.hooks.parameters.live import LiveValues, UnmovedParameter
from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.items.offloaded import PLAIN, guarded, untouched
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.movable import is_wrapper
from tieroff.runtime.tensors import bytes_of, probe_of, unseen, view_of


class _Versioned:
    """A tensor's geometry and version, without its memory.

    `probe` shares the version counter of the tensor that was saved and nothing else, so a write after the bytes have
    left is still seen: autograd itself does not check tensors that went through hooks.
    """

    __slots__ = ("dtype", "offset", "probe", "size", "stride", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()
        self.probe = probe_of(tensor)
        self.version = self.probe._version

    def check(self) -> None:
        """Raises RuntimeError, as autograd does, when the tensor was written since it was saved."""
        if self.probe._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.dtype} {list(self.size)}] is at version {self.probe._version}; "
                f"expected version {self.version} instead. Clone the tensor before the in-place operation."
            )

    def over(self, device: torch.Tensor, *, is_recorded: bool) -> torch.Tensor:
        """Returns a tensor of this geometry over device bytes."""
        if not is_recorded:
            return view_of(device, self.dtype, self.size, self.stride, int(self.offset))
        with unseen():  # the recorder was told of this memory
            return view_of(device, self.dtype, self.size, self.stride, int(self.offset))


class Packed(_Versioned):
    """A saved view of an activation.

    Attributes:
        lent: what was given to somebody who may write it, while its memory is the item's; see [Note: lent activations] in
            items/activation.py. As in a plain run it is one object each time, and not autograd's to take for a gradient.
        takes_writes: what is written to it counts, and is no error; see [Note: tensors on a ctx] in forward/on_ctx.py.
    """

    __slots__ = ("__weakref__", "_lent_version", "item", "lent", "takes_writes")

    def __init__(self, tensor: torch.Tensor, item: ActivationItem) -> None:
        super().__init__(tensor)
        self.item = item
        self.lent: torch.Tensor | None = None
        self._lent_version = 0
        self.takes_writes = False

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """Somebody gets a tensor for what was saved, who may write it."""
        self.lent, self._lent_version = tensor, tensor._version
        return tensor

    def check(self) -> None:
        if not self.takes_writes:
            self._see_writes()
            super().check()

    def take_back(self) -> None:
        """The memory that was lent is not the item's any more."""
        self._see_writes()
        self.lent = None

    def _see_writes(self) -> None:
        """A write that moved the version of what was lent is one to what was saved."""
        if self.lent is not None and self.lent._version != self._lent_version:
            self.version = -1


class PackedParameter(_Versioned):
    """A saved view of a fetched parameter: the parameter is fetched again instead.

    Attributes:
        leaf: the parameter itself, where a Function saved that; see [Note: saved leaves] in parameters/leaves.py.
    """

    __slots__ = ("home_version", "item", "leaf", "times_assigned")

    def __init__(self, tensor: torch.Tensor, item: ParameterItem | UnmovedParameter, leaf: torch.Tensor | None = None) -> None:
        super().__init__(tensor)
        self.item, self.leaf = item, leaf
        home = item.tensor
        self.home_version = home._version if home is not None else 0
        self.times_assigned = item.times_assigned if isinstance(item, ParameterItem) else 0

    def check(self) -> None:
        """Raises RuntimeError when the parameter was written since it was saved, as autograd does."""
        super().check()
        home, item = self.item.tensor, self.item
        if isinstance(item, ParameterItem) and (item.times_assigned != self.times_assigned or item.was_assigned()):
            raise StateError(
                f"parameter {item.name} was given other memory (`.data = ...`) between the forward that used it and backward, "
                "which needs its old value; assign it before the forward or after backward"
            )
        if home is not None and home._version != self.home_version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"parameter {self.item.name} is at version {home._version}; expected version {self.home_version} instead."
            )


Lift = Callable[[ParameterItem], None]


@dataclass(frozen=True, slots=True)
class ParameterView:
    """A view of a parameter of several tensors, by its geometry: of one of these, wherever that lies.

    Attributes:
        of: that tensor.
        first_byte: where the view begins, from where the tensor does.
        times_assigned: how often the item was given other memory when the view was made.
    """

    item: ParameterItem
    of: torch.Tensor
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    first_byte: int
    times_assigned: int

    @classmethod
    def noted(cls, view: torch.Tensor, item: ParameterItem) -> ParameterView:
        """Returns what is noted of a view of an item that is up."""
        first = _first_byte(view)
        of = max((one for one in (item.living, *item.others) if _first_byte(one) <= first), key=_first_byte)
        size, stride = tuple(view.size()), view.stride()
        return cls(item, of, view.dtype, size, stride, first - _first_byte(of), item.times_assigned)

    def made(self) -> torch.Tensor:
        """Returns the view, of a parameter that is up.

        Raises:
            StateError: the parameter was given other memory since; the view was of what it had before.
        """
        if self.item.times_assigned != self.times_assigned or self.item.was_assigned():
            raise StateError(
                f"parameter {self.item.name} was given other memory (`.data = ...`) between the forward that used it and "
                "backward, which needs its old value; assign it before the forward or after backward"
            )
        with untouched(), unseen():
            of = self.of.detach()
            first = _first_byte(of) + self.first_byte
            return view_of(bytes_of(of), self.dtype, self.size, self.stride, first // self.dtype.itemsize)


def _first_byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


class PackedParts:
    """A saved tensor of a wrapper subclass whose parts are a parameter's, or views of them.

    Args:
        item: the parameter's.
        outer: the tensor, where people hold it for the parameter: its parts lie where the parameter's do.
        parts: else by name, what they are.
        made: makes it of its parts.
        lift: brings a parameter up, for a node in backward.

    Attributes:
        leaf: None; the tensor comes back as itself.
    """

    __slots__ = ("_item", "_lift", "_made", "_outer", "_parts")
    leaf: torch.Tensor | None = None

    def __init__(
        self, item: ParameterItem, outer: Any, parts: dict[str, ParameterView], made: Callable[[Any], Any], lift: Lift
    ) -> None:
        self._item, self._outer, self._parts, self._made, self._lift = item, outer, parts, made, lift

    @classmethod
    def of(cls, tensor: torch.Tensor, live: LiveValues, lift: Lift) -> PackedParts | None:
        """Returns it, or None for any other tensor."""
        if not is_wrapper(tensor):
            return None
        below = guarded(tensor)
        if isinstance(below, ParameterItem) and below.outer is tensor:
            return cls(below, tensor, {}, lambda _: tensor, lift)
        outer: Any = tensor
        names, context = outer.__tensor_flatten__()
        parts = {name: getattr(outer, name) for name in names}
        if not parts or any(type(part) not in PLAIN for part in parts.values()):
            return None
        items = [live.on(part.untyped_storage()) for part in parts.values()]
        item = items[0]
        if not isinstance(item, ParameterItem) or any(one is not item for one in items):
            return None
        if item.outer is tensor:
            return cls(item, tensor, {}, lambda _: tensor, lift)
        kind, size, stride = type(outer), outer.shape, outer.stride()

        def made(inner: Any) -> Any:
            return kind.__tensor_unflatten__(inner, context, size, stride)

        return cls(item, None, {name: ParameterView.noted(part, item) for name, part in parts.items()}, made, lift)

    def get(self) -> torch.Tensor:
        """Returns the tensor; its parameter is brought up."""
        self._lift(self._item)
        if self._outer is not None:
            outer: torch.Tensor = self._outer
            return outer
        made: torch.Tensor = self._made({name: view.made() for name, view in self._parts.items()})
        return made


class Kept:
    """A saved tensor that stays where it is.

    Attributes:
        leaf: as in `PackedParameter`.
    """

    __slots__ = ("leaf", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, leaf: torch.Tensor | None = None) -> None:
        self.tensor, self.leaf = tensor, leaf
        self.version = -1 if tensor.is_inference() else tensor._version

    @classmethod
    def whole(cls, tensor: torch.Tensor, leaf: torch.Tensor | None) -> Kept:
        """Keeps a tensor of any class or layout as it is; as torch does, the result of the op that saves it without its graph.

        Such a result would keep itself alive where no backward runs. What an op saves of its arguments stays what it is: to
        detach it is a call to its class, which may do more (a `DTensor` is reduced).
        """
        node = tensor.grad_fn
        if node is None or functorch_is_active() or node._sequence_nr() != torch._C._autograd._get_sequence_nr() - 1:
            return cls(tensor, leaf)
        with unseen_by_the_program():
            return cls(tensor.detach(), leaf)

    def get(self) -> torch.Tensor:
        if self.version >= 0 and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype} {list(self.tensor.size())}] is at version {self.tensor._version}; "
                f"expected version {self.version} instead. Clone the tensor before the in-place operation."
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class PackedBefore:
    """A saved tensor that needs nothing of the engine, as it was in the step before; see [Note: by order] in saved.py.

    Attributes:
        size_bytes: of its storage.
        is_resident: see [Note: resident tensors] in step/executable.py; of nothing that ever moves otherwise.
        ordinal: of its activation; -1: it is of none.
        is_new: nothing of its storage had been saved before: an event of the step.
        parameter: whose value it is a view of, or None.
    """

    size_bytes: int
    is_resident: bool
    ordinal: int = -1
    is_new: bool = False
    parameter: ParameterItem | None = None

    @classmethod
    def of(cls, packed: object, tensor: torch.Tensor, *, is_new: bool) -> PackedBefore | None:
        """Returns what is remembered of a saved tensor that needs nothing of the engine; None of any other."""
        if type(packed) is ResidentView:
            return cls(tensor.untyped_storage().nbytes(), True, packed.ordinal, is_new, packed.parameter)
        if type(packed) is Kept and is_plain(tensor):  # else its bytes do not say everything
            return cls(tensor.untyped_storage().nbytes(), is_resident=False)
        return None


class ResidentView(Kept):
    """A saved view of what the plan leaves on the device; see [Note: resident tensors] in step/executable.py.

    Attributes:
        ordinal: of the activation; -1: it is a parameter.
        parameter: None: it is an activation.
        packed: what stands for it once the engine has taken it over; then `tensor` has no memory.
    """

    __slots__ = ("__weakref__", "ordinal", "packed", "parameter")

    def __init__(
        self, tensor: torch.Tensor, ordinal: int, parameter: ParameterItem | None = None, leaf: torch.Tensor | None = None
    ) -> None:
        self.tensor, self.leaf = tensor, leaf
        self.version = tensor._version
        self.ordinal = ordinal
        self.parameter = parameter
        self.packed: Packed | PackedParameter | None = None

    def become(self, item: ActivationItem) -> Packed:
        """The engine has this for an item from here on; the version that was saved stays the one that is expected."""
        packed = Packed(self.tensor, item)
        packed.version, packed.takes_writes = self.version, self.version < 0
        self.packed = packed
        self.tensor = packed.probe
        return packed

    def become_parameter(self, item: ParameterItem) -> PackedParameter:
        """The same for a saved view of a parameter, which is to be fetched where it is needed."""
        packed = PackedParameter(self.tensor, item, self.leaf)
        packed.version = self.version
        self.packed = packed
        self.tensor = packed.probe
        return packed


def take_writes(packed: object) -> None:
    """What is written to a packed tensor from here on counts, and is no error."""
    if isinstance(packed, Packed):
        packed.takes_writes = True
    elif isinstance(packed, Kept):
        packed.version = -1  # no version is expected


def is_packed(packed: object) -> bool:
    """True for what stands for a tensor whose bytes the engine moves, or may take over."""
    return isinstance(packed, (_Versioned, ResidentView))


def looks_of(packed: Any) -> torch.Tensor:
    """Returns a tensor of the shape, type and device of a packed one, with no values."""
    if isinstance(packed, ResidentView):
        if packed.packed is None:
            return packed.tensor
        packed = packed.packed
    with torch.no_grad(), unseen():
        return torch.empty((), dtype=packed.dtype, device=packed.probe.device).expand(packed.size)


def is_plain(tensor: torch.Tensor) -> bool:
    """True for tensors whose bytes alone, with size and stride, say everything."""
    if type(tensor) not in PLAIN or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    is_plain = _PLAIN_BY_KEYS.get(keys)
    if is_plain is None:
        is_plain = _PLAIN_BY_KEYS[keys] = _has_plain_bytes(tensor)
    return is_plain


_PLAIN_BY_KEYS: dict[int, bool] = {}
"""What `_has_plain_bytes` said of tensors, by their dispatch keys: all that it asks is among these, and few sets occur."""


def _has_plain_bytes(tensor: torch.Tensor) -> bool:
    return (
        not tensor.is_nested
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_inference() or tensor.is_conj() or tensor.is_neg())
        and not tensor._is_zerotensor()  # a tangent of forward mode that has no memory
        and tensor.device.type != "meta"
    )
