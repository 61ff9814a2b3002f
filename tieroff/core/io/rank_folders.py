"""The runs of all ranks of one launch: a folder with a run folder `rank-N` for each of them."""

from __future__ import annotations

from pathlib import Path

from tieroff.core.io.run_folder import RUN_TRACE, Run, load_run
from tieroff.errors import ConfigError, StateError


def has_ranks(folder: Path) -> bool:
    """True for a folder that is no run of its own and has runs of ranks in it."""
    return not (folder / RUN_TRACE).exists() and bool(_folders(folder))


def load_ranks(folder: Path) -> dict[int, Run]:
    """Returns the runs of a folder's ranks, in order of rank; each has its collectives.

    Raises:
        StateError: a run has no collectives: it was saved by a single process, or by an earlier version.
        ConfigError: two runs are of one rank, or they are of launches of different sizes.
        TieroffError: see `load_run`.
    """
    runs: dict[int, Run] = {}
    worlds: dict[int, Path] = {}
    for path in _folders(folder):
        run = load_run(path)
        if run.collectives is None:
            raise StateError(
                f"{path}: expected a run of one of several ranks, but there is no collectives.json; engine.save_run writes it "
                "while the process group exists"
            )
        rank, world = run.collectives.rank, run.collectives.world
        if rank in runs:
            raise ConfigError(f"{path}: expected a rank of its own, but another folder beside it has rank {rank} too")
        runs[rank] = run
        worlds[world] = path
    if len(worlds) > 1:
        found = ", ".join(f"{path.name} of {world} ranks" for world, path in sorted(worlds.items()))
        raise ConfigError(f"{folder}: expected the ranks of one launch, but found {found}")
    return dict(sorted(runs.items()))


def _folders(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"rank-*/{RUN_TRACE}"))
