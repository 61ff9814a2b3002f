"""Computing in bf16 over float32 homes: bit for bit what FSDP2's mixed precision computes on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

import tieroff
from tests.support.models import (
    DROPOUT,
    GPT,
    GPT_WORKLOAD,
    MLP_WORKLOAD,
    WIDTH,
    Checkpointed,
    Recurrent,
    Unused,
    accumulate,
    frozen,
    images,
    next_token,
    sequences,
    tokens,
    under_autocast,
    vectors,
)
from tests.support.parity import (
    BACKENDS,
    HOST,
    NVME,
    Tiers,
    Trainer,
    Workload,
    adamw,
    assert_equal,
    assert_planned,
    config_for,
    copy_of,
    run_plain,
    run_wrapped,
)
from tieroff.errors import StateError
from tieroff.runtime.engine import Engine
from tieroff.runtime.movable import local_of

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

BF16 = {"compute_dtype": "bf16"}


def cnn() -> nn.Module:
    """Without batch normalization, which refuses float32 buffers beside bf16 weights on the CPU, under FSDP2 as well."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


class Attention(nn.Module):
    """Reads weights of a child that it does not call, and inputs of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x[:, mask])


WORKLOADS = (
    GPT_WORKLOAD,
    Workload("tied_and_shared", lambda: GPT(is_tied=True), tokens, next_token),
    Workload("attention", Attention, lambda: (*sequences(), torch.tensor([0, 2, 5]))),
    Workload("lstm", lambda: Recurrent(nn.LSTM), sequences),
    Workload("cnn", cnn, images),
    DROPOUT,
    Workload("checkpoint", lambda: Checkpointed(is_reentrant=False), vectors),
    Workload("frozen", frozen, vectors),
    Workload("unused", Unused, vectors),
    replace(GPT_WORKLOAD, name="accumulation", step=accumulate),
    replace(GPT_WORKLOAD, name="autocast", objective=under_autocast),
)


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Returns a factory of the same model under FSDP2, on one rank."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def build_sharded() -> nn.Module:
        model = build()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        return model

    return build_sharded


def clip(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Clips by the norm of the plain tensors: that of DTensors is summed in another order."""
    grads = [local_of(p.grad) for p in parameters if p.grad is not None]
    holders = [torch.empty_like(grad).requires_grad_() for grad in grads]
    for holder, grad in zip(holders, grads, strict=True):
        holder.grad = grad
    return nn.utils.clip_grad_norm_(holders, limit)


def check(workload: Workload, backend: str, folder: Path, tiers: Tiers = NVME, **config: Any) -> Engine:
    """Asserts that a workload computes what it computes under FSDP2, and that it ran as planned."""
    engines: list[Engine] = []
    peaks: list[int] = []
    given = config_for(tiers, folder) | BF16
    given["plan"] = given["plan"] | config

    def after_step(index: int, engine: Engine) -> None:
        engines.append(engine)
        if index >= workload.steps - 3:
            assert_planned(engine, tiers, peaks[-1], expected.unseen_bytes)

    expected = run_plain(replace(workload, build=sharded(workload.build)), torch.device("cpu"), clip=clip)
    assert_equal(expected, run_wrapped(workload, given, BACKENDS[backend](), after_step, peaks=peaks, clip=clip))
    assert {value.dtype for value in expected.gradients[-1].values()} == {torch.float32}
    return engines[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_it_computes_what_fsdp2_computes(workload: Workload, backend: str, tmp_path: Path) -> None:
    check(workload, backend, tmp_path, HOST if backend == "delayed" else NVME)


@pytest.mark.parametrize("kept", [{"min_bytes": "1MiB"}, {"cover": ["activations"]}], ids=["small", "uncovered"])
def test_parameters_that_stay_are_cast_too(kept: dict[str, Any], tmp_path: Path) -> None:
    tied = next(workload for workload in WORKLOADS if workload.name == "tied_and_shared")
    expected = run_plain(replace(tied, build=sharded(tied.build)), torch.device("cpu"), clip=clip)
    given = config_for(NVME, tmp_path) | BF16
    given["plan"] = given["plan"] | kept
    got = run_wrapped(tied, given, BACKENDS["cpu"](), lambda index, engine: None, clip=clip)
    assert_equal(expected, got)


@pytest.mark.parametrize("tiers", [NVME, Tiers("none", 0, has_nvme=False)], ids=["fits", "no tiers"])
def test_it_holds_where_nothing_moves(tiers: Tiers, tmp_path: Path) -> None:
    expected = run_plain(replace(GPT_WORKLOAD, build=sharded(GPT)), torch.device("cpu"), clip=clip)
    moved: list[int] = []
    config = config_for(tiers, tmp_path, policy="auto", device="1GiB") | BF16

    def after_step(index: int, engine: Engine) -> None:
        moved.append(sum(engine.stats().moved_bytes.values()))

    assert_equal(expected, run_wrapped(GPT_WORKLOAD, config, BACKENDS["cpu"](), after_step, clip=clip))
    assert moved[-3:] == [0, 0, 0]


def test_half_the_bytes_of_activations_move(tmp_path: Path) -> None:
    def moved(**more: Any) -> int:
        found: list[int] = []
        run_wrapped(
            MLP_WORKLOAD,
            config_for(NVME, tmp_path) | more,
            BACKENDS["cpu"](),
            lambda index, engine: found.append(engine.stats().moved_bytes_by_class["activation"]),
        )
        return found[-1]

    assert 0 < moved(**BF16) <= 0.55 * moved()


def test_evaluation_and_what_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = sharded(GPT)()
    torch.manual_seed(0)
    model = tieroff.wrap(GPT(), config=config_for(NVME, tmp_path) | BF16)
    x = torch.randint(0, 50, (2, 16))
    with torch.no_grad():
        expected, got = reference(x), model(x)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, copy_of(local_of(expected)))
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert {value.dtype for value in tieroff.unwrap(model).parameters()} == {torch.float32}


class Clamped(nn.Module):
    """Writes its weight in forward, as spectral constraints do."""

    def __init__(self, *, by_data: bool = False) -> None:
        super().__init__()
        self.linear, self.writes, self.by_data = nn.Linear(WIDTH, WIDTH), True, by_data

    def forward(self, x: Tensor) -> Tensor:
        if self.writes and self.by_data:
            self.linear.weight.data.clamp_(-0.01, 0.01)
        elif self.writes:
            with torch.no_grad():
                self.linear.weight.clamp_(-0.01, 0.01)
        return self.linear(x)


@pytest.mark.parametrize("how", ["training", "evaluation", "by data"])
@pytest.mark.parametrize("min_bytes", [0, "1MiB"], ids=["moved", "stays"])
def test_a_write_that_would_be_lost_is_an_error(min_bytes: Any, how: str, tmp_path: Path) -> None:
    model = Clamped(by_data=how == "by data")
    config = config_for(NVME, tmp_path) | BF16
    config["plan"]["min_bytes"] = min_bytes
    tieroff.wrap(model, adamw(model.parameters()), config)
    before = copy_of(model.linear.weight)
    with torch.set_grad_enabled(how != "evaluation"), pytest.raises(StateError, match="written in place"):
        model(torch.randn(4, WIDTH))
    model.writes = False
    model(torch.randn(4, WIDTH)).sum().backward()
    assert torch.equal(copy_of(model.linear.weight), before)
    tieroff.unwrap(model)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.linear(x).sigmoid()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code, when it compiles
def test_compiled_parts_compute_the_same(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def build(*, compiles: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated(), nn.Linear(WIDTH, 4))
        if compiles:
            model[1].compile(backend="aot_eager")
        return model

    plain = replace(MLP_WORKLOAD, build=lambda: build(compiles=False))
    expected = run_plain(replace(plain, build=sharded(plain.build)), torch.device("cpu"), clip=clip)
    config = config_for(NVME, tmp_path) | BF16
    phases: list[str] = []
    got = run_wrapped(
        replace(plain, build=lambda: build(compiles=True)),
        config,
        BACKENDS["cpu"](),
        lambda index, engine: phases.append(engine.stats().phase),
        clip=clip,
    )
    assert_equal(expected, got)
    assert phases[-1] == "planned"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


MOVES = {"policy": "floor", "device": "100%", "tiers": NVME}
FITS = {"policy": "auto", "device": "1GiB", "tiers": NVME}
HOW = pytest.mark.parametrize(("how", "min_bytes"), [(MOVES, 0), (FITS, 0), (FITS, "1MiB")], ids=["moves", "fits", "stays"])


def wrapped_model(model: nn.Module, folder: Path, how: dict[str, Any], min_bytes: Any) -> torch.optim.Optimizer:
    optimizer = adamw(model.parameters())
    config = config_for(how["tiers"], folder, policy=how["policy"], device=how["device"]) | BF16
    config["plan"]["min_bytes"] = min_bytes
    tieroff.wrap(model, optimizer, config)
    return optimizer


class Rereading(nn.Module):
    """Reads its weight again and again, and notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.given: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        self.given = []
        for _ in range(20):
            weight = self.weight
            self.given.append(StorageWeakRef(weight.untyped_storage()))
            x = (x @ weight).tanh()
        return x


@HOW
def test_autograd_keeps_no_casts(how: dict[str, Any], min_bytes: Any, tmp_path: Path) -> None:
    model = Rereading()
    optimizer = wrapped_model(model, tmp_path, how, min_bytes)
    for _ in range(4):
        out = model(torch.randn(4, WIDTH))
        assert sum(not given.expired() for given in model.given) == 0
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for _ in range(10):
            model(torch.randn(4, WIDTH))
    assert len(tieroff.engine(model).executor.reads.live.found) <= 2
    tieroff.unwrap(model)


@HOW
def test_a_write_between_forward_and_backward_is_autograds_error(how: dict[str, Any], min_bytes: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = wrapped_model(model, tmp_path, how, min_bytes)
    for step in range(5):
        loss = model(torch.randn(4, WIDTH)).sum()
        if step == 4:
            with torch.no_grad():
                model.get_parameter("1.weight").mul_(0.5)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tieroff.unwrap(model)


def shrink_between(trainer: Trainer) -> None:
    """Writes parameters through `.data` between micro-batches."""
    for _ in range(3):
        trainer.loss().backward()
        for parameter in trainer.model.parameters():
            local_of(parameter).data.mul_(0.95)
    trainer.update()


@pytest.mark.parametrize(("policy", "device"), [("floor", "100%"), ("auto", "70%"), ("demand", "70%")])
def test_writes_between_micro_batches_count(policy: str, device: str, tmp_path: Path) -> None:
    workload = replace(MLP_WORKLOAD, step=shrink_between, steps=8)
    expected = run_plain(replace(workload, build=sharded(workload.build)), torch.device("cpu"), clip=clip)
    config = config_for(NVME, tmp_path, policy=policy, device=device) | BF16
    assert_equal(expected, run_wrapped(workload, config, BACKENDS["cpu"](), lambda index, engine: None, clip=clip))


class Ensemble(nn.Module):
    """Runs a part on several weights at once."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([self.first.detach(), self.second.detach()]).float()
        return torch.func.vmap(lambda w: torch.func.functional_call(self.part, {"weight": w}, (x,)))(both).sum(0)


@HOW
def test_transforms_compute_in_the_type_too(how: dict[str, Any], min_bytes: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    wrapped_model(model, tmp_path, how, min_bytes)
    x = torch.randn(3, 5, WIDTH)
    plain = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(model)(x), torch.func.vmap(plain)(x.bfloat16()))
        one = plain(x[0].bfloat16())
    parameters = {name: copy_of(value) for name, value in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x[0],)).float().square().sum()

    grads, value = torch.func.grad_and_value(loss)(parameters)
    assert torch.equal(value, one.float().square().sum())
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    tieroff.unwrap(model)
    ensemble = Ensemble()
    wrapped_model(ensemble, tmp_path, how, min_bytes)
    with torch.no_grad():
        assert ensemble(x[0]).dtype is torch.bfloat16
    tieroff.unwrap(ensemble)


class WithLoss(nn.Module):
    """Has its step begin in a method that takes the targets along."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(x.dtype)
        return self.linear(x)

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        assert y.dtype is torch.float32
        return (self(x).float() - y).square().mean()


def test_only_inputs_of_the_forward_are_cast(tmp_path: Path) -> None:
    model = WithLoss()
    optimizer = wrapped_model(model, tmp_path, MOVES, 0)
    tieroff.engine(model).begin_in("training_step")
    for _ in range(4):
        model.training_step(torch.randn(4, WIDTH), torch.randn(4, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.seen == {torch.bfloat16}
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)


def test_explain_names_the_type(tmp_path: Path) -> None:
    engine = check(MLP_WORKLOAD, "cpu", tmp_path)
    assert "bf16" in engine.explain()
    assert "those of the plain run, bit for bit" not in engine.explain()
