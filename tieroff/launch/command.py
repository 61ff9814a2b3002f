"""The command `tieroff launch`. What it needs is imported inside it, as in `tieroff.cli`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tieroff.launch.summary import Outcome

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""How click reads the command line: what follows the script is the script's."""


def launch(
    script: Annotated[Path, typer.Argument(help="What every rank runs.", exists=True, dir_okay=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own, as they are.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="What `tieroff.wrap` takes in every rank.")] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, help="Ranks. Left out: one per GPU, or as [parallel] plan has it.")
    ] = None,
    nnodes: Annotated[int, typer.Option("--nnodes", min=1, help="Machines; each runs this command.")] = 1,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", min=0, help="Which machine this is. Left out: they count themselves.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option("--rdzv-endpoint", help="HOST:PORT where the machines meet, the same on each.")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option("--log-dir", help="Where to make the folder of logs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document; rank 0's output goes to its log.")] = False,
) -> None:
    """Runs a script in several ranks of one or more machines, as torchrun does, and prints a summary of each rank here.

    Rank 0 has this command's own input and output, the others write to the folder of logs.
    """
    from tieroff.launch.agent import Request
    from tieroff.launch.agent import launch as run

    outcome = run(Request(script, tuple(arguments or ()), config, nproc, log_dir, as_json, nnodes, node_rank, rdzv_endpoint))
    if as_json:
        from tieroff.launch.summary import as_document

        sys.stdout.write(json.dumps(as_document(outcome), indent=2) + "\n")
    else:
        _print(outcome)
    raise typer.Exit(outcome.exit_status)


def _print(outcome: Outcome) -> None:
    """Prints the summary to standard error: standard output is the script's."""
    from rich.console import Console
    from rich.table import Table

    from tieroff.launch.summary import COLUMNS, as_lines

    table = Table(title="launch", title_justify="left")
    for column in COLUMNS:
        table.add_column(column)
    for line in as_lines(outcome):
        table.add_row(*line)
    console = Console(stderr=True, markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    for row in outcome.ranks:
        if row.reason:
            log = f" ({row.log})" if row.log else ""
            console.print(f"rank {row.rank}: {row.status}: {row.reason}{log}", soft_wrap=True)
    console.print(f"logs, config and accounts: {outcome.folder}", soft_wrap=True)
    if outcome.error:
        console.print(f"tieroff: LaunchError: {outcome.error}", soft_wrap=True)
