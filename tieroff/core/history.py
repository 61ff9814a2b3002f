"""Figures of the steps that were run, one after another."""

from __future__ import annotations

from dataclasses import dataclass, field

from tieroff.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one step took and moved.

    Attributes:
        number: of the step, from 1.
        phase: "traced", "measured", "planned", "on demand" or "nothing moved".
        step_ns: from its first event to the end of the update.
        compute_ns, stall_ns, recompute_ns: of that, in code that computes; waiting for transfers; computing again.
        peak_device_bytes: largest count of the engine in this step, 0 where it does not count.
        peak_host_bytes: largest use of the HOST tier so far.
        nvme_bytes: held on NVMe at its end.
        moved_bytes: per link.
        fallbacks: times that it left its plan.
        began_ns: when it began, by the machine's clock, from the beginning of 1970; 0 if that is not known.
        ahead_ns: how long the host was ahead of an accelerator, see `Stats.host_ahead_s`; None on the CPU, or unknown.
    """

    number: int
    phase: str
    step_ns: int
    compute_ns: int = 0
    stall_ns: int = 0
    recompute_ns: int = 0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    nvme_bytes: int = 0
    moved_bytes: dict[str, int] = field(default_factory=dict)
    fallbacks: int = 0
    began_ns: int = 0
    ahead_ns: int | None = None

    @property
    def rest_ns(self) -> int:
        """The step's time apart from compute and stalls: the engine's own work, and code between ops."""
        return max(self.step_ns - self.compute_ns - self.stall_ns, 0)

    def scalars(self) -> dict[str, float]:
        """Returns the figures as name -> value, as loggers of scalars take them; times in seconds."""
        times = {
            "step_s": self.step_ns,
            "compute_s": self.compute_ns,
            "stall_s": self.stall_ns,
            "recompute_s": self.recompute_ns,
            **({"host_ahead_s": self.ahead_ns} if self.ahead_ns is not None else {}),
        }
        sizes = {
            "peak_device_bytes": self.peak_device_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "nvme_bytes": self.nvme_bytes,
            "fallbacks": self.fallbacks,
        }
        return {
            **{f"tieroff/{name}": value / NS_PER_S for name, value in times.items()},
            **{f"tieroff/{name}": float(value) for name, value in sizes.items()},
            **{f"tieroff/moved_bytes/{link}": float(size) for link, size in self.moved_bytes.items()},
        }


@dataclass(frozen=True)
class History:
    """The steps of a run, oldest first; of a long run the last ones."""

    steps: tuple[StepFigures, ...]
