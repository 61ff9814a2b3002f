"""Home items: parameters, gradients and optimizer state, tensors that people hold and may touch at any time.

The tensor object never changes; only what its `.data` lies on does. While it is off the device, it *is* ordinary memory over
its place (host memory, or a mapping of its extent in a file) where the device is the host itself: touching it works. On any
other device it is hollow: see [Note: hollow leaves] in hollow.py.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tieroff.core.tensor import TensorClass, Tier
from tieroff.errors import StateError
from tieroff.runtime.backend.place import HomePlace, Place
from tieroff.runtime.items.hollow import Guard, guard_class, lies_on, owners_of, restore_class, set_data, untouched
from tieroff.runtime.items.item import Item, Mover
from tieroff.runtime.items.residency import ON_DEVICE, Event, State
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.tensors import bytes_of, view_of
from tieroff.storage.nvme.pages import MappedFiles


def why_unmovable(tensor: torch.Tensor) -> str:
    """Returns why this tensor cannot have a home below, or "" when it can."""
    if tensor.is_nested or tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return "no plain strided tensor"
    if tensor.is_quantized or tensor.is_inference() or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return "a quantized, inference or lazily transformed tensor"
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return "it has no bytes"
    if tensor.is_cpu and tensor.is_shared():
        return "it lies in memory shared between processes"
    storage = tensor.untyped_storage()
    if tensor.storage_offset() != 0 or storage.nbytes() != tensor.numel() * tensor.element_size():
        return "a view of a larger storage"
    # Two references are this function's own: the tensor's and the Python storage object's.
    if torch._C._storage_Use_Count(storage._cdata) > 2:
        return "its memory is shared with another tensor"
    if not _is_dense(tensor):
        return "its elements overlap or leave gaps"
    return ""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain tensor that holds a tensor's bytes in this process.

    Of a `DTensor` that is this rank's shard: the very object that the `DTensor` computes on, so that its `.data` may lie
    here or there as that of any other tensor. Everything else holds its bytes itself.
    """
    distributed = sys.modules.get("torch.distributed.tensor")  # without it there is no DTensor; importing it takes long
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return tensor
    with torch.no_grad():  # under autograd it would be a view
        local: torch.Tensor = tensor.to_local()
    return local


def _is_dense(tensor: torch.Tensor) -> bool:
    """True when the elements fill their storage exactly once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class HomeItem(Item):
    """A tensor that people hold: its device copy replaces `.data` for as long as it is lifted.

    Attributes:
        guard: who is asked when user code uses the tensor while it is hollow.
        lower: the tensor's memory below, as a CPU tensor of its geometry; None before the first copy out.
        value: the device copy in the tensor's geometry; None when there is none.
        is_lifted: `.data` is the device copy.
        version: the tensor's version when its copies were last known to be equal.
        may_be_written: user code holds the device copy and is known to write to it in a way that no version shows.
        pins: calls that use the device copy just now; it stays.
        times_assigned: how often user code gave the tensor other memory.
    """

    __slots__ = (
        "_hollow",
        "_ref",
        "dtype",
        "guard",
        "is_lifted",
        "lower",
        "may_be_written",
        "pins",
        "size",
        "stride",
        "times_assigned",
        "value",
        "value_version",
        "version",
    )

    def __init__(
        self, key: Hashable, name: str, kind: TensorClass, tensor: torch.Tensor, tier: Tier, guard: Guard | None = None
    ) -> None:
        super().__init__(key, name, kind, tensor.numel() * tensor.element_size(), tier)
        self._ref: Callable[[], torch.Tensor | None] = weakref.ref(tensor)
        self.dtype, self.size, self.stride = tensor.dtype, tuple(tensor.size()), tuple(tensor.stride())
        self.lower: torch.Tensor | None = None
        self.value: torch.Tensor | None = None
        self.value_version = 0
        self.is_lifted = True
        self.may_be_written = False
        self.guard, self.pins, self.times_assigned = guard, 0, 0
        self._hollow: torch.Tensor | None = None
        self.version = tensor._version

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor itself, or None when it died."""
        return self._ref()

    @property
    def living(self) -> torch.Tensor:
        """The tensor itself, of which somebody else holds a reference for now."""
        tensor = self._ref()
        if tensor is None:
            raise StateError(f"{self.name} died while it was used; this is a bug in tieroff")
        return tensor

    @property
    def valid_value(self) -> torch.Tensor:
        """The device copy in the tensor's geometry, where it is known to be on the device."""
        if self.value is None:
            raise StateError(f"{self.name} has no copy on the device where one was expected; this is a bug in tieroff")
        return self.value

    def adopt(self, traffic: Traffic) -> None:
        """Takes the tensor as it is, on the device, under the engine's care."""
        tensor = self.living
        traffic.hold(self, bytes_of(tensor))
        self.value = tensor.detach()
        self._hollow = traffic.backend.hollow(self.value, f"{self.name} lies below the device: tieroff has its bytes")

    @property
    def is_shown_below(self) -> bool:
        """True when people reach the tensor's bytes where they lie below."""
        return self._hollow is None

    def is_current(self) -> bool:
        """True when `.data` still lies where the engine put it (nobody assigned another memory)."""
        tensor = self.tensor
        with untouched():
            if tensor is None or tensor.dtype is not self.dtype or tuple(tensor.size()) != self.size:
                return False
            if self._hollow is not None:
                expected = self.value if self.is_lifted else self._hollow
                return expected is not None and lies_on(tensor, expected)
            expected = self.value if self.is_lifted else self.lower
            return expected is not None and tensor.data_ptr() == expected.data_ptr()

    def is_elsewhere(self) -> bool:
        """True when the tensor lies on memory that is none of the engine's, whatever the item says of itself."""
        tensor, known = self.tensor, (self.device, self.value, self.lower, self._hollow)
        return tensor is not None and not any(memory is not None and lies_on(tensor, memory) for memory in known)

    def was_written(self) -> bool:
        """True when the tensor, or its device copy behind its back, was written since the copies were equal."""
        tensor = self.tensor
        if tensor is None:
            return False
        if self.may_be_written and self.device is not None:
            return True
        is_older = self.value is not None and self.value._version != self.value_version
        return is_older or version_of(tensor) != self.version

    def note(self) -> None:
        """Remembers the versions at which the copies are equal."""
        tensor = self.tensor
        self.may_be_written = False
        self.version = version_of(tensor) if tensor is not None else 0
        self.value_version = self.value._version if self.value is not None else 0

    def make_place(self, traffic: Mover) -> Place:
        place = HomePlace(traffic.stores[self.tier], self.size_bytes)
        memory = torch.frombuffer(place.home, dtype=torch.uint8, count=self.size_bytes)
        self.lower = view_of(memory, self.dtype, self.size, self.stride, 0)
        return place

    def part_with_lent(self) -> None:
        """A `state_dict()` that somebody keeps has the values of its moment: the next ones get another place."""
        if self._hollow is not None and self.lower is not None and owners_of(self.lower) > 1:
            self.place = self.lower = None  # the memory goes back when its last tensor dies

    def source(self) -> torch.Tensor:
        self.note()
        return super().source()

    def lift(self, traffic: Traffic) -> None:
        """Makes the tensor lie on its device copy, which is fetched when it is not there."""
        self._take_assigned(traffic)
        device = traffic.want(self)
        tensor = self.tensor
        if tensor is None:
            return
        if self._hollow is not None:
            restore_class(tensor)
        if self.is_lifted:
            return
        if self.value is None:
            self.value = view_of(device, self.dtype, self.size, self.stride, 0)
        set_data(tensor, self.value)
        self.is_lifted = True
        self.note()

    def arrived(self) -> None:
        assert self.device is not None
        self.value = view_of(self.device, self.dtype, self.size, self.stride, 0)
        self.note()

    def freed(self) -> None:
        tensor = self.tensor
        if self.is_lifted and tensor is not None and self.lower is not None:
            if self._hollow is None:
                tensor.data = self.lower
            elif self.is_current():  # else somebody gave it other memory, which is its own now
                set_data(tensor, self._hollow)
                guard_class(self)
        self.is_lifted = False
        self.value = None
        self.note()

    def touch(self, traffic: Traffic) -> None:
        """The device copy may have been written, whether or not a version says so (fused kernels move none)."""
        if self.is_lifted and self.device is not None:
            traffic.send(self, Event.TOUCH)
            self.note()

    def refresh(self, traffic: Mover) -> None:
        """Makes what was written since the last copy count: on the device, or behind the engine's back."""
        self._take_assigned(traffic)
        if not self.was_written():
            return
        if self.is_lifted:
            traffic.send(self, Event.TOUCH)
            self.note()
        elif self.value is not None and self._is_value_newer():
            # A fetched value was written in place inside forward: the home gets it at once.
            tensor = self.tensor
            if tensor is not None:
                with torch.no_grad(), _disable_current_modes():
                    tensor.data.copy_(self.value)
            self.note()
        elif self.state in ON_DEVICE or self.state is State.ARRIVING:
            # The home below was written: the device copy is old, the home is what counts.
            traffic.send(self, Event.DROP)
            self.note()

    def may_take(self, value: torch.Tensor) -> bool:
        """True when the tensor may lie on this memory from here on, as by `tensor.data = value`."""
        is_alike = value.dtype is self.dtype and tuple(value.size()) == self.size and value.layout is torch.strided
        return (
            is_alike
            and value.storage_offset() == 0
            and value.untyped_storage().nbytes() == self.size_bytes
            and _is_dense(value)
        )

    def _take_assigned(self, traffic: Mover) -> None:
        """Other memory that user code gave a hollow leaf, while it was up, is its device copy from here on."""
        tensor = self.tensor
        if self._hollow is None or tensor is None or self.value is None or not self.is_lifted:
            return
        with untouched():
            if lies_on(tensor, self.value):
                return
            if tensor.device == self.value.device and self.may_take(tensor):
                self.take(traffic)

    def take(self, traffic: Mover) -> None:
        """The memory that the tensor lies on now is its device copy, and what the engine had of it is void."""
        traffic.settle(self)
        with untouched(), torch.no_grad():
            tensor = self.living
            traffic.hold(self, bytes_of(tensor))
            self.value = tensor.detach()
            if self.stride != tuple(tensor.stride()) and self._hollow is not None:
                self.stride = tuple(tensor.stride())
                self._hollow = self._hollow.as_strided(self.size, self.stride)
                self.lower = self.place = None  # of the other geometry
        self.times_assigned += 1
        self.state, self.is_lifted = State.DEVICE, True
        self.note()

    def _is_value_newer(self) -> bool:
        tensor, value = self.tensor, self.value
        if value is None or value._version != self.value_version:
            return value is not None
        return self.may_be_written and (tensor is None or tensor._version == self.version)

    def leave(self, traffic: Mover) -> None:
        """Moves the tensor to its lower tier, with its latest value; one that somebody holds stays up."""
        if self.is_held:
            return
        self.refresh(traffic)
        traffic.leave(self)

    @property
    def is_held(self) -> bool:
        """True while a call uses the device copy, or something besides the engine shares the memory of a hollow tensor."""
        tensor = self.tensor
        if self.pins:
            return True
        if self._hollow is None or not self.is_lifted or tensor is None or self.device is None:
            return False
        return owners_of(self.device) > 2 + (self.value is not None)  # the tensor, its 1-d view, and the value

    def on_host(self, traffic: Mover) -> torch.Tensor:
        """Returns the tensor's value as memory of the host: where it lies below, or a copy."""
        traffic.settle(self)
        if self.state in (State.BOTH, State.LOWER) and self.lower is not None and not self.was_written():
            traffic.flush()
            return self.lower.detach()
        with untouched():
            return self.living.detach().cpu()

    def settle_below(self, traffic: Traffic, mapped: MappedFiles) -> None:
        """Moves a newly adopted tensor to its lower tier; pages of a mapped checkpoint that held it leave memory."""
        memory = self.device
        self.leave(traffic)
        if memory is not None and memory.is_cpu and self.device is None:
            mapped.page_out(memory.data_ptr(), self.size_bytes)

    def leave_place(self, traffic: Traffic) -> None:
        """Gives the room below back; the tensor stays where it is lifted to."""
        traffic.settle(self)
        if self.place is not None:
            self.place.free()
            self.place = None
        self.lower = None
        self.state = State.DEVICE

    def bring_home(self, traffic: Traffic) -> None:
        """Gives the tensor ordinary device memory with its latest value; the engine's care ends."""
        tensor = self.tensor
        if tensor is None:
            traffic.end(self)
            return
        if self.is_current():
            self.refresh(traffic)
            self.lift(traffic)
        self.detach(traffic)

    def detach(self, traffic: Traffic) -> None:
        """Ends the engine's care and leaves the tensor valid where it lies; a hollow one gets its bytes back first."""
        traffic.settle(self)
        tensor = self.tensor
        if self._hollow is not None and tensor is not None:
            if not self.is_lifted and self.is_current():
                self.lift(traffic)
            restore_class(tensor)
        self.guard = self._hollow = None
        traffic.let_go(self)
        self.value = self.lower = None

    def forsake(self, traffic: Traffic) -> None:
        """Ends the engine's care for a tensor that gets other memory; what it held is lost with it."""
        traffic.settle(self)
        tensor = self.tensor
        if tensor is not None:
            restore_class(tensor)
        self.guard = self._hollow = None
        traffic.let_go(self)
        self.value = self.lower = None


class ParameterItem(HomeItem):
    """A parameter.

    Attributes:
        position: its index among the model's parameters.
    """

    __slots__ = ("position",)

    def __init__(self, position: int, name: str, tensor: torch.Tensor, tier: Tier, guard: Guard | None = None) -> None:
        super().__init__(("param", position), name, TensorClass.PARAMETER, tensor, tier, guard)
        self.position = position
        self._ref = lambda: tensor  # the model holds it anyway; a weak reference would forbid torch.utils.swap_tensors


def version_of(tensor: torch.Tensor) -> int:
    """Returns a tensor's version, whatever its class."""
    with untouched():
        return tensor._version
