"""What a step did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from tieroff.core.history import StepFigures
from tieroff.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of the last step.

    Attributes:
        step_s: from the first event of the step to the end of `optimizer.step` (without an optimizer: to the next step).
        compute_s: of that, in the model's, autograd's, the optimizer's and the user's code. On an accelerator, in a step that
            goes without some of its events: all but waits for transfers.
        stall_s: of that, waiting for transfers.
        recompute_s: compute spent on running recomputed modules again.
        peak_device_bytes: largest count of the engine: device copies it holds plus the trace's transient bytes; 0 while
            there is no trace, or nothing moves.
        peak_host_bytes: largest use of the HOST tier so far.
        nvme_bytes: bytes held on NVMe now.
        moved_bytes: per link: d2h, h2d, nvme_write, nvme_read.
        moved_bytes_by_class: per tensor class, all links together.
        fallbacks: times the step left its plan.
        faults: tensors that were wanted, lay below, and whose fetch had not even begun.
        phase: "traced", "measured", "planned", "on demand" or "nothing moved".
        plans: how many plans were made of this kind of step since it was traced.
        settled_after: planned steps of this kind after which durations and links were found to be within 10 % of those that
            its plan was made for; 0 while they were not.
        settings: values that the engine chose by itself.
        host_ahead_s: how long the host was ahead of an accelerator in this step, the median over the places where it had that
            wait for a transfer, and the step's end. Next to nothing: the device waits for the host. None on the CPU.
        host_updates: buckets of parameters that the CPU updated in host memory.
    """

    step_s: float
    compute_s: float
    stall_s: float
    recompute_s: float
    peak_device_bytes: int
    peak_host_bytes: int
    nvme_bytes: int
    moved_bytes: dict[str, int]
    moved_bytes_by_class: dict[str, int]
    fallbacks: int
    faults: int
    phase: str
    plans: int
    settled_after: int
    settings: dict[str, str]
    host_ahead_s: float | None = None
    host_updates: int = 0

    def figures(self, number: int = 0) -> StepFigures:
        """Returns what of this is kept of every step, as that of step `number`."""
        return StepFigures(
            number=number,
            phase=self.phase,
            step_ns=round(self.step_s * NS_PER_S),
            compute_ns=round(self.compute_s * NS_PER_S),
            stall_ns=round(self.stall_s * NS_PER_S),
            recompute_ns=round(self.recompute_s * NS_PER_S),
            peak_device_bytes=self.peak_device_bytes,
            peak_host_bytes=self.peak_host_bytes,
            nvme_bytes=self.nvme_bytes,
            moved_bytes=dict(self.moved_bytes),
            fallbacks=self.fallbacks,
            ahead_ns=None if self.host_ahead_s is None else round(self.host_ahead_s * NS_PER_S),
        )

    def scalars(self) -> dict[str, float]:
        """Returns the figures as name -> value, as TensorBoard and other loggers of scalars take them."""
        return self.figures().scalars()
