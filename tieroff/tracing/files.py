"""Traces from files: a saved JSON trace, or a folder with kernels.csv and tensors.csv."""

from __future__ import annotations

import csv
from pathlib import Path

from tieroff.core.io.json_files import load_trace_json
from tieroff.core.tensor import Tensor, TensorClass
from tieroff.core.trace import Op, Trace, validate
from tieroff.errors import CaptureError

_NS_PER_MS = 1_000_000


def load_trace(path: str | Path) -> Trace:
    """Returns the trace in a JSON file, or in a folder with `kernels.csv` and `tensors.csv`.

    Raises:
        CaptureError: nothing is there, or its content cannot be read; the message says where.
    """
    path = Path(path)
    if path.is_dir():
        return _load_folder(path)
    return load_trace_json(path)


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
