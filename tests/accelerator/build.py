"""Builds the simulated device once for each state of its sources, outside the source tree."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from tieroff.rehearsal.build import Extension

_HERE = Path(__file__).resolve().parent
_DEVICE = Extension(
    "_simulated",
    tuple(_HERE / part for part in ("device", "ops", "binding")),
    "simulated_device",
    ("-g1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"),
    compilers=(os.environ.get("CXX", "g++"),),
)


def load() -> ModuleType:
    """Returns the module, built where it is not there yet.

    Raises:
        ConfigError: the compiler refused; with what it said.
    """
    return _DEVICE.load()
