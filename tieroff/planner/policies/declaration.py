"""What a policy says of itself: when it decides, and what its authors take memory and links to be.

[Note: two times]
Every policy's plan is simulated twice. The common-model time takes the same machine for all, so rows can be compared with
each other and with `auto`. The faithful time is that under the policy's own options: what its authors' system, or their
simulator, does with the plan. A policy without options of its own has one time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from tieroff.core.machine import Machine
from tieroff.core.plan import Plan
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.planner.simulate.options import SimulationOptions
from tieroff.planner.simulate.simulator import simulate


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
    """What to simulate a plan under besides the common model.

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
class Declaration:
    """One per module of policies, as its `DECLARATION`; see [Note: two times].

    Attributes:
        decides: when.
        options: what its faithful time is simulated under.
        assumes: what its authors' system does besides.
    """

    decides: Decides = Decides.STATIC
    options: ModelOptions = field(default_factory=ModelOptions)
    assumes: Assumptions = field(default_factory=Assumptions)

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
