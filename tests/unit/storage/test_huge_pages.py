"""Large CPU tensors lie on huge pages once tieroff is imported, unless somebody said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PROGRAM = """
import {first}, {second}
tensor = torch.ones(64 << 20, dtype=torch.uint8)
lines = open("/proc/self/smaps").read().splitlines()
print(sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")) >> 10)
"""


def huge_mib(first: str, second: str, told: str | None) -> int:
    """Returns MiB on huge pages of a process with one tensor of 64 MiB."""
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    if told is not None:
        environment["THP_MEM_ALLOC_ENABLE"] = told
    program = _PROGRAM.format(first=first, second=second)
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    return int(run.stdout)


@pytest.mark.parametrize("order", [("torch", "tieroff"), ("tieroff", "torch")])
def test_in_any_order_of_imports(order: tuple[str, str]) -> None:
    is_advised = "[madvise]" in _MODE.read_text()
    if is_advised:  # under "always" it has them anyway, under "never" never
        assert huge_mib(*order, None) >= 48
        assert huge_mib(*order, "0") < 16
    else:
        assert (huge_mib(*order, None) >= 48) == ("[always]" in _MODE.read_text())
