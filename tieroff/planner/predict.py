"""What a plan was predicted to do in a run: the simulator's timeline, to lie beside the measured one."""

from __future__ import annotations

from tieroff.core.run import Run
from tieroff.core.timeline import Timeline
from tieroff.errors import ConfigError, InvalidPlanError
from tieroff.planner.simulate import simulate
from tieroff.units import NS_PER_S, format_seconds

# A prediction made again may differ from the plan's own by this share before the page says so.
_SAME = 0.001


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
