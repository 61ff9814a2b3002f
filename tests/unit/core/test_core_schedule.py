"""From plans to schedules."""

from __future__ import annotations

from dataclasses import replace

from tieroff.core.plan import HostUpdate, Plan, Repeat, Residency, Transfer
from tieroff.core.schedule import Tick, make_schedule
from tieroff.core.tensor import Tier

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME


def _plan(residencies: tuple[Residency, ...], transfers: tuple[Transfer, ...]) -> Plan:
    return Plan("hand", "", 4, {}, {}, residencies, transfers)


def test_schedule_places_each_event_at_its_tick() -> None:
    device, lower, back = Residency(0, DEVICE, 0, 2), Residency(0, HOST, 1, 4), Residency(0, DEVICE, 3, 4)
    out, load = Transfer(0, DEVICE, HOST, 1, 2, 0), Transfer(0, HOST, DEVICE, 3, 3, 0)
    assert make_schedule(_plan((device, lower, back), (out, load))).ticks == (
        Tick(begins=(device,)),
        Tick(begins=(lower,), issues=(out,)),
        Tick(await_outs=(out,), ends=(device,)),
        Tick(begins=(back,), issues=(load,), await_ins=(load,)),
        Tick(ends=(lower, back)),
    )


def test_synchronous_copies_out_are_issued_before_the_others_of_their_tick() -> None:
    late, first = Transfer(0, DEVICE, HOST, 2, 3, 1), Transfer(1, DEVICE, HOST, 2, 2, 0)
    tick = make_schedule(_plan((), (late, first))).ticks[2]
    assert tick == Tick(issue_first=(first,), await_outs=(first,), issues=(late,))


def test_what_ends_with_the_step_is_at_its_last_tick_and_what_crosses_it_comes_round() -> None:
    at_end, across = Transfer(0, DEVICE, HOST, 4, 4, 0), Transfer(1, DEVICE, HOST, 3, 5, 1)
    wrapped, whole = Residency(1, DEVICE, 2, 5), Residency(2, DEVICE, 0, 4)
    ticks = make_schedule(_plan((wrapped, whole), (at_end, across))).ticks
    assert ticks[4] == Tick(issue_first=(at_end,), await_outs=(at_end,))
    assert ticks[3].issues == (across,)
    assert ticks[1] == Tick(await_outs=(across,), ends=(wrapped,))
    assert ticks[0] == Tick()


def test_issues_keep_the_order_of_rank() -> None:
    loads = tuple(Transfer(i, HOST, DEVICE, 1, 2 + i % 2, rank) for i, rank in enumerate((2, 0, 1)))
    issues = make_schedule(_plan((), loads)).ticks[1].issues
    assert [t.rank for t in issues] == [0, 1, 2]


def test_moves_between_host_and_nvme_are_awaited_before_residencies_end_either_way() -> None:
    down, up = Transfer(0, HOST, NVME, 1, 2, 0), Transfer(1, NVME, HOST, 1, 2, 0)
    at_once = Transfer(2, NVME, HOST, 2, 2, 1)
    ticks = make_schedule(_plan((), (down, up, at_once))).ticks
    assert ticks[1] == Tick(issues=(down, up))
    assert ticks[2] == Tick(issue_first=(at_once,), await_outs=(down, up, at_once))


def test_updates_on_the_host_are_issued_in_the_order_of_the_plan_and_come_round() -> None:
    first, second = HostUpdate(2, 2, 3, 7), HostUpdate(1, 2, 5, 7)
    blocking, at_end = HostUpdate(3, 3, 3, 7), HostUpdate(0, 4, 4, 7)
    plan = replace(_plan((), ()), host_updates=(first, second, blocking, at_end))
    ticks = make_schedule(plan).ticks
    assert ticks[2] == Tick(updates=(first, second))
    assert ticks[3] == Tick(update_first=(blocking,), await_updates=(first, blocking))
    assert ticks[1] == Tick(await_updates=(second,))
    assert ticks[4] == Tick(update_first=(at_end,), await_updates=(at_end,))


def test_repeats_of_a_tick_are_in_order_of_op() -> None:
    plan = replace(_plan((), ()), repeats=(Repeat(2, 3), Repeat(0, 3), Repeat(0, 1)))
    ticks = make_schedule(plan).ticks
    assert ticks[3] == Tick(repeats=(Repeat(0, 3), Repeat(2, 3)))
    assert ticks[1] == Tick(repeats=(Repeat(0, 1),))


def test_ranks_are_kept_per_link_though_tiers_differ() -> None:
    from_host, from_device = Transfer(0, HOST, NVME, 1, 2, 1), Transfer(1, DEVICE, NVME, 1, 2, 0)
    assert make_schedule(_plan((), (from_host, from_device))).ticks[1].issues == (from_device, from_host)
