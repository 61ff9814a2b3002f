"""The simulated device is registered for the life of a process, and changes what PyTorch answers: these tests have their own.

`pytest tests/accelerator` runs them as they are; with TIEROFF_TEST_DEVICE=cuda, those of tieroff run on a real device.
Collected beside other tests, they become tests that run files in another process: parity's and all others, as a process takes
seconds to begin. Where long tests run too, each folder has one, and each file of a long folder.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import sim, target, vendor
from tests.accelerator.target import deterministic_kernels

HERE = Path(__file__).resolve().parent
SECONDS_MAX = 1800
# Folders whose tests need nothing of the simulated device; the others set its clock, links and memory.
ANYWHERE = ("parity", "users")
LONG = ("parity",)  # each file takes minutes with the tests that are marked so


class OwnProcess(pytest.Item):
    """The tests of some files, in another process."""

    def __init__(self, *, files: list[Path], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.files = files

    def runtest(self) -> None:
        # A process may also end by a signal when its tests are over: then the stacks of its threads are shown.
        command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, self.files)]
        selected = ["-m", self.config.getoption("-m"), "-k", self.config.getoption("-k")]
        done = subprocess.run([*command, *selected], capture_output=True, text=True, cwd=self.config.rootpath)
        if done.returncode != 0:
            raise AssertionError(f"{done.stdout}{done.stderr}\nexit status {done.returncode}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.files[0], 0, f"{self.name} in a process of its own"


@pytest.hookimpl(trylast=True)  # after those that are not selected are gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    if not ours:
        return
    if target.IS_SIMULATED and len(ours) < len(items):
        shared: dict[Path, list[Path]] = {}
        is_short = "not long" in config.getoption("-m")
        for file in sorted({item.path for item in ours}):
            is_long = file.parent.name in LONG
            short, long = (file.parent, file) if is_long else (HERE, file.parent)
            shared.setdefault(short if is_short else long, []).append(file)
        apart = [
            OwnProcess.from_parent(ours[0].session, name=str(path.relative_to(HERE.parent)), files=files)
            for path, files in shared.items()
        ]
        for one in apart:
            one.add_marker(pytest.mark.timeout(SECONDS_MAX))
            if not is_short:
                one.add_marker(pytest.mark.long)
        theirs = [item for item in items if not item.path.is_relative_to(HERE)]
        # First, as they are the longest: at the end one worker would run them while the others have nothing left.
        items[:] = apart + theirs
        return
    if target.IS_SIMULATED:
        sim.load()
        vendor.install()
        return
    target.let_kernels_warn(ours)
    for item in ours:
        if item.path.parent.name not in ANYWHERE:
            item.add_marker(pytest.mark.skip(reason="needs the simulated device"))


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins with a device that nothing is known of, and leaves no race behind that it has not taken."""
    if not target.IS_SIMULATED:
        yield from deterministic_kernels()
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
