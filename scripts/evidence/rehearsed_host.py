"""Whether the host's time of a rehearsal depends on how large tensors are: a step of GPT-2 85 M beside the same step in small.

    python scripts/evidence/rehearsed_host.py [--turns 5]

Both are `scripts/train_gpt.py` with 12 layers. The small one is a 32nd in width and length, so that matrices and activations
have a 1024th of the bytes, for a machine whose memory and links are 1024 times as slow and whose arithmetic is slower by what
makes the kernels of a step take as long. So both have the same modules, events and kernels, wait as long for the device, and,
under a policy that looks at sizes alone, move the same tensors at the same ticks. They run in turn, plain and at the least
budget that can be met; what is compared is the processor time of a step, the median of the settled ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tieroff.core.machine import Machine, load_machine, save_machine

PROJECT = Path(__file__).resolve().parents[2]
MACHINE = PROJECT / "configs" / "machines" / "h100_80gb.toml"
WIDTH, LENGTH, SHARE = 768, 1024, 32
SLOWER = 6000.0  # of arithmetic: tiles of 128 are hardly filled in small
MIN_BYTES = 64 << 10
SIZES = ("full", "small")
KINDS = ("plain", "floor")


def small_machine(machine: Machine) -> Machine:
    """Returns the machine on which the small step takes the time of the full one."""
    links = {f"{link}_bytes_per_s": round(getattr(machine, f"{link}_bytes_per_s") / SHARE**2) for link in ("h2d", "d2h")}
    return replace(
        machine,
        name=f"{machine.name}, small",
        device_memory_bytes_per_s=machine.device_memory_bytes_per_s // SHARE**2,
        fp32_flops_per_s=machine.fp32_flops_per_s / SLOWER,
        bf16_flops_per_s=machine.bf16_flops_per_s / SLOWER,
        compute_units=1,  # no tail of tiles
        device_power_w=0,
        **links,
    )


def rehearse(size: str, kind: str, steps: int, folder: Path) -> dict[str, Any]:
    """Returns what `tieroff rehearse --json` says of one run, and how many transfers its plan has."""
    share = SHARE if size == "small" else 1
    config = folder / f"{size}.toml"
    # Norms' statistics are as many in small per token, and never move in full.
    least = MIN_BYTES // SHARE**2 * 17 if size == "small" else MIN_BYTES
    config.write_text(f'[plan]\nbackground = false\npolicy = "floor"\nrecompute = false\nmin_bytes = {least}\n')
    script = [str(PROJECT / "scripts/train_gpt.py"), "--layers", "12", "--heads", "12", "--batch", "8", "--steps", str(steps)]
    sizes = ["--width", str(WIDTH // share), "--length", str(LENGTH // share)]
    wrapped = ["--config", str(config)] if kind != "plain" else []
    options = ["--machine", str(folder / f"machine_{size}.toml"), "--device-budget", "min", "--out", str(folder / size)]
    command = [sys.executable, "-m", "tieroff", "rehearse", *options, "--json", *script, *sizes, *wrapped]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(done.stdout)
    found["transfers"] = len(json.loads((folder / size / "plan.json").read_text())["transfers"]) if wrapped else 0
    return found


def table(runs: dict[tuple[str, str], list[dict[str, Any]]]) -> Iterable[str]:
    """Yields the lines of a table in Markdown."""
    yield "| | kernels | transfers | device's step | processor time of the host, ms | median | small / full |"
    yield "|---|---|---|---|---|---|---|"
    for kind in KINDS:
        medians = {}
        for size in SIZES:
            found = runs[kind, size]
            times = [1000 * run["host_cpu_s"] for run in found]
            medians[size] = statistics.median(times)
            last = found[-1]
            cells = [f"{kind}, {size}", str(last["kernels"]), str(last["transfers"]), f"{last['step_s']:.3f} s"]
            cells += [", ".join(f"{time:.1f}" for time in times), f"{medians[size]:.1f}"]
            cells += [f"{medians['small'] / medians['full']:.2f}" if size == "small" else ""]
            yield "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="runs of each; default: 5")
    parser.add_argument("--steps", type=int, default=30, help="of each run; default: 30")
    options = parser.parse_args()
    machine = load_machine(MACHINE)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {(kind, size): [] for kind in KINDS for size in SIZES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_machine(machine, folder / "machine_full.toml")
        save_machine(small_machine(machine), folder / "machine_small.toml")
        for turn in range(options.turns):
            for kind in KINDS:
                for size in SIZES if turn % 2 == 0 else SIZES[::-1]:
                    runs[kind, size].append(rehearse(size, kind, options.steps, folder))
                    print(f"turn {turn + 1}: {kind}, {size}", file=sys.stderr, flush=True)
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
