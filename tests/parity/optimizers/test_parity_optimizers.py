"""Every per-parameter optimizer of torch makes the same updates bucket by bucket as it does at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import tieroff
from tests.support.models import GPT_WORKLOAD, MLP_WORKLOAD, VOCABULARY, WIDTH, tokens
from tests.support.parity import BACKENDS, HOST, NVME, OptimizerFactory, Tiers, Trainer, Workload, check_parity


def make(kind: Callable[..., optim.Optimizer], **options: Any) -> OptimizerFactory:
    return lambda params: kind(params, **options)


def two_groups(params: Any) -> optim.Optimizer:
    first, *others = params
    return optim.AdamW([{"params": [first], "lr": 1e-2, "weight_decay": 0.0}, {"params": others}], lr=1e-3)


WEIGHT_BYTES = 32 * 32 * 4  # of the largest of `MLP_WORKLOAD`
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd_momentum": make(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_fused": make(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": make(optim.Adam, amsgrad=True),
    "adam_fused": make(optim.Adam, fused=True),
    "adamw_foreach": make(optim.AdamW, foreach=True),
    "adamw_single": make(optim.AdamW, foreach=False, maximize=True),
    "adamw_fused": make(optim.AdamW, fused=True, amsgrad=True),
    "adamw_tensor_lr": lambda params: optim.AdamW(params, lr=torch.tensor(1e-3), foreach=False),
    "adamw_two_groups": two_groups,
    "adafactor": make(optim.Adafactor, lr=0.01),
    "adamax": make(optim.Adamax),
    "nadam": make(optim.NAdam, decoupled_weight_decay=True),
    "radam": make(optim.RAdam, foreach=True),
    "rmsprop": make(optim.RMSprop, momentum=0.9, centered=True),
    "rprop": make(optim.Rprop),
    "asgd": make(optim.ASGD, t0=2),
    "adagrad": make(optim.Adagrad, lr_decay=0.1),
    "adagrad_fused": make(optim.Adagrad, fused=True),
    "adadelta": make(optim.Adadelta, lr=1.0),
}


@pytest.mark.parametrize(("backend", "tiers"), [("cpu", NVME), ("delayed", HOST)], ids=["cpu-nvme", "delayed-host"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_makes_the_same_updates_wrapped(name: str, backend: str, tiers: Tiers, tmp_path: Path) -> None:
    unseen_bytes = WEIGHT_BYTES if name == "asgd" else 0  # it averages from its third update on, which no trace has
    workload = replace(MLP_WORKLOAD, optimizer=OPTIMIZERS[name], unseen_bytes=unseen_bytes)
    check_parity(workload, tiers, BACKENDS[backend], tmp_path)


PER_PARAMETER = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adafactor,
)
FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
VARIANTS = [
    *((kind, {"foreach": foreach}) for kind in PER_PARAMETER for foreach in (False, True)),
    *((kind, {"fused": True}) for kind in FUSED),
]


@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=[f"{kind.__name__}-{options}" for kind, options in VARIANTS])
def test_every_variant_of_every_optimizer_makes_the_same_updates(
    kind: Callable[..., optim.Optimizer], options: dict[str, bool], tmp_path: Path
) -> None:
    momentum = {"momentum": 0.9} if kind is optim.SGD else {}  # without it there is no state to move
    # RAdam's updates take more from the sixth on, when it begins to rectify; the one that is recorded is the first.
    unseen_bytes = 16 << 10 if kind is optim.RAdam else 0
    workload = replace(MLP_WORKLOAD, optimizer=make(kind, lr=1e-2, **momentum, **options), unseen_bytes=unseen_bytes)
    check_parity(workload, NVME, BACKENDS["delayed"], tmp_path)


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw_foreach", "adamw_fused", "adafactor"])
def test_optimizer_makes_the_same_updates_on_a_gpt(name: str, tmp_path: Path) -> None:
    workload = replace(GPT_WORKLOAD, optimizer=OPTIMIZERS[name])
    check_parity(workload, NVME, BACKENDS["delayed"], tmp_path)


def test_optimizer_without_state_makes_the_same_updates(tmp_path: Path) -> None:
    workload = replace(
        MLP_WORKLOAD, optimizer=make(optim.SGD, lr=0.1), classes=frozenset({"activation", "parameter", "gradient"})
    )
    check_parity(workload, HOST, BACKENDS["delayed"], tmp_path)


def test_muon_makes_the_same_updates(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 24, bias=False), nn.Tanh(), nn.Linear(24, 16, bias=False))

    workload = replace(MLP_WORKLOAD, build=build, optimizer=make(optim.Muon, lr=0.01))
    check_parity(workload, NVME, BACKENDS["delayed"], tmp_path)


def update_sparsely(trainer: Trainer) -> None:
    trainer.loss().backward()
    trainer.update(clips=False)


def test_sparse_adam_makes_the_same_updates(tmp_path: Path) -> None:
    workload = Workload(
        "sparse",
        lambda: nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, sparse=True), nn.Tanh(), nn.GELU(), nn.Softsign()),
        tokens,
        step=update_sparsely,
        optimizer=make(optim.SparseAdam),
        classes=frozenset({"activation", "parameter", "optimizer"}),  # sparse gradients stay
    )
    check_parity(workload, HOST, BACKENDS["delayed"], tmp_path)


def test_every_optimizer_of_torch_is_tried() -> None:
    tried = {type(factory([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))])) for factory in OPTIMIZERS.values()}
    tried |= {optim.Muon, optim.SparseAdam}
    refused = {optim.LBFGS, optim.Optimizer}
    kinds = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    assert kinds - refused == tried


@pytest.mark.parametrize("at", [0, 6], ids=["from the start", "later"])
def test_parameters_on_one_memory_are_updated_in_one_call(at: int) -> None:
    """Two updates of the same bytes in one call are rounded otherwise than one after the other."""
    models, losses = [], []
    for is_wrapped in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(24, 24), nn.Tanh())))
        optimizer = optim.AdamW(model.parameters(), weight_decay=0.3, foreach=True)
        seen = []
        for step in range(16):
            if step == at:
                for number in (8, 12):
                    model.get_parameter(f"{number}.weight").data = model.get_parameter("2.weight").data
            if is_wrapped and step == 0:
                config = {"budget": {"device": "60%", "host": "1MiB"}, "plan": {"min_bytes": 0, "background": False}}
                tieroff.wrap(model, optimizer, {"device": "cpu", **config})
            loss = model(torch.randn(16, 24, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        losses.append(seen)
        models.append(model)
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
    assert tieroff.engine(models[0]).stats().phase == "planned"
    tieroff.unwrap(models[0])
