"""What joins wrapped models to trainers that people use: one module per trainer, imported when it is first named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tieroff.integrations import accelerate, lightning, transformers

__all__ = ["accelerate", "lightning", "transformers"]


def __getattr__(name: str) -> Any:
    """Imports a trainer's module, so that `import tieroff` suffices and a trainer that is not used need not be installed."""
    if name not in __all__:
        raise AttributeError(f"module 'tieroff.integrations' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return import_module(f"tieroff.integrations.{name}")
