"""The benchmark of host work: its rows, and that work of the engine's shows in them."""

from __future__ import annotations

import argparse
import time
from typing import Any

import pytest

import bench_host
from tieroff.runtime.execution.clock import Clock

OPTIONS = argparse.Namespace(backend="cpu", warmup=8, turns=3, steps=2, min_bytes="0")


def test_a_row_says_what_moved_and_what_it_cost() -> None:
    row = bench_host.measure("lstm", "60%", OPTIONS)
    assert row["phase"] == "planned" and row["losses_equal"]
    assert row["transfers"] >= row["moved_tensors"] > 0
    assert row["of_plain"][1] <= row["of_plain"][0] <= row["of_plain"][2]


def test_the_floor_is_the_least_share_that_can_be_met() -> None:
    share = float(bench_host.floor_of("lstm", "cpu", None).removesuffix("%"))
    row = bench_host.measure("lstm", f"{share}%", OPTIONS)
    assert row["moved_tensors"] > bench_host.measure("lstm", "60%", OPTIONS)["moved_tensors"]


def test_work_in_the_engine_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bench_host.measure("lstm", "60%", OPTIONS)
    tick = Clock.tick

    def slow(self: Clock, *args: Any) -> None:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        tick(self, *args)

    monkeypatch.setattr(Clock, "tick", slow)
    after = bench_host.measure("lstm", "60%", OPTIONS)
    assert after["step_s"] > before["step_s"] + 0.02  # of more than ten ticks
