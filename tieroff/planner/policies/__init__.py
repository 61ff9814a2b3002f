"""The policies by name. A policy takes a Problem and returns a Plan."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tieroff.core.plan import Plan
from tieroff.errors import ConfigError
from tieroff.planner.policies.floor import plan_floor, plan_floor_mixed
from tieroff.planner.policies.greedy import plan_greedy
from tieroff.planner.problem import Problem

Policy = Callable[[Problem], Plan]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"auto": plan_greedy, "floor": plan_floor, "floor_mixed": plan_floor_mixed, "greedy": plan_greedy}
)


def find_policy(name: str) -> Policy:
    """Returns the policy of a name.

    Raises:
        ConfigError: there is none; the message names the nearest one.
    """
    if name not in POLICIES:
        nearest = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.0)
        raise ConfigError(
            f"unknown policy {name!r}; the nearest is {nearest[0]!r}, all are {', '.join(sorted(POLICIES))}"
        )
    return POLICIES[name]
