"""What importing the library loads: it must not make a program wait for what it does not use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tieroff

OWN_WITH_WRAP = {
    "_native",
    "api",
    "config",
    "device_budget",
    "core",
    "errors",
    "parts",
    "planner",
    "probe",
    "recomputation",
    "runtime",
    "session",
    "storage",
    "tracing",
    "uncompiled",
    "units",
    "updates",
}
"""Packages that running a step needs."""

FOREIGN_WITH_WRAP = {"annotated_types", "numpy", "pydantic", "pydantic_core", "torch", "typing_inspection"}

NOT_WITH_WRAP = {
    "tieroff.probe.survey",
    "tieroff.probe.doctor",
    "tieroff.storage.engines.aio",
    "tieroff.planner.layout",
    "tieroff.study.compare.rows",
    "tieroff.study.profiles.files",
}
"""Modules of those packages that other commands or engines need."""


def modules_after(before: str, code: str) -> set[str]:
    """Returns the modules that some code loads in a new process, after other code."""
    program = (
        f"import json, sys\n{before}\nloaded = set(sys.modules)\n{code}\nprint(json.dumps(sorted(set(sys.modules) - loaded)))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def foreign(modules: set[str]) -> set[str]:
    """Returns the top-level packages that neither Python nor this library brings."""
    tops = {name.partition(".")[0] for name in modules}
    return {name for name in tops if name not in sys.stdlib_module_names and not name.startswith(("tieroff", "_"))}


def test_import_loads_nothing_but_its_errors() -> None:
    loaded = modules_after("", "import tieroff")
    assert {name for name in loaded if name.startswith("tieroff")} == {"tieroff", "tieroff.errors"}
    assert foreign(loaded) == set()


def test_wrap_loads_what_a_step_needs_and_nothing_of_the_command_line() -> None:
    loaded = modules_after("import torch", "import tieroff\ntieroff.wrap")
    own = {name for name in loaded if name.startswith("tieroff.")}
    assert {name.split(".")[1] for name in own} <= OWN_WITH_WRAP
    assert not own & NOT_WITH_WRAP
    assert foreign(loaded) <= FOREIGN_WITH_WRAP


def test_every_public_name_is_there_after_import_alone() -> None:
    loaded = modules_after("", "import tieroff\nfor name in tieroff.__all__: getattr(tieroff, name)")
    assert {"tieroff.api", "tieroff.integrations", "tieroff.runtime.optimizer.clipping"} <= loaded


def test_integrations_load_their_trainer_when_they_are_named() -> None:
    loaded = modules_after("", "import tieroff\ntieroff.integrations.accelerate.prepare")
    assert {"tieroff.integrations.accelerate", "accelerate"} <= loaded
    assert "tieroff.integrations.lightning" not in loaded


def test_a_trainer_that_is_not_integrated_is_named_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"'tieroff.integrations' has no attribute 'keras'; it has accelerate, lightning"):
        tieroff.integrations.keras  # noqa: B018


def test_the_trainers_are_named_by_dir_and_imported_when_asked_for() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, tieroff; assert {'integrations', 'wrap', 'BudgetWarning'} <= set(dir(tieroff)); "
            "assert 'torch' not in sys.modules; assert 'accelerate' in tieroff.integrations.__all__; "
            "assert not {'accelerate', 'lightning', 'transformers'} & set(sys.modules)",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


BESIDE_A_PLAIN_LOOP = """
import torch
from torch import nn

def private_bytes():
    rows = [line.split() for line in open("/proc/self/smaps_rollup") if line.startswith("Private_")]
    return sum(int(row[1]) << 10 for row in rows)

def train(count):
    for _ in range(count):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
train(3)
before = private_bytes()
import tieroff
tieroff.wrap(model, optimizer, {"device": "cpu", "nvme": {"dirs": []}, "budget": {"host": 0}})
train(6)
print(private_bytes() - before)
"""


@pytest.mark.alone
def test_a_model_of_which_nothing_moves_takes_what_the_library_s_code_takes() -> None:
    """15 to 16 MiB by Python 3.11, 4.7 of them pydantic's; nothing is left of a recorder, a planner or its process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BESIDE_A_PLAIN_LOOP], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) <= 17 << 20
