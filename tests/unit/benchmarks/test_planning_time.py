"""How long it takes to plan the steps of large models, in processor time: other programs hardly lengthen that."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tieroff.core.machine import load_machine
from tieroff.core.tensor import Tier
from tieroff.study.compare.rows import plan_row
from tieroff.tracing.dry import dry_trace


@pytest.mark.long
@pytest.mark.parametrize(
    "name, gib, ops, limit_s",
    [("step_320k", 8.8, 10_000, 10.0), ("step_405b", 67.3, 4_000, 60.0)],
    ids=["Llama-3-8B in ten rounds", "405B by layers"],
)
def test_steps_of_large_models_are_planned_in_time(project: Path, name: str, gib: float, ops: int, limit_s: float) -> None:
    import llama_steps

    machine = load_machine(project / "configs/machines/h100_80gb.toml")
    trace = dry_trace(getattr(llama_steps, name), machine, kernels="cuda")
    assert len(trace.ops) >= ops
    begin_s = time.process_time()
    row = plan_row(trace, machine, {Tier.DEVICE: int(gib * 2**30), Tier.HOST: 4 * 10**12}).row
    planned_s = time.process_time() - begin_s
    assert row.status == "ok" and (row.d2h_bytes or 0) > 0
    assert planned_s <= limit_s, planned_s
