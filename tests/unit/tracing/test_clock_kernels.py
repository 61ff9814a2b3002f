"""The kernels that a dry trace takes for an accelerator, rounds of gradients, and updates in backward."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tieroff import DryModel
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import RUNTIME_EXECUTOR
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace, validate
from tieroff.errors import CaptureError
from tieroff.planner.make_plan import make_plan
from tieroff.tracing.dry import dry_trace

MACHINE = Machine(
    "paper",
    fp32_flops_per_s=1e13,
    bf16_flops_per_s=1e14,
    device_memory_bytes_per_s=10**12,
    d2h_bytes_per_s=10**10,
    h2d_bytes_per_s=10**10,
    host_bytes=10**12,
)
SEQUENCE, WIDTH, HEADS = 512, 64, 4
SCORES_BYTES = 2 * HEADS * SEQUENCE * SEQUENCE * 2  # of a batch of two, in bf16


class Names:
    """Prices nothing, and keeps which kernels ran."""

    is_repeatable: ClassVar[bool] = False

    def __init__(self) -> None:
        self.seen: list[str] = []

    def duration_ns(self, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        self.seen.append(func._overloadpacket.__name__)
        return 1000


class Block(nn.Module):
    def __init__(self, *, is_recomputed: bool = False) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_recomputed = is_recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.is_recomputed else self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(self.norm(x)).view(2, SEQUENCE, 3 * HEADS, -1).transpose(1, 2).split(HEADS, dim=1)
        mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=x.device).tril() if x.dtype is torch.float32 else None
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return x + F.dropout(self.out(y.transpose(1, 2).reshape(2, SEQUENCE, WIDTH)), 0.1)


def blocks(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    is_recomputed = options.pop("is_recomputed", False)

    def factory() -> DryModel:
        model = nn.Sequential(*(Block(is_recomputed=is_recomputed) for _ in range(3))).to(dtype)
        return DryModel(model, (torch.randn(2, SEQUENCE, WIDTH, dtype=dtype),), **options)

    return factory


def traced(factory: Any, kernels: str = "cuda") -> tuple[Trace, list[str]]:
    names = Names()
    trace = dry_trace(factory, MACHINE, 1024, kernels=kernels, prices=names)
    validate(trace)
    return trace, names.seen


def test_attention_in_bf16_keeps_no_scores() -> None:
    trace, seen = traced(blocks())
    assert seen.count("_scaled_dot_product_flash_attention") == 3
    assert seen.count("_scaled_dot_product_flash_attention_backward") == 3
    assert max(op.transient_bytes for op in trace.ops) < SCORES_BYTES
    assert all(t.size_bytes < SCORES_BYTES for t in trace.tensors if t.kind is TensorClass.ACTIVATION)


def test_attention_with_a_mask_in_fp32_takes_the_efficient_kernel() -> None:
    _, seen = traced(blocks(torch.float32))
    assert seen.count("_scaled_dot_product_efficient_attention") == 3
    assert seen.count("_scaled_dot_product_efficient_attention_backward") == 3


def test_dropout_and_norms_are_one_kernel() -> None:
    _, seen = traced(blocks())
    assert seen.count("native_dropout") == 3 and "bernoulli_" not in seen
    assert seen.count("native_layer_norm") == 3 and "rsqrt" not in seen


def test_layers_that_run_again_take_the_same_kernels_as_in_forward() -> None:
    _, seen = traced(blocks(is_recomputed=True))
    assert seen.count("_scaled_dot_product_flash_attention") == 6
    assert not any("for_cpu" in name for name in seen)


def test_kernels_of_the_cpu_are_left_alone() -> None:
    _, seen = traced(blocks(), kernels="cpu")
    assert "bernoulli_" in seen and "_scaled_dot_product_flash_attention" not in seen


def test_optimizer_updates_together_unless_it_was_told_how() -> None:
    _, seen = traced(blocks())
    assert "_foreach_addcdiv_" in seen
    _, seen = traced(blocks(optimizer=lambda params: torch.optim.AdamW(params, foreach=False)))
    assert "_foreach_addcdiv_" not in seen
    _, seen = traced(blocks(optimizer=lambda params: torch.optim.AdamW(params, fused=True)))
    assert "_fused_adamw_" in seen and "_foreach_addcdiv_" not in seen


def test_autocast_computes_in_its_type() -> None:
    _, plain = traced(blocks(torch.float32))
    _, cast = traced(blocks(torch.float32, autocast=torch.bfloat16))
    assert cast.count("_to_copy") > plain.count("_to_copy") + 6  # weights and inputs of six layers


def test_rounds_add_up_in_the_same_gradients() -> None:
    one, _ = traced(blocks())
    three, _ = traced(blocks(rounds=3))
    forwards = [[op.name for op in trace.ops].count("forward") for trace in (one, three)]
    assert forwards == [1, 3]

    def gradients(trace: Trace) -> list[int]:
        return [index for index, tensor in enumerate(trace.tensors) if tensor.kind is TensorClass.GRADIENT]

    assert len(gradients(three)) == len(gradients(one))
    writes = [sum(g in op.writes for op in three.ops if op.phase == "backward") for g in gradients(three)]
    assert min(writes) >= 3
    buckets = [[op.name for op in trace.ops if op.phase == "optimizer"] for trace in (one, three)]
    assert buckets[0] == buckets[1]


def test_rounds_below_one_are_refused() -> None:
    with pytest.raises(CaptureError, match="expected 1 round of forward and backward per update or more, got 0"):
        traced(blocks(rounds=0))


def test_updates_in_backward_run_once_each_before_its_end_and_let_gradients_go() -> None:
    late, _ = traced(blocks(rounds=2))
    early, _ = traced(blocks(rounds=2, update_in_backward=True))
    names = [op.name for op in early.ops]
    assert sorted(n for n in names if n.startswith("bucket:")) == sorted(op.name for op in late.ops if "bucket:" in op.name)
    last_gradient = max(i for i, op in enumerate(early.ops) if op.name.startswith("grad:"))
    first_update = names.index(next(n for n in names if n.startswith("bucket:")))
    assert first_update < last_gradient
    second_forward = len(names) - 1 - names[::-1].index("forward")
    assert first_update > second_forward  # of the last round
    ends = [tensor.lives_until for tensor in early.tensors if tensor.kind is TensorClass.GRADIENT]
    assert min(ends) < last_gradient < max(ends)
    for op in early.ops:  # an update is an op of its own: the gradient that comes next is no part of it
        touched = [early.tensors[index] for index in {*op.reads, *op.writes} if op.name.startswith("bucket:")]
        own = {index for index in {*op.reads, *op.writes} if early.tensors[index].kind is TensorClass.PARAMETER}
        assert {t.owner for t in touched if t.kind is TensorClass.GRADIENT} <= own
        assert not [t for t in touched if t.kind is TensorClass.ACTIVATION]


def test_a_step_in_rounds_is_planned_for_the_runtime() -> None:
    trace, _ = traced(blocks(rounds=2, update_in_backward=True))
    plan = make_plan(trace, MACHINE, {Tier.DEVICE: trace.peak_bytes * 7 // 10}, capabilities=RUNTIME_EXECUTOR)
    check(plan, trace, RUNTIME_EXECUTOR)
    assert any(transfer.target is Tier.HOST for transfer in plan.transfers)
