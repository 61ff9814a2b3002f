"""A device budget on the CPU without folders in the config: the folder for temporary files takes what is above it."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.twins import MACHINE, adam
from tieroff.config import Config
from tieroff.core.tensor import Tier
from tieroff.errors import BudgetWarning
from tieroff.probe.limits import default_dirs


def train(planning: dict[str, Any], wrapped: dict[str, Any] | None) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.GELU())))
    optimizer = adam(model)
    if wrapped is not None:
        tieroff.wrap(model, optimizer, {"plan": planning, **wrapped}, budget="60%")
    losses = []
    for _ in range(5):
        loss = model(torch.randn(64, 48)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, losses


@pytest.fixture
def planning(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "machine.toml").write_text(MACHINE)
    return {"min_bytes": 0, "machine": str(tmp_path / "machine.toml")}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_budget_alone_moves_to_the_temporary_folder_and_says_so(
    planning: dict[str, Any], temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, plain = train(planning, None)
    model, losses = train(planning, {})
    assert all(map(torch.equal, losses, plain))
    assert tieroff.engine(model).plan.budget_bytes[Tier.NVME] > 0
    assert tieroff.engine(model).stats().nvme_bytes > 0
    said = [record.getMessage() for record in caplog.records if "[nvme] dirs is not set" in record.getMessage()]
    assert len(said) == 1 and str(temporary) in said[0]
    assert list(temporary.iterdir()) == []
    tieroff.unwrap(model)


def test_no_folders_on_purpose_moves_nothing_and_says_why(
    planning: dict[str, Any], temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.warns(BudgetWarning, match=r"nothing can move: there is no tier below\. Name a folder"):
        model, _ = train(planning, {"nvme": {"dirs": []}})
    assert "[nvme] dirs is not set" not in caplog.text
    tieroff.unwrap(model)


@pytest.mark.parametrize(
    ("budget", "device"),
    [
        ({}, "cpu"),
        ({"device": "50%", "host": 2**20}, "cpu"),
        ({"device": "50%", "nvme": 0}, "cpu"),
        ({"device": "50%"}, "cuda"),
    ],
)
def test_no_folder_where_none_is_needed(budget: dict[str, Any], device: str) -> None:
    assert default_dirs(Config.load({"budget": budget}), device) == ()


def test_folder_in_memory_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm here")
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert default_dirs(Config.load({"budget": {"device": "50%"}}), "cpu") in ((), (Path("/var/tmp"),))


def test_models_under_one_budget_say_it_once(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    models = tieroff.wrap([nn.Linear(4, 4), nn.Linear(4, 4)], budget="50%")
    assert caplog.text.count(str(temporary)) == 1
    for model in models:
        tieroff.unwrap(model)


def test_a_program_that_changes_its_directory_keeps_folders_relative_to_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drive").mkdir()
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    tieroff.wrap(model, optimizer, {"nvme": {"dirs": ["drive"]}, "plan": {"min_bytes": 0}}, budget="min")
    monkeypatch.chdir("/")
    for _ in range(4):  # folders are measured before the first plan
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)
