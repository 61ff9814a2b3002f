"""A policy: a function from a Problem to a Plan, with its name and what it says of itself.

[Note: two times]
Every policy's plan is simulated twice. The common-model time takes the same machine for all, so rows can be compared with
each other and with `auto`. The faithful time is that under the policy's own options: what its authors' system, or their
simulator, does with the plan. A policy without options of its own has one time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tieroff.core.machine import Machine
from tieroff.core.plan import Plan
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.errors import ConfigError
from tieroff.planner.problem.problem import Problem
from tieroff.planner.simulate.options import SimulationOptions
from tieroff.planner.simulate.simulator import simulate

_NAME = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")


class Decides(StrEnum):
    """When a policy decides.

    STATIC: before the step, from the whole trace. ONLINE: at ticks, from what came before them and what it predicts; its
    walk over the trace is recorded, and the record is the plan.
    """

    STATIC = "static"
    ONLINE = "on-line"


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the published system does that plans here do not say; `ModelOptions` simulates some of it.

    Attributes:
        has_faults: an access to what is away is found by the memory system, not by the program.
        has_pages: parts of tensors move on their own, page by page.
        reorders: ops are run in another order than the program's.
        compresses: what moves takes fewer bytes than the tensor.
    """

    has_faults: bool = False
    has_pages: bool = False
    reorders: bool = False
    compresses: bool = False

    def words(self) -> tuple[str, ...]:
        """Returns what is assumed, in words."""
        named = {"faults": self.has_faults, "pages": self.has_pages}
        named |= {"reordering": self.reorders, "compression": self.compresses}
        return tuple(word for word, is_assumed in named.items() if is_assumed)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Where the simulation of a plan differs from the common model.

    Attributes:
        simulation: see there.
        fault_bytes_per_s: bandwidth of every link while pages fault one after the other; 0: that of the machine.
    """

    simulation: SimulationOptions = field(default_factory=SimulationOptions)
    fault_bytes_per_s: int = 0

    def machine(self, machine: Machine) -> Machine:
        """Returns a machine whose links are no faster than faults let them be."""
        if not self.fault_bytes_per_s:
            return machine
        names = [f"{link}_bytes_per_s" for link in ("d2h", "h2d", "nvme_write", "nvme_read")]
        return replace(machine, **{name: min(getattr(machine, name), self.fault_bytes_per_s) for name in names})

    def words(self) -> tuple[str, ...]:
        """Returns what differs from the common model, in words; nothing if nothing does."""
        named = {
            "one way at a time": self.simulation.has_exclusive_link,
            "clean bytes written": self.simulation.writes_clean,
            "evictions awaited": self.simulation.eviction_blocks,
            "faults": bool(self.fault_bytes_per_s),
        }
        return tuple(word for word, is_set in named.items() if is_set)


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as `policy` declares it; calling it makes the plan. See [Note: two times].

    Attributes:
        name: what configs, the command line and tables call it.
        make: the function; its plan may be over the device's budget, which the caller checks.
        paper: authors, venue and year; "" for a policy that comes from no paper.
        is_published: it is a port of a published system, so its module works out its plan of the ten ops of
            tests/golden/ten_ops.py, and docs/policies.md has a paragraph and table rows for it.
        decides: when.
        options: what its faithful time is simulated under.
        assumes: what its authors' system does that plans here do not say.
    """

    name: str
    make: Callable[[Problem], Plan]
    paper: str = ""
    is_published: bool = False
    decides: Decides = Decides.STATIC
    options: ModelOptions = field(default_factory=ModelOptions)
    assumes: Assumptions = field(default_factory=Assumptions)

    def __call__(self, problem: Problem) -> Plan:
        """Returns the plan of a problem."""
        return self.make(problem)

    @property
    def is_common(self) -> bool:
        """True when the faithful time is the common one."""
        return not self.options.words()

    def faithful(self, plan: Plan, trace: Trace, machine: Machine) -> Timeline:
        """Returns the timeline of a plan under the policy's own options.

        Raises:
            TraceMismatchError, ConfigError, InvalidPlanError: as `simulate` does.
        """
        return simulate(plan, trace, self.options.machine(machine), self.options.simulation)


def policy(
    name: str,
    *,
    paper: str = "",
    published: bool = False,
    decides: Decides = Decides.STATIC,
    options: ModelOptions | SimulationOptions | None = None,
    assumes: Assumptions | None = None,
) -> Callable[[Callable[[Problem], Plan]], Policy]:
    """Returns a decorator that makes a policy of a function from a Problem to a Plan.

    Args:
        name: lower-case words joined by "-" or "_".
        paper, published, decides, assumes: as in `Policy`.
        options: as in `Policy`; options of the simulator alone will do.

    Raises:
        ConfigError: the name has another form, or a published policy names no paper.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f'expected lower-case words joined by "-" or "_" as the name of a policy, got {name!r}')
    if published and not paper:
        raise ConfigError(f"expected the paper of policy {name!r}, which is declared as published")
    if isinstance(options, SimulationOptions):
        options = ModelOptions(options)

    def declare(make: Callable[[Problem], Plan]) -> Policy:
        return Policy(name, make, paper, published, decides, options or ModelOptions(), assumes or Assumptions())

    return declare
