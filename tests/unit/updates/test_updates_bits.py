"""Updates in host memory give the bits of PyTorch's own, and a wrong arithmetic is found at the second update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tieroff.updates import rule as rules
from tieroff.updates.arithmetic import candidates
from tieroff.updates.native import HAS_UPDATES, _native
from tieroff.updates.rule import Rule

pytestmark = pytest.mark.skipif(not HAS_UPDATES, reason="built without updates in host memory")

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
_ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
# PyTorch's CPU kernels take whole vectors, of up to 32 elements, and round what is left otherwise.
_COUNT = 65_536 + 32

_MakeRule = Callable[[float], Rule]


def _adam(**options: Any) -> tuple[type, dict[str, Any], _MakeRule]:
    own = {**_ADAM, "weight_decay": 1e-2, **options}
    return torch.optim.AdamW, own, lambda step: rules.adam(step, **own, decouples=True)


def _adam_coupled(**options: Any) -> tuple[type, dict[str, Any], _MakeRule]:
    own = {**_ADAM, "weight_decay": 0.0, **options}
    return torch.optim.Adam, own, lambda step: rules.adam(step, **own, decouples=False)


def _sgd(**options: Any) -> tuple[type, dict[str, Any], _MakeRule]:
    own = {"lr": 1e-2, **options}
    return torch.optim.SGD, own, lambda step: rules.sgd(**own, is_first=step == 1 and bool(own.get("momentum")))


def _adagrad(**options: Any) -> tuple[type, dict[str, Any], _MakeRule]:
    own = {"lr": 1e-2, **options}
    return torch.optim.Adagrad, own, lambda step: rules.adagrad(step, **own)


def _address(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def _steps(
    made: tuple[type, dict[str, Any], _MakeRule], type_name: str, arithmetic: str, count: int, steps: int, **mode: bool
) -> Iterator[float]:
    """Yields, step by step, the share of elements that differ between PyTorch's update and ours."""
    make_optimizer, options, make_rule = made
    seeded = torch.Generator().manual_seed(0)
    dtype = _TYPES[type_name]
    start = (torch.randn(count, generator=seeded) * 0.02).to(dtype)
    spread = torch.exp(2 * torch.randn(count, generator=seeded)) * 1e-3
    gradient = (torch.randn(count, generator=seeded) * spread).to(dtype)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make_optimizer([parameter], **options, **mode)
    needed = make_rule(1.0).tensor_count
    own = [start.clone(), gradient, *(torch.zeros_like(start) for _ in range(needed - 2))]
    for step in range(1, steps + 1):
        own[1] = torch.roll(gradient, step * 7919).contiguous()
        parameter.grad = own[1].clone()
        optimizer.step()
        make_rule(float(step)).part(arithmetic, type_name, count, _address(own), _address(own)).run()
        state = optimizer.state[parameter]
        theirs = [parameter.detach(), *(state[key] for key in _KEYS if torch.is_tensor(state.get(key)))]
        ours = [own[0], *own[2:]]
        assert len(theirs) == len(ours)
        yield max((_bits(a) != _bits(b)).double().mean().item() for a, b in zip(theirs, ours, strict=True))


_EQUAL = [
    ("AdamW", _adam(), {"fused": True}, ("float32", "bfloat16")),
    ("AdamW, amsgrad, maximize", _adam(amsgrad=True, maximize=True), {"fused": True}, ("float32", "bfloat16")),
    ("AdamW, no decay", _adam(weight_decay=0.0), {"fused": True}, ("float32", "bfloat16")),
    ("Adam", _adam_coupled(), {"fused": True}, ("float32", "bfloat16")),
    ("Adam, decay, small beta1", _adam_coupled(weight_decay=0.1, betas=(0.4, 0.95)), {"fused": True}, ("float32", "bfloat16")),
    ("SGD", _sgd(), {"foreach": True}, ("float32",)),
    ("SGD, momentum", _sgd(momentum=0.9), {"foreach": True}, ("float32",)),
    ("SGD, momentum, op by op", _sgd(momentum=0.9), {"foreach": False}, ("float32",)),
    ("SGD, momentum, fused", _sgd(momentum=0.9, weight_decay=1e-3), {"fused": True}, ("float32",)),
    (
        "SGD, nesterov, maximize",
        _sgd(momentum=0.9, nesterov=True, weight_decay=1e-3, maximize=True),
        {"foreach": True},
        ("float32",),
    ),
    ("SGD, dampening", _sgd(momentum=0.9, dampening=0.3, weight_decay=1e-3), {"foreach": True}, ("float32",)),
    ("Adagrad", _adagrad(weight_decay=1e-3, lr_decay=0.01), {"fused": True}, ("float32",)),
]


@pytest.mark.parametrize(
    ("made", "mode", "type_name"),
    [pytest.param(made, mode, t, id=f"{name}-{t}") for name, made, mode, types in _EQUAL for t in types],
)
def test_an_update_has_the_bits_of_pytorch(
    made: tuple[type, dict[str, Any], _MakeRule], mode: dict[str, bool], type_name: str
) -> None:
    assert list(_steps(made, type_name, "contracted", _COUNT, 8, **mode)) == [0.0] * 8


@pytest.mark.long
@pytest.mark.parametrize("type_name", ["float32", "bfloat16"])
def test_ten_million_elements_and_twenty_steps_have_the_bits_of_fused_adamw(type_name: str) -> None:
    assert list(_steps(_adam(), type_name, "contracted", 10_000_000, 20, fused=True)) == [0.0] * 20


@pytest.mark.long
def test_ten_million_elements_and_twenty_steps_have_the_bits_of_sgd_with_momentum() -> None:
    assert list(_steps(_sgd(momentum=0.9), "float32", "contracted", 10_000_000, 20, foreach=True)) == [0.0] * 20


@pytest.mark.parametrize("type_name", ["float32", "bfloat16"])
def test_products_and_sums_apart_pass_the_first_update_and_fail_the_second(type_name: str) -> None:
    """From zero moments a fused multiply-add and its parts give the same: one update proves nothing."""
    first, second = _steps(_adam(), type_name, "plain", _COUNT, 2, fused=True)
    assert first == 0.0
    assert second > 0.0


def test_no_arithmetic_has_the_bits_of_adamw_op_by_op_on_the_cpu() -> None:
    """PyTorch's CPU roots are not all correctly rounded where its math library has them; elsewhere one may be equal."""
    shares = {name: list(_steps(_adam(), "float32", name, _COUNT, 3, foreach=True)) for name in candidates(_adam()[2](1.0))}
    values = torch.rand(_COUNT, generator=torch.Generator().manual_seed(3)) * 1e-3
    rounds_roots = torch.equal(values.sqrt(), values.double().sqrt().float())
    assert rounds_roots or all(share[-1] > 0.0 for share in shares.values())


@pytest.mark.parametrize("type_name", ["float32", "bfloat16"])
def test_a_factor_is_a_product_of_its_own(type_name: str) -> None:
    dtype = _TYPES[type_name]
    seeded = torch.Generator().manual_seed(1)
    tensors = [torch.randn(1001, generator=seeded).to(dtype) for _ in range(2)]
    factors = [float(torch.tensor(f, dtype=dtype)) for f in (0.37123, 0.3)]
    scaled = tensors[1].clone()
    for factor in factors:
        scaled.mul_(torch.tensor(factor, dtype=dtype))
    expected, rule = tensors[0].clone(), rules.sgd(lr=0.1)
    rule.part("contracted", type_name, 1001, _address([expected, scaled]), _address([expected, scaled])).run()
    before = tensors[1].clone()
    rule.part("contracted", type_name, 1001, _address(tensors), _address(tensors), factors).run()
    assert torch.equal(_bits(tensors[0]), _bits(expected)) and torch.equal(tensors[1], before)


def test_lion_moves_by_the_sign_of_its_direction() -> None:
    seeded = torch.Generator().manual_seed(1)
    parameter, gradient, moment = (torch.randn(333, generator=seeded) for _ in range(3))
    expected, expected_moment = parameter.clone(), moment.clone()
    expected.mul_(1 - 0.1 * 0.01).add_(expected_moment.clone().mul_(0.9).add_(gradient, alpha=1 - 0.9).sign_(), alpha=-0.1)
    expected_moment.mul_(0.99).add_(gradient, alpha=1 - 0.99)
    addresses = _address([parameter, gradient, moment])
    rules.lion(lr=0.1, betas=(0.9, 0.99), weight_decay=0.01).part("contracted", "float32", 333, addresses, addresses).run()
    assert torch.equal(parameter, expected) and torch.equal(moment, expected_moment)


def test_results_may_go_to_other_memory() -> None:
    seeded = torch.Generator().manual_seed(1)
    read = [torch.rand(777, generator=seeded) for _ in range(4)]
    kept = [tensor.clone() for tensor in read]
    written = [torch.full((777,), -1.0) for _ in range(4)]
    part = _adam()[2](3.0).part("contracted", "float32", 777, _address(read), _address(written))
    part.run()
    assert all(torch.equal(a, b) for a, b in zip(read, kept, strict=True))
    assert torch.equal(written[1], torch.full((777,), -1.0))
    in_place = _adam()[2](3.0).part("contracted", "float32", 777, _address(read), _address(read))
    in_place.run()
    assert all(torch.equal(read[i], written[i]) for i in (0, 2, 3))
    assert part.moved_bytes == 777 * 4 * 7


@pytest.mark.parametrize("type_name", ["float32", "bfloat16"])
@pytest.mark.parametrize("arithmetic", candidates(rules.sgd(lr=1.0)))
def test_instruction_sets_give_the_same_bits(type_name: str, arithmetic: str) -> None:
    dtype = _TYPES[type_name]

    def result(instructions: str, make: _MakeRule) -> list[torch.Tensor]:
        seeded = torch.Generator().manual_seed(2)
        tensors = [torch.rand(1003, generator=seeded).to(dtype) for _ in range(make(2.0).tensor_count)]
        tensors[-1][::7] = float("nan")
        tensors[1][::11] = float("inf")
        make(2.0).part(arithmetic, type_name, 1003, _address(tensors), _address(tensors)).run_with(instructions)
        return [torch.nan_to_num(t, nan=-77.0) for t in tensors]

    for _, _, make in (_adam(amsgrad=True), _adam_coupled(weight_decay=0.1), _sgd(momentum=0.9, nesterov=True)):
        expected = result("portable", make)
        for name in _native.update_instructions():
            found = result(name, make)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), name


def test_a_part_with_too_few_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="addresses of 4 tensors"):
        _adam()[2](1.0).part("contracted", "float32", 1, [1, 2, 3], [1, 2, 3])
    with pytest.raises(ValueError, match="expected one of plain, contracted"):
        _sgd()[2](1.0).part("exact", "float32", 1, [1, 2], [1, 2])
