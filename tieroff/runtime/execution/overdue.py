"""Copies out that a plan begins before the engine has their tensor."""

from __future__ import annotations

import threading

from tieroff.core.tensor import Tier
from tieroff.runtime.items.item import Item, Traffic
from tieroff.runtime.items.residency import State
from tieroff.runtime.step.program import Program


class Overdue:
    """Begins copies out whose tick has gone by when the engine takes their tensor over.

    A plan may have a tensor copied from the end of the op that makes it. The engine has it later: a saved tensor when an op
    that needs it in backward begins, a gradient when it reached its parameter. Ticks find nothing to copy until then, and
    without this the copy would begin where its memory has to be free, with nothing to do beside it.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._due: dict[int, int] = {}
        self._waiting: list[tuple[int, int, Item]] = []

    def begin(self, program: Program | None) -> None:
        """A step begins, with the plan of this program or without one."""
        self._waiting, self._due = [], {}
        if program is None or program.plan is None:
            return
        for transfer in program.plan.transfers:
            if transfer.source is Tier.DEVICE and transfer.tensor not in program.written_by_hooks:
                tick = transfer.issue_at % program.plan.op_count
                self._due[transfer.tensor] = min(tick, self._due.get(transfer.tensor, tick))

    def took(self, item: Item, cursor: int, wait_ticks: int) -> None:
        """The engine has a tensor of the step, `cursor` ticks into it, which may be written up to `wait_ticks` more."""
        if self._due.get(item.index, cursor) >= cursor or item.state is not State.DEVICE:
            return
        if wait_ticks:
            self._waiting.append((cursor + wait_ticks, threading.get_ident(), item))
        else:
            self._traffic.store(item)

    def tick(self, cursor: int) -> None:
        """So many ticks have gone by. Those of another thread say nothing about what runs in this one, such as users' hooks."""
        if not self._waiting:
            return
        own = threading.get_ident()
        ready = [item for at, thread, item in self._waiting if at <= cursor and thread == own]
        self._waiting = [(at, thread, item) for at, thread, item in self._waiting if at > cursor or thread != own]
        for item in ready:
            if item.device is not None:
                self._traffic.store(item)
