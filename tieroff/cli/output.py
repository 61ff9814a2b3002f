"""What every command does with its result and its errors."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import typer

from tieroff.errors import TieroffError

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


def _print_error(error: Exception, *, as_json: bool) -> None:
    if as_json:
        print_json({"error": {"type": type(error).__name__, "message": str(error)}})
    else:
        print(f"tieroff: {type(error).__name__}: {error}", file=sys.stderr)


def print_json(document: object) -> None:
    """Prints a command's one document."""
    print(json.dumps(document, indent=2, default=str))
