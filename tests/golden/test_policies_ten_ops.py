"""Each published policy's plan of the ten ops is what its docstring works out, and no other policy's."""

from __future__ import annotations

import re
import sys
from itertools import combinations

import pytest

from tests.golden.ten_ops import line_of, problems
from tieroff.core.check.plan import check
from tieroff.core.tensor import Tier
from tieroff.planner.policies import all_policies, find_policy
from tieroff.units import MIB

PUBLISHED = [name for name, policy in all_policies().items() if policy.is_published]
_OVER = {"ssdtrain"}
"""Policies whose rule leaves both problems over their budgets; every other one brings both under them."""


def _documented(policy: str) -> dict[str, str]:
    """Returns what the docstring of a policy's module says of its plans, by problem."""
    text = " ".join((sys.modules[find_policy(policy).make.__module__].__doc__ or "").split())
    found = re.findall(rf"\* {re.escape(policy)}: A `([^`]*)`; B `([^`]*)`", text)
    assert len(found) == 1, f"expected the plans of {policy} once in its docstring, found {len(found)}"
    return dict(zip("AB", found[0], strict=True))


def test_table_of_the_ten_ops_is_right() -> None:
    for name, device_mib in (("A", 33), ("B", 31)):
        problem = problems()[name]
        assert (problem.live // MIB).tolist() == [16, 24, 28, 38, 33, 29, 27, 21, 16, 14]
        assert problem.device_bytes == device_mib * MIB


@pytest.mark.parametrize("policy", PUBLISHED)
def test_plan_of_ten_ops_is_what_the_docstring_works_out(policy: str) -> None:
    documented = _documented(policy)
    for name, problem in problems().items():
        plan = find_policy(policy)(problem)
        assert line_of(plan) == documented[name]
        peak = plan.peak_bytes[Tier.DEVICE]
        assert (peak > problem.device_bytes) == (policy in _OVER or (policy, name) == ("vdnn-conv", "B"))
        if peak <= problem.device_bytes:
            check(plan, problem.trace, problem.capabilities)


def test_no_policy_is_another_one() -> None:
    plans = {policy: tuple(line_of(find_policy(policy)(p)) for p in problems().values()) for policy in PUBLISHED}
    same = [pair for pair in combinations(PUBLISHED, 2) if plans[pair[0]] == plans[pair[1]]]
    assert same == []
    assert all(any(lines) for lines in plans.values())
