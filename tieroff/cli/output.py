"""What every command does with its result and its errors."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from tieroff.errors import ConfigError, TieroffError

EXIT_ERROR = 1
EXIT_INFEASIBLE = 3


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command's error a message (or with --json a document) and exit status 1."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except (TieroffError, OSError) as error:
            _print_error(error, as_json=options["as_json"])
            raise typer.Exit(EXIT_ERROR) from None
        except (typer.Exit, typer.BadParameter):
            raise
        except Exception as error:
            if not options["as_json"]:
                raise
            _print_error(error, as_json=True)
            raise typer.Exit(EXIT_ERROR) from None

    return run


def check_out(path: Path | None) -> None:
    """Returns when a result can be written to a path, which is asked before the work for it begins.

    Raises:
        ConfigError: it is a folder, or its folder does not exist.
    """
    if path is not None and path.is_dir():
        raise ConfigError(f"--out {path}: this is a folder; name a file in it")
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--out {path}: the folder {path.parent} does not exist; make it, or name another one")


def _print_error(error: Exception, *, as_json: bool) -> None:
    if as_json:
        print_json({"error": {"type": type(error).__name__, "message": str(error)}})
    else:
        print(f"tieroff: {type(error).__name__}: {error}", file=sys.stderr)


def print_json(document: object) -> None:
    """Prints a command's one document."""
    print(json.dumps(document, indent=2, default=str))
