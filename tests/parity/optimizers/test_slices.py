"""Which updates may be made in slices: asked of the optimizers themselves, and not of their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.parity import HOST, Trainer, warnings_of_tieroff
from tests.support.recipes.sliced import config, workload
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.optimizer.buckets import raw_step
from tieroff.runtime.optimizer.slices.proof import Trial, Verdict
from tieroff.runtime.optimizer.slices.rows import RowsOfState, slices_of

Make = Callable[[list[Any]], torch.optim.Optimizer]


class Own(torch.optim.Optimizer):
    """An optimizer that nobody knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.change(param, param.grad) * group["lr"] / group["calls"])

    def change(self, param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()


class Trusting(Own):
    """As LAMB and LARS: by the norm of what is updated."""

    def change(self, param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (param.norm() / (gradient.norm() + 1e-6))


class Clipping(Own):
    """By the norm, too, but only where that is larger than in any trial: no result shows it."""

    def change(self, param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm().div(1e30).clamp(min=1.0)


class Noisy(Own):
    """Draws numbers."""

    def change(self, param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.rand_like(param)


class Rolling(Own):
    """Each element takes its neighbour's gradient."""

    def change(self, param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.roll(1)


@torch.library.custom_op("tests_of_slices::_fused_change", mutates_args=())
def fused_change(gradient: torch.Tensor) -> torch.Tensor:
    """A kernel that rounds the elements beyond whole vectors of 32 otherwise, as torch's fused SGD did before 2.14."""
    change = gradient.sign()
    change.view(-1)[change.numel() // 32 * 32 :].mul_(1.25)
    return change


class Ends(Own):
    """By a kernel whose results depend on where a tensor ends."""

    def change(self, param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return fused_change(gradient)


class Sized(Own):
    """Large parameters learn more slowly, and no part of one that is tried or updated is large."""

    def __init__(self, params: Any, size_of: Callable[[torch.Tensor], int]) -> None:
        super().__init__(params)
        self.size_of = size_of

    def change(self, param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (0.1 if self.size_of(param) > 10**9 else 1.0)


SIZES: list[Callable[[torch.Tensor], int]] = [
    lambda param: param.numel(),
    lambda param: param.shape[0],
    lambda param: param.data.size(0),
    len,
    torch.numel,
    lambda param: param.grad.nbytes if param.grad is not None else 0,
    lambda param: param.untyped_storage().nbytes(),
]


@pytest.mark.parametrize("size_of", SIZES)
def test_an_optimizer_that_asks_for_sizes_is_refused(size_of: Callable[[torch.Tensor], int]) -> None:
    assert tried(lambda params: Sized(params, size_of)).why_not == "its step asks how large a tensor is"


def tried(make: Make, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (517, 67)) -> Verdict:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape).to(dtype))
    optimizer = make([parameter])
    parameter.grad = torch.randn(shape).to(dtype)
    before, keys = parameter.detach().clone(), list(optimizer.state)
    verdict = Trial(optimizer, parameter, lambda tensor, rows: tensor.detach()[:rows], raw_step(optimizer), (), {}).verdict()
    assert torch.equal(before, parameter)
    assert list(optimizer.state) == keys
    return verdict


@pytest.mark.parametrize(
    ("make", "state_bytes"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), 0),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 4),
        (lambda params: torch.optim.AdamW(params), 8),
        (lambda params: torch.optim.AdamW(params, foreach=True), 8),
        (lambda params: torch.optim.AdamW(params, fused=True), 8),
        (lambda params: torch.optim.Adam(params, amsgrad=True), 12),
        (lambda params: torch.optim.Adagrad(params), 4),
        (lambda params: torch.optim.Adamax(params, foreach=True), 8),
        (Own, 0),
    ],
)
def test_an_elementwise_update_may_be_made_in_slices(make: Make, state_bytes: int) -> None:
    assert (tried(make).why_not, tried(make).state_bytes) == ("", state_bytes)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda params: torch.optim.Adafactor(params), "its step asks how large"),
        (lambda params: torch.optim.Muon(params), "its step asks how large"),
        (Trusting, "norm"),
        (Clipping, "norm"),
        (Noisy, "rand_like"),
        (Rolling, "roll"),
    ],
)
def test_any_other_update_is_refused(make: Make, why: str) -> None:
    assert why in tried(make).why_not


def test_kernels_whose_last_elements_are_rounded_otherwise_are_refused() -> None:
    verdict = tried(Ends)
    assert verdict.why_not == "parameters differ when it is updated in slices"


@pytest.mark.parametrize("shape", [(4099, 64), (1000, 67), (50_001,), (7, 1 << 16), (3, 5, 1000)])
def test_slices_hold_each_row_once_and_begin_at_whole_vectors(shape: tuple[int, ...]) -> None:
    parameter = torch.zeros(shape)
    slices = slices_of(parameter, parameter.numel() * 4 // 16)
    assert [row for rows in slices for row in rows] == [*range(shape[0])]
    row = parameter.numel() // shape[0]
    assert all(rows.start * row % 64 == 0 for rows in slices)


@pytest.mark.parametrize("breaks_in", [1, 3])
def test_an_interrupt_between_slices_leaves_an_optimizer_of_its_own_parameters(
    breaks_in: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(workload(torch.optim.AdamW), torch.device("cpu"))
    with warnings_of_tieroff():
        tieroff.wrap(trainer.model, trainer.optimizer, config(HOST, tmp_path), backend=CpuBackend())
        for index in range(breaks_in - 1):
            trainer.run(index)
        keep, calls = RowsOfState.keep, [0]

        def keep_or_break(self: RowsOfState, rows: range, state: dict[str, Any]) -> None:
            calls[0] += len(rows) > 200  # a slice of the embedding, not of a trial
            if calls[0] == 5:
                raise KeyboardInterrupt
            keep(self, rows, state)

        monkeypatch.setattr(RowsOfState, "keep", keep_or_break)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(breaks_in)
        monkeypatch.undo()
        parameters = list(trainer.model.parameters())
        assert trainer.optimizer.param_groups[0]["params"] == parameters
        assert {id(param) for param in trainer.optimizer.state} <= set(map(id, parameters))
        for index in range(4):
            trainer.run(breaks_in + 1 + index)
        tieroff.unwrap(trainer.model)
    assert all(state["exp_avg"].isfinite().all() for state in trainer.optimizer.state.values())
    assert trainer.optimizer.state[parameters[0]]["step"] == 4 + breaks_in - 1
