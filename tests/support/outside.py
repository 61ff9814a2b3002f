"""Tests on data of others are skipped, with a reason, where that data is not at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import g10_cells
from harness.data import outside_data
from tieroff.core.trace import Trace
from tieroff.study.profiles.files import load_trace


def _why_missing(path: Path) -> str:
    return f"no outside data at {path}; TIEROFF_TEST_DATA names its folder"


def needs_outside_data(name: str) -> pytest.MarkDecorator:
    """Returns a mark that skips a test where this part of the outside data is missing."""
    path = outside_data(name)
    return pytest.mark.skipif(not path.exists(), reason=_why_missing(path))


def outside(name: str) -> Path:
    """Returns the path of a part of the outside data; where it is missing, the test that asks is skipped."""
    path = outside_data(name)
    if not path.exists():
        pytest.skip(_why_missing(path))
    return path


def published_trace(cell: str) -> Trace:
    """Returns one of G10's published traces, such as `VIT-b1024`; where it is missing, the test that asks is skipped."""
    return load_trace(outside(f"g10/{g10_cells.trace_folder(cell).relative_to(g10_cells.FOLDER)}"))
