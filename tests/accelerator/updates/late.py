"""Native threads whose jobs are late, and of which the race detector knows what memory they read and write, and until when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.accelerator import sim, target
from tieroff._native import UpdateGate
from tieroff.runtime.optimizer.host import updates
from tieroff.updates.pool import make_pool
from tieroff.updates.rule import Rule

LATE_S = 0.2


class Threads:
    """A pool; what its jobs touch is in use by them from submission until a thread of the program knows that they are over.

    Attributes:
        native: the pool itself.
        submitted: tickets, in order.
        gates: of those submitted while `are_shut`: each begins when its own is open.
    """

    def __init__(self, ranges: dict[int, list[tuple[int, int, bool]]]) -> None:
        self.native = make_pool()
        self.submitted: list[int] = []
        self.gates: list[UpdateGate] = []
        self.are_shut = False
        self._ranges = ranges
        self._agents: dict[int, list[int]] = {}

    def submit(self, parts: Sequence[Any], gates: Sequence[Any], counters: Sequence[int]) -> int:
        if self.are_shut:
            self.gates.append(UpdateGate())
            gates = [self.gates[-1]]
        ticket: int = self.native.submit(parts, gates, counters)
        self.submitted.append(ticket)
        if target.IS_SIMULATED:
            touched = [each for part in parts for each in self._ranges.pop(id(part))]
            self._agents[ticket] = [sim.begin_host_io(*each, "an update") for each in touched]
        return ticket

    def is_done(self, ticket: int) -> bool:
        return self._known(ticket, is_over=self.native.is_done(ticket))

    def wait(self, ticket: int, timeout_s: float) -> bool:
        return self._known(ticket, is_over=self.native.wait(ticket, timeout_s))

    def settle(self, timeout_s: float) -> bool:
        is_over = self.native.settle(timeout_s)
        for ticket in list(self._agents):
            self._known(ticket, is_over=is_over)
        return is_over

    def _known(self, ticket: int, *, is_over: bool) -> bool:
        for agent in self._agents.pop(ticket, ()) if is_over else ():
            sim.end_host_io(agent)
        return is_over

    @property
    def last_ticket(self) -> int:
        return self.native.last_ticket

    def close(self) -> None:
        self.native.close()
        for ticket in list(self._agents):
            self._known(ticket, is_over=True)

    def __del__(self) -> None:
        self.close()  # as the native pool does


class Lateness:
    """The pools that engines make while it is in force."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[Threads] = []
        ranges: dict[int, list[tuple[int, int, bool]]] = {}
        make_part = Rule.part

        def part(rule: Rule, arithmetic: str, type_name: str, count: int, *addresses: Any) -> Any:
            made = make_part(rule, arithmetic, type_name, count, *addresses)
            size_bytes = count * {"float32": 4, "bfloat16": 2}[type_name]
            inputs, outputs = addresses[:2]
            read = [(address, size_bytes, False) for address in inputs if address not in outputs or address == inputs[1]]
            written = [(address, size_bytes, True) for number, address in enumerate(outputs) if number != 1]
            ranges[id(made)] = read + written
            return made

        def make(_near_cpus: Any) -> Any:
            self.pools.append(Threads(ranges))
            return self.pools[-1]

        monkeypatch.setattr(Rule, "part", part)
        monkeypatch.setattr(updates, "make_pool", make)

    def set(self, seconds: float = LATE_S) -> None:
        """From here on, jobs begin so late."""
        for pool in self.pools:
            pool.native.delay(round(seconds * 1e9))
