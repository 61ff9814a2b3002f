"""A Schedule: what to issue, await and release at each tick, derived from a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from tieroff.core.plan import Plan, Residency, Transfer
from tieroff.core.tensor import Tier


@dataclass(frozen=True, slots=True)
class Tick:
    """The events at one tick, in the order of [Note: order of events at a tick].

    Attributes:
        issue_first: transfers to a lower tier that are both issued and awaited here, in order of rank.
        await_outs: transfers to a lower tier to wait for; holds those of `issue_first` too.
        ends: residencies that end.
        begins: residencies that begin.
        issues: all other transfers to issue, in order of rank on each link.
        await_ins: transfers to the device to wait for.
    """

    issue_first: tuple[Transfer, ...] = ()
    await_outs: tuple[Transfer, ...] = ()
    ends: tuple[Residency, ...] = ()
    begins: tuple[Residency, ...] = ()
    issues: tuple[Transfer, ...] = ()
    await_ins: tuple[Transfer, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True when nothing happens here."""
        return not (self.await_outs or self.ends or self.begins or self.issues or self.await_ins)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Ticks 0 to n of a step of n ops; tick n is the end of the step, before tick 0 of the next one.

    A residency of the whole ring, (0, n), never begins or ends here. What crosses the end of the step appears at its
    tick modulo n; what ends exactly with the step appears at tick n.
    """

    ticks: tuple[Tick, ...]


@dataclass(slots=True)
class _Draft:
    issue_first: list[Transfer] = field(default_factory=list)
    await_outs: list[Transfer] = field(default_factory=list)
    ends: list[Residency] = field(default_factory=list)
    begins: list[Residency] = field(default_factory=list)
    issues: list[Transfer] = field(default_factory=list)
    await_ins: list[Transfer] = field(default_factory=list)


def make_schedule(plan: Plan) -> Schedule:
    """Returns the schedule of a plan, in time linear in its transfers and residencies (but for sorting by rank)."""
    op_count = plan.op_count
    ticks = [_Draft() for _ in range(op_count + 1)]
    for residency in plan.residencies:
        if residency.stop - residency.start == op_count:
            continue
        ticks[residency.start].begins.append(residency)
        ticks[_fold(residency.stop, op_count)].ends.append(residency)
    for transfer in sorted(plan.transfers, key=lambda t: t.rank):
        leaves = transfer.target is not Tier.DEVICE
        end = ticks[_fold(transfer.ready_by, op_count)]
        if leaves and transfer.issue_at == transfer.ready_by:
            end.issue_first.append(transfer)
        else:
            ticks[_fold(transfer.issue_at, op_count)].issues.append(transfer)
        (end.await_outs if leaves else end.await_ins).append(transfer)
    return Schedule(
        tuple(
            Tick(
                tuple(t.issue_first),
                tuple(t.await_outs),
                tuple(t.ends),
                tuple(t.begins),
                tuple(t.issues),
                tuple(t.await_ins),
            )
            for t in ticks
        )
    )


def _fold(tick: int, op_count: int) -> int:
    return tick if tick <= op_count else tick - op_count
