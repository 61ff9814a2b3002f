"""What the tests on a GPU share: kernels whose sums come out the same each time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.accelerator.target import deterministic_kernels, let_kernels_warn


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    let_kernels_warn(item for item in items if item.path.is_relative_to(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _deterministic_kernels() -> Iterator[None]:
    yield from deterministic_kernels()
