"""Each rule of the checker, shown by spoiling a good plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tieroff.core.check import check
from tieroff.core.plan import Capabilities, Plan, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
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
    (
        "away when used",
        "required",
        lambda p: _residency(p, Residency(1, DEVICE, 1, 2), Residency(1, DEVICE, 2, 3)),
    ),
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
    (
        "no load",
        "from_nowhere",
        lambda p: _transfer(p, Transfer(0, HOST, DEVICE, 5, 5, 2)),
    ),
    (
        "no copy out",
        "from_nowhere",
        lambda p: replace(
            p, transfers=tuple(replace(t, rank=0) if t.rank == 1 and t.target is HOST else t for t in p.transfers[1:])
        ),
    ),
    (
        "no copy out after the write",
        "lost_data",
        lambda p: _transfer(p, Transfer(1, DEVICE, HOST, 6, 6, 1)),
    ),
    (
        "ranks repeated",
        "rank",
        lambda p: _transfer(p, Transfer(1, HOST, DEVICE, 3, 4, 1), Transfer(1, HOST, DEVICE, 3, 4, 0)),
    ),
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


def test_good_plan_passes() -> None:
    check(_PLAN, _TRACE)


@pytest.mark.parametrize(("rule", "spoil"), [s[1:] for s in _SPOILED], ids=[s[0] for s in _SPOILED])
def test_spoiled_plan_is_refused_with_its_rule(rule: str, spoil: Callable[[Plan], Plan]) -> None:
    with pytest.raises(InvalidPlanError) as caught:
        check(spoil(_PLAN), _TRACE)
    assert caught.value.rule == rule, caught.value


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
        transfers=(
            Transfer(1, DEVICE, HOST, 6, 6, 0),
            Transfer(1, HOST, DEVICE, 1, 1, 0),
            Transfer(1, HOST, DEVICE, 3, 4, 1),
        ),
        peak_bytes={DEVICE: 111, HOST: 10},
    )
    with pytest.raises(InvalidPlanError) as caught:
        check(plan, early)
    assert caught.value.rule == "lost_data"
