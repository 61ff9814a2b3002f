"""What the tests on a GPU share: kernels whose sums come out the same each time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Read when cuBLAS makes its first handle, so before any test.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _deterministic_kernels() -> Iterator[None]:
    """Without this the plain run does not equal itself; kernels that have no such form only warn, and are not used."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.use_deterministic_algorithms(was_deterministic)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags
