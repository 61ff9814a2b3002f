"""Each rule of the checker, shown by spoiling a good plan."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieroff.core.check import rules
from tieroff.core.check.memory import check_bytes
from tieroff.core.check.plan import check
from tieroff.core.check.rules import Rule
from tieroff.core.plan import (
    IDEAL_EXECUTOR,
    Allocation,
    AllocationKind,
    Capabilities,
    HostUpdate,
    Plan,
    Repeat,
    Residency,
    Transfer,
)
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Queue, Trace
from tieroff.errors import InvalidPlanError

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME

# x: activation, written at 0, read at 5. w: parameter, read at 1, written at 4. s: stays.
_TRACE = Trace(
    ops=(
        Op("op0", 10, (), (0,)),
        Op("op1", 10, (1,), ()),
        Op("op2", 10, (2,), (), transient_bytes=3),
        Op("op3", 10),
        Op("op4", 10, (), (1,)),
        Op("op5", 10, (0,), ()),
    ),
    tensors=(
        Tensor("x", 100, TensorClass.ACTIVATION),
        Tensor("w", 10, TensorClass.PARAMETER, is_persistent=True),
        Tensor("s", 1, TensorClass.OPTIMIZER, is_persistent=True, is_movable=False),
    ),
)
_PLAN = Plan(
    policy="hand",
    trace_digest=_TRACE.digest,
    op_count=6,
    budget_bytes={DEVICE: 111, HOST: 110},
    peak_bytes={DEVICE: 111, HOST: 110},
    residencies=(
        Residency(0, DEVICE, 0, 2),
        Residency(0, DEVICE, 5, 6),
        Residency(0, HOST, 1, 6),
        Residency(1, DEVICE, 1, 2),
        Residency(1, DEVICE, 3, 6),
        Residency(1, HOST, 0, 6),
        Residency(2, DEVICE, 0, 6),
    ),
    transfers=(
        Transfer(0, DEVICE, HOST, 1, 2, 0),
        Transfer(1, DEVICE, HOST, 6, 6, 1),
        Transfer(1, HOST, DEVICE, 1, 1, 0),
        Transfer(1, HOST, DEVICE, 3, 4, 1),
        Transfer(0, HOST, DEVICE, 5, 5, 2),
    ),
)


def _residency(plan: Plan, old: Residency, *new: Residency) -> Plan:
    assert old in plan.residencies
    return replace(plan, residencies=tuple(r for r in plan.residencies if r != old) + new)


def _transfer(plan: Plan, old: Transfer, *new: Transfer) -> Plan:
    assert old in plan.transfers
    return replace(plan, transfers=tuple(t for t in plan.transfers if t != old) + new)


_OUT_W, _IN_W = Transfer(1, DEVICE, HOST, 6, 6, 1), Transfer(1, HOST, DEVICE, 3, 4, 1)


def _copy_w(plan: Plan, issue_at: int, ready_by: int, loaded_by: int = 3) -> Plan:
    """Moves w's copy out, and the await of the load before it."""
    plan = _transfer(plan, _IN_W, replace(_IN_W, ready_by=loaded_by))
    return _transfer(plan, _OUT_W, replace(_OUT_W, issue_at=issue_at, ready_by=ready_by))


_SPOILED: list[tuple[str, str, Callable[[Plan], Plan]]] = [
    ("other trace", "digest", lambda p: replace(p, trace_digest="0")),
    ("other number of ops", "digest", lambda p: replace(p, op_count=7)),
    ("unknown tensor", "range", lambda p: _residency(p, Residency(2, DEVICE, 0, 6), Residency(3, DEVICE, 0, 6))),
    ("empty residency", "range", lambda p: _residency(p, Residency(0, DEVICE, 5, 6), Residency(0, DEVICE, 5, 5))),
    ("activation past the end", "range", lambda p: _residency(p, Residency(0, HOST, 1, 6), Residency(0, HOST, 1, 7))),
    (
        "ready before issue",
        "range",
        lambda p: _transfer(p, Transfer(0, DEVICE, HOST, 1, 2, 0), Transfer(0, DEVICE, HOST, 2, 1, 0)),
    ),
    (
        "to its own tier",
        "range",
        lambda p: _transfer(p, Transfer(0, DEVICE, HOST, 1, 2, 0), Transfer(0, DEVICE, DEVICE, 1, 2, 0)),
    ),
    ("twice in a tier", "overlap", lambda p: replace(p, residencies=(*p.residencies, Residency(0, DEVICE, 1, 3)))),
    ("no residency", "required", lambda p: replace(p, residencies=p.residencies[:-1])),
    ("away when used", "required", lambda p: _residency(p, Residency(1, DEVICE, 1, 2), Residency(1, DEVICE, 2, 3))),
    (
        "load awaited after the use",
        "not_ready",
        lambda p: _transfer(p, Transfer(1, HOST, DEVICE, 3, 4, 1), Transfer(1, HOST, DEVICE, 3, 5, 1)),
    ),
    ("device budget", "budget", lambda p: replace(p, budget_bytes={DEVICE: 110, HOST: 110})),
    ("host budget", "budget", lambda p: replace(p, budget_bytes={DEVICE: 111, HOST: 109})),
    (
        "source leaves during the copy",
        "source",
        lambda p: _transfer(p, Transfer(0, DEVICE, HOST, 1, 2, 0), Transfer(0, DEVICE, HOST, 1, 3, 0)),
    ),
    ("no place to copy to", "target", lambda p: _residency(p, Residency(0, HOST, 1, 6), Residency(0, HOST, 2, 6))),
    ("written while copied", "stale_copy", lambda p: _copy_w(p, 4, 6)),
    ("copied before the write", "lost_data", lambda p: _copy_w(p, 4, 4)),
    ("copied before it is loaded", "invalid_copy", lambda p: _copy_w(p, 4, 4, loaded_by=4)),
    ("no load", "from_nowhere", lambda p: _transfer(p, Transfer(0, HOST, DEVICE, 5, 5, 2))),
    (
        "no copy out",
        "from_nowhere",
        lambda p: replace(
            p, transfers=tuple(replace(t, rank=0) if t.rank == 1 and t.target is HOST else t for t in p.transfers[1:])
        ),
    ),
    ("no copy out after the write", "lost_data", lambda p: _transfer(p, Transfer(1, DEVICE, HOST, 6, 6, 1))),
    ("ranks repeated", "rank", lambda p: _transfer(p, Transfer(1, HOST, DEVICE, 3, 4, 1), Transfer(1, HOST, DEVICE, 3, 4, 0))),
    (
        "ranks against the order of issue",
        "rank",
        lambda p: _transfer(
            _transfer(p, Transfer(1, HOST, DEVICE, 3, 4, 1), Transfer(1, HOST, DEVICE, 3, 4, 2)),
            Transfer(0, HOST, DEVICE, 5, 5, 2),
            Transfer(0, HOST, DEVICE, 5, 5, 1),
        ),
    ),
    ("wrong peak", "peak", lambda p: replace(p, peak_bytes={DEVICE: 111, HOST: 111})),
]


# x: made again at 4 by its op; y stays; w: a parameter in two parts; g: its gradient; m: state that lives below, with a
# second copy on the NVMe for a while. The CPU runs the update, and ops from 2 on may repeat.
_RICH_TRACE = Trace(
    ops=(
        Op("make x", 10, (2,), (0,), transient_bytes=7),
        Op("make y", 10, (0,), (1,)),
        Op("idle", 10),
        Op("use y", 10, (1,), ()),
        Op("make g", 10, (0,), (3,), transient_bytes=5),
        Op("idle too", 10),
        Op("update", 10, (2, 3, 4), (2, 4), phase="optimizer"),
        Op("end", 10),
    ),
    tensors=(
        Tensor("x", 4, TensorClass.ACTIVATION),
        Tensor("y", 2, TensorClass.ACTIVATION),
        Tensor("w", 8, TensorClass.PARAMETER, is_persistent=True),
        Tensor("g", 8, TensorClass.GRADIENT, owner=2),
        Tensor("m", 8, TensorClass.OPTIMIZER, is_persistent=True),
    ),
)
_W_BACK = Transfer(2, HOST, DEVICE, 3, 4, 2, 4, 8)
_M_DOWN = Transfer(4, HOST, NVME, 7, 8, 0)
_UPDATE = HostUpdate(6, 6, 7, 100)
_RICH_PLAN = Plan(
    policy="hand",
    trace_digest=_RICH_TRACE.digest,
    op_count=8,
    budget_bytes={DEVICE: 27, HOST: 24, NVME: 8},
    peak_bytes={DEVICE: 27, HOST: 24, NVME: 8},
    residencies=(
        Residency(0, DEVICE, 0, 2),
        Residency(0, DEVICE, 4, 5),
        Residency(1, DEVICE, 1, 4),
        Residency(2, DEVICE, 0, 5, 0, 4),
        Residency(2, DEVICE, 0, 1, 4, 8),
        Residency(2, DEVICE, 3, 5, 4, 8),
        Residency(2, HOST, 0, 8),
        Residency(3, DEVICE, 4, 6),
        Residency(3, HOST, 5, 7),
        Residency(4, HOST, 0, 8),
        Residency(4, NVME, 7, 9),
    ),
    transfers=(
        Transfer(2, HOST, DEVICE, 0, 0, 0, 0, 4),
        Transfer(2, HOST, DEVICE, 0, 0, 1, 4, 8),
        _W_BACK,
        Transfer(3, DEVICE, HOST, 5, 6, 0),
        _M_DOWN,
    ),
    repeats=(Repeat(0, 4),),
    host_updates=(_UPDATE,),
    allocation=Allocation(AllocationKind.ADDRESSES, addresses=(8, 8, 12, 0, 4, 4, -1, 12, -1, -1, -1)),
)


def _addresses(plan: Plan, *addresses: int) -> Plan:
    return replace(plan, allocation=replace(plan.allocation, addresses=addresses))


def _rich(change: Callable[[Plan], Plan]) -> Callable[[Plan], Plan]:
    """Returns a change of residencies that needs no addresses: bytes are counted as they are."""

    def spoil(plan: Plan) -> Plan:
        return change(replace(plan, allocation=Allocation()))

    return spoil


_RICH_SPOILED: list[tuple[str, str, Callable[[Plan], Plan]]] = [
    ("number of ops of another step", "digest", lambda p: replace(p, op_count=2 * p.op_count)),
    ("bytes past the end", "range", lambda p: _transfer(p, _W_BACK, replace(_W_BACK, stop_byte=9))),
    ("no bytes", "range", lambda p: _transfer(p, _W_BACK, replace(_W_BACK, first_byte=8, stop_byte=0))),
    ("part nowhere", "required", _rich(lambda p: _residency(p, Residency(1, DEVICE, 1, 4), Residency(1, DEVICE, 1, 4, 1)))),
    (
        "part away when used",
        "required",
        _rich(lambda p: _residency(p, Residency(2, DEVICE, 0, 1, 4, 8), Residency(2, DEVICE, 0, 1, 5, 8))),
    ),
    (
        "part twice in a tier",
        "overlap",
        _rich(lambda p: replace(p, residencies=(*p.residencies, Residency(2, DEVICE, 4, 5, 3, 5)))),
    ),
    ("part of a load", "from_nowhere", lambda p: _transfer(p, _W_BACK, replace(_W_BACK, stop_byte=7))),
    ("load that ends too early", "repeat", _rich(lambda p: replace(p, repeats=(Repeat(0, 3), *p.repeats)))),
    ("repeat before its op", "repeat", lambda p: replace(p, repeats=(Repeat(4, 4),))),
    ("repeat that is there twice", "repeat", lambda p: replace(p, repeats=(Repeat(0, 4), Repeat(0, 4)))),
    ("repeat of an update", "repeat", lambda p: replace(p, repeats=(*p.repeats, Repeat(6, 7)))),
    ("repeat that writes what lasts", "repeat", lambda p: replace(p, host_updates=(), repeats=(Repeat(6, 7),))),
    ("repeat without the room for its result", "repeat", _rich(lambda p: replace(p, repeats=(*p.repeats, Repeat(1, 5))))),
    ("no repeat", "from_nowhere", lambda p: replace(p, repeats=())),
    ("repeat that is too late", "lost_data", lambda p: _late_repeat(p)),
    ("update of another op", "host_update", lambda p: replace(p, host_updates=(replace(_UPDATE, op=5),))),
    ("update before its op", "host_update", lambda p: replace(p, host_updates=(replace(_UPDATE, issue_at=5),))),
    ("update twice", "host_update", lambda p: replace(p, host_updates=(_UPDATE, _UPDATE))),
    ("update in less than no time", "host_update", lambda p: replace(p, host_updates=(replace(_UPDATE, duration_ns=-1),))),
    ("update past its op in the next step", "host_update", lambda p: replace(p, host_updates=(HostUpdate(6, 7, 15, 1),))),
    ("update past its data", "host_update", lambda p: replace(p, host_updates=(replace(_UPDATE, ready_by=8),))),
    (
        "update before the gradient is there",
        "host_update",
        _rich(
            lambda p: _transfer(
                _residency(p, Residency(3, DEVICE, 4, 6), Residency(3, DEVICE, 4, 7)),
                Transfer(3, DEVICE, HOST, 5, 6, 0),
                Transfer(3, DEVICE, HOST, 5, 7, 0),
            )
        ),
    ),
    (
        "copy of what is updated",
        "invalid_copy",
        _rich(
            lambda p: replace(
                _residency(p, Residency(3, HOST, 5, 7), Residency(3, HOST, 5, 8)), host_updates=(replace(_UPDATE, ready_by=8),)
            )
        ),
    ),
    ("copy while it is updated", "stale_copy", lambda p: _copy_m(p, 5, 7)),
    ("load awaited after its source ends", "source", _rich(lambda p: _source_ends(p))),
    ("no addresses", "address", lambda p: _addresses(p)),
    ("address below the device", "address", lambda p: _addresses(p, 8, 8, 12, 0, 4, 4, 0, 12, -1, -1, -1)),
    ("no address on the device", "address", lambda p: _addresses(p, 8, -1, 12, 0, 4, 4, -1, 12, -1, -1, -1)),
    ("address twice", "address", lambda p: _addresses(p, 8, 8, 11, 0, 4, 4, -1, 12, -1, -1, -1)),
    ("peak below the highest end", "peak", lambda p: replace(p, peak_bytes={**p.peak_bytes, DEVICE: 20})),
    ("address too high", "budget", lambda p: _addresses(p, 8, 8, 12, 0, 4, 4, -1, 13, -1, -1, -1)),
    ("ranks by pair of tiers", "rank", lambda p: _two_writes(p)),
]


def _copy_m(plan: Plan, issue_at: int, ready_by: int) -> Plan:
    plan = _residency(replace(plan, allocation=Allocation()), Residency(4, NVME, 7, 9), Residency(4, NVME, issue_at, 9))
    return _transfer(plan, _M_DOWN, replace(_M_DOWN, issue_at=issue_at, ready_by=ready_by))


def _late_repeat(plan: Plan) -> Plan:
    """Op 4 finds x in a tier that holds nothing of it, since its op runs again one tick later."""
    plan = replace(plan, repeats=(Repeat(0, 5),), allocation=Allocation())
    plan = _residency(plan, Residency(0, DEVICE, 4, 5), Residency(0, DEVICE, 4, 6))
    plan = _residency(plan, Residency(2, DEVICE, 3, 5, 4, 8), Residency(2, DEVICE, 3, 6, 4, 8))
    return _residency(plan, Residency(2, DEVICE, 0, 5, 0, 4), Residency(2, DEVICE, 0, 6, 0, 4))


def _source_ends(plan: Plan) -> Plan:
    """y goes to the host and back, and its room there is given away at the tick at which the load is awaited."""
    plan = _residency(plan, Residency(1, DEVICE, 1, 4), *(Residency(1, DEVICE, 1, 2), Residency(1, DEVICE, 3, 4)))
    plan = replace(plan, residencies=(*plan.residencies, Residency(1, HOST, 2, 3)))
    plan = _transfer(plan, Transfer(3, DEVICE, HOST, 5, 6, 0), Transfer(3, DEVICE, HOST, 5, 6, 1))
    moves = (Transfer(1, DEVICE, HOST, 2, 2, 0), Transfer(1, HOST, DEVICE, 3, 3, 3))
    return replace(plan, transfers=(*plan.transfers, *moves))


def _two_writes(plan: Plan) -> Plan:
    """y is copied to the NVMe from the device, on the link that m's copy takes too, with ranks of its own."""
    plan = replace(plan, residencies=(*plan.residencies, Residency(1, NVME, 2, 4)), allocation=Allocation())
    return replace(plan, transfers=(*plan.transfers, Transfer(1, DEVICE, NVME, 2, 3, 0)))


_DENIED: list[tuple[str, dict[str, object]]] = [
    ("no tier nvme", {"tiers": (HOST,)}),
    ("between host and nvme", {"moves_host_nvme": False}),
    ("repeats no single op", {"repeats_ops": False}),
    ("updates nothing on the host", {"updates_on_host": False}),
    ("moves no parts", {"splits": False}),
    ("cuts tensors at multiples of 3 bytes", {"granule_bytes": 3}),
    ("below min_bytes", {"min_bytes": 9}),
]


def test_good_plans_pass() -> None:
    check(_PLAN, _TRACE)
    check(_RICH_PLAN, _RICH_TRACE, IDEAL_EXECUTOR)


@pytest.mark.parametrize(("rule", "spoil"), [s[1:] for s in _SPOILED], ids=[s[0] for s in _SPOILED])
def test_spoiled_plan_is_refused_with_its_rule(rule: str, spoil: Callable[[Plan], Plan]) -> None:
    with pytest.raises(InvalidPlanError) as caught:
        check(spoil(_PLAN), _TRACE)
    assert caught.value.rule == rule, caught.value


@pytest.mark.parametrize(("rule", "spoil"), [s[1:] for s in _RICH_SPOILED], ids=[s[0] for s in _RICH_SPOILED])
def test_spoiled_rich_plan_is_refused_with_its_rule(rule: str, spoil: Callable[[Plan], Plan]) -> None:
    with pytest.raises(InvalidPlanError) as caught:
        check(spoil(_RICH_PLAN), _RICH_TRACE, IDEAL_EXECUTOR)
    assert caught.value.rule == rule, caught.value


@pytest.mark.parametrize("rule", [rule.value for rule in Rule])
def test_every_rule_has_an_example_and_its_line_in_the_table(rule: str) -> None:
    examples = {s[1] for s in _SPOILED + _RICH_SPOILED} | ({"capability"} if _DENIED else set())
    assert rule in examples
    assert f"| {rule} | " in (rules.__doc__ or "")


@pytest.mark.parametrize(("told", "denied"), _DENIED, ids=[d[0] for d in _DENIED])
def test_what_the_executor_cannot_do_is_refused(told: str, denied: dict[str, Any]) -> None:
    with pytest.raises(InvalidPlanError, match=told) as caught:
        check(_RICH_PLAN, _RICH_TRACE, replace(IDEAL_EXECUTOR, **denied))
    assert caught.value.rule == "capability"


# a makes x and y from w; x is read at once, y at the end; w changes between. u and v are updated one after the other.
_CHAIN = Trace(
    ops=(
        Op("a", 1, (2,), (0,)),
        Op("b", 1, (0,), (1,)),
        Op("c", 1, (2,), (0,)),
        Op("d", 1, (0,), ()),
        Op("e", 1, (1,), ()),
        Op("f", 1, (2, 3), (3,), phase="optimizer"),
        Op("g", 1, (3,), (2,), phase="optimizer"),
    ),
    tensors=(
        Tensor("x", 1, TensorClass.ACTIVATION),
        Tensor("y", 1, TensorClass.ACTIVATION, lives_until=6),
        Tensor("w", 1, TensorClass.PARAMETER, is_persistent=True),
        Tensor("m", 1, TensorClass.OPTIMIZER, is_persistent=True),
    ),
)


def _chain(residencies: tuple[Residency, ...], **changes: object) -> Plan:
    """Returns a plan for `_CHAIN` without limits, in which w and m stay unless they are named."""
    named = {r.tensor for r in residencies}
    held = residencies + tuple(Residency(t, DEVICE, 0, 7) for t in (2, 3) if t not in named)
    values: dict[str, object] = {"transfers": (), **changes}
    used = {tier: [sum(r.tier is tier and (r.start <= op < r.stop) for r in held) for op in range(7)] for tier in Tier}
    peaks = {tier: max(line) for tier, line in used.items()}
    return Plan("hand", _CHAIN.digest, 7, dict.fromkeys(Tier, 99), peaks, held, **values)  # type: ignore[arg-type]


def _refused(plan: Plan) -> str:
    """Returns the rule that a plan for `_CHAIN` breaks, or "" for none."""
    try:
        check(plan, _CHAIN, IDEAL_EXECUTOR)
    except InvalidPlanError as error:
        return error.rule
    return ""


def test_chain_of_repeats_makes_an_old_version_for_the_next() -> None:
    y = (Residency(1, DEVICE, 1, 2), Residency(1, DEVICE, 4, 6))
    chain = (Repeat(0, 4), Repeat(1, 4))
    assert _refused(_chain((Residency(0, DEVICE, 0, 5), *y), repeats=chain)) == ""
    assert _refused(_chain((Residency(0, DEVICE, 0, 5), *y), repeats=chain[1:])) == "repeat"  # x holds what c made
    assert _refused(_chain((Residency(0, DEVICE, 0, 4), *y), repeats=chain)) == "repeat"
    assert _refused(_chain((Residency(0, DEVICE, 0, 5), *y), repeats=(Repeat(0, 3), Repeat(1, 4)))) == "lost_data"


def test_data_that_a_repeat_brings_back_after_it_was_needed_is_lost() -> None:
    x = (Residency(0, DEVICE, 0, 7),)
    late = (Residency(1, DEVICE, 1, 5), Residency(1, DEVICE, 6, 7))
    assert _refused(_chain((*x, *late), repeats=(Repeat(0, 6), Repeat(1, 6)))) == "lost_data"
    kept = (Residency(1, DEVICE, 1, 6), Residency(1, DEVICE, 6, 7))
    assert _refused(_chain((*x, *kept), repeats=(Repeat(0, 6), Repeat(1, 6)))) == ""
    assert _refused(_chain((*x, Residency(1, DEVICE, 1, 2)))) == "required"
    assert _refused(_chain((*x, Residency(1, DEVICE, 1, 5)))) == "lost_data"


def test_data_that_a_repeat_brings_back_and_that_leaves_again_too_early_is_lost() -> None:
    y = (Residency(1, DEVICE, 1, 2), Residency(1, DEVICE, 4, 5))
    assert _refused(_chain((Residency(0, DEVICE, 0, 5), *y), repeats=(Repeat(0, 4), Repeat(1, 4)))) == "lost_data"


def test_copy_is_stale_when_a_repeat_overwrites_its_source_with_an_old_version() -> None:
    y = (Residency(1, DEVICE, 1, 6),)
    copy = Transfer(0, DEVICE, HOST, 3, 5, 0)
    held = (Residency(0, DEVICE, 0, 5), Residency(0, HOST, 3, 6), *y)
    assert _refused(_chain(held, transfers=(copy,))) == ""
    assert _refused(_chain(held, transfers=(copy,), repeats=(Repeat(0, 4),))) == "stale_copy"
    assert _refused(_chain(held, transfers=(copy,), repeats=(Repeat(2, 4),))) == ""  # the same bytes once more


def test_updates_on_the_host_wait_for_each_other() -> None:
    stay = (Residency(0, DEVICE, 0, 4), Residency(1, DEVICE, 1, 6), Residency(2, HOST, 0, 7), Residency(3, HOST, 0, 7))
    loads = (Transfer(2, HOST, DEVICE, 0, 0, 0),)
    held = (*stay, Residency(2, DEVICE, 0, 3))
    good = (HostUpdate(5, 5, 6, 1), HostUpdate(6, 6, 7, 1))
    assert _refused(_chain(held, transfers=loads, host_updates=good)) == ""
    assert _refused(_chain(held, transfers=loads, host_updates=(HostUpdate(5, 6, 7, 1), good[1]))) == "host_update"
    blocking = (HostUpdate(5, 5, 6, 1), HostUpdate(6, 7, 7, 1))
    assert _refused(_chain(held, transfers=loads, host_updates=blocking)) == ""
    backwards = (HostUpdate(5, 6, 7, 1), HostUpdate(6, 6, 6, 1))
    assert _refused(_chain(held, transfers=loads, host_updates=backwards)) == "host_update"
    across = (good[0], HostUpdate(6, 6, 8, 1))
    assert _refused(_chain(held, transfers=loads, host_updates=across)) == "invalid_copy"  # w is loaded at 0, too early


def test_budgets_below_hold_room_in_whole_granules_and_peaks_are_bytes() -> None:
    can = replace(IDEAL_EXECUTOR, granule_bytes=64)
    held = (Residency(0, DEVICE, 0, 4), Residency(1, DEVICE, 1, 6), Residency(3, HOST, 0, 7))
    plan = _chain(held, host_updates=())
    plan = replace(plan, residencies=(*plan.residencies, Residency(3, DEVICE, 5, 7)), transfers=_THERE_AND_BACK)
    plan = replace(plan, peak_bytes={**plan.peak_bytes, DEVICE: 3})
    check(replace(plan, budget_bytes={DEVICE: 9, HOST: 64}), _CHAIN, can)
    with pytest.raises(InvalidPlanError, match="64 B at op 0"):
        check(replace(plan, budget_bytes={DEVICE: 9, HOST: 63}), _CHAIN, can)


_THERE_AND_BACK = (Transfer(3, HOST, DEVICE, 5, 5, 0), Transfer(3, DEVICE, HOST, 7, 7, 0))


@given(seed=st.integers(0, 2**32))
def test_addresses_are_refused_exactly_when_two_meet_and_their_peak_is_the_highest_end(seed: int) -> None:
    rng = random.Random(seed)
    n = 6
    tensors = tuple(_blob(str(i), rng.randint(1, 4)) for i in range(rng.randint(1, 5)))
    trace = Trace(tuple(Op(str(i), 1, transient_bytes=rng.choice((0, 3))) for i in range(n)), tensors)
    starts = [rng.randrange(n) for _ in tensors]
    held = tuple(Residency(i, DEVICE, start, start + rng.randint(1, n)) for i, start in enumerate(starts))
    addresses = tuple(rng.randint(0, 9) for _ in tensors)
    spans = [range(a, a + t.size_bytes) for a, t in zip(addresses, tensors, strict=True)]
    ops = [{op % n for op in range(r.start, r.stop)} for r in held]
    pairs = itertools.combinations(range(len(tensors)), 2)
    meets = any(ops[i] & ops[j] and set(spans[i]) & set(spans[j]) for i, j in pairs)
    ends = [max((span.stop for span, own in zip(spans, ops, strict=True) if op in own), default=0) for op in range(n)]
    peak = max(end + op.transient_bytes for end, op in zip(ends, trace.ops, strict=True))
    allocation = Allocation(AllocationKind.ADDRESSES, addresses=addresses)
    plan = Plan("random", trace.digest, n, {DEVICE: peak}, {DEVICE: peak}, held, (), allocation=allocation)
    if meets:
        with pytest.raises(InvalidPlanError, match="are held at once"):
            check_bytes(plan, trace, 1)
        return
    check_bytes(plan, trace, 1)
    with pytest.raises(InvalidPlanError, match="over its budget"):
        check_bytes(replace(plan, budget_bytes={DEVICE: peak - 1}), trace, 1)


def _blob(name: str, size_bytes: int) -> Tensor:
    return Tensor(name, size_bytes, TensorClass.ACTIVATION)


def test_update_across_the_end_needs_an_executor_that_wraps() -> None:
    held = (*(Residency(t, DEVICE, 0, 6) for t in (0, 1)), Residency(3, HOST, 0, 7), Residency(3, DEVICE, 5, 7))
    plan = _chain((*held[:2], Residency(2, HOST, 0, 7), Residency(2, DEVICE, 2, 6), *held[2:]))
    moves = (Transfer(3, DEVICE, HOST, 6, 6, 0), Transfer(2, HOST, DEVICE, 2, 2, 0), Transfer(3, HOST, DEVICE, 5, 5, 1))
    plan = replace(plan, transfers=moves, host_updates=(HostUpdate(6, 6, 8, 1),))
    with pytest.raises(InvalidPlanError, match="across the end of the step"):
        check(plan, _CHAIN, replace(IDEAL_EXECUTOR, wraps=False, updates_cross=False))


def test_capability_tier_is_checked() -> None:
    with pytest.raises(InvalidPlanError, match="no tier host"):
        check(_PLAN, _TRACE, Capabilities(tiers=(NVME,)))


def test_capability_min_bytes_is_checked() -> None:
    with pytest.raises(InvalidPlanError, match="below min_bytes"):
        check(_PLAN, _TRACE, Capabilities(min_bytes=11))


def test_capability_movable_is_checked() -> None:
    pinned = replace(_TRACE, tensors=(replace(_TRACE.tensors[0], is_movable=False), *_TRACE.tensors[1:]))
    with pytest.raises(InvalidPlanError, match="cannot move"):
        check(replace(_PLAN, trace_digest=pinned.digest), pinned)


def test_capability_host_to_nvme_is_checked() -> None:
    plan = replace(_PLAN, transfers=(*_PLAN.transfers, Transfer(0, HOST, NVME, 3, 4, 0)))
    with pytest.raises(InvalidPlanError, match="between host and nvme"):
        check(plan, _TRACE)


def test_capability_wraps_is_checked_and_a_wrapping_plan_passes_where_it_is_there() -> None:
    plan = _transfer(_PLAN, Transfer(1, DEVICE, HOST, 6, 6, 1), Transfer(1, DEVICE, HOST, 5, 7, 1))
    plan = _residency(plan, Residency(1, DEVICE, 3, 6), Residency(1, DEVICE, 3, 7))
    plan = replace(plan, peak_bytes={DEVICE: 111, HOST: 110})
    with pytest.raises(InvalidPlanError, match="across the end of the step"):
        check(plan, _TRACE)
    check(plan, _TRACE, Capabilities(wraps=True))


def test_capability_refuses_a_moved_tensor_on_the_device_across_the_end() -> None:
    plan = _residency(_PLAN, Residency(1, DEVICE, 1, 2), Residency(1, DEVICE, 0, 2))
    plan = _residency(plan, Residency(1, DEVICE, 3, 6), Residency(1, DEVICE, 3, 6))
    plan = _transfer(plan, Transfer(1, HOST, DEVICE, 1, 1, 0), Transfer(1, HOST, DEVICE, 0, 1, 0))
    check(plan, _TRACE)
    whole = replace(
        plan,
        residencies=(*(r for r in plan.residencies if (r.tensor, r.tier) != (1, DEVICE)), Residency(1, DEVICE, 0, 6)),
        transfers=tuple(t for t in plan.transfers if t.tensor == 0 or (t.rank == 0 and t.source is HOST)),
    )
    whole = replace(whole, transfers=tuple(replace(t, rank=min(t.rank, 1)) for t in whole.transfers))
    with pytest.raises(InvalidPlanError, match="across the step's end"):
        check(whole, _TRACE)


def test_capability_gradient_follows_parameter_is_checked() -> None:
    gradient = Tensor("g", 1, TensorClass.GRADIENT, owner=1, lives_until=6)
    ops = (*_TRACE.ops[:3], replace(_TRACE.ops[3], writes=(3,)), *_TRACE.ops[4:])
    trace = replace(_TRACE, ops=ops, tensors=(*_TRACE.tensors, gradient))
    plan = replace(
        _PLAN,
        trace_digest=trace.digest,
        residencies=(*_PLAN.residencies, Residency(3, DEVICE, 3, 6)),
        budget_bytes={DEVICE: 112, HOST: 111},
        peak_bytes={DEVICE: 112, HOST: 110},
    )
    check(plan, trace)
    with pytest.raises(InvalidPlanError, match="must move together") as caught:
        check(plan, trace, Capabilities(gradient_follows_parameter=True))
    assert caught.value.rule == "capability"


def test_lost_data_counts_life_after_the_last_use() -> None:
    trace = replace(_TRACE, tensors=(replace(_TRACE.tensors[0], lives_until=6), *_TRACE.tensors[1:]))
    check(replace(_PLAN, trace_digest=trace.digest), trace)
    ops = (*_TRACE.ops[:5], Op("op5", 10))
    early = replace(trace, ops=ops)
    plan = replace(
        _PLAN,
        trace_digest=early.digest,
        residencies=(Residency(0, DEVICE, 0, 2), *_PLAN.residencies[3:]),
        transfers=(Transfer(1, DEVICE, HOST, 6, 6, 0), Transfer(1, HOST, DEVICE, 1, 1, 0), Transfer(1, HOST, DEVICE, 3, 4, 1)),
        peak_bytes={DEVICE: 111, HOST: 10},
    )
    with pytest.raises(InvalidPlanError) as caught:
        check(plan, early)
    assert caught.value.rule == "lost_data"


_REDUCED = Trace(
    ops=(
        Op("backward", 10, (), (0,)),
        Op("reduce", 10, (0,), (1,), queue=Queue.COMMUNICATION),
        Op("beside", 10),
        Op("after", 10, awaits=1),
        Op("update", 10, (1,), (2,), phase="optimizer"),
    ),
    tensors=(
        Tensor("gradient", 8, TensorClass.ACTIVATION),
        Tensor("reduced", 4, TensorClass.GRADIENT),
        Tensor("weights", 4, TensorClass.PARAMETER, is_persistent=True),
    ),
)


def _reduced_plan(gradient_until: int, copy_at: int, **more: Any) -> Plan:
    """The reduced gradient goes out at a tick and comes back for the update."""
    residencies = (
        Residency(0, Tier.DEVICE, 0, gradient_until),
        Residency(1, Tier.DEVICE, 1, copy_at + 1),
        Residency(1, Tier.HOST, copy_at, 5),
        Residency(1, Tier.DEVICE, 4, 5),
        Residency(2, Tier.DEVICE, 0, 5),
    )
    moves = (Transfer(1, Tier.DEVICE, Tier.HOST, copy_at, copy_at + 1, 0), Transfer(1, Tier.HOST, Tier.DEVICE, 4, 4, 0))
    used = [sum(size for r, size in zip(residencies, (8, 4, 4, 4, 4), strict=True) if _on_device(r, op)) for op in range(5)]
    peaks = {Tier.DEVICE: max(used), Tier.HOST: 4}
    return Plan("hand", _REDUCED.digest, 5, {Tier.DEVICE: 100, Tier.HOST: 100}, peaks, residencies, moves, **more)


def _on_device(residency: Residency, op: int) -> bool:
    return residency.tier is Tier.DEVICE and residency.start <= op < residency.stop


def test_what_communication_writes_is_copied_once_it_is_awaited() -> None:
    check(_reduced_plan(gradient_until=3, copy_at=3), _REDUCED, IDEAL_EXECUTOR)
    with pytest.raises(InvalidPlanError, match="required: tensor 1"):
        check(_reduced_plan(gradient_until=3, copy_at=1), _REDUCED, IDEAL_EXECUTOR)


def test_copy_made_while_communication_writes_is_of_no_use() -> None:
    plan = _reduced_plan(gradient_until=3, copy_at=2)
    with pytest.raises(InvalidPlanError) as refused:
        check(plan, _REDUCED, IDEAL_EXECUTOR)
    assert refused.value.rule == "stale_copy"


def test_what_communication_reads_stays_until_it_is_awaited() -> None:
    with pytest.raises(InvalidPlanError, match=r"required: tensor 0 .gradient. is required at op 2"):
        check(_reduced_plan(gradient_until=2, copy_at=3), _REDUCED, IDEAL_EXECUTOR)


def test_communication_is_neither_repeated_nor_run_by_the_host() -> None:
    with pytest.raises(InvalidPlanError, match="repeat: expected an op of compute"):
        check(_reduced_plan(gradient_until=3, copy_at=3, repeats=(Repeat(1, 3),)), _REDUCED, IDEAL_EXECUTOR)
    ops = (*_REDUCED.ops[:1], replace(_REDUCED.ops[1], phase="optimizer"), *_REDUCED.ops[2:])
    plan = _reduced_plan(gradient_until=3, copy_at=3, host_updates=(HostUpdate(1, 1, 2, 5),))
    with pytest.raises(InvalidPlanError, match="host_update: expected an op of compute"):
        check(plan, replace(_REDUCED, ops=ops), IDEAL_EXECUTOR)
