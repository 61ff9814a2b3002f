"""tieroff trains a PyTorch model within a memory budget smaller than its step needs."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from tieroff.errors import (
    BudgetWarning,
    CaptureError,
    CheckpointError,
    ConfigError,
    InfeasiblePlanError,
    InvalidPlanError,
    StateError,
    StoreError,
    TieroffError,
    TraceMismatchError,
)

if TYPE_CHECKING:
    from tieroff import integrations
    from tieroff.api import engine, on_host, scope, sleep, unwrap, wake, wrap
    from tieroff.checkpoint import load_weights, save_weights
    from tieroff.config import Config
    from tieroff.partition.parallelize import parallelize
    from tieroff.runtime.optimizer.clipping import clip_grad_norm_
    from tieroff.runtime.optimizer.known import per_parameter
    from tieroff.session.shared import Budget
    from tieroff.tracing.dry import DryModel

__all__ = [
    "Budget",
    "BudgetWarning",
    "CaptureError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DryModel",
    "InfeasiblePlanError",
    "InvalidPlanError",
    "StateError",
    "StoreError",
    "TieroffError",
    "TraceMismatchError",
    "clip_grad_norm_",
    "engine",
    "integrations",
    "load_weights",
    "on_host",
    "parallelize",
    "per_parameter",
    "save_weights",
    "scope",
    "sleep",
    "unwrap",
    "wake",
    "wrap",
]

if sys.platform.startswith("linux"):
    # torch reads this when it allocates the first tensor on the CPU, and then asks for huge pages in large ones. Memory that
    # left the process, so that a budget holds, is faulted in again page by page when it is wanted: on the CPU backend that took
    # most of what a step loses (docs/results/huge_pages.json). Set to 0 by a person, it stays 0.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

try:
    __version__ = version("tieroff")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+unknown"

_LAZY = {
    "wrap": "api",
    "unwrap": "api",
    "engine": "api",
    "scope": "api",
    "sleep": "api",
    "wake": "api",
    "on_host": "api",
    "load_weights": "checkpoint",
    "save_weights": "checkpoint",
    "clip_grad_norm_": "runtime.optimizer.clipping",
    "Budget": "session.shared",
    "Config": "config",
    "DryModel": "tracing.dry",
    "parallelize": "partition.parallelize",
    "per_parameter": "runtime.optimizer.known",
}


def __getattr__(name: str) -> Any:
    """Imports torch only when something that needs it is asked for: the command line starts fast."""
    from importlib import import_module

    if name == "integrations":  # a package whose modules need a library each
        return import_module("tieroff.integrations")
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'tieroff' has no attribute {name!r}")
    path = f"tieroff.{module}"
    if path not in sys.modules:  # programs ask for a name in each step, and reading what is resident takes long
        from tieroff.core.io.resident import LOADING  # `import tieroff` loads nothing but its errors

        with LOADING.counted():
            import_module(path)
    return getattr(import_module(path), name)


def __dir__() -> list[str]:
    """Names what is imported when it is asked for, too."""
    return sorted({*globals(), *__all__})
