"""Settings in which the behaviour tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.covering import pairwise
from tests.support.twins import Setting


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """The CPU backend with real files below."""
    return Setting(tmp_path, nvme=True)


@pytest.fixture(params=["cpu", "delayed"])
def each_setting(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    """The CPU backend with real files below, and late copies to the host tier."""
    return Setting(tmp_path, nvme=True) if request.param == "cpu" else Setting(tmp_path, delayed=True)


# What the step is planned with: everything moved out, or a share of what it takes.
_BUDGETS: dict[str, dict[str, Any]] = {
    "floor": {},
    "auto-100": {"policy": "auto", "device": "100%"},
    "auto-80": {"policy": "auto", "device": "80%"},
    "auto-50": {"policy": "auto", "device": "50%"},
}
_PLANNED: dict[str, dict[str, Any]] = {
    f"{'delayed' if delayed else 'cpu'}-{budget}-{'nvme' if nvme else 'host'}": {
        "delayed": delayed,
        "nvme": nvme,
        **_BUDGETS[budget],
    }
    for delayed, budget, nvme in pairwise((False, True), tuple(_BUDGETS), (False, True))
}


@pytest.fixture(params=_PLANNED)
def planned_setting(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    """Each pair of a backend, a lower tier, and everything moved out or a plan for all, four fifths or half of a step."""
    return Setting(tmp_path, **_PLANNED[request.param])
