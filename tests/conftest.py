"""What every test shares: no config from outside, and property tests that say of a tree always the same.

`pytest --hypothesis-profile=explore` draws new examples in each run.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.covering import take_turns

# One thread computes, whatever the shell says, here and in the programs that tests start: kernels take scratch memory for each
# thread, several add in another order, and a worker has a core. Torch reads this as it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# Tests of other folders import these too, so before any of them.
pytest.register_assert_rewrite("tests.support.parity", "tests.support.databases")

# How long an example takes says more of the machine than of the code.
_SHARED = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", _SHARED)
settings.register_profile("tieroff", _SHARED, derandomize=True)
settings.register_profile("short", _SHARED, derandomize=True, max_examples=40)
settings.load_profile("tieroff")


def pytest_configure(config: pytest.Config) -> None:
    """Tries properties on fewer examples where long tests are left out, and lets Ctrl-C through to programs of the tests.

    A shell starts what runs in the background with SIGINT ignored, and whoever ignores a signal hands that on.
    """
    if "not long" in config.getoption("-m") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("short")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_config_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config named in the environment must not decide what a test does."""
    monkeypatch.delenv("TIEROFF_CONFIG", raising=False)


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Iterator[None]:
    """No test leaves a pair of saved-tensor hooks in force, which every later test of its process would run under."""
    yield
    torch: Any = sys.modules.get("torch")
    if torch is None or (left := torch._C._autograd._top_saved_tensors_default_hooks(True)) is None:
        return
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    pytest.fail(f"the test left hooks on saved tensors in force: {left}")


@pytest.fixture(scope="session")
def project() -> Path:
    """The root of the source tree."""
    return Path(__file__).resolve().parent.parent


def pytest_collection_finish(session: pytest.Session) -> None:
    """Has the garbage collector pass over what every test needs: a third of a million objects, and many tests collect."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        importlib.import_module("torch._dynamo")  # torch.optim imports it at its first step
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():  # each call of torch.manual_seed would keep a formatted stack for it: 1 ms
                device.manual_seed_all = device.manual_seed = lambda seed: None
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _leave_behind_what_lives_on() -> Iterator[None]:
    """Has the garbage collector pass over what a file leaves too: of reports and caches, a hundred thousand objects in time."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before those marked `long` are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what only `--all` tries, and skips tests marked `gpu` on a machine without CUDA, with the reason."""
    take_turns(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lets no long test begin later than its runner said (scripts/test.sh --minutes)."""
    until = os.environ.get("TIEROFF_TEST_UNTIL")
    if until and time.time() > float(until) and any(item.get_closest_marker(mark) for mark in ("long", "published")):
        pytest.skip("no time was left for this long test")


@pytest.fixture(autouse=True, scope="session")
def _planner_of_all_tests() -> Iterator[None]:
    """Keeps one process that plans for all tests, whose steps wait for it: the third step is the first with a plan."""
    workshop: Any = importlib.import_module("tieroff.session.workshop")
    planner: Any = importlib.import_module("tieroff.planner.beside.client").planner()
    workshop.steps_wait = True
    planner.open(is_waited_for=True)
    yield
    planner.close()
    workshop.steps_wait = False


@pytest.fixture(autouse=True, scope="session")
def _machine_measured_once() -> Iterator[None]:
    """Has the first model without a machine file measure the links, for all that follow in this process.

    Measuring takes a process of its own and 1.5 seconds. Tests of measuring itself call `tieroff.probe`, which stays as it is.
    """
    links: Any = importlib.import_module("tieroff.session.links")
    measure, known = links.measure_apart, dict[Any, Any]()

    def measured(dirs: Sequence[Path], **options: Any) -> Any:
        file_systems = tuple(os.stat(folder).st_dev if folder.is_dir() else folder for folder in dirs)
        key = file_systems, tuple(sorted(options.items()))
        if key not in known:
            known[key] = measure(dirs, **options)
        return known[key]

    links.measure_apart = measured
    yield
    links.measure_apart = measure
