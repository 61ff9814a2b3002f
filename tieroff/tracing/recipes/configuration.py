"""A model's configuration as transformers knows it, from this machine alone: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tieroff.errors import ConfigError


def load_configuration(place: str) -> Any:
    """Returns transformers' configuration of a model.

    Args:
        place: a configuration's file, a folder that holds `config.json`, or an id whose configuration lies in the local cache.

    Raises:
        ConfigError: transformers is missing, nothing is there, or it is of no model that transformers knows.
    """
    transformers = expect_library("transformers")
    path = Path(place).expanduser()
    is_local = path.exists()
    if not is_local and (path.suffix == ".json" or place.startswith((".", "/", "~")) or place.count("/") > 1):
        raise ConfigError(f"--hf: no file or folder {place}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"--hf: expected a config.json in the folder {place}, found none")
    try:
        return transformers.AutoConfig.from_pretrained(
            str(path) if is_local else place, local_files_only=True, trust_remote_code=False
        )
    except OSError as error:
        if is_local:
            raise ConfigError(f"--hf: {place} is no configuration that can be read: {error}") from error
        raise ConfigError(
            f"--hf: no configuration of {place!r} in the local cache, and this command does not use the network: fetch the one "
            f"file with `hf download {place} config.json`, or give the path of a config.json"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--hf: expected the configuration of a model that transformers {transformers.__version__} carries in {place}, "
            f"but {error}"
        ) from error


def expect_library(name: str) -> Any:
    """Returns an optional library.

    Raises:
        ConfigError: it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"--hf needs {name}, which is not installed: {error}; pip install 'tieroff[{name}]'") from error
