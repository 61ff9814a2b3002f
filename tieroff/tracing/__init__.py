"""Traces of training steps: recorded, or predicted from fake tensors.

`profile` records a step on a machine with a GPU, in files from which a plan can be made on any other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def profile(
    model: torch.nn.Module, step: Callable[[], object], folder: str | Path = "profile", steps: int = 3
) -> tuple[Path, Path]:
    """Runs some training steps under torch's profiler; see `tieroff.tracing.profiling.profile`."""
    from tieroff.tracing import profiling  # torch's profiler is loaded only where it is used

    return profiling.profile(model, step, folder, steps)
