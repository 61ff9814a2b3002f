"""Settings in which the behaviour tests run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.twins import PLANNED, Setting, planned


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """The CPU backend with real files below."""
    return Setting(tmp_path, nvme=True)


@pytest.fixture(params=["cpu", "delayed"])
def each_setting(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    """The CPU backend with real files below, and late copies to the host tier."""
    return Setting(tmp_path, nvme=True) if request.param == "cpu" else Setting(tmp_path, delayed=True)


@pytest.fixture(params=PLANNED)
def planned_setting(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    """Each pair of a backend, a lower tier, and everything moved out or a plan for all, four fifths or half of a step."""
    return Setting(tmp_path, **planned(request.param))
