"""Each generator of `auto` off and on: what can be planned stays the same."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings

from tests.property.test_planner_properties import cases, machines
from tests.property.test_updates_properties import cases as cases_with_updates
from tests.support.covering import examples, pairwise
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.planner.auto.portfolio import GENERATORS, plan_with
from tieroff.planner.problem.problem import make_problem
from tieroff.planner.simulate.simulator import simulate

_OTHERS = sorted(GENERATORS - {"updated"})  # which does nothing where no CPU updates
_SWITCHES = {*pairwise(*([False, True] for _ in _OTHERS)), (False,) * len(_OTHERS), (True,) * len(_OTHERS)}
_SUBSETS = [frozenset(itertools.compress(_OTHERS, switches)) for switches in sorted(_SWITCHES)]
_WITH_UPDATES = [subset | {"updated"} for subset in _SUBSETS]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(case=cases(), machine=machines())
def test_every_choice_of_generators_plans_the_same_problems(case: tuple[Trace, dict[Tier, int]], machine: Machine) -> None:
    trace, budget = case
    problem = make_problem(trace, machine, budget, IDEAL_EXECUTOR)
    found = {}
    for chosen in _SUBSETS:
        plan = plan_with(problem, chosen)
        if plan.peak_bytes[Tier.DEVICE] <= budget[Tier.DEVICE]:
            check(plan, trace, IDEAL_EXECUTOR)
            found[chosen] = simulate(plan, trace, machine).step_ns
    assert set(found) in (set(), set(_SUBSETS))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(case=cases_with_updates())
def test_updates_on_the_host_off_and_on_plan_the_same_problems(case: tuple[Trace, dict[Tier, int], Machine]) -> None:
    trace, budget, machine = case
    problem = make_problem(trace, machine, budget, IDEAL_EXECUTOR)
    chosen = [*_WITH_UPDATES, *(subset - {"updated"} for subset in _WITH_UPDATES)]
    plans = [plan_with(problem, subset) for subset in chosen]
    fits = [plan.peak_bytes[Tier.DEVICE] <= budget[Tier.DEVICE] for plan in plans]
    for plan, fit in zip(plans, fits, strict=True):
        if fit:
            check(plan, trace, IDEAL_EXECUTOR)
    assert len(set(fits)) == 1
