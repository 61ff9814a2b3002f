"""The residency of one tensor as a state machine without I/O: events in, instructions out.

Who owns the bytes, and what may come next:

| state    | valid copies  | in flight   | store    | stored | touch   | drop     | fetch    | arrived | update   | updated |
|----------|---------------|-------------|----------|--------|---------|----------|----------|---------|----------|---------|
| DEVICE   | device        | -           | LEAVING  | -      | DEVICE  | refused  | DEVICE   | -       | refused  | -       |
| LEAVING  | device        | copy out    | LEAVING  | BOTH   | STALE   | LOWER    | LEAVING  | -       | refused  | -       |
| STALE    | device        | useless out | LEAVING  | DEVICE | STALE   | refused  | STALE    | -       | refused  | -       |
| BOTH     | device, lower | -           | BOTH     | -      | DEVICE  | LOWER    | BOTH     | -       | refused  | -       |
| LOWER    | lower         | -           | LOWER    | -      | refused | LOWER    | ARRIVING | -       | UPDATING | -       |
| ARRIVING | lower         | copy in     | ARRIVING | -      | refused | LOWER    | ARRIVING | BOTH    | refused  | -       |
| UPDATING | -             | host update | UPDATING | -      | refused | UPDATING | ARRIVING | -       | refused  | LOWER   |

A reload is an edge out of LOWER, and LOWER is reached only through a copy out that was awaited: a reload without its
own store's completion cannot be expressed. `drop` in LEAVING awaits the copy first; in STALE it is refused, since the
copy in flight holds an older value; `store` there awaits the useless copy and starts another.
`update` leads from LOWER alone: a job of the host's threads reads the bytes below or writes them, until `updated` leads back.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from tieroff.errors import StateError


class State(Enum):
    """See the table of the module."""

    DEVICE = auto()
    LEAVING = auto()
    STALE = auto()
    BOTH = auto()
    LOWER = auto()
    ARRIVING = auto()
    UPDATING = auto()

    __hash__ = object.__hash__  # by identity: Enum's own is Python code, which every move would run


# To look into an `Enum` takes 0.2 us in Python 3.11, which goes through its metaclass; a step asks thousands of times.
DEVICE: Final = State.DEVICE
LEAVING: Final = State.LEAVING
STALE: Final = State.STALE
BOTH: Final = State.BOTH
LOWER: Final = State.LOWER
ARRIVING: Final = State.ARRIVING
UPDATING: Final = State.UPDATING


class Event(Enum):
    """What happens to a tensor."""

    STORE = auto()
    STORED = auto()
    STORE_FAILED = auto()
    TOUCH = auto()
    DROP = auto()
    FETCH = auto()
    ARRIVED = auto()
    FETCH_FAILED = auto()
    UPDATE = auto()
    UPDATED = auto()

    __hash__ = object.__hash__


class Do(Enum):
    """What the caller must do, in this order, to carry the event out."""

    START_OUT = auto()
    AWAIT_OUT = auto()
    START_IN = auto()
    AWAIT_IN = auto()
    FREE_DEVICE = auto()
    AWAIT_UPDATE = auto()


S, E = State, Event
_TABLE: dict[tuple[State, Event], tuple[State, tuple[Do, ...]]] = {
    (S.DEVICE, E.STORE): (S.LEAVING, (Do.START_OUT,)),
    (S.DEVICE, E.TOUCH): (S.DEVICE, ()),
    (S.DEVICE, E.FETCH): (S.DEVICE, ()),
    (S.LEAVING, E.STORE): (S.LEAVING, ()),
    (S.LEAVING, E.STORED): (S.BOTH, ()),
    (S.LEAVING, E.STORE_FAILED): (S.DEVICE, ()),
    (S.LEAVING, E.TOUCH): (S.STALE, ()),
    (S.LEAVING, E.DROP): (S.LOWER, (Do.AWAIT_OUT, Do.FREE_DEVICE)),
    (S.LEAVING, E.FETCH): (S.LEAVING, ()),
    (S.STALE, E.STORE): (S.LEAVING, (Do.AWAIT_OUT, Do.START_OUT)),
    (S.STALE, E.STORED): (S.DEVICE, ()),
    (S.STALE, E.STORE_FAILED): (S.DEVICE, ()),
    (S.STALE, E.TOUCH): (S.STALE, ()),
    (S.STALE, E.FETCH): (S.STALE, ()),
    (S.BOTH, E.STORE): (S.BOTH, ()),
    (S.BOTH, E.TOUCH): (S.DEVICE, ()),
    (S.BOTH, E.DROP): (S.LOWER, (Do.FREE_DEVICE,)),
    (S.BOTH, E.FETCH): (S.BOTH, ()),
    (S.LOWER, E.STORE): (S.LOWER, ()),
    (S.LOWER, E.DROP): (S.LOWER, ()),
    (S.LOWER, E.FETCH): (S.ARRIVING, (Do.START_IN,)),
    (S.ARRIVING, E.STORE): (S.ARRIVING, ()),
    (S.ARRIVING, E.DROP): (S.LOWER, (Do.AWAIT_IN, Do.FREE_DEVICE)),
    (S.ARRIVING, E.FETCH): (S.ARRIVING, ()),
    (S.ARRIVING, E.ARRIVED): (S.BOTH, ()),
    (S.ARRIVING, E.FETCH_FAILED): (S.LOWER, (Do.FREE_DEVICE,)),
    (S.LOWER, E.UPDATE): (S.UPDATING, ()),
    (S.UPDATING, E.UPDATED): (S.LOWER, ()),
    (S.UPDATING, E.STORE): (S.UPDATING, ()),
    (S.UPDATING, E.DROP): (S.UPDATING, ()),
    (S.UPDATING, E.FETCH): (S.ARRIVING, (Do.AWAIT_UPDATE, Do.START_IN)),
}
ON_DEVICE = frozenset({DEVICE, LEAVING, STALE, BOTH})
BELOW = frozenset({LOWER, UPDATING})
"""All bytes are below, and nothing brings them up."""


def transition(state: State, event: Event) -> tuple[State, tuple[Do, ...]]:
    """Returns the next state and what to do for it.

    Raises:
        StateError: the event is refused in this state (data would be lost or read before it is there).
    """
    try:
        return _TABLE[state, event]
    except KeyError:
        raise StateError(f"a tensor in state {state.name} cannot take event {event.name}; this is a bug in tieroff") from None
