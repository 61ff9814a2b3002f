"""The accelerator under test: the simulated one, or what TIEROFF_TEST_DEVICE names, such as "cuda"."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.accelerator import sim
from tieroff.core.machine import Machine
from tieroff.runtime.backend.accelerator import AcceleratorBackend

# Read when cuBLAS makes its first handle, so before any test.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

NAME = os.environ.get("TIEROFF_TEST_DEVICE", sim.NAME)
IS_SIMULATED = NAME == sim.NAME


def device(index: int = 0) -> torch.device:
    """Returns one of its devices."""
    return torch.device(NAME, index)


def backend(index: int = 0) -> AcceleratorBackend:
    """Returns a new backend on one of its devices."""
    return AcceleratorBackend(device(index))


def machine_with_links(bytes_per_s: int) -> Machine:
    """Returns a machine whose links move so much each way at once, for the simulated device's clock."""
    return Machine(
        name="made up",
        measured="datasheet",
        device_bytes=1 << 40,
        host_bytes=1 << 40,
        nvme_bytes=0,
        d2h_bytes_per_s=bytes_per_s,
        h2d_bytes_per_s=bytes_per_s,
    )


def deterministic_kernels() -> Iterator[None]:
    """For a fixture. Without it a plain run on CUDA does not equal itself.

    Kernels that have no such form only warn, and are not used.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    # As contexts: torch's databases of operators forbid to set these for good. Other kernels of attention add in any order.
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False), sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(was_deterministic)


def let_kernels_warn(items: Iterable[pytest.Item]) -> None:
    """Has tests go on where a kernel says that it has no deterministic form."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:.*determinis:UserWarning"))
