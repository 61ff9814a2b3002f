"""Home items: parameters, gradients and optimizer state, tensors that people hold and may touch at any time.

The tensor object never changes; only what its `.data` lies on does. While it is off the device, it *is* ordinary memory over
its place (host memory, or a mapping of its extent in a file) where the device is the host itself: touching it works. On any
other device it is offloaded: see [Note: offloaded leaves] in offloaded.py.

[Note: values have one place that people can hold]
What something besides the engine holds (a view, `p.data`, a NumPy array, a `state_dict()`) is not moved: a tensor that is up
stays up, and one that is shown below stays there, where it is used like any memory. So an alias follows its tensor as long
as the alias lives, whatever the plan says. What a tensor lies on is asked by its address before it is moved either way: user
code may have given it other memory (`p.data = x`), which is its value from there on, and sharing with another process moves
the memory under all its tensors. The item then lets go, and the tensor is taken over, or kept, when the next step begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tieroff.core.tensor import TensorClass, Tier
from tieroff.errors import StateError
from tieroff.runtime.backend.place import HomePlace, Place
from tieroff.runtime.items.item import Item, Mover
from tieroff.runtime.items.offloaded import (
    PLAIN,
    Guard,
    address_of,
    data_of,
    guard_class,
    lies_on,
    owners_of,
    restore_class,
    set_data,
    untouched,
    unwatch,
    version_of,
)
from tieroff.runtime.items.residency import ARRIVING, BOTH, DEVICE, LOWER, ON_DEVICE, Event
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.movable import is_dense
from tieroff.runtime.tensors import bytes_of, is_storage_held, owners_by, storage_of, view_of


class HomeItem(Item):
    """A tensor that people hold: its device copy replaces `.data` for as long as it is lifted.

    Attributes:
        guard: who is asked when user code uses the tensor while it is offloaded.
        lower: the tensor's memory below, as a CPU tensor of its geometry; None before the first copy out.
        value: the device copy in the tensor's geometry; None when there is none.
        is_lifted: `.data` is the device copy.
        version: the tensor's version when its copies were last known to be equal.
        may_be_written: user code holds the device copy and is known to write to it in a way that no version shows.
        pins: calls that use the device copy just now; it stays.
        readers: threads besides the step's that use the tensor just now: it stays where it is.
        is_sliced: its update uses it where it lies below; see [Note: slices] in optimizer/slices/rows.py.
        is_unmanaged: the tensor lies on memory that the engine cannot move, until it is taken over again.
        times_assigned: how often user code gave the tensor other memory.
    """

    __slots__ = (
        "dtype",
        "guard",
        "is_lifted",
        "is_sliced",
        "is_unmanaged",
        "lower",
        "lower_address",
        "lower_storage",
        "may_be_written",
        "pins",
        "placeholder",
        "readers",
        "ref",
        "size",
        "stride",
        "times_assigned",
        "value",
        "value_address",
        "value_version",
        "version",
    )

    def __init__(
        self, key: Hashable, name: str, kind: TensorClass, tensor: torch.Tensor, tier: Tier, guard: Guard | None = None
    ) -> None:
        super().__init__(key, name, kind, tensor.numel() * tensor.element_size(), tier)
        self.ref: Callable[[], torch.Tensor | None] = weakref.ref(tensor)
        self.dtype, self.size, self.stride = tensor.dtype, tuple(tensor.size()), tuple(tensor.stride())
        self.lower: torch.Tensor | None = None
        self.value: torch.Tensor | None = None
        self.value_version = 0
        self.is_lifted, self.may_be_written, self.is_unmanaged, self.is_sliced = True, False, False, False
        self.guard, self.pins, self.readers, self.times_assigned = guard, 0, 0, 0
        self.value_address = self.lower_address = self.lower_storage = 0
        self.placeholder: torch.Tensor | None = None
        self.version = tensor._version

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor itself, or None when it died."""
        return self.ref()

    @property
    def living(self) -> torch.Tensor:
        """The tensor itself, of which somebody else holds a reference for now."""
        tensor = self.ref()
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
        value = tensor.detach()
        self._set_value(value)
        self.placeholder = traffic.backend.placeholder(value, f"{self.name} lies below the device: tieroff has its bytes")

    def _set_value(self, value: torch.Tensor) -> None:
        self.value = value
        if self.placeholder is None:
            self.value_address = value.data_ptr()

    @property
    def is_shown_below(self) -> bool:
        """True when people reach the tensor's bytes where they lie below."""
        return self.placeholder is None

    def is_current(self) -> bool:
        """True when `.data` still lies where the engine put it (nobody assigned another memory)."""
        tensor = self.ref()
        if type(tensor) in PLAIN:  # most are: entering `untouched` costs as much as the rest
            return self._is_where_it_was_put(tensor)
        with untouched():
            return self._is_where_it_was_put(tensor)

    def _is_where_it_was_put(self, tensor: torch.Tensor | None) -> bool:
        if tensor is None or tensor.dtype is not self.dtype or tensor.size() != self.size:
            return False
        if self.placeholder is not None:
            expected = self.value if self.is_lifted else self.placeholder
            return expected is not None and lies_on(tensor, expected)
        expected = self.value if self.is_lifted else self.lower
        if expected is None or self.is_unmanaged or tensor.stride() != self.stride:
            return False
        return tensor.data_ptr() == (self.value_address if self.is_lifted else self.lower_address)

    def is_as_left(self) -> bool:
        """True when nobody gave the tensor other memory or wrote it; False where that takes more than a look to know."""
        tensor = self.ref()
        if self.placeholder is not None or type(tensor) not in PLAIN or self.may_be_written or self.is_unmanaged:
            return False
        assert tensor is not None
        if tensor.data_ptr() != (self.value_address if self.is_lifted else self.lower_address):
            return False
        value = self.value
        return tensor._version == self.version and (value is None or value._version == self.value_version)

    def was_assigned(self) -> bool:
        """True when user code gave the tensor other memory and the engine has not followed yet."""
        is_known = (self.device is not None or self.place is not None) if self.placeholder is None else self.is_lifted
        return is_known and not self.is_current()

    def was_written(self) -> bool:
        """True when the tensor, or its device copy behind its back, was written since the copies were equal."""
        tensor, value = self.ref(), self.value
        if tensor is None or (self.may_be_written and self.device is not None):
            return tensor is not None
        is_older = value is not None and value._version != self.value_version
        return is_older or version_of(tensor) != self.version

    def note(self) -> None:
        """Remembers the versions at which the copies are equal."""
        tensor, value = self.ref(), self.value
        self.may_be_written = False
        self.version = version_of(tensor) if tensor is not None else 0
        self.value_version = value._version if value is not None else 0

    def make_place(self, traffic: Mover) -> Place:
        traffic.register_memory(self.lie_in(place := HomePlace(traffic.stores[self.tier], self.size_bytes)))
        return place

    def lie_in(self, place: HomePlace) -> torch.Tensor:
        """The tensor's memory below is that of this place from here on; returns it."""
        memory = torch.frombuffer(place.home, dtype=torch.uint8, count=self.size_bytes)
        self.lower = lower = view_of(memory, self.dtype, self.size, self.stride, 0)
        self.lower_address, self.lower_storage = place.home.address, storage_of(lower)
        return lower

    def part_with_lent(self) -> None:
        """Memory below that somebody else keeps is his, with its values: the next ones get another place."""
        is_hidden = self.placeholder is not None or self.is_lifted
        if is_hidden and self.lower is not None and owners_of(self.lower) > 1:
            self.place = self.lower = None  # the memory goes back when its last tensor dies

    def source(self) -> torch.Tensor:
        self.note()
        return super().source()

    def lift(self, traffic: Traffic) -> None:
        """Makes the tensor lie on its device copy, which is fetched when it is not there; one held below stays there."""
        self._take_assigned(traffic)
        self.is_refused = False
        if self.placeholder is None and self.is_lifted and self.state in ON_DEVICE:
            return  # most often: it is there
        if not self.is_lifted:
            self.refresh(traffic)  # a copy that came up ahead may be older than what lies below
        if self.stays_below:
            self._drop_copy(traffic)
            return
        device = traffic.want(self)
        tensor = self.tensor
        if tensor is None:
            return
        if self.is_lifted:
            restore_class(self)
            return
        traffic.settle(self)  # people may write it at once: see [Note: late evictions] in table.py
        if self.value is None:
            self._set_value(view_of(device, self.dtype, self.size, self.stride, 0))
        assert self.value is not None
        self.before_expose()
        set_data(tensor, self.value)
        self.is_lifted = True
        self.follow()
        restore_class(self)  # last: until then functions of other threads go through the guard
        self.note()

    @property
    def stays_below(self) -> bool:
        """True while something besides the engine holds or uses the tensor's memory below, where it is shown, or it is dead."""
        if self.tensor is None:
            return True  # as a gradient that was cleared since, and that the plan has come up to be written
        if self.placeholder is not None or self.is_lifted or self.lower is None:
            return False
        # The tensors, and the engine's view.
        return self.readers > 0 or owners_by(self.lower_storage) > 1 + self.sharers or is_storage_held(self.lower)

    def _drop_copy(self, traffic: Mover) -> None:
        """What was fetched of a tensor that is used below may be older than it by the time it would be used."""
        self.refresh(traffic)
        if self.device is not None:
            traffic.send(self, Event.DROP)

    def before_fetch(self) -> None:
        self.note()

    def arrived(self) -> None:
        device = self.device
        assert device is not None
        self._set_value(view_of(device, self.dtype, self.size, self.stride, 0))
        self.value_version = self.valid_value._version  # and not the tensor's, which may have moved since the copy began

    def before_expose(self) -> None:
        """People are about to reach the value, which came up, through the tensor."""

    def is_below_now(self) -> None:
        """People reach the bytes below through the tensor from here on."""

    def before_free(self) -> None:
        tensor = self.tensor
        if self.is_lifted and tensor is not None and self.lower is not None:
            if self.placeholder is not None:
                self.hide()
            elif address_of(tensor) == self.value_address:  # else user code gave it other memory, which `refresh` takes
                unwatch(tensor)
                tensor.data = self.lower
                self.is_below_now()
        self.value, self.is_lifted = None, False
        self.note()

    def hide(self) -> None:
        """Has people find the tensor offloaded, wherever its bytes lie; one that somebody gave other memory keeps that."""
        if self.placeholder is not None and self.is_current():
            guard_class(self)  # first: functions of other threads go through the guard before the memory is gone
            set_data(self.living, self.placeholder)
        self.is_lifted = False
        self.note()

    def touch(self, traffic: Mover) -> None:
        """The device copy may have been written, whether or not a version says so (fused kernels move none)."""
        if self.is_lifted and self.device is not None:
            if self.state is BOTH:
                self.state = DEVICE
            elif self.state is not DEVICE:  # else there is no other copy that it could make old
                traffic.send(self, Event.TOUCH)
            self.note()

    def refresh(self, traffic: Mover) -> None:
        """Makes what was written since the last copy count: on the device, or behind the engine's back."""
        if self.is_as_left():
            return
        self._take_assigned(traffic)
        if not self.was_written():
            return
        if self.is_lifted:
            self.touch(traffic)
        elif self.value is not None and self._is_value_newer():
            # A fetched value was written in place inside forward: the home gets it at once.
            tensor = self.tensor
            if tensor is not None:
                with torch.no_grad(), _disable_current_modes():
                    data_of(tensor).copy_(self.value)
            self.note()
        elif self.state in ON_DEVICE or self.state is ARRIVING:
            # The home below was written: the device copy is old, the home is what counts.
            traffic.send(self, Event.DROP)
            self.note()

    def may_take(self, value: torch.Tensor) -> bool:
        """True when the tensor may lie on this memory from here on, as by `tensor.data = value`."""
        is_alike = value.dtype is self.dtype and tuple(value.size()) == self.size and value.layout is torch.strided
        return (
            is_alike and value.storage_offset() == 0 and value.untyped_storage().nbytes() == self.size_bytes and is_dense(value)
        )

    def _take_assigned(self, traffic: Mover) -> None:
        """Other memory that user code gave the tensor is its value from here on.

        See [Note: values have one place that people can hold].
        """
        tensor = self.ref()
        if tensor is None or self.is_unmanaged:
            return
        if self.placeholder is None:
            if address_of(tensor) != (self.value_address if self.is_lifted else self.lower_address):
                restore_class(self)
                self._follow(tensor, traffic)
            return
        value = self.value
        if value is None or not self.is_lifted:
            return
        with untouched():
            if not lies_on(tensor, value) and tensor.device == value.device and self.may_take(tensor):
                self.take(traffic)

    def _follow(self, tensor: torch.Tensor, traffic: Mover) -> None:
        """The tensor is shown below or up, and lies on neither of the engine's memories, or on the other one."""
        if self.device is None and self.place is None:
            return  # nothing of it is the engine's
        if self.lower is not None and tensor.data_ptr() == self.lower_address and lies_on(tensor, self.lower):
            self.put_back(traffic)
            return
        is_shared = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_shared()
        is_own = self.value is None or not lies_on(tensor, self.value)
        if is_own and not is_shared and self.may_take(tensor) and tuple(tensor.stride()) == self.stride:
            self.take(traffic)
        else:
            self.unmanage(traffic)

    def put_back(self, traffic: Mover) -> None:
        """User code gave the tensor its own memory below again, where its bytes count: what is up is void."""
        traffic.settle(self)
        traffic.release(self)
        self.value, self.is_lifted, self.state = None, False, LOWER
        self.times_assigned += 1
        self.note()

    def unmanage(self, traffic: Mover) -> None:
        """The tensor is on memory that the engine does not move: it stays there, as if on the device, for this step."""
        traffic.settle(self)
        tensor = self.living
        self.is_unmanaged = True
        self.place = self.lower = None
        if tensor.layout is torch.strided:
            traffic.hold(self, bytes_of(tensor))
        self._set_value(tensor.detach())
        self.times_assigned += 1
        self.state, self.is_lifted = DEVICE, True
        self.note()

    def take(self, traffic: Mover) -> None:
        """The memory that the tensor lies on now is its device copy, and what the engine had of it is void."""
        traffic.settle(self)
        with untouched(), torch.no_grad():
            tensor = self.living
            traffic.hold(self, bytes_of(tensor))
            self._set_value(tensor.detach())
            if self.stride != tuple(tensor.stride()) and self.placeholder is not None:
                self.stride = tuple(tensor.stride())
                self.placeholder = self.placeholder.as_strided(self.size, self.stride)
                self.lower = self.place = None  # of the other geometry
        self.times_assigned += 1
        self.state, self.is_lifted = DEVICE, True
        self.note()

    def _is_value_newer(self) -> bool:
        tensor, value = self.tensor, self.value
        if value is None or value._version != self.value_version:
            return value is not None
        return self.may_be_written and (tensor is None or tensor._version == self.version)

    def leave(self, traffic: Mover) -> None:
        """Moves the tensor to its lower tier, with its latest value; one that somebody holds stays up, and is asked again."""
        self.end_copy_out(traffic)
        self._take_assigned(traffic)  # who shares the memory that it was given, as a vector of all, holds that
        if self.is_held:
            self.touch(traffic)  # no version says what is written through an alias
            self.is_refused = True
            return traffic.refused.append(self)
        self.refresh(traffic)
        traffic.leave(self)

    def end_copy_out(self, traffic: Mover) -> None:
        """Waits for a copy out of what people reach, and may write. Its threads hold that memory, as an alias does."""
        if self.leaving is not None and self.is_lifted:
            self.refresh(traffic)
            traffic.settle(self)

    @property
    def is_held(self) -> bool:
        """True while a call or another thread uses the device copy, or something besides the engine shares its memory."""
        tensor, device = self.tensor, self.device
        if self.pins or self.is_unmanaged:
            return True
        if not self.is_lifted or tensor is None or device is None:
            return False
        if self.readers:
            return True
        return owners_of(device) > self.sharers + 1 + (self.value is not None)  # its 1-d view, and the value

    def detach(self, traffic: Traffic) -> None:
        """Ends the engine's care and leaves the tensor valid where it lies; an offloaded one gets its bytes back first."""
        traffic.settle(self)
        if self.placeholder is not None and not self.is_lifted and self.is_current():
            self.lift(traffic)
        self.forsake(traffic)

    def forsake(self, traffic: Traffic) -> None:
        """Ends the engine's care for a tensor that gets other memory; what it held is lost with it."""
        traffic.settle(self)
        tensor = self.tensor
        if tensor is not None:
            restore_class(self)
            if self.was_assigned():
                self.times_assigned += 1
        self.guard = self.placeholder = None
        traffic.unmanage(self)
        self.value = self.lower = None
