"""Records both files of a training step on a machine with a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, schedule
from torch.profiler import profile as torch_profile

from tieroff.errors import CaptureError

PROFILE = "kineto.json.gz"
EXECUTION_TRACE = "execution_trace.json"
_WARMUP_STEPS = 2


def profile(
    model: torch.nn.Module, step: Callable[[], object], folder: str | Path = "profile", steps: int = 3
) -> tuple[Path, Path]:
    """Runs some training steps under torch's profiler; returns the two files that `tieroff plan` makes a trace of.

    `tieroff plan --trace FIRST --execution-trace SECOND` then plans anywhere. Two steps before those that are recorded
    make what is made once: optimizer state, kernels, the allocator's memory. Loader and printing may be part of a step.

    Args:
        model: what `step` trains, on a GPU.
        step: runs one whole training step: forward, backward, update, cleared gradients.
        folder: where the files go; made if it is not there.
        steps: how many to record; the one in the middle becomes the trace.

    Raises:
        CaptureError: the model is not on an accelerator that the profiler knows, or `steps` is below 1.
    """
    device = next((p.device.type for p in model.parameters() if p.device.type != "cpu"), None)
    activities = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
    if device not in activities:
        raise CaptureError(
            f"expected a model on a GPU, whose kernels the profiler times, got one on {device or 'the cpu'}: move it there "
            "first, or plan a model that never ran with --model"
        )
    return record(step, [ProfilerActivity.CPU, activities[device]], folder, steps)


def record(step: Callable[[], object], activities: list[ProfilerActivity], folder: str | Path, steps: int) -> tuple[Path, Path]:
    """Runs steps under a profiler and an observer of operators that begin together; returns their files."""
    if steps < 1:
        raise CaptureError(f"expected to record 1 step or more, got {steps}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / PROFILE, folder / EXECUTION_TRACE
    observer = ExecutionTraceObserver()
    observer.register_callback(str(written[1]))
    with torch_profile(
        activities=activities,
        schedule=schedule(wait=1, warmup=_WARMUP_STEPS - 1, active=steps),
        on_trace_ready=lambda found: found.export_chrome_trace(str(written[0])),
        record_shapes=True,
        execution_trace_observer=observer,
    ) as profiler:
        for _ in range(_WARMUP_STEPS + steps):
            step()
            profiler.step()
    observer.cleanup()
    return written
