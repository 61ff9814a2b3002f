"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Effort(StrEnum):
    """How long the planner may search."""

    fast = "fast"
    high = "high"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Wide = Annotated[bool, typer.Option("--wide", help="Print all columns, whatever the width.")]
_TRACE = "A saved trace, a run's folder, one of kernels.csv and tensors.csv, or an execution trace of PyTorch's."
TraceOption = Annotated[Path, typer.Option("--trace", help=_TRACE)]
AnyTraceOption = Annotated[Path | None, typer.Option("--trace", help=_TRACE)]
ExecutionTraceOption = Annotated[
    Path | None,
    typer.Option("--execution-trace", help="With what torch's profiler wrote as --trace: the execution trace beside it."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="MODULE:FACTORY, a function that returns (model, inputs) or a tieroff.DryModel; imports MODULE."
    ),
]
MachineOption = Annotated[Path, typer.Option("--machine", help="A file written by `tieroff probe --out`.")]
DeviceBudgetOption = Annotated[str, typer.Option("--device-budget", help='Bytes, a share of the peak ("25%"), or "min".')]
HostBudgetOption = Annotated[str | None, typer.Option("--host-budget", help="Bytes; the machine's when left out.")]
NvmeBudgetOption = Annotated[str | None, typer.Option("--nvme-budget", help="Bytes; the machine's when left out.")]
EffortOption = Annotated[Effort, typer.Option("--effort", help="fast: seconds; high: minutes.")]
