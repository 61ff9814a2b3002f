"""The checking mode: what the runtime does is held against the table of states, the bytes themselves, and the plan.

The runtime sets some states without asking the table. While this mode is on, each change must be one that the table allows, and
where an item is said to have two valid copies in memory, their bytes must be equal.

[Note: a program is its plan]
At run time a wrong program costs time or memory and is hard to see: a tensor that is away is fetched when it is used, and what
is there already is not fetched twice. So each program that is adopted is held against residencies and transfers of its plan,
without the schedule that it was made from: every action must be due at its tick, and all that is due must be done.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import StateError
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.item import Item
from tieroff.runtime.items.residency import Event, State, transition
from tieroff.runtime.step import executable, kinds
from tieroff.runtime.step.executable import Executable
from tieroff.runtime.step.program import Program
from tieroff.runtime.step.recorded import Recorded

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _next_states() -> frozenset[tuple[State, State]]:
    found = set[tuple[State, State]]()
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


Due = tuple[int, str, int]  # (tick, action, tensor)


def _due(plan: Plan, moved: frozenset[int]) -> Iterator[Due]:
    """Yields what a plan has the runtime do; see core/plan.py for when."""
    count = plan.op_count

    def at(tick: int) -> int:
        return tick if tick <= count else tick - count  # of the next round

    for residency in plan.residencies:
        is_whole = residency.stop - residency.start == count
        if residency.tier is Tier.DEVICE and residency.tensor in moved and not is_whole:
            yield at(residency.stop), "leaves", residency.tensor
    for transfer in plan.transfers:
        if transfer.target is Tier.DEVICE:
            yield at(transfer.issue_at), "copy in", transfer.tensor
            yield at(transfer.ready_by), "arrives", transfer.tensor
            continue
        is_first = transfer.issue_at == transfer.ready_by and transfer.source is Tier.DEVICE
        yield at(transfer.issue_at), "copy out first" if is_first else "copy out", transfer.tensor
        yield at(transfer.ready_by), "waits", transfer.tensor


def _done(program: Program) -> Iterator[Due]:
    for tick, actions in enumerate(program):
        if actions is None:
            continue
        issues = [("copy in" if leads_in else "copy out", tensor) for leads_in, tensor in actions.issues]
        for name, tensors in (
            ("copy out first", actions.outs_first),
            ("waits", actions.waits),
            ("leaves", actions.leaves),
            ("arrives", actions.arrivals),
        ):
            yield from ((tick, name, tensor) for tensor in tensors)
        yield from ((tick, name, tensor) for name, tensor in issues)


def wrong_in(program: Program, plan: Plan) -> list[str]:
    """Returns, as text, each action of a program that its plan has not, and each of the plan that the program has not."""
    moved = frozenset(r.tensor for r in plan.residencies if r.tier is not Tier.DEVICE)
    due, done = Counter(_due(plan, moved)), Counter(_done(program))
    extra = [f"tick {tick}: {name} of tensor {tensor} is not due" for tick, name, tensor in (done - due).elements()]
    missing = [f"tick {tick}: {name} of tensor {tensor} is missing" for tick, name, tensor in (due - done).elements()]
    return extra + missing


def followed(plan: Plan, trace: Trace, recorded: Recorded) -> Plan:
    """Returns the plan that the runtime follows where it is given this one; see step/executable.py."""
    tiers = {r.tensor: r.tier for r in plan.residencies if r.tier is not Tier.DEVICE}
    plan = executable.loaded_after_user_code(plan, trace, recorded)
    stays = tuple(executable.stays_for_update(plan, trace, tiers, recorded.update_at))
    plan = executable.copied_after_user_code(executable.without_early_copies(plan, recorded), stays, recorded)
    return executable.brought_back_for_update(plan, stays, tiers, recorded.update_at)


@contextlib.contextmanager
def programs_checked() -> Iterator[list[str]]:
    """Inside, programs are checked when they are adopted: see [Note: a program is its plan]; yields what was found."""
    module: Any = kinds
    make, found = module.make_executable, list[str]()

    def make_checked(plan: Plan, trace: Trace, recorded: Recorded) -> Executable:
        made: Executable = make(plan, trace, recorded)
        found.extend(wrong_in(made.program, followed(plan, trace, recorded)))
        return made

    module.make_executable = make_checked
    try:
        yield found
    finally:
        module.make_executable = make


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
