"""Measurements of others that tests compare with: a folder beside the checkout, or the one that TIEROFF_TEST_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_PROJECT = Path(__file__).resolve().parent.parent


def published(*parts: str) -> Path:
    """Returns the path of a published measurement; skips the test, and says why, where it is not there."""
    folder = Path(os.environ.get("TIEROFF_TEST_DATA", _PROJECT.parent / "shared" / "data"))
    path = folder.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is not there: set TIEROFF_TEST_DATA to the folder with measurements of others")
    return path
