"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tieroff.cli.options import AsJson
from tieroff.cli.output import print_json
from tieroff.errors import ConfigError


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="What engine.save_run wrote, or a folder of such: rank-*.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The page; RUN_DIR/report.html when left out.")] = None,
    perfetto: Annotated[Path | None, typer.Option("--perfetto", help="Write a trace for ui.perfetto.dev.")] = None,
    tensorboard: Annotated[Path | None, typer.Option("--tensorboard", help="Write scalars into this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draws what a run did: memory, lanes, waits, decisions, predicted and measured. No page with another output alone.

    Of several ranks, with a run in rank-0, rank-1 and so on, it draws lanes of each and who waited for whom.
    """
    from tieroff.core.io.rank_folders import has_ranks, load_ranks
    from tieroff.core.io.run_folder import load_run
    from tieroff.planner.predict import predict
    from tieroff.report.page import check_page, write_page
    from tieroff.report.perfetto import write_perfetto
    from tieroff.report.ranks.page import write_ranks_page
    from tieroff.report.tensorboard import write_scalars

    if out is None and perfetto is None and tensorboard is None:
        out = run_dir / "report.html"
    if out is not None and run_dir.is_dir():
        check_page(out)
    if has_ranks(run_dir):
        if perfetto is not None or tensorboard is not None:
            raise ConfigError(
                f"{run_dir}: expected the run of one rank for --perfetto and --tensorboard; name its folder rank-N"
            )
        if out is not None:
            write_ranks_page(out, load_ranks(run_dir))
    else:
        run = load_run(run_dir)
        predicted, note = predict(run)
        if out is not None:
            write_page(out, run, predicted, note)
        if perfetto is not None:
            write_perfetto(perfetto, run, predicted)
        if tensorboard is not None:
            write_scalars(tensorboard, run)
    written = {"report": out, "perfetto": perfetto, "tensorboard": tensorboard}
    if as_json:
        print_json({name: str(path) if path is not None else None for name, path in written.items()})
    else:
        for path in filter(None, written.values()):
            print(f"written to {path}")
