"""Memory that an op takes from the device's allocator and gives back: no tensor of the step, and it has to fit beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tieroff
from tests.accelerator import target

MIB = 1 << 20
SCRATCH_BYTES = 8 * MIB


@torch.library.custom_op("tieroff_tests::with_scratch", mutates_args=())
def with_scratch(x: torch.Tensor) -> torch.Tensor:
    """A copy, made by way of memory that nobody sees."""
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=x.device)
    scratch.zero_()
    return x.clone()


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    """Nothing is saved."""


with_scratch.register_autograd(lambda ctx, grad: grad.clone(), setup_context=_setup)


class Scratching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = with_scratch(self.linear(x))
        return found


def test_what_an_op_takes_for_itself_counts_in_its_op() -> None:
    device = target.device()
    model = Scratching().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tieroff.wrap(model, optimizer, {"budget": {"device": "1GiB", "host": "64MiB"}})
    for _ in range(2):
        model(torch.ones(1024, 256, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    transient = [op.transient_bytes for op in tieroff.engine(model).trace.ops]
    tieroff.unwrap(model)
    assert sum(SCRATCH_BYTES <= size < 2 * SCRATCH_BYTES for size in transient) == 1
