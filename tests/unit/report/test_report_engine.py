"""What a real engine saves and draws: the measured timeline adds up, and the run folder is read back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import tieroff
from tieroff.core.io.run_folder import load_run
from tieroff.core.tensor import Tier
from tieroff.errors import ConfigError, StateError

pytest.importorskip("plotly")


def trained(folder: Path, budget: str, policy: str = "floor", steps: int = 5) -> nn.Module:
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    config = {
        "device": "cpu",
        "budget": {"device": budget, "host": "64KiB", "nvme": "8MiB"},
        "nvme": {"dirs": [str(folder)], "staging": "64KiB"},
        "plan": {"min_bytes": "4KiB", "policy": policy},
    }
    tieroff.wrap(model, optimizer, config=config)
    for _ in range(steps):
        model(torch.ones(64, 64)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_saved_run_has_what_the_step_did(tmp_path: Path) -> None:
    before_ns = time.time_ns()
    model = trained(tmp_path, "50%")
    engine = tieroff.engine(model)
    engine.save_run(tmp_path / "run")
    run = load_run(tmp_path / "run")
    stats, timeline = engine.stats(), run.timeline
    assert stats.phase == "planned"
    assert timeline == engine.timeline
    assert len(timeline.ops) == len(run.trace.ops)
    assert timeline.stall_ns == round(stats.stall_s * 1e9)
    assert timeline.moved_bytes == stats.moved_bytes
    assert all(len(held) == len(timeline.ops) for held in timeline.memory.values())
    assert max(timeline.memory[Tier.DEVICE]) <= run.plan.budget_bytes[Tier.DEVICE]
    assert max(timeline.memory[Tier.NVME]) > 0
    last = run.steps[-1]
    assert run.collectives is None and timeline.host_ns == ()
    assert before_ns < last.began_ns < last.began_ns + last.step_ns < time.time_ns()
    assert abs(timeline.began_ns - last.began_ns) < last.step_ns  # read twice, from two clocks
    assert run.machine is not None and run.machine.has_tier(Tier.NVME)
    assert [step.phase for step in run.steps] == ["traced", "measured", "planned", "planned", "planned"]
    assert [step.number for step in run.steps] == [1, 2, 3, 4, 5]
    assert run.steps[-1].scalars() == stats.figures(5).scalars()
    assert stats.scalars()["tieroff/stall_s"] == pytest.approx(stats.stall_s)
    assert run.explanation == engine.explain(detail=True)
    assert len(engine.explain().splitlines()) == 7  # "Held, and why" and "Not managed, and why" among them
    engine.save_report(tmp_path / "run.html")
    assert 'id="figure-lanes"' in (tmp_path / "run.html").read_text()
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        engine.save_report(tmp_path / "nowhere" / "run.html")
    tieroff.unwrap(model)


def test_run_in_which_everything_fits_is_saved_and_drawn(tmp_path: Path) -> None:
    model = trained(tmp_path, "100%", "auto")
    engine = tieroff.engine(model)
    engine.save_run(tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert not run.was_timed
    assert run.last_planned is not None and run.last_planned.phase == "nothing moved"
    assert engine.explain().startswith("Nothing moved, because everything fits")
    engine.save_report(tmp_path / "run.html")
    tieroff.unwrap(model)


def test_last_step_of_another_kind_does_not_hide_the_plan(tmp_path: Path) -> None:
    model = trained(tmp_path, "50%")
    engine = tieroff.engine(model)
    planned = engine.plan
    model(torch.ones(3, 64)).sum().backward()  # the smaller last batch of an epoch, which is traced
    engine.save_run(tmp_path / "run")
    assert load_run(tmp_path / "run").plan == planned
    assert engine.explain().startswith("It fits: ")
    tieroff.unwrap(model)


def test_nothing_is_saved_before_the_first_planned_step(tmp_path: Path) -> None:
    model = trained(tmp_path, "50%", steps=2)
    engine = tieroff.engine(model)
    for save in (engine.save_run, engine.save_report):
        with pytest.raises(StateError, match=r"no step has run under a plan yet"):
            save(tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()
    assert [step.phase for step in engine.history.steps] == ["traced", "measured"]
    tieroff.unwrap(model)
