"""Traces from files: a saved JSON trace, a folder with kernels.csv and tensors.csv, or what PyTorch's profiler wrote."""

from __future__ import annotations

import csv
from pathlib import Path

from tieroff.core.io.json_files import load_trace_json
from tieroff.core.io.run_folder import RUN_TRACE
from tieroff.core.machine import Machine
from tieroff.core.tensor import Tensor, TensorClass
from tieroff.core.trace import Op, Trace, validate
from tieroff.errors import CaptureError
from tieroff.study.profiles.documents import read_document
from tieroff.study.profiles.join import load_profile

_NS_PER_MS = 1_000_000
_BEGINNING_BYTES = 64 << 10


def load_trace(path: str | Path, execution_trace: str | Path | None = None, machine: Machine | None = None) -> Trace:
    """Returns the trace in a JSON file, in a folder with `kernels.csv` and `tensors.csv`, or of a profiled program.

    Args:
        path: of the file or folder; with an execution trace, of what `torch.profiler` wrote beside it; or of an execution
            trace alone.
        execution_trace: the other file of a profiled program, see `tieroff.tracing.profile`.
        machine: for which op times are estimated where the file has none, as an execution trace alone.

    Raises:
        CaptureError: the path does not exist or cannot be read; the message names the place.
        ConfigError: times are to be estimated, and the machine says nothing of its arithmetic or its memory.
    """
    path = Path(path)
    if execution_trace is not None:
        return load_profile(path, execution_trace)
    if (path / RUN_TRACE).is_file():
        return load_trace_json(path / RUN_TRACE)  # what `engine.save_run` wrote
    if path.is_dir():
        if not (path / "tensors.csv").exists() and not (path / "kernels.csv").exists():
            raise CaptureError(
                f"{path}: expected the folder of a run with {RUN_TRACE} in it, or one of kernels.csv and tensors.csv, got one "
                "with none of them; tieroff.engine(model).save_run(FOLDER) writes the first"
            )
        return _load_folder(path)
    if _is_profiled(path):
        return _load_one_of_two(path, machine)
    return load_trace_json(path)


def _is_profiled(path: Path) -> bool:
    """True for a file that `torch.profiler` wrote, as far as its name or its beginning tells."""
    if path.suffix in (".gz", ".tgz", ".tar"):
        return True
    try:
        with path.open("rb") as file:
            beginning = file.read(_BEGINNING_BYTES)
    except OSError:
        return False  # the reader raises the error
    is_execution_trace = b'"schema"' in beginning and b'"nodes"' in beginning
    return is_execution_trace or b'"traceEvents"' in beginning or b'"schemaVersion"' in beginning


def _load_one_of_two(path: Path, machine: Machine | None) -> Trace:
    """Returns the trace of one of a profiled program's two files, which only an execution trace suffices for."""
    document = read_document(path, "what torch's profiler wrote of a step")
    if "nodes" not in document:
        raise CaptureError(
            f"{path}: expected an execution trace beside the profiler's output, which says what ran and how long but not "
            "which memory it used: record both with tieroff.tracing.profile(model, step), and give the second file as "
            "--execution-trace"
        )
    if machine is None:
        raise CaptureError(
            f"{path}: expected a machine to estimate op times for, since an execution trace alone has none; give one, or the "
            "profiler's output beside it"
        )
    from tieroff.study.profiles.alone import load_execution_trace  # the other kinds of traces need no torch

    return load_execution_trace(path, machine)


def _rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise CaptureError(f"{path}: expected columns {', '.join(columns)}; {', '.join(missing)} missing")
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CaptureError(f"{path}: expected a table with {', '.join(columns)}, but {error}") from error
    for number, row in enumerate(rows, start=2):
        if any(row[name] is None for name in columns):
            raise CaptureError(f"{path}, line {number}: expected {len(columns)} columns or more, the line is cut off")
    return rows


def _load_folder(folder: Path) -> Trace:
    tensors_path, kernels_path = folder / "tensors.csv", folder / "kernels.csv"
    index_of: dict[str, int] = {}
    tensors: list[Tensor] = []
    for number, row in enumerate(_rows(tensors_path, ("tensor", "bytes", "kind")), start=2):
        where = f"{tensors_path}, line {number}"
        tensor = _tensor(row, where)
        if row["tensor"] in index_of:
            raise CaptureError(f"{where}: tensor {row['tensor']} is there twice")
        index_of[row["tensor"]] = len(tensors)
        tensors.append(tensor)
    ops: list[Op] = []
    for number, row in enumerate(_rows(kernels_path, ("kernel", "name", "ms", "reads", "writes")), start=2):
        where = f"{kernels_path}, line {number}"
        try:
            duration_ns = round(float(row["ms"]) * _NS_PER_MS)
        except (ValueError, OverflowError):
            raise CaptureError(f"{where}: expected ms as a number, got {row['ms']!r}") from None
        if duration_ns < 0:
            raise CaptureError(f"{where}: expected ms >= 0, got {row['ms']}")
        reads, writes = (_indices(row[key], index_of, where) for key in ("reads", "writes"))
        ops.append(Op(row["name"], duration_ns, reads, writes))
    if not ops:
        raise CaptureError(f"{kernels_path}: expected at least one kernel, got none")
    trace = Trace(tuple(ops), tuple(tensors), name=folder.name, origin="file")
    validate(trace, str(folder))
    return trace


def _tensor(row: dict[str, str], where: str) -> Tensor:
    try:
        size_bytes = int(row["bytes"])
    except ValueError:
        raise CaptureError(f"{where}: expected bytes as an integer, got {row['bytes']!r}") from None
    if size_bytes <= 0:
        raise CaptureError(f"{where}: expected bytes above 0, got {size_bytes}")
    kind = row["kind"]
    if kind not in ("global", "local", "workspace"):
        raise CaptureError(f"{where}: expected kind global, local or workspace, got {kind!r}")
    is_global = kind == "global"
    return Tensor(
        name=row["tensor"],
        size_bytes=size_bytes,
        kind=TensorClass.PARAMETER if is_global else TensorClass.ACTIVATION,
        is_persistent=is_global,
        is_movable=kind != "workspace",
    )


def _indices(text: str, index_of: dict[str, int], where: str) -> tuple[int, ...]:
    try:
        return tuple(index_of[name] for name in text.split())
    except KeyError as error:
        raise CaptureError(f"{where}: tensor {error.args[0]} is not in tensors.csv") from None
