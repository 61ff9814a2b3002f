"""The device is registered for the life of the process, and changes what PyTorch answers there: these tests have their own.

`pytest tests/accelerator` runs them as they are. Collected beside other tests, the folder becomes one test that runs it in
another process.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    if len(ours) < len(items):
        one = OwnProcess.from_parent(ours[0].session, name="accelerator")
        one.add_marker(pytest.mark.timeout(SECONDS_MAX))
        items[:] = [item for item in items if item not in set(ours)] + [one]
        return
    from tests.accelerator import sim

    sim.load()


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    """Each test begins with a device that nothing is known of, and leaves no race behind that it has not taken."""
    import torch

    from tests.accelerator import sim

    torch.set_num_threads(1)  # sums of the host are those of the device's threads
    sim.reset()
    sim.set_stacks(sim.STACK_FRAMES)
    torch.accelerator.set_device_index(0)
    yield
    sim.set_late_links(0)
    sim.set_pin_limit(None)
    sim.set_raising(False)
    sim.check()
    sim.reset()
