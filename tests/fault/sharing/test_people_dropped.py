"""A wrapped model that nobody holds any more, without `unwrap`: as in a search for the largest batch that fits."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import tieroff
from tests.support.twins import Setting, mlp_and_adam, usual_step

pytestmark = pytest.mark.timeout(60)

SETTINGS: dict[str, dict[str, Any]] = {
    "host": {"policy": "auto", "device": "80%"},
    "host-late": {"policy": "auto", "device": "80%", "delayed": True},
    "drive": {"nvme": True},
    "drive-late": {"nvme": True, "delayed": True},
}


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    return Setting(tmp_path, **SETTINGS[request.param])


def trained(setting: Setting) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, optimizer = mlp_and_adam()
    setting.wrap(model, optimizer)
    for _ in range(5):
        usual_step(model, optimizer)
    return model, optimizer


def dropped(setting: Setting) -> list[weakref.ref[Any]]:
    """Trains a model; returns what refers weakly to it and to what belongs to it."""
    model, optimizer = trained(setting)
    return [weakref.ref(one) for one in (model, optimizer, tieroff.engine(model), *model.parameters())]


def held() -> tuple[int, int, int]:
    """Returns how many descriptors, threads and mappings of files this process has."""
    files = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/nvme/" in line]
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(files)


def test_it_is_collected_and_what_it_ran_on_is_given_back_by_the_next_wrap(setting: Setting) -> None:
    counts = []
    for _ in range(4):
        references = dropped(setting)
        gc.collect()
        assert [reference() for reference in references] == [None] * len(references)
        counts.append(held())
    assert counts[1] == counts[2] == counts[3]
    model, _ = trained(setting)
    tieroff.unwrap(model)
    assert held() <= counts[1]


def test_what_is_kept_of_it_keeps_its_values(setting: Setting) -> None:
    model, optimizer = trained(setting)
    kept = [*model.parameters(), *(value for entry in optimizer.state.values() for value in entry.values())]
    values = [tensor.detach().clone() for tensor in kept]
    del model, optimizer
    gc.collect()
    other, other_optimizer = trained(setting)
    usual_step(other, other_optimizer)
    assert all(map(torch.equal, kept, values))
    tieroff.unwrap(other)


def test_one_that_was_unwrapped_is_closed_once(setting: Setting) -> None:
    """A backend counts its engines: closing one twice would end what another model uses."""
    backend = setting.backend()
    torch.manual_seed(0)
    models = [mlp_and_adam() for _ in range(2)]
    for model, optimizer in models:
        tieroff.wrap(model, optimizer, setting.config(), backend=backend)
        usual_step(model, optimizer)
    tieroff.unwrap(models.pop(0)[0])
    gc.collect()
    another, _ = trained(setting)  # here what is gone is given back
    ((model, optimizer),) = models
    for _ in range(4):
        usual_step(model, optimizer)
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)
    tieroff.unwrap(another)
