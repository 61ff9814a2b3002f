"""A program: what the runtime does at each tick of a plan, as flat lists of tensors, made once when the plan is adopted.

A `Tick` of the schedule lists residencies and transfers, most of which ask nothing of the runtime at that tick: copies below
that begin or end, and what stays on the device for the whole step. The program leaves those out, so that a tick at which
nothing happens costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tieroff.core.plan import Transfer
from tieroff.core.schedule import Tick
from tieroff.core.tensor import Tier


class Actions(NamedTuple):
    """What happens at one tick, in this order; all numbers are those of tensors in the trace.

    Attributes:
        outs_first: copies out begin.
        waits: copies out are waited for.
        leaves: tensors leave the device, after a copy out where none is valid.
        issues: copies begin, in order of rank: (leads to the device, tensor).
        arrivals: copies to the device are waited for.
    """

    outs_first: tuple[int, ...]
    waits: tuple[int, ...]
    leaves: tuple[int, ...]
    issues: tuple[tuple[bool, int], ...]
    arrivals: tuple[int, ...]


Program = tuple[Actions | None, ...]


def make_program(ticks: Sequence[Tick], moved: Collection[int]) -> Program:
    """Returns the program of a schedule: None at each tick at which nothing happens.

    Args:
        ticks: of the schedule.
        moved: tensors that are ever anywhere but on the device.
    """
    return tuple(_actions(tick, moved) for tick in ticks)


def _actions(tick: Tick, moved: Collection[int]) -> Actions | None:
    leaves = tuple(r.tensor for r in tick.ends if r.tier is Tier.DEVICE and r.tensor in moved)
    actions = Actions(
        outs_first=tuple(t.tensor for t in tick.issue_first if t.source is Tier.DEVICE),
        waits=tuple(t.tensor for t in tick.await_outs),  # also of what leaves right after: a copy under way holds its source
        leaves=leaves,
        issues=tuple(map(_issue, tick.issues)),
        arrivals=tuple(t.tensor for t in tick.await_ins),
    )
    return actions if any(actions) else None


def _issue(transfer: Transfer) -> tuple[bool, int]:
    return transfer.source is not Tier.DEVICE, transfer.tensor
