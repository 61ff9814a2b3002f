"""`tieroff.clip_grad_norm_` beside torch's: the same bits, and the same error."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import tieroff


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    result = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((300, 200), (17,), (), (64, 3, 3, 3))]
    for index, parameter in enumerate(result):
        parameter.grad = torch.randn_like(parameter) * 10**index
    return [*result, nn.Parameter(torch.zeros(3))]  # the last one without a gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_equal_to_torch(dtype: torch.dtype, order: float, limit: float) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    total = tieroff.clip_grad_norm_(iter(ours), limit, order)
    assert torch.equal(total, nn.utils.clip_grad_norm_(theirs, limit, order))
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert ours[-1].grad is None
    clipped, untouched = ([p.grad for p in params[:-1] if p.grad is not None] for params in (ours, parameters(dtype)))
    assert (limit > 1) == all(map(torch.equal, clipped, untouched))


def test_no_gradient_and_one_tensor() -> None:
    assert tieroff.clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0) == 0
    parameter = parameters(torch.float32)[0]
    tieroff.clip_grad_norm_(parameter, 1.0)
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad.norm(), torch.tensor(1.0))


def test_a_norm_that_is_not_finite_is_an_error_that_leaves_gradients_alone() -> None:
    given = parameters(torch.float32)
    assert given[1].grad is not None
    given[1].grad[3] = float("nan")
    before = [copy.deepcopy(p.grad) for p in given[:-1]]
    with pytest.raises(RuntimeError, match=r"order 2\.0 to be finite, got nan"):
        tieroff.clip_grad_norm_(given, 1.0, error_if_nonfinite=True)
    for parameter, gradient in zip(given, before, strict=False):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)
    assert torch.isnan(tieroff.clip_grad_norm_(given, 1.0))


def test_a_wrapped_model_trains_with_it_as_plain_with_torch(tmp_path: Path) -> None:
    def train(config: dict[str, object] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters())
        clip = nn.utils.clip_grad_norm_
        if config is not None:
            tieroff.wrap(model, optimizer, config)
            clip = tieroff.clip_grad_norm_  # type: ignore[assignment]
        results = []
        for _ in range(5):
            loss = model(torch.randn(32, 128)).square().mean()
            loss.backward()
            results += [loss.detach(), clip(model.parameters(), 0.01)]
            optimizer.step()
            optimizer.zero_grad()
        if config is not None:
            moved = tieroff.engine(model).stats().moved_bytes_by_class
            assert moved["gradient"] > 0
            tieroff.unwrap(model)
        return [*results, *(p.detach() for p in model.parameters())]

    config = {"budget": {"device": "90%"}, "nvme": {"dirs": [str(tmp_path)]}, "plan": {"policy": "floor", "min_bytes": 0}}
    for ours, theirs in zip(train(config), train(None), strict=True):
        assert torch.equal(ours, theirs)
