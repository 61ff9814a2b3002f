"""The `tieroff` command.

What a command needs is imported inside it, so that `tieroff --version` loads neither torch nor the native module.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tieroff.cli.machine import doctor, probe
from tieroff.cli.output import reports_errors
from tieroff.cli.partition import partition
from tieroff.cli.planning import compare, plan
from tieroff.cli.reporting import report
from tieroff.launch import command as launching
from tieroff.probe.calibration import command as calibrating
from tieroff.rehearsal import command as rehearsing

app = typer.Typer(
    help="Trains PyTorch models within a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Runs the command line. Exit status: 0 done, 1 an error, 2 usage, 3 `plan` found nothing feasible."""
    app()


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from tieroff import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# A new command is a function in a module of this folder, named as the command. It has an option `as_json: AsJson`, prints one
# document with `print_json` when that is set, and raises `TieroffError` or `typer.Exit`. Here it needs its import and one line.
app.command()(reports_errors(probe))
app.command()(reports_errors(doctor))
app.command()(reports_errors(plan))
app.command()(reports_errors(report))
app.command()(reports_errors(compare))
app.command()(reports_errors(calibrating.calibrate))
app.command(context_settings=launching.SETTINGS)(reports_errors(launching.launch))
app.command()(reports_errors(partition))
app.command("calibrate")(reports_errors(calibrating.calibrate))
app.command(context_settings=rehearsing.SETTINGS)(reports_errors(rehearsing.rehearse))
