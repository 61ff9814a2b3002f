"""A plan that the user gave, run as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tieroff.config import Config
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import Capabilities, Plan
from tieroff.core.seams import Fit, Made, Pending
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import TraceMismatchError
from tieroff.planner.user_code import bring_back
from tieroff.session.links import Links
from tieroff.session.planning import may_bring_back
from tieroff.session.ranks import Ranks
from tieroff.session.workshop import Known
from tieroff.tracing.recorder import StepRecorder


class GivenPlan:
    """Implements `core.seams.PlanSource` for one plan. Nothing is left to decide, so no machine is measured.

    Args:
        plan: what the user gave.
        config: names the machine file for reports, if any.
        device: what the recorder watches.
        links: the machine.
        ranks: which process of a launch this is.
        capabilities: what the runtime can execute; the plan is checked against it.
    """

    def __init__(
        self, plan: Plan, config: Config, device: torch.device, links: Links, ranks: Ranks, capabilities: Capabilities
    ) -> None:
        self._plan, self._config, self._device = plan, config, device
        self._links, self._ranks, self._capabilities = links, ranks, capabilities

    def recorder(self) -> StepRecorder:
        return StepRecorder(self._device)

    def plan(self, traces: Sequence[Trace], rates: dict[str, float], *, updates_on_host: bool = False) -> Pending[Made]:
        return Known(lambda: Made(0, self._checked(traces[0]), None))

    def _checked(self, trace: Trace) -> Plan:
        if self._plan.recompute and not trace.recompute_ops:
            return self._plan  # its layers run again from now on; it is compared with the step in which they do
        if self._plan.trace_digest != trace.digest:
            raise TraceMismatchError(
                f"the given plan is for trace {self._plan.trace_digest}, this step's trace is {trace.digest}: "
                "it was made for another model, batch or library version; make a new plan"
            )
        check(self._plan, trace, self._capabilities)
        return self._plan

    def can_move(self, trace: Trace) -> bool:
        """Returns True: the plan says what moves."""
        return True

    def lacks_for_updates(self, trace: Trace) -> str | None:
        return "" if self._plan.host_updates else None

    def bring_back(self, trace: Trace, op: int, used: Mapping[int, bool]) -> Trace:
        if not may_bring_back(self._config, self._ranks) or self._plan.trace_digest == trace.digest:
            return trace
        return bring_back(trace, op, used, self._plan.budget_bytes[Tier.DEVICE], self._config.plan.min_bytes)

    def fit(self, plan: Plan | None) -> Fit:
        """Returns that it suits: it is never replaced."""
        return Fit.SUITS

    def forecast(self, plan: Plan, trace: Trace, rates: dict[str, float]) -> Pending[None]:
        """Finds None: the plan stays, however long it takes."""
        return Known(lambda: None)

    def close(self) -> None:
        """Does nothing: nobody plans."""

    def leaves_room(self, size_bytes: int) -> bool:
        """Returns False: the plan says what is on the device."""
        return False

    def spare_bytes(self, trace: Trace) -> int:
        return 0

    def machine_at(self, rates: dict[str, float]) -> None:
        """Returns None: links are not compared with any."""

    def machine_of(self, trace: Trace) -> Machine | None:
        is_planned = trace.digest == self._plan.trace_digest
        return self._links.machine if is_planned and self._links.is_named else None
