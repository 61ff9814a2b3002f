"""Which arithmetic an optimizer's updates have is found by comparing the two updates after the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tieroff.core.buckets import has_kernels
from tieroff.runtime.optimizer.host.apart import results_of, told_apart
from tieroff.runtime.optimizer.host.capture import Capture, capture
from tieroff.runtime.optimizer.host.proof import UPDATES_COMPARED_AT_MOST, Proof, Verdict
from tieroff.updates import rule as rules
from tieroff.updates.native import HAS_UPDATES
from tieroff.updates.rule import Rule

pytestmark = pytest.mark.skipif(not HAS_UPDATES, reason="built without updates in host memory")

_SIZES = (4096, 65_536)


def _adamw(*, lr: float) -> Rule:
    return rules.adam(7, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decouples=True)


class _Training:
    """An optimizer with random gradients, whose updates a proof sees."""

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], *, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        self._seeded = torch.Generator().manual_seed(0)
        self.parameters = [torch.nn.Parameter(self._random(size, 0.02).to(dtype)) for size in _SIZES]
        self.optimizer = make(self.parameters, **{"lr": 1e-3, **options})
        self.step_count = 0

    def _random(self, size: int, scale: float) -> torch.Tensor:
        return torch.randn(size, generator=self._seeded) * scale

    def set_gradients(self) -> list[Capture]:
        for parameter in self.parameters:
            parameter.grad = self._random(parameter.numel(), 1e-3).to(parameter.dtype)
        found = [capture(self.optimizer, self.optimizer.param_groups[0], parameter) for parameter in self.parameters]
        return [one for one in found if one is not None]

    def run(self, proof: Proof, steps: int = 1) -> Capture:
        """Makes steps; returns a capture of the next one."""
        for _ in range(steps):
            trial = proof.begin(self.set_gradients())
            self.optimizer.step()
            self.step_count += 1
            proof.end(trial, self.step_count)
        return self.set_gradients()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.0}])
def test_fused_adamw_is_proven_by_the_second_and_third_update(dtype: torch.dtype, options: dict[str, Any]) -> None:
    training, proof = _Training(torch.optim.AdamW, dtype=dtype, fused=True, **options), Proof()
    assert training.set_gradients() == []  # no state yet: nothing to compare
    assert proof.verdict(training.run(proof, 1)) is None
    assert proof.verdict(training.run(proof, 1)) is None
    assert proof.verdict(training.run(proof, 1)) == Verdict("contracted", "contracted", 0.0)


def test_sgd_with_momentum_is_proven() -> None:
    training, proof = _Training(torch.optim.SGD, momentum=0.9, foreach=True), Proof()
    assert proof.verdict(training.run(proof, 3)) == Verdict("contracted", "contracted", 0.0)


def _rounds_roots_correctly() -> bool:
    values = torch.rand(1 << 16, generator=torch.Generator().manual_seed(3)) * 1e-3
    return torch.equal(values.sqrt(), values.double().sqrt().float())


def test_adamw_op_by_op_on_the_cpu_stays_on_the_device_and_its_share_is_told() -> None:
    """PyTorch's CPU roots are not all correctly rounded where its math library has them."""
    training, proof = _Training(torch.optim.AdamW, foreach=True), Proof()
    verdict = proof.verdict(training.run(proof, 3))
    assert verdict is not None
    assert verdict.arithmetic is None or _rounds_roots_correctly()
    assert 0.0 < verdict.share < 0.5 or _rounds_roots_correctly()


def test_the_nearest_is_taken_where_rounding_may_differ() -> None:
    training, proof = _Training(torch.optim.AdamW, foreach=True), Proof(exact=False)
    verdict = proof.verdict(training.run(proof, 3))
    assert verdict is not None and verdict.arithmetic == verdict.nearest


class _WithState(_Training):
    """Its moments are there, and zero, before the first update: as a trial of that one would find them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(torch.optim.AdamW, **options)
        for parameter in self.parameters:
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}


@pytest.mark.parametrize("only", [["plain"], ["plain", "double-apart"]])
def test_a_wrong_arithmetic_passes_the_first_update_and_is_refused_at_the_second(only: Sequence[str]) -> None:
    """`plain` is the right one but for fused multiply-adds."""
    training, proof = _WithState(fused=True), Proof(only=only)
    assert proof.verdict(training.run(proof)) is None  # all its bits are right so far
    verdict = proof.verdict(training.run(proof))
    assert verdict is not None and verdict.arithmetic is None and verdict.nearest == "plain" and verdict.share > 0.0


def _device_updates(proof: Proof, step: int, rule: Rule, arithmetic: str, kind: object = None) -> Capture:
    """A device that is known to round so makes an update; `step` counts from 1. Returns what a proof saw of it."""
    seeded = torch.Generator().manual_seed(step)
    scales = (2e-2, 1e-3, 1e-3, 1e-6)[: rule.tensor_count]
    tensors = tuple(torch.rand(1 << 16, generator=seeded).sub(0.5 if i < 3 else 0.0) * scale for i, scale in enumerate(scales))
    seen = Capture(rule, "float32", tensors, ("device", kind or rule.kind))
    trial, results = proof.begin([seen]), results_of(rule, arithmetic, "float32", tensors)
    for tensor, result in zip((tensors[0], *tensors[2:]), results, strict=True):
        tensor.copy_(result)
    proof.end(trial, step)
    return seen


_TOLD_LATER = [
    (rules.sgd(lr=0.5), rules.sgd(lr=0.05)),
    (rules.sgd(lr=0.25, momentum=0.9), rules.sgd(lr=0.3, momentum=0.9)),
    (rules.sgd(lr=0.0), rules.sgd(lr=0.01)),
    (_adamw(lr=0.0), _adamw(lr=1e-3)),
]


@pytest.mark.parametrize(("rule", "later"), _TOLD_LATER)
@pytest.mark.parametrize("arithmetic", ["plain", "device-ops-reciprocal", "double-first"])
def test_updates_that_do_not_tell_roundings_apart_prove_none(rule: Rule, later: Rule, arithmetic: str) -> None:
    """As a learning rate of 1/2, with which all products are exact: with the next one of a schedule bits would differ."""
    proof = Proof()
    for step in range(1, UPDATES_COMPARED_AT_MOST):
        seen = _device_updates(proof, step, rule, arithmetic)
        verdict = proof.verdict(seen)
        if verdict is not None:  # so much was told apart that what is left rounds alike
            assert not _makes_other_bits(later, verdict.arithmetic, arithmetic)
    verdict = proof.verdict(_device_updates(proof, UPDATES_COMPARED_AT_MOST, rule, arithmetic))
    assert verdict is not None and (verdict.arithmetic is None) == bool(verdict.rival)
    assert not _makes_other_bits(later, verdict.arithmetic, arithmetic)


@pytest.mark.parametrize(("rule", "later"), _TOLD_LATER)
def test_updates_prove_once_one_tells_roundings_apart(rule: Rule, later: Rule) -> None:
    proof = Proof()
    for step in (1, 2):
        _device_updates(proof, step, rule, "plain")
    verdict = proof.verdict(_device_updates(proof, 3, later, "plain"))
    assert verdict == Verdict("plain", "plain", 0.0)


def _makes_other_bits(rule: Rule, one: str | None, other: str) -> bool:
    return one is not None and told_apart(rule, "float32", one, other)


def test_what_was_proven_is_refused_when_a_later_comparison_fails() -> None:
    training, proof = _Training(torch.optim.AdamW, fused=True), Proof()
    found = training.run(proof, 3)
    trial = proof.begin([found])
    training.optimizer.step()
    training.parameters[0].data[0] += 1.0  # as a device that rounds in another way from now on
    proof.end(trial, 4)
    verdict = proof.verdict(found)
    assert verdict is not None and verdict.arithmetic is None and verdict.share > 0.0


def test_another_arithmetic_does_not_take_the_place_of_a_proven_one_unseen() -> None:
    """Two that rounded alike do so no more: by the first of them updates were made, which may have been wrong."""
    proof, rule = Proof(only=("double-first", "double-second")), rules.sgd(lr=0.3, momentum=0.9)
    for step in (1, 2):
        seen = _device_updates(proof, step, rule, "double-second")
    assert proof.verdict(seen) == Verdict("double-first", "double-first", 0.0)
    later = rules.sgd(lr=0.3, momentum=0.9, dampening=0.1)
    verdict = proof.verdict(_device_updates(proof, 3, later, "double-second", rule.kind))
    assert verdict is not None and (verdict.arithmetic, verdict.nearest) == (None, "double-first")
    assert verdict.share > 0.0


def test_sgd_without_dampening_proves_nothing_of_sgd_with_it() -> None:
    """Times 1 a gradient is not rounded, so that nothing tells which of two products is joined to their sum."""
    plain, dampened = rules.sgd(lr=0.3, momentum=0.9), rules.sgd(lr=0.3, momentum=0.9, dampening=0.1)
    assert not told_apart(plain, "float32", "double-first", "double-second")
    assert told_apart(dampened, "float32", "double-first", "double-second")
    proof = Proof()
    for step in (1, 2):
        seen = _device_updates(proof, step, plain, "double-second")
    assert proof.verdict(seen) is not None
    assert proof.verdict(_device_updates(proof, 3, dampened, "double-second")) is None
    verdict = proof.verdict(_device_updates(proof, 4, dampened, "double-second"))
    assert verdict == Verdict("double-second", "double-second", 0.0)
    assert rules.sgd(lr=0.3, dampening=0.1).kind == rules.sgd(lr=0.3).kind


def test_options_count_as_they_are_at_the_moment() -> None:
    training, proof = _Training(torch.optim.AdamW, fused=True), Proof()
    training.run(proof, 1)
    captures = training.set_gradients()
    training.optimizer.param_groups[0]["lr"] = 0.5  # as a scheduler does
    later = training.set_gradients()
    assert captures[0].rule.scalars["step"] == pytest.approx(later[0].rule.scalars["step"] / 500)
    assert captures[0].kind == later[0].kind


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.RMSprop, {}),
        (torch.optim.AdamW, {"capturable": True, "foreach": False}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-3), "foreach": False}),
        (type("Own", (torch.optim.AdamW,), {}), {}),
    ],
)
def test_what_no_kernel_is_known_to_make_is_not_captured(make: Any, options: dict[str, Any]) -> None:
    training = _Training(make, **options)
    for parameter in training.parameters:
        state = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        training.optimizer.state[parameter] = {"step": torch.tensor(1.0), **state}
    assert training.set_gradients() == []


def test_tensors_that_lie_otherwise_are_not_captured() -> None:
    training, proof = _Training(torch.optim.AdamW, fused=True), Proof()
    training.run(proof, 1)
    parameter = training.parameters[0]
    parameter.grad = torch.ones(2 * parameter.numel())[::2]
    assert capture(training.optimizer, training.optimizer.param_groups[0], parameter) is None


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adamax]
)
def test_a_class_is_said_to_have_kernels_where_its_updates_are_captured(make: Any) -> None:
    training = _Training(make)
    training.set_gradients()
    training.optimizer.step()
    assert bool(training.set_gradients()) is has_kernels(make)


def test_a_subclass_has_no_kernels() -> None:
    assert not has_kernels(type("AdamW", (torch.optim.AdamW,), {}))
