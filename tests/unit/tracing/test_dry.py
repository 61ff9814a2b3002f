"""A dry trace: the same structure as that of a real step, nothing materialised, durations by roofline."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tieroff
from tests.support.models import GPT, Checkpointed, InPlace
from tieroff import DryModel
from tieroff.core.buckets import UPDATED_ON_DEVICE, updated_on_device
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import Capabilities
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.errors import CaptureError, ConfigError
from tieroff.planner.make_plan import make_plan
from tieroff.planner.problem.problem import live_bytes
from tieroff.tracing.dry import dry_trace
from tieroff.tracing.factory import find_factory
from tieroff.tracing.recorder import StepRecorder
from tieroff.tracing.recording.scratch import PeakCounter
from tieroff.tracing.roofline import Roofline

MIN_BYTES = 1024
MACHINE = Machine(
    "paper",
    fp32_flops_per_s=1e12,
    bf16_flops_per_s=8e12,
    device_memory_bytes_per_s=10**11,
    d2h_bytes_per_s=10**9,
    h2d_bytes_per_s=10**9,
    host_bytes=10**12,
)


def next_token(model: nn.Module) -> DryModel:
    x = torch.randint(0, 50, (4, 16))
    return DryModel(model, (x,), lambda out: nn.functional.cross_entropy(out.flatten(0, 1), x.flatten()))


def cnn() -> DryModel:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.Dropout(0.1),
        nn.Linear(64, 10),
    )
    return DryModel(model, (torch.randn(8, 3, 32, 32),))


def frozen() -> DryModel:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    model[2].requires_grad_(False)
    return DryModel(model, (torch.randn(16, 32),), optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))


def groups() -> DryModel:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def optimizer(params: Any) -> torch.optim.Optimizer:
        first, *others = params
        return torch.optim.Adam([{"params": others, "lr": 0.1}, {"params": [first], "weight_decay": 0.1}])

    return DryModel(model, (torch.randn(32, 64),), lambda out: out.square().mean(), optimizer)


class Half(nn.Module):
    """Returns a dictionary, takes keywords, recomputes in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, *, x: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        y = checkpoint(lambda z: self.second(self.first(z).relu()), x, use_reentrant=False)
        return {"y": y * scale, "x": x}


def half() -> DryModel:
    return DryModel(Half().to(torch.bfloat16), {"x": torch.randn(32, 64, dtype=torch.bfloat16), "scale": 2.0})


FACTORIES: dict[str, Callable[[], DryModel]] = {
    "gpt": lambda: next_token(GPT()),
    "tied gpt": lambda: next_token(GPT(is_tied=True)),
    "cnn": cnn,
    "frozen": frozen,
    "groups": groups,
    "half": half,
    "in place": lambda: DryModel(InPlace(), (torch.randn(16, 32),)),
    "checkpointed": lambda: DryModel(Checkpointed(is_reentrant=False), (torch.randn(16, 32),)),
    "reentrant": lambda: DryModel(Checkpointed(is_reentrant=True), (torch.randn(16, 32, requires_grad=True),)),
}


def real_trace(factory: Callable[[], DryModel]) -> Trace:
    """Returns the trace that a wrapped model's first step gives."""
    made = factory()
    args, kwargs = ((), made.inputs) if isinstance(made.inputs, dict) else (made.inputs, {})
    optimizer = (made.optimizer or torch.optim.AdamW)(made.model.parameters())
    config = {"device": "cpu", "budget": {"device": "90%", "host": "64MiB", "strict": True}, "plan": {"min_bytes": MIN_BYTES}}
    model = tieroff.wrap(made.model, optimizer, config)
    try:
        for _ in range(2):
            out = model(*args, **kwargs)
            parts = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            loss = made.loss(out) if made.loss else functools.reduce(operator.add, [part.float().sum() for part in parts])
            del out, parts
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return tieroff.engine(model).trace
    finally:
        tieroff.unwrap(model)


def ops_in(intervals: tuple[tuple[int, int], ...]) -> set[int]:
    return {op for start, stop in intervals for op in range(start, stop)}


@pytest.fixture
def _no_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels of the CPU take for themselves shows in the process's memory only: no fake tensor knows it."""
    monkeypatch.setattr(PeakCounter, "reset", lambda self: False)


@pytest.mark.usefixtures("_no_scratch")
@pytest.mark.parametrize("name", FACTORIES)
def test_dry_trace_has_the_structure_of_the_real_one(name: str) -> None:
    torch.manual_seed(0)
    real = real_trace(FACTORIES[name])
    dry = dry_trace(FACTORIES[name], MACHINE, MIN_BYTES)
    assert [(op.name, op.phase, op.transient_bytes) for op in dry.ops] == [
        (op.name, op.phase, op.transient_bytes) for op in real.ops
    ]
    assert [(t.name, t.size_bytes, t.kind, t.is_persistent, t.owner, t.lives_until) for t in dry.tensors] == [
        (t.name, t.size_bytes, t.kind, t.is_persistent, t.owner, t.lives_until) for t in real.tensors
    ]
    assert live_bytes(dry).tolist() == live_bytes(real).tolist()
    for ours, theirs in zip(dry.lifetimes, real.lifetimes, strict=True):
        # A recorded step keeps a parameter or two at hand for longer than it needs them; a dry one does not.
        if dry.tensors[ours.tensor].kind is TensorClass.PARAMETER:
            assert ops_in(ours.required) <= ops_in(theirs.required)
        else:
            assert (ours.birth, ours.death) == (theirs.birth, theirs.death)


def test_dry_trace_materialises_nothing() -> None:
    def petabytes() -> DryModel:
        width = 10**7
        return DryModel(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)), (torch.randn(4, width),))

    trace = dry_trace(petabytes, MACHINE)
    parameters = sum(t.size_bytes for t in trace.tensors if t.kind is TensorClass.PARAMETER)
    assert parameters == 2 * 4 * (10**14 + 10**7)
    assert live_bytes(trace).max() > 4 * parameters
    assert (trace.origin, trace.meta["durations"]) == ("dry", "estimated: roofline of machine paper")


def test_dry_trace_of_a_gpu_names_what_the_cpu_does_not_update() -> None:
    def factory() -> DryModel:
        return DryModel(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 33)), (torch.randn(4, 64),))

    assert updated_on_device(dry_trace(factory, MACHINE, kernels="cuda").meta) == {"1.bias"}
    assert UPDATED_ON_DEVICE not in dry_trace(factory, MACHINE).meta


@pytest.mark.parametrize(("dtype", "rate"), [(torch.float32, 1e12), (torch.bfloat16, 8e12), (torch.float16, 8e12)])
def test_durations_are_arithmetic_where_it_binds(dtype: torch.dtype, rate: float) -> None:
    def factory() -> DryModel:
        model = nn.Linear(512, 2048, bias=False, dtype=dtype)
        return DryModel(model, (torch.randn(4096, 512, dtype=dtype),), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))

    fast_memory = Machine(fp32_flops_per_s=1e12, bf16_flops_per_s=8e12, device_memory_bytes_per_s=10**18)
    spent_s = dry_trace(factory, fast_memory).ideal_ns / 1e9
    assert spent_s == pytest.approx(2 * 2 * 4096 * 512 * 2048 / rate, rel=1e-4)  # forward, and the gradient of the weight


def estimated(op: Any, *args: Any) -> int:
    """Returns the ns of an op on meta tensors, at a byte per ns and no limit on arithmetic."""
    roofline = Roofline.of(Machine(fp32_flops_per_s=1e30, device_memory_bytes_per_s=10**9))
    return roofline.duration_ns(op, args, {}, op(*args))


def test_durations_are_memory_traffic_where_it_binds() -> None:
    aten = torch.ops.aten
    a, b = torch.empty(8, 512, device="meta"), torch.empty(512, 64, device="meta")
    assert estimated(aten.mm.default, a, b) == 4 * (8 * 512 + 512 * 64 + 8 * 64)
    assert estimated(aten.add_.Tensor, a, a) == 3 * 4 * 8 * 512
    assert estimated(aten.sum.default, torch.ones(1, device="meta").expand(1000)) == 4 + 4  # an expanded tensor has one element
    assert estimated(aten._foreach_add_.Scalar, [a, b], 1.0) == 4 * (8 * 512 + 512 * 64)


def test_views_and_memory_that_is_only_taken_cost_nothing() -> None:
    aten = torch.ops.aten
    a = torch.empty(8, 512, device="meta")
    assert estimated(aten.t.default, a) == estimated(aten.view.default, a, [4096]) == estimated(aten.detach.default, a) == 0
    assert estimated(aten.empty_like.default, a) == estimated(aten._unsafe_view.default, a, [4096]) == 0


def test_lookup_reads_rows_and_not_the_table() -> None:
    table, rows = torch.empty(10**9, 64, device="meta"), torch.empty(4, dtype=torch.long, device="meta")
    assert estimated(torch.ops.aten.embedding.default, table, rows) == 4 * 8 + 2 * 4 * 4 * 64


def test_attention_counts_its_arithmetic() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x * self.scale, x, x, is_causal=True)

    machine = Machine(fp32_flops_per_s=1e12, device_memory_bytes_per_s=10**18)
    trace = dry_trace(lambda: DryModel(Attention(), (torch.randn(2, 4, 512, 64),)), machine)
    forward_flops = 2 * 2 * (2 * 4 * 512 * 512 * 64)
    assert trace.ideal_ns / 1e9 == pytest.approx(forward_flops * (1 + 2.5) / 1e12, rel=1e-3)  # two products, and five back
    largest = max(t.size_bytes for t in trace.tensors if t.kind is TensorClass.ACTIVATION)
    assert largest == 4 * 2 * 4 * 512 * 64  # no matrix of scores is kept


@pytest.mark.parametrize("policy", ["auto", "floor"])
def test_dry_trace_can_be_planned(policy: str) -> None:
    trace = dry_trace(FACTORIES["gpt"], MACHINE, MIN_BYTES)
    budget = {Tier.DEVICE: int(live_bytes(trace).max() * 0.6)}
    capabilities = Capabilities()
    plan = make_plan(trace, MACHINE, budget, policy, capabilities=capabilities)
    check(plan, trace, capabilities)
    assert plan.transfers
    assert plan.peak_bytes[Tier.DEVICE] <= budget[Tier.DEVICE]


def test_tuple_gets_the_default_loss_and_optimizer() -> None:
    trace = dry_trace(lambda: (nn.Linear(64, 64), (torch.randn(8, 64),)), MACHINE, 0)
    names = {tensor.name for tensor in trace.tensors}
    assert {"weight", "bias", "gradient of weight", "exp_avg of weight", "exp_avg_sq of bias"} <= names
    assert trace.name == "Linear"


def test_gradient_that_nobody_clears_wraps_round_the_step() -> None:
    def factory() -> DryModel:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        return DryModel(model, (torch.randn(8, 64),), optimizer=lambda params: torch.optim.SGD(list(params)[2:], lr=0.1))

    kinds = {t.name: t.is_persistent for t in dry_trace(factory, MACHINE, MIN_BYTES).tensors}
    assert (kinds["gradient of 0.weight"], kinds["gradient of 1.weight"]) == (True, False)


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if (x > 0).any() else x


class Choosing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).argmax()


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: nn.Linear(4, 4), "got Linear"),
        (lambda: ("model", (1,)), "got str"),
        (lambda: (nn.Linear(4, 4), torch.randn(2, 4)), "got Tensor"),
        (lambda: (nn.Linear(4, 4), (torch.randn(2, 5),)), "needs the values of tensors"),
        (lambda: (nn.Embedding(4, 4).requires_grad_(False), (torch.zeros(2, dtype=torch.long),)), "depends on a parameter"),
        (lambda: DryModel(nn.Linear(4, 4), (torch.randn(2, 4),), lambda out: out), r"got \(2, 4\)"),
        (lambda: DryModel(nn.Linear(4, 4), (torch.randn(2, 4),), lambda out: 3.0), "got float"),  # type: ignore[arg-type, return-value]
        (lambda: (Choosing(4, 4), (torch.randn(2, 4),)), "expected the model to return a floating-point tensor"),
        (lambda: (Branching(4, 4), (torch.randn(2, 4),)), "trace a real step instead"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_factory_that_cannot_be_run_dry_is_an_error_that_says_why(made: Callable[[], Any], told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        dry_trace(made, MACHINE)


@pytest.mark.parametrize(
    ("machine", "missing"),
    [
        (Machine("a", fp32_flops_per_s=1e12), "device_memory_bytes_per_s is missing"),
        (Machine("a", device_memory_bytes_per_s=1, bf16_flops_per_s=1e12), "fp32_flops_per_s is missing"),
    ],
)
def test_machine_without_a_roofline_is_an_error_that_names_its_keys(machine: Machine, missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        dry_trace(FACTORIES["gpt"], machine)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("json", "MODULE:FACTORY"),
        (":dumps", "MODULE:FACTORY"),
        ("no.such.module:f", "no.such"),
        ("json:nothing", "nothing"),
        ("json:__name__", "got str"),
    ],
)
def test_factory_that_is_not_there_is_an_error(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        find_factory(text)


def test_factory_may_be_a_name_inside_a_class() -> None:
    factory: Callable[..., Any] = find_factory("math:pi.__add__")
    assert factory(1) == math.pi + 1


def test_torch_has_its_own_functions_again_after_dry_and_recorded_steps() -> None:
    own = torch.ctc_loss
    dry_trace(FACTORIES["gpt"], MACHINE, MIN_BYTES)
    recorder = StepRecorder(torch.device("cpu"))
    recorder.start()
    try:
        assert torch.ctc_loss is not own
    finally:
        recorder.stop()
    assert torch.ctc_loss is own
