"""Gradients that user code touches between backward and update stay on the device for it, and count as it leaves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace

Touch = Callable[[nn.Module], Any]


def clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)


def look(model: nn.Module) -> float:
    return sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)


def write_raw(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data.mul_(0.5)
        p.grad.detach().numpy()[...] *= 3.0


def write_some(model: nn.Module) -> None:
    for p in list(model.parameters())[::3]:
        assert p.grad is not None
        p.grad.clamp_(-1e-3, 1e-3)


def train(touch: Touch, folder: Path | None, policy: str = "auto") -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(160, 160), nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if folder is not None:
        tieroff.wrap(
            model,
            optimizer,
            {
                "device": "cpu",
                "budget": {"device": "32%", "host": 0, "nvme": "64MiB"},
                "nvme": {"dirs": [str(folder)], "staging": "1MiB"},
                "plan": {"min_bytes": "16KiB", "policy": policy},
            },
        )
    results, account = [], None
    for step in range(7):
        loss = model(torch.randn(256, 160)).square().mean()
        loss.backward()
        seen = touch(model) if step != 5 else None  # once it does nothing
        results += [loss.detach(), torch.as_tensor(0.0 if seen is None else seen)]
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        engine = tieroff.engine(model)
        account = engine.stats(), engine.trace, engine.plan
        tieroff.unwrap(model)
    return [*results, *(p.detach() for p in model.parameters())], account


@pytest.mark.parametrize("touch", [clip, clip_values, look, write_raw, write_some])
def test_numbers_are_those_of_the_plain_run(touch: Touch, tmp_path: Path) -> None:
    expected, _ = train(touch, None)
    found, (stats, _, _) = train(touch, tmp_path)
    assert stats.phase == "planned" and stats.moved_bytes["nvme_write"] > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def user_code(trace: Trace) -> int:
    """Returns the op in which user code runs between backward and update."""
    return next(i for i, op in enumerate(trace.ops) if op.name.startswith("bucket:")) - 1


def test_they_are_on_the_device_meanwhile_as_many_as_find_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[int] = []

    def clip_and_count(model: nn.Module) -> None:
        homes = tieroff.engine(model).executor.homes
        known = [homes.gradients.get(item.position) for item in homes.parameters.values() if item.grad is not None]
        there.append(sum(item is None or item.device is not None for item in known))  # one without an item never moves
        return clip_values(model)

    _, (_, trace, plan) = train(clip_and_count, tmp_path)
    at = user_code(trace)
    wanted = {i for i in trace.ops[at].writes if trace.tensors[i].kind is TensorClass.GRADIENT}
    planned = {r.tensor for r in plan.residencies if r.tier is Tier.DEVICE and r.start <= at < r.stop}
    assert len(wanted) >= 4 and wanted <= planned
    assert there[-1] >= len(wanted)

    monkeypatch.setattr("tieroff.session.planning.bring_back", lambda trace, op, used, budget_bytes, min_bytes: trace)
    train(clip_and_count, tmp_path)
    assert there[-1] < len(wanted)


def test_other_policies_plan_for_the_step_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("tieroff.session.planning.bring_back", lambda *arguments: asked.append("asked"))
    _, (stats, _, _) = train(clip_values, tmp_path, policy="floor")
    assert stats.phase == "planned" and not asked
