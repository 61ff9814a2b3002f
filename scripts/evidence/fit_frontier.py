"""Fits one number of an H100's clock, the share of the two-byte peak that products reach, to the speed with the most memory.

    python scripts/evidence/fit_frontier.py DATA/gpu

Writes it to configs/machines/h100_80gb.toml. Speeds with less memory are not looked at: they are what the clock is then
judged by. With 67.3 GiB the step waits for nothing, so it takes what its kernels take.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

from scipy.optimize import brentq

from fit_machines import MACHINES
from llama_steps import evenly, llama
from published_steps import Collected
from tieroff.core.machine import Machine, load_machine
from tieroff.tracing.clock.model import Clock
from tieroff.tracing.dry import dry_trace

SEQUENCE, STEP_TOKENS, FULL_GIB = 1024, 64 << 10, 67.3
KEPT_LAYERS = evenly(28, 1, 31)
"""Layers that keep their activations within 67.3 GiB, of what plans make fastest there."""
_FILE = MACHINES / "h100_80gb.toml"
_LINE = re.compile(r"^matmul_short = .*$", re.MULTILINE)


def measured_tokens_per_s(folder: Path, sequence: int, budget_gib: float) -> list[float]:
    """Returns the measured speeds within one budget, of all sizes of steps."""
    lines = csv.DictReader((folder / "llama3_8b_h100.csv").read_text().splitlines())
    return [
        float(line["measured_tokens_per_s"])
        for line in lines
        if int(line["sequence"]) == sequence and float(line["gpu_budget_gib"]) == budget_gib
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of measurements, with llama3_8b_h100.csv")
    speeds = measured_tokens_per_s(parser.parse_args().folder, SEQUENCE, FULL_GIB)
    wanted_s = STEP_TOKENS * len(speeds) / sum(speeds)
    collected = Collected()
    dry_trace(llama(SEQUENCE, kept_layers=KEPT_LAYERS), Machine(), kernels="cuda", prices=collected)
    machine = load_machine(_FILE)

    def excess_s(share: float) -> float:
        clock = Clock.of(machine)
        own = Clock(machine, clock.constants.of({"matmul_short": share}))
        return sum(own.work_s(work) * count for work, count in collected.works.items()) - wanted_s

    share = brentq(excess_s, 0.3, 1.2, xtol=1e-4)
    _FILE.write_text(_LINE.sub(f"matmul_short = {share:.3f}", _FILE.read_text()))
    print(f"matmul_short = {share:.3f} for {STEP_TOKENS / wanted_s:,.0f} tokens a second")


if __name__ == "__main__":
    main()
