"""The recorder of one step: what lives beside what while an op runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tieroff.tracing.recorder import StepRecorder
from tieroff.tracing.scratch import PeakCounter

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeakCounter, "reset", lambda self: False)


def mib() -> torch.Tensor:
    return torch.ones(MIB // 4)


def transients(*steps: Callable[[], None]) -> list[int]:
    """Returns the transient MiB of ops that run one function each."""
    recorder = StepRecorder(torch.device("cpu"))
    recorder.start()
    try:
        for step in steps:
            recorder.event("op", "")
            step()
        recorder.event("end", "")
    finally:
        recorder.stop()
    trace = recorder.finish([], [0] * (len(steps) + 1), "test")
    return [op.transient_bytes // MIB for op in trace.ops[:-1]]


def test_result_lies_beside_the_argument_that_ends_with_its_op() -> None:
    def last_of_its_op() -> None:
        tensor = mib()
        tensor = tensor + 1

    def in_mid_op() -> None:
        tensor = mib()
        tensor = tensor + 1
        tensor.sum()

    assert transients(last_of_its_op, in_mid_op) == [2, 2]


def test_what_died_before_an_op_does_not_lie_beside_its_result() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            mib()

    assert transients(one_after_the_other) == [1]


def test_what_outlives_its_op_counts_in_the_next_ones() -> None:
    kept: list[torch.Tensor] = []
    assert transients(lambda: kept.append(mib()), lambda: kept.append(mib()), kept.clear, lambda: None) == [1, 2, 2, 0]
