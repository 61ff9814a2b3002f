"""Quantized weights and wrapper subclasses: they leave between their uses, and every number is the plain run's.

How many bytes of them are up is counted by the Functions that use them, from the storages that they get.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tieroff
from tests.support.parity import HOST, NVME, Outcome, Trainer, Workload, assert_equal, config_for, run_plain
from tests.support.recipes.quantized import KINDS, PROJECTORS, SEEN, Block, Linear4bit, Momentum, Projecting, Scaled
from tieroff.core.tensor import Tier
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.hooks.forward.rebound import Rebound
from tieroff.runtime.items.homes import HomeItem
from tieroff.units import format_bytes

WIDTH, LAYERS = 128, 6
CHECKPOINTS = ("none", "reentrant", "non-reentrant")


class Net(nn.Module):
    def __init__(self, kind: Callable[[int], nn.Module], checkpoints: str) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block(kind, WIDTH) for _ in range(LAYERS))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)  # as `enable_input_require_grads` has it
        for block in self.blocks:
            plain = self.checkpoints == "none"
            x = block(x) if plain else checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant")
        return x


def accumulating(trainer: Trainer) -> None:
    for _ in range(2):
        (trainer.loss() / 2).backward()
    trainer.update()


def workload(kind: str, checkpoints: str = "none", **options: Any) -> Workload:
    return Workload(kind, lambda: Net(KINDS[kind], checkpoints), lambda: (torch.randn(8, WIDTH),), step=accumulating, **options)


def weight_bytes(model: nn.Module) -> int:
    """Of all packed weights."""
    return sum(p.untyped_storage().nbytes() if not isinstance(p, Scaled) else p.data8.nbytes for p in _frozen(model))


def _frozen(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if not p.requires_grad]


def run(
    work: Workload, folder: Path, *, policy: str = "floor", device: str = "100%", tiers: Any = NVME
) -> tuple[Outcome, int, Any]:
    """Runs wrapped; returns what it computed, the most packed bytes that were up in the last step, and that step's figures."""
    trainer = Trainer(work, torch.device("cpu"))
    config = config_for(tiers, folder, policy=policy, device=device)
    tieroff.wrap(trainer.model, trainer.optimizer, config, backend=CpuBackend())
    for index in range(work.steps):
        SEEN.clear()
        trainer.run(index)
    most, stats = SEEN.most_bytes, tieroff.engine(trainer.model).stats()
    outcome = trainer.finish()
    tieroff.unwrap(trainer.model)
    return outcome, most, stats


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_leave_between_uses(kind: str, checkpoints: str, tmp_path: Path) -> None:
    work = workload(kind, checkpoints)
    plain = run_plain(work, torch.device("cpu"))
    outcome, most, stats = run(work, tmp_path)
    assert_equal(plain, outcome)
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    one = weight_bytes(Net(KINDS[kind], checkpoints)) / LAYERS
    assert most <= 2.5 * one, f"{most / one:.1f} of {LAYERS} weights were up together"


@pytest.mark.filterwarnings("ignore::tieroff.errors.BudgetWarning")  # 25 % is less than some of these need
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["50%", "25%", "min"])
def test_quantized_weights_within_a_budget(kind: str, device: str, tmp_path: Path) -> None:
    work = workload(kind, "non-reentrant")
    outcome, _, stats = run(work, tmp_path, policy="auto", device=device, tiers=HOST)
    assert_equal(run_plain(work, torch.device("cpu")), outcome)
    assert stats.phase == "planned"


def test_frozen_weights_travel_up_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing writes them, so their bytes below stay right."""
    work = workload("eight bits", optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    trainer = Trainer(work, torch.device("cpu"))
    tieroff.wrap(trainer.model, trainer.optimizer, config_for(NVME, tmp_path), backend=CpuBackend())
    sent: list[str] = []
    source = HomeItem.source

    def told(item: HomeItem) -> Tensor:
        sent.append(item.name)
        return source(item)

    monkeypatch.setattr(HomeItem, "source", told)
    for index in range(work.steps):
        if index == work.steps - 2:
            sent.clear()  # until a trace shows what forward writes, all that is lifted counts as written
        trainer.run(index)
    assert any("b.weight" in name for name in sent)
    assert [name for name in sent if "base" in name and "gradient" not in name] == []
    tieroff.unwrap(trainer.model)


# -- control arms --------------------------------------------------------------------------------------------------------


def test_control_a_view_on_a_ctx_holds_its_weight_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rebound, "read", lambda self, item: None)
    work = workload("four bits")
    outcome, most, _ = run(work, tmp_path)
    assert_equal(run_plain(work, torch.device("cpu")), outcome)
    assert most > (LAYERS - 0.5) * weight_bytes(Net(Linear4bit, "none")) / LAYERS


def _swapped(net: Net, buffers: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor], int]:
    """Trains a step with weights that module hooks bring up into fresh memory, or into buffers in turn."""
    turn = [0]
    for block in net.blocks:
        below = block.base.weight.data.clone()

        def up(module: Any, *_: Any, below: Tensor = below) -> None:
            if buffers is None:
                module.weight.data = below.clone()
            else:
                turn[0] += 1
                module.weight.data = buffers[turn[0] % len(buffers)].copy_(below)

        def down(module: Any, *_: Any, below: Tensor = below) -> None:
            module.weight.data = below

        down(block.base)
        block.base.register_forward_pre_hook(up)
        block.base.register_forward_hook(down)
        block.base.register_full_backward_pre_hook(up)
        block.base.register_full_backward_hook(down)
    SEEN.clear()
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    out = net(x)
    out.square().mean().backward()
    return out.detach(), [p.grad for p in net.parameters() if p.grad is not None], SEEN.most_bytes


def _net() -> Net:
    torch.manual_seed(0)
    return Net(Linear4bit, "none")


def test_control_swapped_data_frees_nothing() -> None:
    net = _net()
    total = weight_bytes(net)
    _, _, most = _swapped(net)
    assert most >= total


def test_control_two_staging_buffers_give_wrong_gradients() -> None:
    out, grads, _ = _swapped(_net())
    buffers = [torch.empty_like(_net().blocks[0].base.weight.data) for _ in range(2)]
    out2, wrong, _ = _swapped(_net(), buffers)
    assert torch.equal(out, out2)
    assert sum(not torch.equal(a, b) for a, b in zip(grads, wrong, strict=True)) > len(grads) // 2


# -- what nobody knows ---------------------------------------------------------------------------------------------------


class Unknown(nn.Parameter):
    """A subclass of somebody's."""


class LinearUnknown(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.randn(width, width).as_subclass(Unknown)
        self.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def test_unknown_class_stays_and_is_told(tmp_path: Path) -> None:
    work = Workload("unknown", lambda: Net(LinearUnknown, "none"), lambda: (torch.randn(8, WIDTH),))
    trainer = Trainer(work, torch.device("cpu"))
    tieroff.wrap(trainer.model, trainer.optimizer, config_for(NVME, tmp_path, device="min"), backend=CpuBackend())
    for index in range(work.steps):
        trainer.run(index)
    engine = tieroff.engine(trainer.model)
    said = engine.explain().splitlines()
    left_alone = [line for line in said if line.startswith("Left alone") and "Unknown" in line]
    assert len(left_alone) == 1 and f"and {LAYERS - 3} more" in left_alone[0]
    not_managed = [line for line in said if line.startswith("Not managed") and "Unknown" in line]
    assert len(not_managed) == 1 and format_bytes(LAYERS * WIDTH * WIDTH * 4) in not_managed[0]
    assert engine.plan.peak_bytes[Tier.DEVICE] >= LAYERS * WIDTH * WIDTH * 4
    assert_equal(run_plain(work, torch.device("cpu")), trainer.finish())
    tieroff.unwrap(trainer.model)


# -- optimizer state -----------------------------------------------------------------------------------------------------


def test_state_of_parts_and_objects_moves_in_buckets(tmp_path: Path) -> None:
    """A wrapper subclass of two parts, and an object that holds a tensor and a count."""
    work = workload("four bits", optimizer=Momentum)
    plain = run_plain(work, torch.device("cpu"))
    trainer = Trainer(work, torch.device("cpu"))
    tieroff.wrap(trainer.model, trainer.optimizer, config_for(NVME, tmp_path), backend=CpuBackend())
    for index in range(work.steps):
        trainer.run(index)
    engine = tieroff.engine(trainer.model)
    stats = engine.stats()
    assert stats.moved_bytes_by_class["optimizer"] > 0
    assert "stepped whole" not in engine.explain()
    p = next(p for p in trainer.model.parameters() if p.requires_grad)
    entry = trainer.optimizer.state[p]
    held = [entry["momentum"].data8, entry["momentum"].scale, entry["scaling"].factor]
    items = {id(one): item for item in engine.executor.homes.states.values() for one in (item.tensor, *item.others)}
    assert all(items[id(one)].place is not None for one in held)
    outcome = trainer.finish()
    tieroff.unwrap(trainer.model)
    assert_equal(_without_objects(plain), _without_objects(outcome))
    assert all(
        torch.equal(a.factor, b.factor) and a.calls == b.calls for a, b in zip(_objects(plain), _objects(outcome), strict=True)
    )


def test_views_in_objects_of_state_move_with_what_they_are_views_of(tmp_path: Path) -> None:
    """A projector keeps a few of the singular vectors that it computed; their memory is that of all."""
    work = workload("four bits", optimizer=Projecting)
    trainer = Trainer(work, torch.device("cpu"))
    tieroff.wrap(trainer.model, trainer.optimizer, config_for(NVME, tmp_path), backend=CpuBackend())
    for index in range(work.steps):
        PROJECTORS.clear()
        trainer.run(index)
    engine = tieroff.engine(trainer.model)
    stats = engine.stats()
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    assert "stepped whole" not in engine.explain() and "optimizer" in stats.moved_bytes_by_class
    state = [one["projector"].vectors for one in trainer.optimizer.state.values()]
    assert PROJECTORS.most_bytes <= sum(one._base.nbytes for one in state) / 4
    outcome = trainer.finish()
    tieroff.unwrap(trainer.model)
    plain = run_plain(work, torch.device("cpu"))  # not before: what it computed holds its state
    for found in (plain, outcome):
        found.optimizer = {key: value.vectors if key.endswith("projector") else value for key, value in found.optimizer.items()}
    assert_equal(plain, outcome)
    assert all(one.untyped_storage().nbytes() == one._base.nbytes for one in state)  # as the program made them


def test_resumes_with_state_of_parts_and_objects(tmp_path: Path) -> None:
    work = workload("four bits", "reentrant", optimizer=Momentum)
    plain = run_plain(work, torch.device("cpu"))
    file, half = tmp_path / "saved.pt", work.steps // 2
    for steps in (range(half), range(half, work.steps)):
        trainer = Trainer(work, torch.device("cpu"))
        if steps.start:
            saved = torch.load(file, weights_only=False)
            trainer.model.load_state_dict(saved["model"])
            trainer.optimizer.load_state_dict(saved["optimizer"])
            trainer.scheduler.load_state_dict(saved["scheduler"])
        tieroff.wrap(trainer.model, trainer.optimizer, config_for(NVME, tmp_path), backend=CpuBackend())
        for index in steps:
            trainer.run(index)
        state = {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.scheduler}
        torch.save({name: one.state_dict() for name, one in state.items()}, file)  # type: ignore[attr-defined]
        outcome = trainer.finish()
        tieroff.unwrap(trainer.model)
    plain.losses, plain.gradients, plain.values = (
        plain.losses[-len(outcome.losses) :],
        plain.gradients[half:],
        plain.values[half:],
    )
    assert_equal(_without_objects(plain), _without_objects(outcome))


def _objects(outcome: Outcome) -> list[Any]:
    return [value for key, value in outcome.optimizer.items() if key.endswith("scaling")]


def _without_objects(outcome: Outcome) -> Outcome:
    kept = {}
    for key, value in outcome.optimizer.items():
        if isinstance(value, Scaled):
            kept[f"{key} data8"], kept[f"{key} scale"] = value.data8, value.scale
        elif not key.endswith("scaling"):
            kept[key] = value
    return Outcome(outcome.losses, outcome.gradients, [_parted(values) for values in outcome.values], kept)


def _parted(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: value.dequantized() if isinstance(value, Scaled) else value.as_subclass(Tensor) for key, value in values.items()
    }
