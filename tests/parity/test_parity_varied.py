"""Steps that never repeat: right under the on-line predictor, within the budget, and with half of the faults and fewer."""

from __future__ import annotations

import logging
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import tieroff
from harness.slow import SlowBackend
from harness.varied import MODELS, Plain, train
from tests.support.parity import BACKENDS
from tieroff.errors import StoreError
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.backend.place import Place
from tieroff.runtime.items.item import Item
from tieroff.runtime.items.traffic import Traffic
from tieroff.storage.completion import Completion

MIB = 1 << 20
SIZES: dict[str, Any] = {"width": 64, "layers": 2, "budget": "60%"}
STEPS: dict[str, dict[str, Any]] = {  # with many lengths to draw from, few come twice
    "experts": {"steps": 18, "rows": 64},
    "random depth": {"steps": 18, "rows": 64},
    "random lengths": {"steps": 28, "rows": 256},
}


def wrapped(model: nn.Module, folder: Path, budget: str = "60%") -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"device": "cpu", "budget": {"device": budget, "nvme": "64MiB"}, "nvme": {"dirs": [str(folder)]}}
    tieroff.wrap(model, optimizer, config={**config, "plan": {"min_bytes": "1KiB"}}, backend=CpuBackend())
    return model, optimizer


@pytest.mark.parametrize("name", list(MODELS))
def test_losses_are_those_of_the_plain_run_when_copies_are_late(name: str, tmp_path: Path) -> None:
    plain, _ = train(name, None, tmp_path, backend=None, **STEPS[name], **SIZES)
    losses, figures = train(name, "auto", tmp_path, backend=BACKENDS["delayed"](), **STEPS[name], **SIZES)
    assert losses == plain
    assert "on demand" in [seen.phase for seen in figures[-8:]]


@pytest.mark.alone  # whether a fetch is early enough depends on how fast the steps are
@pytest.mark.parametrize("name", list(MODELS))
def test_predictor_is_right_and_has_at_most_half_the_faults_of_paging_on_demand(name: str, tmp_path: Path) -> None:
    plain, _ = train(name, None, tmp_path, backend=None, **STEPS[name], **SIZES)
    faults = {}
    for policy in ("demand", "auto"):
        losses, figures = train(name, policy, tmp_path, backend=SlowBackend(200e6), **STEPS[name], **SIZES)
        assert losses == plain, policy
        free = [seen for seen in figures if seen.phase == "on demand"]
        assert len(free) >= 3
        faults[policy] = statistics.median(seen.faults for seen in free)
    assert 0 < faults["auto"] <= faults["demand"] / 2, faults


def test_what_is_held_beyond_the_moment_stays_in_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    rooms: list[int] = []
    hold = Traffic.hold

    def watched(self: Traffic, item: Item, device: Tensor) -> None:
        hold(self, item, device)
        held.append(self.device_bytes)

    def seen(stats: tieroff.Stats, plan: Any) -> None:
        if stats.phase == "on demand":
            rooms.append(engine.executor.on_demand.room_bytes)
            most.append(max(held))
        held.clear()

    most: list[int] = []
    model, optimizer = wrapped(MODELS["experts"][0](64, 3), tmp_path, budget="1200KiB")
    engine = tieroff.engine(model)
    engine.watch(seen)
    monkeypatch.setattr(Traffic, "hold", watched)
    for step in range(20):
        torch.manual_seed(step)
        model(torch.randn(64, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    tieroff.unwrap(model)
    assert len(rooms) >= 4 and min(rooms) > 0
    # What an op brings itself comes on top of the room, and is in what ops need: the budget has both.
    assert max(most) <= 1200 * 1024, (most, rooms)


def test_batch_larger_than_any_that_was_traced_has_no_room(tmp_path: Path) -> None:
    model, optimizer = wrapped(Plain(64, 3), tmp_path)
    engine = tieroff.engine(model)
    rooms, phases = [], []
    for rows in (*range(20, 38), 30_000 // 64, 10):
        model(torch.randn(rows, 64)).pow(2).mean().backward()
        rooms.append(engine.executor.on_demand.room_bytes)
        optimizer.step()
        optimizer.zero_grad()
        phases.append(engine.stats().phase)
    tieroff.unwrap(model)
    assert phases == ["traced"] * 16 + ["on demand"] * 3 + ["measured"]  # for the kind of 35 rows
    assert rooms[0] == 0 and rooms[16:18] == [0, 0]  # of 36 and 37 rows: the largest that was traced has 35
    assert rooms[18] == 0 < rooms[19]


def test_kind_that_comes_again_soon_is_traced_and_planned(tmp_path: Path) -> None:
    model, optimizer = wrapped(Plain(64, 2), tmp_path)
    phases = []
    for rows in (*range(20, 37), 36, 36, 36):
        model(torch.randn(rows, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        phases.append(tieroff.engine(model).stats().phase)
    tieroff.unwrap(model)
    assert phases[16:] == ["on demand", "traced", "measured", "planned"]


def test_new_sizes_below_a_traced_one_run_by_its_plan(tmp_path: Path) -> None:
    sizes = (40, *range(24, 39), 31, 17)
    outcomes = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        model, phases, losses = Plain(64, 2), [], []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if folder is not None:
            config = {"device": "cpu", "budget": {"device": "60%", "nvme": "64MiB"}, "nvme": {"dirs": [str(folder)]}}
            tieroff.wrap(model, optimizer, {**config, "plan": {"min_bytes": "1KiB"}})
        for rows in sizes:
            loss = model(torch.randn(rows, 64)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
            if folder is not None:
                phases.append(tieroff.engine(model).stats().phase)
        outcomes.append(losses)
    assert outcomes[0] == outcomes[1]
    assert phases == ["traced", "measured", *["planned"] * (len(sizes) - 2)]
    assert tieroff.engine(model).stats().fallbacks == 0
    tieroff.unwrap(model)


class Branching(Plain):
    """Another branch for few rows."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out + super().forward(x * 0.5) if x.shape[0] < 20 else out


def test_smaller_inputs_that_take_another_way_are_a_kind_of_their_own(tmp_path: Path) -> None:
    model, optimizer = wrapped(Branching(64, 2), tmp_path)
    phases = []
    for rows in (40, 40, 40, 12, 13, 30, 12, 12, 12, 12, 12, 12, 12, 40):
        model(torch.randn(rows, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        phases.append(tieroff.engine(model).stats().phase)
    # Two that were taken for the kind of 40 rows left its plan; no other is, not even one that would follow it.
    assert phases[:3] == ["traced", "measured", "planned"]
    assert phases[3:6] == ["on demand"] * 3
    assert phases[-2:] == ["planned", "planned"]
    tieroff.unwrap(model)


def test_only_the_step_is_traced(tmp_path: Path) -> None:
    model, optimizer = wrapped(Plain(64, 2), tmp_path)

    def is_traced() -> bool:
        return bool(_get_current_dispatch_mode_stack())

    seen = [is_traced()]
    loss = model(torch.randn(8, 64)).pow(2).mean()
    seen.append(is_traced())
    loss.backward()
    seen.append(is_traced())  # gradients may be clipped
    optimizer.step()
    seen.append(is_traced())
    tieroff.unwrap(model)
    assert seen == [False, True, True, False]


class _Broken:
    """A copy in that fails when it is waited for."""

    start_ns = stop_ns = 0

    def __init__(self, inner: Completion) -> None:
        self._inner = inner

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self._inner.wait(timeout_s)
        raise StoreError("the drive gave wrong bytes")


class _Unreliable(CpuBackend):
    """Fails one copy in when it is told to."""

    countdown = -1

    def copy_in(self, place: Place, target: Tensor) -> Completion:
        self.countdown -= 1
        arrival = super().copy_in(place, target)
        return _Broken(arrival) if self.countdown == 0 else arrival


@pytest.mark.parametrize("countdown", [2, 9, 20])
def test_fetch_that_fails_is_told_and_the_next_step_is_right(
    countdown: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "tieroff")

    def run(backend: _Unreliable | None) -> list[float]:
        torch.manual_seed(0)
        model = MODELS["random depth"][0](64, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if backend is not None:
            config = {"device": "cpu", "budget": {"device": "60%", "nvme": "64MiB"}, "nvme": {"dirs": [str(tmp_path)]}}
            tieroff.wrap(model, optimizer, config={**config, "plan": {"min_bytes": "1KiB"}}, backend=backend)
        losses = []
        for step in range(20):
            torch.manual_seed(step)
            optimizer.zero_grad()
            if step == 17:
                if backend is None:
                    continue
                assert tieroff.engine(model).stats().phase == "on demand"
                backend.countdown = countdown
                with pytest.raises(StoreError, match="wrong bytes"):
                    model(torch.randn(64, 64)).pow(2).mean().backward()
                continue
            loss = model(torch.randn(64, 64)).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if backend is not None:
            tieroff.unwrap(model)
        return losses

    assert run(_Unreliable()) == run(None)
