"""The cases that are programs of their own: tests, the host's benchmark, and exactness of updates on the CPU."""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_kit.places import ROOT

QUIET = ("-q", "-W", "ignore::DeprecationWarning", "-p", "no:cacheprovider", "-p", "no:benchmark")
_TESTS = ("tests/accelerator/parity", "tests/accelerator/users")
SMOKE = "tests/accelerator/parity/test_accelerator_parity.py"
PROCESSES = 8


@dataclass(frozen=True)
class Program:
    """A command of the kit, and how to read what it leaves.

    Attributes:
        arguments: of Python.
        result: the file that it writes.
    """

    arguments: tuple[str, ...]
    result: Path

    def rows(self) -> list[dict[str, Any]]:
        """Returns what the file has: counts of tests, or the rows of a benchmark; nothing where it is not there."""
        if not self.result.is_file():
            return []
        if self.result.suffix == ".xml":
            return [counts_of(self.result)]
        found: list[dict[str, Any]] = json.loads(self.result.read_text())["rows"]
        return found


def counts_of(report: Path) -> dict[str, int]:
    """Returns how many tests passed, failed and were skipped by pytest's report."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        total, bad, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "skipped"))
        bad += int(suite.get("errors", 0))
        counts["passed"] += total - bad - skipped
        counts["failed"] += bad
        counts["skipped"] += skipped
    return counts


def environment(is_tiny: bool) -> dict[str, str]:
    """Returns the variables of every program: where it finds the kit, and on a GPU that tests are for it."""
    paths = (str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts" / "evidence"), os.environ.get("PYTHONPATH", ""))
    of_device = {} if is_tiny else {"TIEROFF_TEST_DEVICE": "cuda"}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja stands beside the interpreter
    paths_of_both = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PATH": programs}
    return {**os.environ, **of_device, **paths_of_both, "HF_HUB_OFFLINE": "1"}


def program_of(case: str, out: Path, *, is_tiny: bool) -> Program:
    """Returns the program of a case without rows."""
    makers: Mapping[str, Any] = {"smoke": _smoke, "tests": _tests, "host": _host, "exact": _exact}
    made: Program = makers[case](out, is_tiny)
    return made


def _smoke(out: Path, is_tiny: bool) -> Program:
    report = out / "smoke.xml"
    auto = f"{ROOT / SMOKE}::test_auto_computes_the_same_within_its_budget"
    chosen = (auto, "-k", "gpt and host") if is_tiny else (auto, f"{ROOT / SMOKE}::test_loop_computes_the_same")
    gds = () if is_tiny else (str(ROOT / "tests/gpu/test_cuda_gds.py"),)
    processes = () if is_tiny else ("--numprocesses", str(PROCESSES))
    return Program(
        ("-m", "pytest", *chosen, *gds, *QUIET, *processes, "-m", "not long or turn", f"--junitxml={report}"), report
    )


def _tests(out: Path, is_tiny: bool) -> Program:
    report = out / "tests.xml"
    folders = ("tests/accelerator/parity/test_accelerator_memory.py",) if is_tiny else (*_TESTS, "tests/gpu")
    processes = () if is_tiny else ("--numprocesses", str(PROCESSES))
    paths = tuple(str(ROOT / folder) for folder in folders)
    return Program(("-m", "pytest", *paths, *QUIET, *processes, "-m", "not long or turn", f"--junitxml={report}"), report)


def _host(out: Path, is_tiny: bool) -> Program:
    rows = out / "host.json"
    script = str(ROOT / "benchmarks/bench_host.py")
    sizes: tuple[str, ...] = ("--models", "gpt", "--budgets", "100%", "60%", "40%")
    if is_tiny:
        sizes = ("--models", "gpt", "--budgets", "60%", "--warmup", "6", "--turns", "2", "--steps", "2")
    return Program((script, "--backend", "sim" if is_tiny else "cuda", *sizes, "--json", str(rows)), rows)


def _exact(out: Path, is_tiny: bool) -> Program:
    rows = out / "exact.json"
    sizes = ("--device", "cpu", "--elements", "4096") if is_tiny else ()
    return Program((str(Path(__file__).with_name("exact.py")), *sizes, "--json", str(rows)), rows)
