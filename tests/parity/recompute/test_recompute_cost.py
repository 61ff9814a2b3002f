"""Plans have layers run again where moving what they save takes longer, at the cost that was said, with equal numbers."""

from __future__ import annotations

import contextlib
import pickle
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tieroff
from tieroff.core.io.run_folder import load_run
from tieroff.core.machine import Machine, save_machine
from tieroff.core.plan import Plan
from tieroff.core.trace import Trace
from tieroff.errors import StateError
from tieroff.planner.layers import layer_runs
from tieroff.planner.predict import predict
from tieroff.units import NS_PER_S

_WIDTH = 64
_PAUSE_S = 0.03
_STEPS = 12


class Pause(nn.Module):
    """Takes a known time, as a kernel would."""

    wait = staticmethod(time.sleep)

    def forward(self, x: Tensor) -> Tensor:
        self.wait(_PAUSE_S)
        return x


class PauseClock:
    """Shows the time that pauses take, and next to none of what this machine takes for the rest."""

    def __init__(self) -> None:
        self._begun_ns, self._paused_ns = time.monotonic_ns(), 0
        self._real_ns = time.monotonic_ns

    def now_ns(self) -> int:
        return self._begun_ns + self._paused_ns + (self._real_ns() - self._begun_ns) // 100

    def wait(self, seconds: float) -> None:
        self._paused_ns += round(seconds * NS_PER_S)


@pytest.fixture(autouse=True)
def _paused_by_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the pauses."""
    clock = PauseClock()
    monkeypatch.setattr(time, "monotonic_ns", clock.now_ns)
    monkeypatch.setattr(Pause, "wait", staticmethod(clock.wait))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.pause, self.drop = Pause(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(nn.functional.gelu(self.pause(self.up(x)))))


class Counting(Layer):
    """Not the same when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Scaling(Layer):
    """Writes its input, which autograd allows: nothing saved it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.01))


class Watched(Layer):
    """Has a hook that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        calls = self.calls
        self.up.register_forward_hook(lambda *_: calls.append(1))


def _train(
    folder: Path | None,
    layer: Callable[[], nn.Module] = Layer,
    *,
    is_autocast: bool = False,
    recomputes: bool = True,
    plan: Plan | None = None,
) -> tuple[list[float], list[float], nn.Module]:
    """Returns losses, what running again took of each planned step, and the model; plain without a folder."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for _ in range(4)), nn.Linear(_WIDTH, _WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    if folder is not None:
        slow = Machine("slow", "datasheet", nvme_bytes=1 << 30, nvme_write_bytes_per_s=4 << 20, nvme_read_bytes_per_s=4 << 20)
        save_machine(slow, folder / "machine.toml")
        config = {
            "device": "cpu",
            "budget": {"device": "75%", "nvme": "64MiB"},
            "nvme": {"dirs": [str(folder)]},
            "plan": {
                "min_bytes": 0,
                "recompute": recomputes,
                "recompute_layers": ["[0-3]"],
                "machine": str(folder / "machine.toml"),
            },
        }
        tieroff.wrap(model, optimizer, config=config, plan=plan)
    losses, again_s = [], []
    for step in range(_STEPS):
        torch.manual_seed(step)
        x = torch.randn(512, _WIDTH)
        with torch.autocast("cpu", torch.bfloat16) if is_autocast else contextlib.nullcontext():
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if folder is not None:
            stats = tieroff.engine(model).stats()
            again_s += [stats.recompute_s] if stats.phase == "planned" else []
    return losses, again_s, model


def _price_ns(trace: Trace, paths: tuple[str, ...]) -> int:
    return sum(run.cost_ns for run in layer_runs(trace) if run.path in paths)


@pytest.mark.parametrize("is_autocast", [False, True], ids=["float", "autocast"])
def test_recompute_costs_what_plan_and_price_say(is_autocast: bool, tmp_path: Path) -> None:
    for name in ("moving", "again"):
        (tmp_path / name).mkdir()
    plain, _, _ = _train(None, is_autocast=is_autocast)
    moving, none_s, moved = _train(tmp_path / "moving", is_autocast=is_autocast, recomputes=False)
    losses, again_s, model = _train(tmp_path / "again", is_autocast=is_autocast)
    engine = tieroff.engine(model)
    paths = engine.plan.recompute
    price_ns = _price_ns(tieroff.engine(moved).trace, paths)
    engine.save_run(tmp_path / "run")
    tieroff.unwrap(model)
    tieroff.unwrap(moved)
    assert plain == moving == losses
    assert set(none_s) == {0.0}
    assert paths == tuple(str(number) for number in range(len(paths)))
    assert paths
    predicted, _ = predict(load_run(tmp_path / "run"))
    assert predicted is not None
    measured_s = statistics.median(again_s[-4:])
    assert measured_s >= len(paths) * _PAUSE_S
    assert predicted.recompute_ns / NS_PER_S == pytest.approx(measured_s, rel=0.1)
    assert price_ns / NS_PER_S == pytest.approx(measured_s, rel=0.1)


class Drawing(Layer):
    """Has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand((), generator=self.own))


class Gaussian(Layer):
    """Draws from NumPy as of old, which caches every second number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(1 + 0.01 * np.random.randn()))


class Meter:
    def __init__(self) -> None:
        self.seen = {"calls": [0]}


class Metered(Layer):
    """Counts deep inside an object."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        self.meter.seen["calls"][0] += 1
        return super().forward(x)


class Averaging(Layer):
    """Keeps an average in a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(_WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
        return super().forward(x + 0.1 * self.average)


class LateRandom(Layer):
    """Begins to draw Python's random numbers when training runs already."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * random.uniform(0.9, 1.1) if torch.initial_seed() >= 8 else x)


class Stepwise(Layer):
    """Writes a buffer in some steps only."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if torch.initial_seed() % 4 == 3:
            self.total.add_(1)
        return super().forward(x + 0.01 * self.total)


@pytest.mark.parametrize("layer", [Counting, Scaling, Watched, Drawing, Gaussian, Metered, Averaging])
def test_layers_that_cannot_run_again_never_do(layer: type[Layer], tmp_path: Path) -> None:
    np.random.seed(0)
    plain, _, _ = _train(None, layer)
    np.random.seed(0)
    losses, again_s, model = _train(tmp_path, layer)
    recomputed = tieroff.engine(model).plan.recompute
    tieroff.unwrap(model)
    assert recomputed == ()
    assert set(again_s) == {0.0}
    assert losses == plain
    for child in model.children():
        if isinstance(child, Counting):
            assert child.calls == _STEPS
        if isinstance(child, Watched):
            assert len(child.calls) == _STEPS
        if isinstance(child, Metered):
            assert child.meter.seen == {"calls": [_STEPS]}


def test_layer_that_changes_its_ways_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="draws Python's or NumPy's random numbers"):
        _train(tmp_path, LateRandom)


def test_buffers_written_now_and_then_are_written_once(tmp_path: Path) -> None:
    plain, _, _ = _train(None, Stepwise)
    losses, _, model = _train(tmp_path, Stepwise)
    assert tieroff.engine(model).plan.recompute
    tieroff.unwrap(model)
    assert losses == plain
    assert [float(child.total) for child in model.children() if isinstance(child, Stepwise)] == [_STEPS // 4] * 4


def test_hooks_hung_later_are_told_once(tmp_path: Path) -> None:
    _, _, model = _train(tmp_path)
    assert "0" in tieroff.engine(model).plan.recompute
    calls: list[int] = []
    first = model.get_submodule("0")
    assert isinstance(first, Layer)
    first.up.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        model(torch.randn(512, _WIDTH)).square().mean().backward()
    tieroff.unwrap(model)
    assert len(calls) == 3


def test_given_plan_has_its_layers_run_again(tmp_path: Path) -> None:
    for name in ("made", "given"):
        (tmp_path / name).mkdir()
    losses, _, model = _train(tmp_path / "made")
    plan = tieroff.engine(model).plan
    tieroff.unwrap(model)
    again, again_s, model = _train(tmp_path / "given", plan=plan)
    assert tieroff.engine(model).plan is plan
    tieroff.unwrap(model)
    assert again == losses
    assert min(again_s) >= len(plan.recompute) * _PAUSE_S


def test_names_that_no_module_has_are_an_error(tmp_path: Path) -> None:
    model = nn.Sequential(Layer(), nn.Linear(_WIDTH, _WIDTH))
    config = {"device": "cpu", "plan": {"recompute_layers": ["blocks.*"]}}
    with pytest.raises(StateError, match=r"names or patterns of modules such as 0, 0\.up.*'blocks\.\*'"):
        tieroff.wrap(model, config=config)
    assert "forward" not in model.__dict__


def test_nothing_is_left_on_the_layers_after_the_recorded_step(tmp_path: Path) -> None:
    config = {
        "device": "cpu",
        "budget": {"device": "75%", "nvme": "64MiB"},
        "nvme": {"dirs": [str(tmp_path)]},
        "plan": {"min_bytes": 0, "recompute_layers": ["0"]},
    }
    model = nn.Sequential(Layer(), nn.Linear(_WIDTH, _WIDTH))
    optimizer = torch.optim.SGD(model.parameters())
    tieroff.wrap(model, optimizer, config=config)
    model(torch.randn(8, _WIDTH)).sum().backward()
    optimizer.step()
    copied = pickle.loads(pickle.dumps(model))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in (*model.modules(), *copied.modules()))
    tieroff.unwrap(model)
