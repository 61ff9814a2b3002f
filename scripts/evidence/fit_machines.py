"""Fits the clock's constants to measured steps, and writes the machine files of GPUs that nobody here has.

    python scripts/evidence/fit_machines.py DATA/gpu/neusight

Writes tieroff/tracing/clock/constants.toml and configs/machines/*.toml of the GPUs in data/gpus.toml that name a file.
A constant leaves its starting value, that of published single kernels, only as far as the steps insist on it: as many steps
as are there would otherwise be learnt by heart. Errors are those of fits that have not seen the model, or the GPU.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from published_steps import GPUS, Measured, Step, load_gpus, measured_steps, predict_s, step_of
from tieroff.core.machine import Machine, machine_to_toml
from tieroff.tracing.clock.interval import COVERAGE, DEVIATIONS
from tieroff.tracing.clock.model import Constants

PROJECT = Path(__file__).resolve().parents[2]
CONSTANTS = PROJECT / "tieroff" / "tracing" / "clock" / "constants.toml"
MACHINES = PROJECT / "configs" / "machines"

START = Constants(
    matmul_fp32=0.95,
    matmul_fp32_wide=0.77,
    matmul_fp32_matrix=0.75,
    matmul_short=0.68,
    attention=0.5,
    convolution=0.9,
    memory=0.75,
    fp32_joule_per_flop=5.3e-12,
    tail_tiles_per_unit=0.2,
    kernel_s=4e-6,
    refill_s_per_byte=12e-12,
    log_error=0.0,
    log_error_unseen=0.0,
)
FREEDOM = {
    "matmul_fp32": 0.1,
    "matmul_fp32_matrix": 0.1,
    "memory": 0.1,
    "fp32_joule_per_flop": 0.1,
    "tail_tiles_per_unit": 0.5,
    "kernel_s": 0.7,
    "refill_s_per_byte": 0.4,
}
"""How far the logarithm of a constant may go from its start, as one standard deviation; others stay."""
_NOISE = 0.08
"""Standard deviation of the logarithm of a measured step, by which forward alone differs where memory does not explain it."""


def fit(
    measured: Collection[Measured], steps: dict[str, Step], gpus: dict[str, Machine], start: Constants = START
) -> Constants:
    """Returns the constants that explain the measured steps best; large residuals count less than by their square."""
    names = list(FREEDOM)

    def constants(changes: Sequence[float]) -> Constants:
        values = {name: getattr(start, name) * math.exp(change) for name, change in zip(names, changes, strict=True)}
        return replace(start, **values)

    def residuals(changes: Sequence[float]) -> list[float]:
        chosen = constants(changes)
        errors = [log_error(row, steps, gpus, chosen) / _NOISE for row in measured]
        return errors + [change / FREEDOM[name] for name, change in zip(names, changes, strict=True)]

    return constants(list(least_squares(residuals, np.zeros(len(names)), loss="soft_l1").x))


def log_error(row: Measured, steps: dict[str, Step], gpus: dict[str, Machine], constants: Constants) -> float:
    """Returns the logarithm of predicted over measured."""
    return math.log(predict_s(steps[row.step], gpus[row.gpu], constants) / row.seconds)


def own(common: Constants, rows: Sequence[Measured], steps: dict[str, Step], gpus: dict[str, Machine]) -> dict[str, float]:
    """Returns the constants of one GPU where its steps draw them away from the common ones."""
    found = fit(rows, steps, gpus, common)
    return {name: float(f"{getattr(found, name):.4g}") for name in FREEDOM}


def left_out(
    measured: Sequence[Measured], steps: dict[str, Step], gpus: dict[str, Machine], group: str
) -> dict[Measured, float]:
    """Returns each step's error by a fit that has seen no step of its model, or of its GPU."""
    keys = {row: _group_of(row, steps, group) for row in measured}
    errors: dict[Measured, float] = {}
    for key in sorted(set(keys.values())):
        others = [row for row in measured if keys[row] != key]
        common = fit(others, steps, gpus)
        for row in (row for row in measured if keys[row] == key):
            same = [other for other in others if other.gpu == row.gpu]
            errors[row] = log_error(row, steps, gpus, common.of(own(common, same, steps, gpus)))
    return errors


def _group_of(row: Measured, steps: dict[str, Step], group: str) -> str:
    return row.gpu if group == "gpu" else steps[row.step].model


def coverage(errors: dict[Measured, float], steps: dict[str, Step], group: str) -> int:
    """Returns how many steps lie in the interval that the errors of other models, or GPUs, give; errors from `left_out`."""
    return sum(multiple <= DEVIATIONS for multiple in multiples(errors, steps, group))


def multiples(errors: dict[Measured, float], steps: dict[str, Step], group: str) -> list[float]:
    """Returns each step's error over the root mean square of those of other models, or GPUs; errors from `left_out`."""
    found = []
    for row, error in errors.items():
        key = _group_of(row, steps, group)
        others = [other for known, other in errors.items() if _group_of(known, steps, group) != key]
        found.append(math.fabs(error) / root_mean_square(others))
    return found


def nine_in_ten(values: Sequence[float]) -> float:
    """Returns what the next value of the same kind stays below nine times in ten, whatever their distribution.

    It is their k-th smallest with k = 0.9 (n + 1), rounded up: split conformal prediction.
    """
    return sorted(values)[min(math.ceil(COVERAGE * (len(values) + 1)), len(values)) - 1]


def root_mean_square(values: Collection[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def write_constants(constants: Constants, measured: Sequence[Measured]) -> None:
    """Writes the constants with where they come from."""
    gpus = ", ".join(sorted({row.gpu for row in measured}))
    lines = [
        "# Written by scripts/evidence/fit_machines.py. What each means: tieroff/tracing/clock/model.py.",
        f"# Fitted to {len(measured)} training steps that NeuSight measured on {gpus}.",
        *(f"{key} = {value:.4g}" for key, value in asdict(constants).items()),
    ]
    CONSTANTS.write_text("\n".join(lines) + "\n")


def write_machines(clocks: dict[str, dict[str, float]], measured: Sequence[Measured]) -> None:
    """Writes the machine files; those of GPUs that were fitted carry their own constants and the error of the fit."""
    for gpu, table in tomllib.loads(GPUS.read_text()).items():
        if "file" not in table:
            continue
        rows = [row.step for row in measured if row.gpu == gpu]
        links = {f"{link}_bytes_per_s": round(table["link_bytes_per_s"]) for link in ("d2h", "h2d")}
        machine = replace(
            load_gpus()[gpu],
            measured="datasheet" + (f", clock fitted to {len(rows)} measured steps" if rows else ""),
            host_bytes=round(table["host_bytes"]),
            device_type="cuda",
            clock=clocks.get(gpu, {}),
            **links,
        )
        origin = f"fitted with others to {', '.join(rows)}" if rows else "not among those that the clock was fitted to"
        head = f"# Written by scripts/evidence/fit_machines.py from {table['source']}; {origin}.\n"
        head += "# Assumed: links, what copies of pinned memory reach through such a PCIe, and host memory. Measure yours.\n"
        (MACHINES / f"{table['file']}.toml").write_text(head + machine_to_toml(machine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="measured steps, one folder per GPU")
    folder = parser.parse_args().folder
    gpus, measured = load_gpus(), measured_steps(folder)
    steps = {name: step_of(name) for name in sorted({row.step for row in measured})}
    constants = fit(measured, steps, gpus)
    by_model, by_gpu = (left_out(measured, steps, gpus, group) for group in ("model", "gpu"))
    constants = replace(
        constants, log_error=root_mean_square(by_model.values()), log_error_unseen=root_mean_square(by_gpu.values())
    )
    clocks = {
        gpu: own(constants, [row for row in measured if row.gpu == gpu], steps, gpus)
        | {"log_error": float(f"{constants.log_error:.4g}")}
        for gpu in sorted({row.gpu for row in measured})
    }
    write_constants(constants, measured)
    write_machines(clocks, measured)
    for row in measured:
        errors = (log_error(row, steps, gpus, constants.of(clocks[row.gpu])), by_model[row], by_gpu[row])
        fitted, model, gpu = (f"{math.expm1(error):+.1%}" for error in errors)
        print(f"{row.gpu:24} {row.step:26} {row.seconds:7.3f} s  fitted {fitted}  model unseen {model}  GPU unseen {gpu}")
    for group, unseen in (("model", by_model), ("gpu", by_gpu)):
        needed = nine_in_ten(multiples(unseen, steps, group))
        print(f"{group} unseen: nine in ten within {needed:.2f} root mean squares; intervals take {DEVIATIONS}")


if __name__ == "__main__":
    main()
