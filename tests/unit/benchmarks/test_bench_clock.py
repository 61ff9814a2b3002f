"""Figures of steps by an accelerator's clock."""

from __future__ import annotations

import bench_clock
from tieroff.core.timeline import OpSpan, Timeline


def test_the_host_is_as_far_ahead_as_half_of_the_ops_began_after_their_calls() -> None:
    ops = (OpSpan(3_000, 9_000), OpSpan(12_000, 20_000), OpSpan(21_000, 22_000))
    host_ns = (1_000, 2_000, 5_000, 6_000, 20_000, 21_000)
    assert bench_clock.ahead_s(Timeline(ops=ops, transfers=(), stalls=(), host_ns=host_ns)) == 2e-6
