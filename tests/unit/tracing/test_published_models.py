"""The models of scripts/evidence: what they compute, whichever way they compute it; and how often intervals held."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import llama_steps
from fit_machines import coverage
from llama_steps import Layer, Sizes, turned
from published_steps import Measured, Step
from tieroff.core.trace import Op, Trace

SIZES = Sizes(width=32, layers=1, heads=4, shared_heads=2, inner=48)
ROWS, SEQUENCE = 2, 6


def plainly(layer: Layer, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Returns what a layer computes, written down without tiles and with everything kept."""
    y = layer.norm(x)
    heads = [part(y).view(ROWS, SEQUENCE, -1, SIZES.head).transpose(1, 2) for part in (layer.query, layer.key, layer.value)]
    query, key = (turned(part, angles) for part in heads[:2])
    y = F.scaled_dot_product_attention(query, key, heads[2], is_causal=True, enable_gqa=True)
    x = x + layer.out(y.transpose(1, 2).flatten(2))
    y = layer.inner_norm(x)
    total: torch.Tensor = x + layer.down(F.silu(layer.gate(y)) * layer.up(y))
    return total


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_layer_of_llama_computes_the_same_in_tiles_and_again_in_backward(
    is_recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_steps, "_TILE_TOKENS", 5)  # the last tile is smaller
    torch.manual_seed(0)
    layer = Layer(SIZES, is_recomputed).double()
    angles = torch.randn(2, SEQUENCE, SIZES.head, dtype=torch.double)
    given = torch.randn(ROWS, SEQUENCE, SIZES.width, dtype=torch.double)
    found = []
    for run in (lambda x: layer(x, angles), lambda x: plainly(layer, x, angles)):
        layer.zero_grad()
        x = given.clone().requires_grad_()
        out = run(x)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *(param.grad for param in layer.parameters())])
    for own, plain in zip(*found, strict=True):
        torch.testing.assert_close(own, plain)


@pytest.mark.parametrize(("error", "inside"), [(0.1, 3), (0.27, 2)])
def test_interval_of_a_step_comes_from_the_errors_of_other_models(error: float, inside: int) -> None:
    """An error of its own would widen it: 0.27 is then within 2.55 times the root mean square of all three, 0.18."""
    errors = {Measured("card", f"{model}-train-512-1", 1.0): value for model, value in (("a", 0.1), ("b", -0.1), ("c", error))}
    steps = {row.step: Step(row.step, Counter(), Trace((Op("op", 1),), ())) for row in errors}
    assert coverage(errors, steps, "model") == inside
