"""Updates in slices: the plain run's bits, in a budget that holds no whole update of the largest parameter."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.covering import in_turn
from tests.support.parity import HOST, NVME, OptimizerFactory, Tiers, Trainer, machine_file, plain_step, run_wrapped
from tests.support.recipes.sliced import BUDGET_BYTES, EMBEDDING_BYTES, check, config, workload
from tieroff.core.buckets import BYTES_BELOW
from tieroff.core.machine import Machine, load_machine
from tieroff.core.plan import RUNTIME_EXECUTOR
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.extended.slices import in_slices
from tieroff.planner.least import least
from tieroff.planner.problem.problem import make_problem
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.engine import Engine
from tieroff.tracing.dry import DryModel, dry_trace

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-3, initial_accumulator_value=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-3),
}


def assert_sliced(engine: Engine) -> None:
    assert int(engine.trace.meta[BYTES_BELOW].partition("=")[2]) >= EMBEDDING_BYTES
    assert engine.plan.budget_bytes[Tier.DEVICE] <= 0.6 * 4 * EMBEDDING_BYTES + EMBEDDING_BYTES // 4


@pytest.mark.parametrize(("name", "tiers"), in_turn(tuple(OPTIMIZERS), (HOST, NVME)))
def test_a_large_parameter_is_updated_in_slices(name: str, tiers: Tiers, tmp_path: Path) -> None:
    assert BUDGET_BYTES < 4 * EMBEDDING_BYTES
    check(workload(OPTIMIZERS[name]), tiers, CpuBackend(), config(tiers, tmp_path), assert_sliced)


def without_clipping(trainer: Trainer) -> None:
    trainer.loss().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


@pytest.mark.parametrize("tiers", [HOST, NVME], ids=lambda tiers: tiers.name)
def test_it_is_updated_in_slices_in_backward(tiers: Tiers, tmp_path: Path) -> None:
    found = config(tiers, tmp_path)
    found["plan"]["update_in_backward"] = True
    trained = workload(OPTIMIZERS["adamw-foreach"], step=without_clipping)
    check(trained, tiers, CpuBackend(), found, assert_sliced)


def uses_state(trainer: Trainer) -> None:
    """Reads and writes optimizer state, keeps state dicts and loads one."""
    plain_step(trainer)
    state = trainer.optimizer.state[trainer.model.get_parameter("embedding.weight")]
    trainer.note(state["exp_avg"].norm())
    state["exp_avg_sq"].mul_(0.5)
    kept = copy.deepcopy(trainer.optimizer.state_dict())
    if len(trainer.outcome.values) % 3 == 2:
        trainer.optimizer.load_state_dict(kept)
    trainer.note(kept["state"][0]["exp_avg_sq"].sum())


@pytest.mark.parametrize("tiers", [HOST, NVME], ids=lambda tiers: tiers.name)
def test_user_code_finds_the_state_that_the_plain_run_has(tiers: Tiers, tmp_path: Path) -> None:
    trained = workload(OPTIMIZERS["adamw-foreach"], step=uses_state)
    check(trained, tiers, CpuBackend(), config(tiers, tmp_path), assert_sliced)


def least_of(tmp_path: Path, device: int | str, name: str = "adamw") -> int:
    """Returns the least device bytes of a step, from the error of a budget that is too small."""
    strict = config(HOST, tmp_path, device)
    strict["budget"]["strict"] = True
    with pytest.raises(InfeasiblePlanError) as caught:
        run_wrapped(workload(OPTIMIZERS[name]), strict, CpuBackend(), lambda *_: None)
    return caught.value.needed_bytes


def test_the_least_of_a_model_that_is_half_embedding_falls_to_two_fifths(tmp_path: Path) -> None:
    whole, sliced = least_of(tmp_path, "1%"), least_of(tmp_path, 64 << 10)  # a share is known after the first step only
    assert whole > 5.5 * EMBEDDING_BYTES
    assert sliced <= 0.45 * whole


@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_a_dry_trace_in_slices_needs_what_a_run_does(name: str, tmp_path: Path) -> None:
    trained, machine = workload(OPTIMIZERS[name]), load_machine(machine_file(tmp_path))
    machine = replace(machine, fp32_flops_per_s=1 << 40, device_memory_bytes_per_s=1 << 37)

    def factory() -> DryModel:
        inputs = tuple(batch.to("meta") for batch in trained.batch())
        return DryModel(trained.build(), inputs, lambda y: y.float().square().mean(), trained.optimizer)

    dry = dry_trace(factory, machine, min_bytes=1)
    sliced = in_slices(dry, machine, 64 << 10, HOST.host_bytes)
    whole_bytes, sliced_bytes = (least_bytes(trace, machine) for trace in (dry, sliced))
    assert whole_bytes > 3.9 * EMBEDDING_BYTES
    assert sliced_bytes == pytest.approx(least_of(tmp_path, 64 << 10, name), rel=0.1)
    below_bytes = sum(t.size_bytes for t in dry.tensors) - sum(t.size_bytes for t in sliced.tensors)
    assert sliced.meta[BYTES_BELOW] == f"host={below_bytes}"
    assert sliced.ideal_ns > dry.ideal_ns
    assert in_slices(dry, machine, 8 * EMBEDDING_BYTES, HOST.host_bytes) is dry
    assert in_slices(dry, machine, None, HOST.host_bytes) is dry, "too small to be worth it with the least as budget"


def least_bytes(trace: Trace, machine: Machine) -> int:
    budget = {Tier.DEVICE: 0, Tier.HOST: HOST.host_bytes}
    return least(make_problem(trace, machine, budget, RUNTIME_EXECUTOR)).floor_bytes
