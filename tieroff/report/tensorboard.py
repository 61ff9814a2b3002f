"""The figures of a run's steps as scalars that TensorBoard shows.

A training loop that has a writer of its own needs none of this: it adds each item of `engine.stats().scalars()`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tieroff.core.io.run_folder import Run
from tieroff.errors import ConfigError, StateError


def write_scalars(folder: Path, run: Run) -> int:
    """Writes an event file into a folder of TensorBoard, which is made when it is missing.

    Returns:
        The number of steps written.

    Raises:
        ConfigError: tensorboard is not installed, or the folder is a file.
        StateError: the run has no figures of steps.
        OSError: the folder cannot be written.
    """
    if not run.steps:
        raise StateError("--tensorboard: the run folder has no figures of steps (steps.json)")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--tensorboard {folder}: this is a file; name a folder")
    writer = _writer_class()(log_dir=str(folder))
    try:
        for step in run.steps:
            for name, value in step.scalars().items():
                writer.add_scalar(name, value, step.number)
        writer.add_text("tieroff/explain", run.explanation.replace("\n", "  \n"), run.steps[-1].number)
    finally:
        writer.close()
    return len(run.steps)


def _writer_class() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        raise ConfigError(f"--tensorboard needs tensorboard: {error}; pip install 'tieroff[tensorboard]'") from error
