"""The accelerator under test: the simulated one, or what TIEROFF_TEST_DEVICE names, such as "cuda"."""

from __future__ import annotations

import os

import torch

from tests.accelerator import sim
from tieroff.runtime.backend.accelerator import AcceleratorBackend

NAME = os.environ.get("TIEROFF_TEST_DEVICE", sim.NAME)
IS_SIMULATED = NAME == sim.NAME


def device(index: int = 0) -> torch.device:
    """Returns one of its devices."""
    return torch.device(NAME, index)


def backend(index: int = 0) -> AcceleratorBackend:
    """Returns a new backend on one of its devices."""
    return AcceleratorBackend(device(index))
