"""Mixed precision, clipping, several ranks and compiled modules on an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tieroff
from tests.accelerator import sim, target
from tests.accelerator.users.loops import STEPS, Net, Program, Usage, check
from tieroff.runtime.items.gradient import GradientItem
from tieroff.runtime.items.homes import HomeItem

START_SCALE = 2.0**24


def scaled(clip: Callable[..., Tensor] | None) -> Usage:
    """float16 under a loss scale that is too large at first, so that updates are skipped."""

    def usage(p: Program) -> None:
        p.wrap()
        scaler = torch.amp.GradScaler(target.NAME, init_scale=START_SCALE, growth_interval=100)
        for index in range(2 * STEPS):
            with torch.autocast(target.NAME, dtype=torch.float16):
                loss = p.loss(index)
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(p.optimizer)
                p.note(clip(p.parameters, 0.5))
            scaler.step(p.optimizer)
            scaler.update()
            p.optimizer.zero_grad()
            p.note(loss, scaler.get_scale())
            if p.engine is not None and index > STEPS:
                stats = p.engine.stats()
                p.phases.append((stats.phase, stats.fallbacks))

    return usage


@pytest.mark.parametrize("clip", [None, nn.utils.clip_grad_norm_, tieroff.clip_grad_norm_], ids=["none", "torch", "ours"])
def test_a_loss_scale_gives_the_same(clip: Callable[..., Tensor] | None, tmp_path: Path) -> None:
    wrapped = check(scaled(clip), tmp_path)
    scales = [value for value in wrapped.seen if isinstance(value, float)]
    assert scales[0] < START_SCALE  # an update was skipped


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, tieroff.clip_grad_norm_], ids=["torch", "ours"])
def test_clipping_brings_up_one_gradient_after_another(clip: Callable[..., Tensor], tmp_path: Path) -> None:
    """The most that the gradients take on the device while they are clipped is a few of them."""
    above: list[int] = []

    def usage(p: Program) -> None:
        p.wrap()
        for index in range(STEPS):
            loss = p.loss(index)
            loss.backward()
            torch.accelerator.synchronize(target.device())
            torch.accelerator.reset_peak_memory_stats(target.device())
            before = torch.accelerator.memory_allocated(target.device())
            p.note(clip(p.parameters, 0.1))
            torch.accelerator.synchronize(target.device())
            if not p.is_plain:
                above.append(torch.accelerator.max_memory_allocated(target.device()) - before)
            p.update(loss)

    check(usage, tmp_path, make=lambda: Deep(12))
    weight_bytes = 64 * 64 * 4
    assert max(above) < 6 * weight_bytes < 12 * weight_bytes


class Called(TorchFunctionMode):
    """Notes the functions that the program and torch call."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_torchs_clipping_calls_the_same_functions(tmp_path: Path) -> None:
    """On a GPU the norm of a tensor in a list has other last bits than its norm by itself."""

    def usage(p: Program) -> None:
        p.wrap()
        for index in range(STEPS):
            loss = p.loss(index)
            loss.backward()
            with Called() as called:
                nn.utils.clip_grad_norm_(p.parameters, 0.1)
            norms = [name for name in called.names if "norm" in name]
            p.note(*[name for name in norms if name != "clip_grad_norm_"])
            p.update(loss)

    wrapped = check(usage, tmp_path)
    assert wrapped.seen.count("_foreach_norm") == STEPS


def test_a_mode_that_changes_functions_sees_no_copy_of_the_engine(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        p.wrap()
        for index in range(STEPS):
            with Called() as called:
                loss = p.loss(index)
                loss.backward()
                p.optimizer.step()
            p.update(loss)
            p.note(called.names.count("copy_"))

    check(usage, tmp_path)


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_model_that_was_on_the_host_before_sums_gradients(rounds: int, tmp_path: Path) -> None:
    """What accumulates its gradients is another node on each device: the one of the host has none to wait for."""

    def usage(p: Program) -> None:
        if not p.is_plain:
            p.model.cpu()
        p.wrap()
        for index in range(STEPS):
            for again in range(rounds):
                loss = p.loss(rounds * index + again)
                loss.backward()
            p.note(*[parameter.grad for parameter in p.parameters])
            p.update(loss)

    check(usage, tmp_path)


class Deep(Net):
    """More layers between."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(16, 64), nn.Linear(64, 16)
        self.deep = nn.Sequential(*[nn.Linear(64, 64) for _ in range(count)])
        self.inside = through_deep


def through_deep(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.outward(torch.tanh(model.deep(model.inward(x))))
    return out


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank, whose collectives on the device do nothing."""

    dist.init_process_group(f"cpu:gloo,{target.NAME}:fake", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def unpinned_copies() -> int:
    return sim.counters()["unpinned_async_copies"] if target.IS_SIMULATED else 0


def ddp(before: bool, **options: Any) -> Usage:
    """DDP with a hook that changes what its buckets hold, so that a bucket which misses a gradient shows."""

    def usage(p: Program) -> None:
        copies = unpinned_copies()
        if not before:
            p.wrap()
        outer = nn.parallel.DistributedDataParallel(p.model, init_sync=False, bucket_cap_mb=0.002, **options)
        reduced: list[int] = []

        def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            reduced.append(bucket.index())
            buffer = bucket.buffer()
            buffer.copy_((buffer.cpu() * 3).to(buffer.device))
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(buffer)
            return future

        hook.__annotations__.clear()  # DDP compares them with classes, and here they are text
        outer.register_comm_hook(None, hook)
        if before:
            p.wrap()
        for index in range(STEPS):
            if index == 1:
                with outer.no_sync():
                    p.loss(30, outer).backward()
            loss = p.loss(index, outer)
            loss.backward()
            p.note(*[parameter.grad for parameter in p.parameters])
            p.update(loss)
        p.note(reduced, unpinned_copies() - copies)

    return usage


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("as_view", [False, True], ids=["copied", "views"])
@pytest.mark.parametrize("before", [True, False], ids=["before_wrap", "after_wrap"])
def test_ddp_reduces_the_same(before: bool, as_view: bool, tmp_path: Path) -> None:
    check(ddp(before, gradient_as_bucket_view=as_view), tmp_path)
    if target.IS_SIMULATED:
        sim.check()
        sim.reset()  # DDP's own copies of memory that is not pinned: as many wrapped as plain


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own, as it compiles
def test_a_compiled_module_computes_the_same(tmp_path: Path) -> None:
    def usage(p: Program) -> None:
        torch.compiler.reset()
        p.model.second = torch.compile(p.model.second, backend="aot_eager")
        p.wrap()
        p.steps()

    check(usage, tmp_path)


def test_an_optimizer_that_evaluates_a_model_of_which_nothing_moves(tmp_path: Path) -> None:
    """What an update has lowered for an evaluation has no address that could be looked at."""

    def usage(p: Program) -> None:
        p.optimizer = torch.optim.LBFGS(p.model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
        p.wrap()
        for index in range(STEPS):

            def closure(index: int = index) -> Tensor:
                p.optimizer.zero_grad()
                loss = p.loss(index)
                loss.backward()
                return loss

            p.note(p.optimizer.step(closure))

    check(usage, tmp_path, planned=0, policy="auto")


def test_ctrl_c_as_a_parameter_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has arrived, and the engine has not looked at it yet."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def usage(p: Program) -> None:
        p.wrap()
        p.steps()
        if not p.is_plain:
            with monkeypatch.context() as patch:
                patch.setattr(HomeItem, "arrived", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    p.loss(STEPS)
        p.steps(4, STEPS)

    check(usage, tmp_path)


STEPS_BEFORE_WAITING = 2  # from the next one on, factors wait


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_as_a_clipped_gradient_arrives(times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes up for the first time. Its factors wait until then: they are in its bytes once, whoever looks next."""
    interrupts: list[str] = []

    def interrupted(item: GradientItem) -> None:
        interrupts.append(item.name)
        raise KeyboardInterrupt

    def usage(p: Program) -> None:
        p.wrap()
        for index in range(STEPS_BEFORE_WAITING + 1):
            loss = p.loss(index)
            loss.backward()
            for _ in range(times):
                p.note(nn.utils.clip_grad_norm_(p.parameters, 0.01))
            if index < STEPS_BEFORE_WAITING:
                p.update(loss)
        if not p.is_plain:
            with monkeypatch.context() as patch:
                patch.setattr(GradientItem, "arrived", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    p.optimizer.step()
        for parameter in p.parameters:
            assert parameter.grad is not None
            p.note(parameter.grad.detach().clone())

    check(usage, tmp_path, planned=0, make=lambda: Deep(12))
    assert len(interrupts) == 1
