"""What the tests on a GPU share: kernels whose sums come out the same each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.accelerator.target import deterministic_kernels


@pytest.fixture(autouse=True)
def _deterministic_kernels() -> Iterator[None]:
    yield from deterministic_kernels()
