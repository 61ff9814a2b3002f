"""The function of a person's module that makes the model to trace."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tieroff.errors import ConfigError


def find_factory(text: str) -> Callable[[], Any]:
    """Returns the function that "MODULE:FACTORY" names; the module is imported.

    Raises:
        ConfigError: the text has another form, there is no such module or function, or importing it trains or ends the program.
    """
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ConfigError(f'expected a model as "MODULE:FACTORY", such as "models.gpt:gpt_7b", got {text!r}')
    try:
        found: Any = _imported(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"expected a function {name!r} in a module {module_name!r}, but {error}; "
            "name the module as in an import, and run the command in its folder"
        ) from error
    if not callable(found):
        raise ConfigError(f"expected {text} to be a function that returns a DryModel, got {type(found).__name__}")
    factory: Callable[[], Any] = found
    return factory


def _imported(name: str) -> Any:
    remedy = f'put what is to run only as a program under if __name__ == "__main__": in {name}'

    def refuse(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        raise ConfigError(f"importing {name} trains: its {type(optimizer).__name__} was stepped; {remedy}")

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        return importlib.import_module(name)
    except SystemExit as error:
        raise ConfigError(f"importing {name} ended the program (exit status {error.code}); {remedy}") from error
    finally:
        handle.remove()
