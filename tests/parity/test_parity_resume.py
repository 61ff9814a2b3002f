"""A run that is saved, and goes on in new objects under another budget and policy, equals the run that never stopped."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tieroff
from tests.support.delayed import DelayedBackend
from tests.support.parity import are_same_bits, copy_of, differing, machine_file, state_of
from tieroff.planner.policies import all_policies
from tieroff.runtime.backend.cpu import CpuBackend

STEPS, SAVED_AFTER = 9, 4
NVME_BYTES, HOST_BYTES = 16 << 20, 32 << 20

# torch.distributed.checkpoint says it of every call with no_dist=True.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Net(nn.Module):
    """Tied weights, dropout, running statistics, and something without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 48)
        self.body = nn.Sequential(
            nn.Linear(48, 96), nn.BatchNorm1d(96), nn.GELU(), nn.Dropout(0.2), nn.Linear(96, 48), nn.LayerNorm(48)
        )
        self.head = nn.Linear(48, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(48), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embedding(tokens) * self.frozen))
        return out


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
}


@dataclass
class Run:
    """A training run and what it computed: a loss per step, and the clipped norm."""

    optimizer_name: str
    model: nn.Module = field(init=False)
    numbers: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = Net()
        self.optimizer = OPTIMIZERS[self.optimizer_name]([p for p in self.model.parameters() if p.requires_grad])
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=STEPS + 1)

    def step(self) -> None:
        tokens = torch.randint(0, 40, (24,))  # no seed per step: data and dropout hang on the saved state of the generator
        loss = nn.functional.cross_entropy(self.model(tokens), tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.numbers += [copy_of(loss), copy_of(norm)]

    def end(self) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Any]]:
        values = {name: copy_of(value) for name, value in self.model.state_dict().items()}
        return self.numbers, values, {**state_of(self.optimizer), **self.scheduler.state_dict()}


@dataclass(frozen=True)
class Under:
    """What a part of a run runs under; None: without tieroff."""

    name: str
    policy: str | None
    device: str | int = "100%"
    host_bytes: int = 0
    nvme_bytes: int = NVME_BYTES
    is_delayed: bool = False

    def wrap(self, run: Run, folder: Path) -> None:
        if self.policy is None:
            return
        drive = folder / "drive"
        drive.mkdir(exist_ok=True)
        tieroff.wrap(
            run.model,
            run.optimizer,
            {
                "budget": {"device": self.device, "host": self.host_bytes, "nvme": self.nvme_bytes},
                "nvme": {"dirs": [str(drive)] if self.nvme_bytes else [], "staging": "1MiB"},
                "plan": {"policy": self.policy, "min_bytes": 0, "machine": str(machine_file(folder))},
            },
            backend=DelayedBackend(3) if self.is_delayed else CpuBackend(),
        )

    def unwrap(self, run: Run) -> None:
        if self.policy is not None:
            stats = tieroff.engine(run.model).stats()
            assert stats.fallbacks == 0
            assert stats.phase == ("nothing moved" if self.device == "1GiB" else "planned")
            tieroff.unwrap(run.model)


PLAIN = Under("plain", None)
FLOOR = Under("floor-nvme", "floor")
DELAYED = Under("floor-delayed", "floor", is_delayed=True)
HOST = Under("auto-host-70", "auto", "70%", HOST_BYTES, 0)
MIXED = Under("auto-mixed-80", "auto", "80%", 64 << 10)
ROOMY = Under("everything-fits", "auto", "1GiB")
PAIRS = [(FLOOR, HOST), (HOST, FLOOR), (MIXED, DELAYED), (DELAYED, ROOMY), (ROOMY, FLOOR), (PLAIN, MIXED), (FLOOR, PLAIN)]


def save_with_torch(run: Run, folder: Path) -> None:
    torch.save(
        {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "scheduler": run.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        },
        folder / "all.pt",
    )


def load_with_torch(run: Run, folder: Path) -> None:
    found = torch.load(folder / "all.pt", weights_only=True)
    run.model.load_state_dict(found["model"])
    run.optimizer.load_state_dict(found["optimizer"])
    run.scheduler.load_state_dict(found["scheduler"])
    torch.set_rng_state(found["rng"])


def save_with_dcp(run: Run, folder: Path) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    rest = {"scheduler": run.scheduler.state_dict(), "rng": torch.get_rng_state()}
    dcp.save({"model": model, "optimizer": optimizer, **rest}, checkpoint_id=folder / "dcp", no_dist=True)


def load_with_dcp(run: Run, folder: Path) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    rest = {"scheduler": run.scheduler.state_dict(), "rng": torch.get_rng_state()}
    found: dict[str, Any] = {"model": model, "optimizer": optimizer, **rest}
    dcp.load(found, checkpoint_id=folder / "dcp", no_dist=True)
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    run.scheduler.load_state_dict(found["scheduler"])
    torch.set_rng_state(found["rng"])


def save_weights(run: Run, folder: Path) -> None:
    tieroff.save_weights(run.model, folder / "weights", max_shard_bytes="20KiB")
    save_with_torch(run, folder)


def load_weights(run: Run, folder: Path) -> None:
    load_with_torch(run, folder)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    tieroff.load_weights(run.model, folder / "weights")


WAYS = {
    "torch": (save_with_torch, load_with_torch),
    "dcp": (save_with_dcp, load_with_dcp),
    "weights": (save_weights, load_weights),
}


def whole_run(optimizer_name: str) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Any]]:
    torch.manual_seed(5)
    run = Run(optimizer_name)
    for _ in range(STEPS):
        run.step()
    return run.end()


def assert_same(expected: tuple[Any, ...], run: Run, first: list[Tensor]) -> None:
    numbers, values, state = expected
    found_numbers, found_values, found_state = run.end()
    found = first + found_numbers
    assert len(found) == len(numbers)
    assert [i for i, pair in enumerate(zip(numbers, found, strict=True)) if not are_same_bits(*pair)] == []
    assert differing(values, found_values) == []
    assert differing(state, found_state) == []


def first_part(optimizer_name: str, under: Under, folder: Path, save: Callable[[Run, Path], None]) -> list[Tensor]:
    torch.manual_seed(5)
    run = Run(optimizer_name)
    under.wrap(run, folder)
    for _ in range(SAVED_AFTER):
        run.step()
    save(run, folder)
    under.unwrap(run)
    return run.numbers


CASES = [
    *((*pair, "adamw", "torch") for pair in PAIRS),
    *((*pair, "momentum", "dcp") for pair in (PAIRS[0], PAIRS[2], PAIRS[5])),
    *((*pair, "adamw", "weights") for pair in (PAIRS[1], PAIRS[3], PAIRS[4])),
]


@pytest.mark.parametrize(("before", "after", "optimizer_name", "way"), CASES, ids=lambda part: getattr(part, "name", part))
def test_resume_is_bit_equal_to_the_run_that_never_stopped(
    before: Under, after: Under, optimizer_name: str, way: str, tmp_path: Path
) -> None:
    save, load = WAYS[way]
    expected = whole_run(optimizer_name)
    first = first_part(optimizer_name, before, tmp_path, save)
    torch.manual_seed(random.randrange(1 << 30))  # whatever comes out of it is to be replaced
    run = Run(optimizer_name)
    after.wrap(run, tmp_path)
    load(run, tmp_path)
    for _ in range(STEPS - SAVED_AFTER):
        run.step()
    assert_same(expected, run, first)
    after.unwrap(run)


@pytest.mark.parametrize(
    ("under", "way"),
    [
        (FLOOR, "torch"),
        (DELAYED, "torch"),
        (HOST, "torch"),
        (DELAYED, "dcp"),
        (ROOMY, "dcp"),
        (FLOOR, "weights"),
        (DELAYED, "weights"),
    ],
    ids=lambda part: getattr(part, "name", part),
)
def test_loading_in_mid_run_goes_back_to_the_saved_step(under: Under, way: str, tmp_path: Path) -> None:
    save, load = WAYS[way]
    expected = whole_run("adamw")
    torch.manual_seed(5)
    run = Run("adamw")
    under.wrap(run, tmp_path)
    for _ in range(SAVED_AFTER):
        run.step()
    save(run, tmp_path)
    first = list(run.numbers)
    for _ in range(3):  # planned steps, whose results are thrown away
        run.step()
    run.numbers.clear()
    load(run, tmp_path)
    for _ in range(STEPS - SAVED_AFTER):
        run.step()
    assert_same(expected, run, first)
    under.unwrap(run)


def part_under(policy: str, folder: Path, *, is_first: bool) -> None:
    """Runs one part of a run in the process that calls: the first from the seed, the second from its checkpoint."""
    torch.manual_seed(5 if is_first else random.randrange(1 << 30))
    run = Run("adamw")
    Under(policy, policy, "75%", HOST_BYTES).wrap(run, folder)
    if not is_first:
        load_with_torch(run, folder)
    for _ in range(SAVED_AFTER if is_first else STEPS - SAVED_AFTER):
        run.step()
    phase = tieroff.engine(run.model).stats().phase
    if is_first:
        save_with_torch(run, folder)
    torch.save([phase, *run.end()], folder / ("first.pt" if is_first else "second.pt"))
    tieroff.unwrap(run.model)


def test_a_new_process_resumes_under_every_policy(tmp_path: Path, project: Path) -> None:
    """One process runs all first parts, another all second parts, each under another policy than it was saved under."""
    policies = sorted(all_policies())
    following = dict(zip(policies, policies[1:] + policies[:1], strict=True))
    for is_first in (True, False):
        parts = [(policy if is_first else following[policy], str(tmp_path / policy)) for policy in policies]
        program = f"""
import warnings
from pathlib import Path
import tieroff
from tests.parity.test_parity_resume import part_under
from tieroff.session import workshop
workshop.steps_wait = True  # which step is the first with a plan does not depend on what else the machine does
warnings.simplefilter("ignore", tieroff.BudgetWarning)  # rules that do not meet it get what they need
for policy, folder in {parts!r}:
    Path(folder).mkdir(exist_ok=True)
    part_under(policy, Path(folder), is_first={is_first})
"""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as many threads as here: they add in another order
        command = [sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, cwd=project, check=False, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    numbers, values, state = whole_run("adamw")
    for policy in policies:
        first = torch.load(tmp_path / policy / "first.pt", weights_only=True)
        phase, found_numbers, found_values, found_state = torch.load(tmp_path / policy / "second.pt", weights_only=True)
        where = f"from {policy} to {following[policy]}"
        assert phase in ("planned", "on demand", "nothing moved"), where
        found = first[1] + found_numbers
        assert [i for i, pair in enumerate(zip(numbers, found, strict=True)) if not are_same_bits(*pair)] == [], where
        assert differing(values, found_values) == [], where
        assert differing(state, found_state) == [], where


def test_loading_before_wrap_resumes_too(tmp_path: Path) -> None:
    expected = whole_run("adamw")
    first = first_part("adamw", FLOOR, tmp_path, save_with_torch)
    run = Run("adamw")
    load_with_torch(run, tmp_path)
    HOST.wrap(run, tmp_path)
    for _ in range(STEPS - SAVED_AFTER):
        run.step()
    assert_same(expected, run, first)
    HOST.unwrap(run)


def test_a_new_process_resumes_from_the_meta_device(tmp_path: Path, project: Path) -> None:
    """Weights from shards into a model that never was in memory, everything else from torch.save."""
    expected = whole_run("adamw")
    first = first_part("adamw", FLOOR, tmp_path, save_weights)
    program = f"""
import torch
from pathlib import Path
import tieroff
from tests.parity.test_parity_resume import MIXED, SAVED_AFTER, STEPS, Run
folder = Path({str(tmp_path)!r})
with torch.device("meta"):
    run = Run("adamw")
MIXED.wrap(run, folder)
tieroff.load_weights(run.model, folder / "weights")
found = torch.load(folder / "all.pt", weights_only=True, mmap=True)
run.optimizer.load_state_dict(found["optimizer"])
run.scheduler.load_state_dict(found["scheduler"])
torch.set_rng_state(found["rng"])
del found
for _ in range(STEPS - SAVED_AFTER):
    run.step()
numbers, values, state = run.end()
torch.save([numbers, values, state], folder / "end.pt")
MIXED.unwrap(run)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as many threads as here: they add in another order
    command = [sys.executable, "-W", "error", "-c", program]
    subprocess.run(command, cwd=project, check=True, capture_output=True, text=True, env=environment)
    numbers, values, state = torch.load(tmp_path / "end.pt", weights_only=True)
    assert [i for i, pair in enumerate(zip(expected[0], first + numbers, strict=True)) if not are_same_bits(*pair)] == []
    assert differing(expected[1], values) == []
    assert differing(expected[2], state) == []
