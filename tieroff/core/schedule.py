"""A Schedule: what to issue, await and release at each tick, derived from a plan."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from tieroff.core.plan import HostUpdate, Plan, Repeat, Residency, Transfer
from tieroff.core.tensor import Tier


@dataclass(frozen=True, slots=True)
class Tick:
    """The events at one tick, in the order of [Note: order of events at a tick].

    Attributes:
        issue_first: transfers that do not lead to the device and are both issued and awaited here, in order of rank.
        await_outs: transfers that do not lead to the device to wait for; holds those of `issue_first` too.
        ends: residencies that end.
        begins: residencies that begin.
        issues: all other transfers to issue, in order of rank on each link.
        await_ins: transfers to the device to wait for.
        update_first: updates on the host that are both issued and awaited here; issued with `issue_first`.
        await_updates: updates on the host to wait for, with `await_outs`; holds those of `update_first` too.
        updates: all other updates on the host to issue, with `issues`, in the order in which the CPU serves them.
        repeats: ops that run again after `await_ins`, in order of op.
    """

    issue_first: tuple[Transfer, ...] = ()
    await_outs: tuple[Transfer, ...] = ()
    ends: tuple[Residency, ...] = ()
    begins: tuple[Residency, ...] = ()
    issues: tuple[Transfer, ...] = ()
    await_ins: tuple[Transfer, ...] = ()
    update_first: tuple[HostUpdate, ...] = ()
    await_updates: tuple[HostUpdate, ...] = ()
    updates: tuple[HostUpdate, ...] = ()
    repeats: tuple[Repeat, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """Ticks 0 to n of a ring of n ops; tick n is the end of the ring, before tick 0 of its next round.

    A residency of the whole ring never begins or ends here. What crosses the end of the ring appears at its tick modulo
    n; what ends exactly with the ring appears at tick n.
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
    update_first: list[HostUpdate] = field(default_factory=list)
    await_updates: list[HostUpdate] = field(default_factory=list)
    updates: list[HostUpdate] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)


def make_schedule(plan: Plan) -> Schedule:
    """Returns the schedule of a plan, in time linear in the plan's size (except for sorting)."""
    op_count = plan.op_count
    ticks = [_Draft() for _ in range(op_count + 1)]
    for residency in plan.residencies:
        if residency.stop - residency.start == op_count:
            continue
        ticks[residency.start].begins.append(residency)
        ticks[_fold(residency.stop, op_count)].ends.append(residency)
    for transfer in sorted(plan.transfers, key=lambda t: t.rank):
        leads_in = transfer.target is Tier.DEVICE
        end = ticks[_fold(transfer.ready_by, op_count)]
        if not leads_in and transfer.issue_at == transfer.ready_by:
            end.issue_first.append(transfer)
        else:
            ticks[_fold(transfer.issue_at, op_count)].issues.append(transfer)
        (end.await_ins if leads_in else end.await_outs).append(transfer)
    for update in plan.host_updates:
        end = ticks[_fold(update.ready_by, op_count)]
        if update.issue_at == update.ready_by:
            end.update_first.append(update)
        else:
            ticks[_fold(update.issue_at, op_count)].updates.append(update)
        end.await_updates.append(update)
    for repeat in sorted(plan.repeats, key=lambda r: r.op):
        ticks[repeat.at].repeats.append(repeat)
    return Schedule(tuple(Tick(*(tuple(getattr(t, f.name)) for f in fields(Tick))) for t in ticks))


def _fold(tick: int, op_count: int) -> int:
    return tick if tick <= op_count else tick - op_count
