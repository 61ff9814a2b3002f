"""What the homes of all stores share: they are memory with methods."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

from tieroff.errors import StateError
from tieroff.storage.completion import Completion
from tieroff.storage.store import Block


class HomeMemory:
    """Mixed into a ctypes array at a given address, which gives the buffer protocol and weak references.

    Python before 3.12 has no other way to let a class of its own export memory that it does not own.
    """

    address: int
    size_bytes: int

    if TYPE_CHECKING:

        def __buffer__(self, flags: int, /) -> memoryview: ...

    def note(self, copy: Completion) -> None:
        """Does nothing: but for host memory, all copies are the store's own."""


def place_home(base: type[HomeMemory], size_bytes: int, address: int, types: dict[int, Any]) -> Any:
    """Returns a `base` over `size_bytes` of memory at `address`, without its attributes.

    Args:
        types: one class per size, kept by the store: a class is large and slow to make.
    """
    if size_bytes not in types:
        namespace = {"_type_": ctypes.c_ubyte, "_length_": size_bytes, "__hash__": object.__hash__}
        types[size_bytes] = type(base.__name__, (base, ctypes.Array), namespace)
    home = types[size_bytes].from_address(address)
    home.address = address
    home.size_bytes = size_bytes
    return home


def check_published(block: Block | None) -> None:
    """Returns if the block's last write has ended well.

    Raises:
        StateError: there was none, or it is still under way.
        StoreError: it failed.
    """
    written = block.written if block is not None else None
    if written is None:
        raise StateError("publish() needs a write() before it; there was none since the last publish()")
    if not written.done():
        raise StateError("publish() was called before the write has ended; wait for its completion first")
    written.wait(0.0)


class Death(weakref.ref[Any]):
    """What a queue gets when an object dies: a home ([Note: finalizers]), or an engine ([Note: dropped models]).

    With the queue's `append` as its callback, C code alone runs then. In a finalizer of Python, Ctrl-C would be dropped, and
    with it what was to be freed.

    Attributes:
        item: what the object had.
    """

    __slots__ = ("item",)
    item: Any
