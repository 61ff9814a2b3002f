"""A model of which an embedding is half, in a budget that does not hold the embedding's whole update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.parity import (
    PEAK_TOLERANCE,
    OptimizerFactory,
    Tiers,
    Workload,
    assert_equal,
    config_for,
    plain_step,
    run_plain,
    run_wrapped,
)
from tieroff.core.tensor import Tier
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.engine import Engine

ROWS, WIDTH, INNER, LAYERS, STEPS = 4099, 64, 256, 8, 8
EMBEDDING_BYTES = ROWS * WIDTH * 4
BUDGET_BYTES = 3 * EMBEDDING_BYTES
"""An update of the whole takes 4 times the embedding's bytes, or 6 where each op of it makes a tensor."""


class Embedded(nn.Module):
    """An embedding, and layers of as many bytes together."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(*pair) for _ in range(LAYERS) for pair in ((WIDTH, INNER), (INNER, WIDTH)))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def workload(optimizer: OptimizerFactory, dtype: torch.dtype = torch.float32, **options: Any) -> Workload:
    """Returns the training loop, with clipping and a scheduler."""
    return Workload(
        name="embedded",
        build=lambda: Embedded().to(dtype),
        batch=lambda: (torch.randint(0, ROWS, (2, 8)),),
        optimizer=optimizer,
        steps=STEPS,
        **{"step": plain_step, **options},
    )


def config(tiers: Tiers, folder: Path, device: int | str = BUDGET_BYTES) -> dict[str, Any]:
    """Returns a config with this device budget."""
    found = config_for(tiers, folder, policy="auto", device=str(device))
    found["budget"]["device"] = device
    if tiers.has_nvme:
        found["budget"]["nvme"] = 64 << 20
    return found


def check(
    trained: Workload,
    tiers: Tiers,
    backend: Backend,
    config: dict[str, Any],
    look: Callable[[Engine], None],
    phase: str = "planned",
) -> None:
    """Asserts that a run has the bits of the plain one and stays within its budget by a count that is not the engine's.

    Args:
        trained: by `workload`.
        tiers: below the device.
        backend: the device.
        config: of the wrapped run.
        look: looks at the engine after each of the last steps.
        phase: of those.
    """
    peaks: list[int] = []

    def after_step(index: int, engine: Engine) -> None:
        if index < STEPS - 3:
            return
        assert (engine.stats().phase, engine.stats().fallbacks) == (phase, 0)
        look(engine)
        budget = engine.plan.budget_bytes[Tier.DEVICE]
        assert peaks[-1] <= budget * (1 + PEAK_TOLERANCE) + plain.unseen_bytes

    plain = run_plain(trained, backend.device)
    wrapped = run_wrapped(trained, config, backend, after_step, peaks=peaks)
    assert_equal(plain, wrapped)
