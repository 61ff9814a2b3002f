"""Copies, and checkpoints that are loaded, of more than the device's budget holds at once."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import tieroff
from tests.accelerator import target
from tests.accelerator.users.loops import Program, check
from tests.corpus.parts import LM, Mlp, update
from tests.corpus.run import ON_DEVICE_BYTES, differing, run
from tests.corpus.run import Program as Counted
from tieroff.core.tensor import Tier


def lower_budget(p: Program, share: float) -> None:
    """Leaves the device this much of what all parameters take."""
    assert p.engine is not None
    runner = p.engine.executor.context.runner
    assert runner.planned is not None
    budget = int(share * sum(parameter.numel() * parameter.element_size() for parameter in p.parameters))
    budgets = {**runner.planned.plan.budget_bytes, Tier.DEVICE: budget}
    runner.planned = replace(runner.planned, plan=replace(runner.planned.plan, budget_bytes=budgets))


def test_a_deep_copy_brings_up_one_tensor_after_another(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        p.steps()
        if not p.is_plain:
            lower_budget(p, 0.5)
        model, optimizer = copy.deepcopy((p.model, p.optimizer))
        assert [*model.parameters()] == [parameter for group in optimizer.param_groups for parameter in group["params"]]
        p.note(*model.parameters(), *tree_leaves([*optimizer.state.values()]))
        p.steps(5, 8)  # the copies are memory that its plan does not know: it is traced again

    check(usage, tmp_path)


def test_a_parameter_is_swapped_behind_a_state_dict(tmp_path: Path) -> None:
    """Torch refuses to swap what somebody holds weakly."""

    def usage(p: Program) -> None:
        p.wrap()
        p.steps()
        given = p.model.state_dict()
        weight = next(iter(p.model.parameters()))
        torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.full_like(weight, 0.01)))
        del given
        p.steps(6, 8)

    check(usage, tmp_path)


@pytest.mark.parametrize("is_on_host", [True, False])
def test_an_average_over_state_dicts_goes_where_it_lies(is_on_host: bool, tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        average = copy.deepcopy(p.model).to("cpu" if is_on_host else target.device())
        p.wrap()
        for first in (0, 4):
            p.steps(4, first)
            with torch.no_grad():
                for mine, theirs in zip(average.state_dict().values(), p.model.state_dict().values(), strict=True):
                    mine.copy_(mine * 0.9 + theirs.to(mine.device) * 0.1)
        p.note(*average.parameters())

    check(usage, tmp_path)


def test_a_deep_copy_shares_memory_where_its_original_does(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        p.steps()
        state: Any = p.optimizer.state[p.model.second.weight]["exp_avg"]
        tensor, other, alias = copy.deepcopy([state, state, state.view(-1)])
        assert tensor is other
        p.note(tensor.data_ptr() == alias.data_ptr(), tensor, alias)

    check(usage, tmp_path)


def test_a_model_is_pickled_on_the_host(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        p.steps()
        if p.is_plain:
            p.note(*pickle.loads(pickle.dumps(p.model)).parameters())
        else:
            with tieroff.on_host(p.model):
                p.note(*pickle.loads(pickle.dumps(p.model)).parameters())
        p.steps(2, 8)

    check(usage, tmp_path)


FORKS = """
import os, sys
from pathlib import Path
import torch
from torch import nn
from tests.accelerator import sim, target, vendor
if target.IS_SIMULATED:
    sim.load()
    vendor.install()
import tieroff
device = target.device()
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
tieroff.wrap(model, optimizer, {"plan": {"min_bytes": 0}, "nvme": {"dirs": [sys.argv[1]]}}, budget="min")
for _ in range(4):
    model(torch.randn(8, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
loss = model(torch.randn(8, 64, device=device)).sum()
child = os.fork()
if child == 0:
    sys.exit(3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
loss.backward()
optimizer.step()
tieroff.unwrap(model)
print(status, os.listdir(sys.argv[1]))
"""


def test_a_child_that_is_forked_in_the_midst_of_a_step_ends_by_itself(project: Path, tmp_path: Path) -> None:
    """Nothing of the engine keeps it: without the limit PyTorch's autograd waits 10 s for threads that it does not have."""
    environment = {**os.environ, "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT": "0"}
    command = [sys.executable, "-c", FORKS, str(tmp_path)]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "3 []\n"), done.stderr


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("budget", ["min", "40%"])
@pytest.mark.parametrize(("steps", "is_own"), [(0, False), (4, False), (4, True)], ids=["first", "later", "into-its-own"])
@pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")
def test_a_checkpoint_of_the_optimizer_is_loaded_in_its_budget(
    steps: int, is_own: bool, budget: str, fused: bool, tmp_path: Path
) -> None:
    """Also one that was read into the tensors of the optimizer's own state dict, as torch.distributed.checkpoint does."""
    saved = tmp_path / "saved.pt"
    seen = list[str]()

    def train(p: Counted, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for index in range(steps):
            loss = model(p.rows(index, 4, 64)).square().mean()
            loss.backward()
            update(optimizer)
            p.end(model, loss.detach())

    def usage(p: Counted) -> None:
        model = Mlp(64, 12).to(p.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
        optimizer.register_load_state_dict_post_hook(
            lambda optimizer: seen.extend(state["exp_avg"].device.type for state in optimizer.state.values())
        )
        p.wrap(model, optimizer)
        train(p, model, optimizer, steps)
        p.taken.begin()
        given = loaded = torch.load(saved)
        if is_own:
            given = optimizer.state_dict()
            for key, entries in given["state"].items():
                for name, value in entries.items():
                    value.copy_(loaded["state"][key][name])
        optimizer.load_state_dict(given)
        del given
        peaks.append(p.taken.peak_bytes)
        train(p, model, optimizer, 4)
        p.note(*model.parameters(), tree_leaves(list(optimizer.state_dict()["state"].values())), tree_leaves(loaded))

    peaks = list[int]()
    device = target.device()
    model = Mlp(64, 12)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), saved)
    plain, wrapped = run(usage, Counted(device, tmp_path)), run(usage, Counted(device, tmp_path, budget, target.backend))
    assert differing(plain, wrapped) == []
    assert set(seen) == {device.type}
    last = wrapped.steps[-1]
    assert last.phase == "planned"
    assert last.limit_bytes is not None
    model_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert peaks[0] >= 3 * model_bytes
    counters_bytes = 512 * len(list(model.parameters())) if is_own and fused else 0  # a block each: they go where they count
    assert peaks[1] <= last.limit_bytes + ON_DEVICE_BYTES + counters_bytes


def test_a_tied_weight_lies_once_in_a_state_dict(tmp_path: Path) -> None:
    """Wherever the plan has it: what is saved has it once, as that of a plain run."""

    def usage(p: Counted) -> None:
        model = LM(layers=2).to(p.device)
        optimizer = torch.optim.AdamW(model.parameters())
        p.wrap(model, optimizer)
        for index in range(5):
            model(p.tokens(index, 3, 12)).square().mean().backward()
            update(optimizer)
            p.end(model)
            given = model.state_dict()
            p.note(given["head.weight"].data_ptr() == given["embed.weight"].data_ptr())
            given["head.weight"].mul_(0.5)
        p.note(*model.state_dict().values())

    plain = run(usage, Counted(target.device(), tmp_path))
    for budget in ("90%", "min"):
        assert differing(plain, run(usage, Counted(target.device(), tmp_path, budget, target.backend))) == [], budget


def test_what_the_program_drops_after_unwrap_is_freed_at_once(tmp_path: Path) -> None:
    """Without Python's collector of circles: a layer that is replaced, and the optimizer with its state."""
    device = target.device()
    p = Counted(device, tmp_path, "min", target.backend)
    gc.collect()
    before_bytes = torch.accelerator.memory_allocated(device)
    model = Mlp(64, 4).to(device)
    optimizer: Any = torch.optim.Adam(model.parameters())
    p.wrap(model, optimizer)
    for index in range(4):
        model(p.rows(index, 3, 64)).square().mean().backward()
        update(optimizer)
        p.end(model)
    p.unwrap(model)
    gc.disable()
    try:
        model.layers, optimizer = model.layers[:1], None
        torch.accelerator.synchronize(device)
        left_bytes = torch.accelerator.memory_allocated(device) - before_bytes
    finally:
        gc.enable()
    assert left_bytes <= 64 * 65 * 4 + 8 * 512
