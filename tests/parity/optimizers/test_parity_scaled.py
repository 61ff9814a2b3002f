"""Gradients that are clipped while they lie below: the plain run's numbers, and no byte moves for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.support.parity import BACKENDS, HOST, MIXED, NVME, SEED, Tiers, are_same_bits, config_for
from tests.support.twins import MACHINE

STEPS = 7
Act = Callable[[nn.Module], Any]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def clip(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_in_lists(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=True)


def clip_ours(model: nn.Module) -> Tensor:
    return tieroff.clip_grad_norm_(model.parameters(), 0.01)


def clip_largest(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-4, norm_type=float("inf"))


def clip_twice(model: nn.Module) -> Tensor:
    return clip(model) + nn.utils.clip_grad_norm_(list(model.parameters())[:3], 1e-3)


def clip_compiled(model: nn.Module) -> Tensor:
    compiled = torch.compile(lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01), backend="eager")
    norm: Tensor = compiled(list(model.parameters()))
    return norm


def average(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient.mul_(0.5)
    torch._foreach_mul_(gradients(model)[1:], 3)


def clip_some(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(list(model.parameters())[::2], 0.01)


def clip_by_a_number_that_changes(model: nn.Module) -> None:
    factor = torch.tensor(0.5)
    for gradient in gradients(model):
        gradient.mul_(factor)
        factor.mul_(0.9)


def clip_by_a_number_that_changes_past_versions(model: nn.Module) -> None:
    factor = torch.tensor(0.5)
    for gradient in gradients(model):
        gradient.mul_(factor)
        factor.data.mul_(0.9)


# What needs the bytes after the factor, before it, or both.
def clip_and_look(model: nn.Module) -> Tensor:
    return clip(model) + torch.stack([gradient.norm() for gradient in gradients(model)]).sum()


def clip_and_clamp(model: nn.Module) -> Tensor:
    norm = clip(model)
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    return norm


def clamp_and_clip(model: nn.Module) -> Tensor:
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    return clip(model)


def clip_with_aliases(model: nn.Module) -> Tensor:
    before = [gradient.data for gradient in gradients(model)[:4]]
    norm = clip(model)
    after = [gradient.numpy() for gradient in gradients(model)[4:]]
    clip(model)
    return norm + sum(alias.sum() for alias in before) + sum(float(alias.sum()) for alias in after)


def write_past_versions(model: nn.Module) -> Tensor:
    for gradient in gradients(model)[:3]:
        gradient.data.add_(1e-3)
    return clip(model)


def replace_and_clip(model: nn.Module) -> Tensor:
    first, second = list(model.parameters())[:2]
    assert first.grad is not None and second.grad is not None
    first.grad = first.grad * 2
    clip(model)
    second.grad.data = second.grad.data + 1e-3
    return clip(model)


def differentiate_norms(model: nn.Module) -> Tensor:
    found = gradients(model)
    for gradient in found:
        gradient.requires_grad_()
    torch.stack([torch.linalg.vector_norm(gradient, 2.0) for gradient in found]).sum().backward()
    slopes = [gradient.grad for gradient in found]
    for gradient in found:
        gradient.requires_grad_(False)
        gradient.grad = None
    return torch.stack([slope.sum() for slope in slopes if slope is not None])


FREE: list[Act] = [
    clip,
    clip_compiled,
    clip_in_lists,
    clip_ours,
    clip_largest,
    clip_twice,
    average,
    clip_some,
    clip_by_a_number_that_changes,
    clip_by_a_number_that_changes_past_versions,
]
NEEDING: list[Act] = [
    differentiate_norms,
    clip_and_look,
    clip_and_clamp,
    clamp_and_clip,
    clip_with_aliases,
    write_past_versions,
    replace_and_clip,
]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.GELU())))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def train(act: Act, folder: Path | None, tiers: Tiers = NVME, backend: str = "cpu", rounds: int = 1, **plan: Any) -> Any:
    """Returns everything that came out, and of a wrapped run the last step's figures."""
    model, optimizer = make()
    if folder is not None:
        tieroff.wrap(model, optimizer, config_for(tiers, folder, **plan), backend=BACKENDS[backend]())
    results: list[Tensor] = []
    for step in range(STEPS):
        for _ in range(rounds):
            loss = model(torch.randn(32, 96)).square().mean()
            loss.backward()
        seen = act(model) if step != 4 else None  # once it does nothing
        results += [loss.detach(), torch.as_tensor(0.0 if seen is None else seen)]
        optimizer.step()
        optimizer.zero_grad()
    if folder is None:
        return [*results, *(p.detach() for p in model.parameters())], None
    stats = tieroff.engine(model).stats()
    tieroff.unwrap(model)
    return [*results, *(p.detach() for p in model.parameters())], stats


def assert_same(expected: Iterable[Tensor], found: Iterable[Tensor]) -> None:
    assert [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not are_same_bits(a, b)] == []


@pytest.mark.parametrize("act", FREE + NEEDING)
def test_numbers_are_those_of_the_plain_run(act: Act, tmp_path: Path) -> None:
    expected, _ = train(act, None)
    cases: list[tuple[Tiers, str, Any]] = [(NVME, "cpu", {}), (MIXED, "delayed", {"policy": "auto", "device": "60%"})]
    for tiers, backend, budget in cases:
        found, stats = train(act, tmp_path, tiers, backend, **budget)
        assert stats.phase == "planned" and stats.moved_bytes_by_class["gradient"] > 0
        assert_same(expected, found)


@pytest.mark.parametrize("act", FREE)
def test_nothing_moves_for_it(act: Act, tmp_path: Path) -> None:
    _, plain = train(lambda model: None, tmp_path)
    _, clipped = train(act, tmp_path)
    assert clipped.moved_bytes == plain.moved_bytes


def test_gradients_of_several_rounds(tmp_path: Path) -> None:
    expected, _ = train(clip, None, rounds=3)
    found, stats = train(clip, tmp_path, HOST, rounds=3)
    assert stats.phase == "planned"
    assert_same(expected, found)


def test_gradients_cleared_between_forward_and_backward(tmp_path: Path) -> None:
    """The last step's gradient is gone when its copy out is due: the plan has one tensor for both."""
    (tmp_path / "machine.toml").write_text(MACHINE)
    outcomes = []
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 256))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if is_wrapped:
            planning = {"min_bytes": 0, "machine": str(tmp_path / "machine.toml")}
            config = {"device": "cpu", "budget": {"nvme": "16MiB"}, "nvme": {"dirs": [str(tmp_path)]}, "plan": planning}
            tieroff.wrap(model, optimizer, config, budget="85%")
        for step in range(STEPS):
            loss = model(torch.randn(64, 64)).square().mean()
            model.zero_grad(set_to_none=True)
            if is_wrapped and step == STEPS - 1:
                executor = tieroff.engine(model).executor
                gone = [item for item in executor.homes.gradients.values() if item.device is not None]
                assert gone
                for item in gone:
                    executor.traffic.store(item)  # as at a tick of such a plan
            loss.backward()
            clip(model)
            optimizer.step()
        outcomes.append(list(model.parameters()))
    assert_same(*outcomes)
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_are_kept_and_scaled_where_nothing_moves(backend: str, tmp_path: Path) -> None:
    """The first steps scale them below, where they lie when a plan begins that moves nothing."""

    def run(folder: Path | None) -> list[Tensor]:
        model, optimizer = make()
        if folder is not None:
            config = config_for(HOST, folder, policy="auto", device="100%")
            tieroff.wrap(model, optimizer, config, backend=BACKENDS[backend]())
        seen: list[Tensor] = []
        for _ in range(STEPS):
            for gradient in gradients(model):
                gradient.mul_(0.9)
            model(torch.randn(32, 96)).square().mean().backward()
            optimizer.step()
            seen += [gradient.clone() for gradient in gradients(model)]
        if folder is not None:
            assert tieroff.engine(model).stats().phase == "nothing moved"
            tieroff.unwrap(model)
        return seen

    assert_same(run(None), run(tmp_path))


def test_hooks_that_write_past_versions(tmp_path: Path) -> None:
    def with_hooks(act: Act) -> Act:
        hooked: set[int] = set()

        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.data.mul_(3.0)

        def run(model: nn.Module) -> Any:
            if id(model) not in hooked:
                hooked.add(id(model))
                for parameter in list(model.parameters())[::2]:
                    parameter.register_post_accumulate_grad_hook(hook)
            return act(model)

        return run

    expected, _ = train(with_hooks(clip), None)
    found, _ = train(with_hooks(clip), tmp_path)
    assert_same(expected, found)


def prepared(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    """Returns a model after planned steps, with gradients that were clipped below, and these as they have to be."""
    models = [make(), make()]
    tieroff.wrap(*models[1], config_for(NVME, folder), backend=BACKENDS["cpu"]())
    for model, optimizer in models:
        torch.manual_seed(SEED + 1)
        for step in range(6):
            model(torch.randn(32, 96)).square().mean().backward()
            clip(model)
            if step < 5:
                optimizer.step()
                optimizer.zero_grad()
    model, optimizer = models[1]
    assert sum(item.waiting is not None for item in tieroff.engine(model).executor.homes.gradients.values()) >= 6
    return model, optimizer, gradients(models[0][0])


def test_what_waits_is_there_after_unwrap(tmp_path: Path) -> None:
    model, _, expected = prepared(tmp_path)
    tieroff.unwrap(model)
    assert all(type(gradient) is Tensor for gradient in gradients(model))
    assert_same(expected, gradients(model))


def test_an_update_that_is_skipped_leaves_them_to_the_next_backward(tmp_path: Path) -> None:
    model, _, expected = prepared(tmp_path)
    x = torch.randn(32, 96)
    plain, _ = make()
    plain.load_state_dict(model.state_dict())
    for parameter, gradient in zip(plain.parameters(), expected, strict=True):
        parameter.grad = gradient
    for trained in (plain, model):
        trained(x).square().mean().backward()
    assert_same(gradients(plain), (gradient.clone() for gradient in gradients(model)))
    tieroff.unwrap(model)


def test_a_forked_child_finds_them_scaled(tmp_path: Path) -> None:
    model, _, expected = prepared(tmp_path)
    pid = os.fork()
    if pid == 0:
        try:
            assert_same(expected, gradients(model))
        except tieroff.errors.StateError:
            os._exit(3)  # what lies on NVMe is not the child's
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert_same(expected, gradients(model))
    tieroff.unwrap(model)
