"""What the parity tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.checking import programs_checked, states_checked


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models are slower on several threads, and sums over threads are another matter than what is tested."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _checking_mode() -> Iterator[None]:
    """Every step is right by its states, and every program by its plan, and not only by its numbers."""
    with states_checked() as states, programs_checked() as programs:
        yield
    assert states == []
    assert programs == []
