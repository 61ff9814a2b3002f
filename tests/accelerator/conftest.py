"""The simulated device is registered for the life of a process, and changes what PyTorch answers: these tests have their own.

`pytest tests/accelerator` runs them as they are; with TIEROFF_TEST_DEVICE=cuda, those of tieroff run on a real device.
Collected beside other tests, the folder becomes one test that runs it in another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.accelerator import sim, target, vendor

# Read when cuBLAS makes its first handle, so before any test.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

HERE = Path(__file__).resolve().parent
SECONDS_MAX = 3000


class OwnProcess(pytest.Item):
    """All tests of this folder, in another process."""

    def runtest(self) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE)]
        marks = self.config.getoption("-m")
        done = subprocess.run([*command, "-m", marks], capture_output=True, text=True, cwd=self.config.rootpath)
        if done.returncode != 0:
            raise AssertionError(done.stdout + done.stderr)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, int, str]:
        return HERE, 0, "tests/accelerator in a process of its own"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    if not ours:
        return
    if target.IS_SIMULATED and len(ours) < len(items):
        one = OwnProcess.from_parent(ours[0].session, name="accelerator")
        one.add_marker(pytest.mark.timeout(SECONDS_MAX))
        items[:] = [item for item in items if item not in set(ours)] + [one]
        return
    if target.IS_SIMULATED:
        sim.load()
        vendor.install()
        return
    for item in ours:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.skip(reason="of the simulated device itself"))


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins with a device that nothing is known of, and leaves no race behind that it has not taken."""
    if not target.IS_SIMULATED:
        yield from _deterministic_kernels()
        return
    torch.set_num_threads(1)  # sums of the host are those of the device's threads
    sim.reset()
    sim.set_stacks(sim.STACK_FRAMES)
    torch.accelerator.set_device_index(0)
    yield
    sim.set_late_links(0)
    sim.set_pin_limit(None)
    sim.set_raising(False)
    sim.check()
    wrong = sim.mistakes()
    sim.reset()
    if not request.path.parent.samefile(HERE):  # tieroff's own; the device's tests make such mistakes on purpose
        assert not wrong, f"expected no such access of the device's or of pinned memory: {wrong}"


def _deterministic_kernels() -> Iterator[None]:
    """Without this a plain run on CUDA does not equal itself; kernels that have no such form only warn, and are not used."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.use_deterministic_algorithms(was_deterministic)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags
