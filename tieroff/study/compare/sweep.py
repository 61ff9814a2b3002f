"""Sweeps of one trace: over budgets, where more memory is never slower, and over durations other than the planned ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import Capabilities, Plan
from tieroff.core.tensor import Tier
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.errors import ConfigError
from tieroff.planner.bounds.bounds import best_bound_ns, scope_of
from tieroff.planner.make_plan import default_capabilities, plan_with_timeline
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.simulate.simulator import simulate
from tieroff.study.compare.rows import Result, plan_row
from tieroff.units import NS_PER_S

_EQUAL = 5e-6  # share of a step: microseconds of steps that take a second


def sweep(
    trace: Trace,
    machine: Machine,
    budgets: Sequence[dict[Tier, int]],
    policy: str = "auto",
    effort: str = "fast",
    capabilities: Capabilities | None = None,
) -> list[Result]:
    """Returns one result per budget, in the order given; a larger budget is never slower than a smaller one.

    A plan for a budget that is at most as large in every tier is a candidate too, and is checked under the larger one. It
    is taken over where it is faster by more than a few parts in a million: below that the own plan, which may move less,
    is as good.

    Raises:
        ConfigError: an unknown policy or effort, or a tier without links.
    """
    full = [{tier: budget.get(tier, machine.capacity_bytes(tier)) for tier in Tier} for budget in budgets]
    found: dict[int, Result] = {}
    for index in sorted(range(len(full)), key=lambda i: sum(full[i].values())):
        own = plan_row(trace, machine, budgets[index], policy, effort, capabilities)
        smaller = [found[i] for i in found if all(full[i][tier] <= full[index][tier] for tier in Tier)]
        best = min([own, *smaller], key=_step_s)
        found[index] = own
        if _step_s(best) < _step_s(own) * (1.0 - _EQUAL):
            problem = make_problem(trace, machine, full[index], capabilities or default_capabilities(trace), effort)
            found[index] = _taken_over(best, own, problem)
    return [found[index] for index in range(len(full))]


def _step_s(result: Result) -> float:
    return float("inf") if result.row.step_s is None else result.row.step_s


def _taken_over(best: Result, own: Result, problem: Problem) -> Result:
    """Returns the result of a smaller budget as that of this problem, with this one's planning time and a bound of it."""
    assert best.plan is not None
    plan = replace(best.plan, budget_bytes=problem.budget)
    check(plan, problem.trace, problem.capabilities)
    scope, bound_s = scope_of(plan), own.row.bound_s
    if bound_s is None or own.plan is None or scope_of(own.plan) != scope:
        bound_s = best_bound_ns(problem, problem.effort, scope) / NS_PER_S
    return Result(replace(best.row, bound_s=bound_s, plan_s=own.row.plan_s or best.row.plan_s), plan, best.timeline)


def with_noise(trace: Trace, share: float, seed: int) -> Trace:
    """Returns the trace with every op's duration times a factor that is uniform in 1 +- share; of a seed, always the same.

    Raises:
        ConfigError: the share is not within 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"expected a share of noise from 0 to 1, got {share}")
    chance = random.Random(seed)
    return trace.with_durations([round(op.duration_ns * chance.uniform(1 - share, 1 + share)) for op in trace.ops])


def replay(plan: Plan, trace: Trace, machine: Machine, share: float, seed: int) -> Timeline:
    """Returns the predicted timeline of a plan in a step whose ops take other times than those it was made for.

    Args:
        plan: made for `trace`, or for any trace of its structure.
        trace, share, seed: see `with_noise`.
        machine: as it was planned for.

    Raises:
        ConfigError: the share is not within 0 to 1.
        TraceMismatchError: the plan is for another structure.
    """
    return simulate(plan, with_noise(trace, share, seed), machine)


@dataclass(frozen=True, slots=True)
class NoiseRow:
    """What a plan does when ops take other times.

    Attributes:
        share, seed: of the noise.
        ideal_s: sum of the noisy durations.
        step_s: with the plan made for the durations without noise.
        informed_step_s: with a plan made for the noisy ones.
    """

    share: float
    seed: int
    ideal_s: float
    step_s: float
    informed_step_s: float


def noise_rows(
    trace: Trace,
    machine: Machine,
    budget: dict[Tier, int],
    shares: Sequence[float],
    seeds: Sequence[int] = (0,),
    effort: str = "fast",
) -> list[NoiseRow]:
    """Returns a row per share and seed, for the plan that `auto` makes for the durations of the trace.

    Raises:
        ConfigError: a share is not within 0 to 1.
        InfeasiblePlanError: there is no plan.
    """
    plan, _ = plan_with_timeline(trace, machine, budget, "auto", effort)
    rows: list[NoiseRow] = []
    for share in shares:
        for seed in seeds:
            noisy = with_noise(trace, share, seed)
            step_ns = replay(plan, trace, machine, share, seed).step_ns
            informed_ns = plan_with_timeline(noisy, machine, budget, "auto", effort)[1].step_ns
            times = (value / NS_PER_S for value in (noisy.ideal_ns, step_ns, informed_ns))
            rows.append(NoiseRow(share, seed, *times))
    return rows
