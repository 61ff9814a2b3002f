"""Settings in which the behaviour tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.twins import Setting


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """The CPU backend with real files below."""
    return Setting(tmp_path, nvme=True)


@pytest.fixture(params=["cpu", "delayed"])
def each_setting(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    """The CPU backend with real files below, and late copies to the host tier."""
    return Setting(tmp_path, nvme=True) if request.param == "cpu" else Setting(tmp_path, delayed=True)


# Each backend, policy, budget and tier, and not their product.
_PLANNED: dict[str, dict[str, Any]] = {
    "cpu-floor": {"nvme": True},
    "cpu-auto-80": {"policy": "auto", "device": "80%", "nvme": True},
    "delayed-floor": {"delayed": True},
    "delayed-auto-100": {"policy": "auto", "device": "100%", "delayed": True},
    "delayed-auto-50": {"policy": "auto", "device": "50%", "nvme": True, "delayed": True},
}


@pytest.fixture(params=_PLANNED)
def planned_setting(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    """Everything moved out, and plans for all, four fifths and half of what a step takes."""
    return Setting(tmp_path, **_PLANNED[request.param])
