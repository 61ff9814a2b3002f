"""The checking mode: every change of an item's state is held against the table of states, and against the bytes themselves.

The runtime's short ways set states without asking the table. While this mode is on, each change must be one that the table, or
one of its two short ways, allows, and where an item is said to have two valid copies in memory, their bytes must be equal.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Any

from tieroff.errors import StateError
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.item import Item
from tieroff.runtime.items.residency import Event, State, transition

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _next_states() -> frozenset[tuple[State, State]]:
    found = {(State.LOWER, State.BOTH), (State.DEVICE, State.BOTH)}  # a small copy is over when its call returns
    for state in State:
        found |= {(state, state), (state, State.DEVICE)}  # what the program holds may be taken as the device copy at any time
        for event in Event:
            with contextlib.suppress(StateError):
                found.add((state, transition(state, event)[0]))
    return frozenset(found)


NEXT = _next_states()


def differs(item: Item) -> bool:
    """True for an item of which two copies lie in the host's memory and are not equal."""
    address = item.place.address if item.place is not None else None
    if item.device is None or address is None or item.device.device.type != "cpu":
        return False
    return bool(_libc.memcmp(address, item.device.data_ptr(), item.size_bytes))


@contextlib.contextmanager
def states_checked() -> Iterator[list[str]]:
    """Inside, changes of states are checked; yields what was found to be wrong, as text."""
    kind: Any = Item
    slot, found = vars(Item)["state"], list[str]()

    def set_state(item: Item, state: State) -> None:
        try:
            before = slot.__get__(item, Item)
        except AttributeError:  # it is being made
            before = state
        slot.__set__(item, state)
        is_put_back = sys._getframe(1).f_code is HomeItem.put_back.__code__  # by user code, where its bytes are the valid ones
        if (before, state) not in NEXT and not is_put_back:
            found.append(f"{item.name} went from {before.name} to {state.name}")
        elif state is State.BOTH and before is not state and differs(item):
            found.append(f"{item.name} came from {before.name} to BOTH with two values")

    kind.state = property(slot.__get__, set_state)
    try:
        yield found
    finally:
        kind.state = slot
