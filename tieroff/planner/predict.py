"""What a plan is predicted to do: by the simulator, to lie beside what was measured, and beside the least time."""

from __future__ import annotations

from tieroff.core.io.run_folder import Run
from tieroff.core.machine import Machine
from tieroff.core.plan import Plan
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.errors import ConfigError, InvalidPlanError
from tieroff.planner.bounds.bounds import best_bound_ns, scope_of
from tieroff.planner.make_plan import default_capabilities
from tieroff.planner.problem.problem import make_problem
from tieroff.planner.simulate.simulator import simulate
from tieroff.units import NS_PER_S, format_seconds

# A prediction made again may differ from the plan's own by this share before the page says so.
_SAME = 0.001


def forecast(plan: Plan, trace: Trace, machine: Machine, effort: str = "fast") -> tuple[int, int]:
    """Returns what a step takes under a plan on a machine, and a lower bound for all plans that do what this one does, in ns.

    Args:
        plan: what runs.
        trace: its trace, with the durations to predict for.
        machine: its links.
        effort: of the bound, see `best_bound_ns`.

    Raises:
        ConfigError: the machine has no link that the plan uses.
        InvalidPlanError: the plan is not one for this trace.
    """
    step_ns = simulate(plan, trace, machine).step_ns
    problem = make_problem(trace, machine, dict(plan.budget_bytes), default_capabilities(trace))
    return step_ns, best_bound_ns(problem, effort, scope_of(plan))


def predict(run: Run) -> tuple[Timeline | None, str]:
    """Returns the predicted timeline of a run's step and "", or None and why there is none.

    A timeline with a text is one for another machine, or for other options of the simulator, than those of the plan.
    """
    if run.machine is None:
        return None, "There is no prediction: the machine that the plan was made for is not in the run folder."
    try:
        timeline = simulate(run.plan, run.trace, run.machine)
    except (ConfigError, InvalidPlanError) as error:
        return None, f"There is no prediction: {error}"
    if abs(timeline.step_ns - run.plan.step_ns) > _SAME * run.plan.step_ns:
        own, again = (format_seconds(ns / NS_PER_S) for ns in (run.plan.step_ns, timeline.step_ns))
        return timeline, f"The plan itself predicts a step of {own}; simulated again on the run's machine it is {again}."
    return timeline, ""
