"""Steps in which nothing moves: the engine takes its hooks off, and still sees all that it must."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.injector import Injector
from tests.support.twins import Setting, assert_same, look
from tieroff.runtime.engine import Engine
from tieroff.runtime.hooks.forward.walk import Walk
from tieroff.runtime.hooks.forward.watch import Watch
from tieroff.runtime.hooks.parameters.access import FetchingDict, QuietDict

Change = Callable[[nn.Module, torch.optim.Optimizer], None]
BEFORE = 5


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    inner = [part for _ in range(3) for part in (nn.GELU(), nn.Linear(64, 64))]
    model = nn.Sequential(nn.Linear(32, 64), nn.Sequential(*inner), nn.Linear(64, 32))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, batch: int = 4) -> torch.Tensor:
    torch.manual_seed(index)
    dtype = next(model.parameters()).dtype
    loss = model(torch.randn(batch, 32).to(dtype)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def wrapped(tmp_path: Path, device: str = "1GiB") -> tuple[nn.Module, torch.optim.Optimizer, Engine]:
    model, optimizer = made()
    Setting(tmp_path, device=device).wrap(model, optimizer, policy="auto")
    return model, optimizer, tieroff.engine(model)


def hooked(model: nn.Module) -> int:
    """Returns how many parameters have a hook that says when their gradient has arrived."""
    return sum(bool(getattr(p, "_post_accumulate_grad_hooks", None)) for p in model.parameters())


def is_bypassed(model: nn.Module) -> bool:
    kinds = {type(module.__dict__["_parameters"]) for module in model.modules()}
    assert kinds in ({QuietDict}, {FetchingDict}), kinds
    assert (hooked(model) <= 1) == (kinds == {QuietDict})
    return kinds == {QuietDict}


def run(change: Change | None, tmp_path: Path | None, steps: int = 10) -> list[dict[str, Any]]:
    """Returns what is seen of a plain or a wrapped loop, in which something is changed in the middle."""
    model, optimizer = made()
    if tmp_path is not None:
        Setting(tmp_path).wrap(model, optimizer, policy="auto")
    seen = []
    for index in range(steps):
        if index == BEFORE and change is not None:
            assert tmp_path is None or is_bypassed(model)
            change(model, optimizer)
        seen.append(look(model, optimizer, step(model, optimizer, index)))
    if tmp_path is not None:
        tieroff.unwrap(model)
        assert hooked(model) == 0
    return seen


def test_hooks_are_gone_once_nothing_moves_and_unwrap_leaves_a_plain_model(tmp_path: Path) -> None:
    model, optimizer, engine = wrapped(tmp_path)
    for index in range(2):
        step(model, optimizer, index)
        assert not is_bypassed(model)
    for index in range(2, 6):
        step(model, optimizer, index)
        assert is_bypassed(model) and hooked(model) == 1
        assert engine.stats().phase == "nothing moved" and engine.stats().step_s > 0
    assert len(engine.history.steps) == 6
    assert [seen.phase for seen in engine.history.steps[2:]] == ["nothing moved"] * 4
    assert "Nothing moved" in engine.explain() and engine.plan.moves_nothing
    tieroff.unwrap(model)
    assert {type(module.__dict__["_parameters"]) for module in model.modules()} == {dict}
    assert hooked(model) == 0


def _in_place(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def _assign(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


def _replace(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert isinstance(model, nn.Sequential) and isinstance(model[0], nn.Linear)
    optimizer.state.pop(model[0].weight)
    model[0].weight = nn.Parameter(torch.ones_like(model[0].weight) * 0.01)
    optimizer.param_groups[0]["params"][0] = model[0].weight


def _freeze(model: nn.Module, _: torch.optim.Optimizer) -> None:
    next(model.parameters()).requires_grad_(False)


def _other_memory(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def _convert(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.double()
    for state in optimizer.state.values():
        state.update({name: value.double() for name, value in state.items() if name != "step"})


def _new_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    model.append(nn.Linear(32, 32))  # type: ignore[operator]
    optimizer.add_param_group({"params": list(list(model.children())[-1].parameters())})


def _other_module(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model[1][0] = nn.ReLU()  # type: ignore[index]


def _optimizer_state(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _options(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def _fail(model: nn.Module, _: torch.optim.Optimizer) -> None:
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 31, dtype=next(model.parameters()).dtype))


def _fail_in_backward(model: nn.Module, _: torch.optim.Optimizer) -> None:
    def refuse(grad: torch.Tensor) -> None:
        raise ValueError("no")

    out = model(torch.randn(4, 32))
    out.register_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        out.sum().backward()


def _skip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 32)).sum().backward()
    optimizer.zero_grad()  # as a loss scale does that found infinities


def _infer(model: nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(torch.randn(3, 32))


def _substitute(model: nn.Module, _: torch.optim.Optimizer) -> None:
    others = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    assert not torch.func.functional_call(model, others, (torch.randn(4, 32),)).any()


def _update_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


CHANGES: list[Change] = [
    _in_place,
    _assign,
    _replace,
    _freeze,
    _other_memory,
    _convert,
    _new_module,
    _other_module,
    _optimizer_state,
    _options,
    _fail,
    _fail_in_backward,
    _skip,
    _infer,
    _substitute,
    _update_alone,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_what_people_do_while_nothing_moves_counts(tmp_path: Path, change: Change) -> None:
    assert_same(run(change, None), run(change, tmp_path))


@pytest.mark.parametrize("change", [_replace, _freeze, _other_memory, _convert, _new_module, _other_module])
def test_a_watch_sees_every_change(change: Change) -> None:
    model, optimizer = made()
    for index in range(2):
        step(model, optimizer, index)
    watch = Watch(Walk(model), list(model.parameters()))
    step(model, optimizer, 2)
    assert watch.is_same
    change(model, optimizer)
    assert not watch.is_same


class Running(nn.Module):
    """Gives its buffer another tensor in each forward."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x * (1 + self.mean)


def test_a_buffer_that_each_forward_replaces_keeps_the_engine_aside(tmp_path: Path) -> None:
    seen = []
    for folder in (None, tmp_path):
        model, optimizer = made()
        assert isinstance(model, nn.Sequential)
        model.append(Running())
        if folder is not None:
            Setting(folder).wrap(model, optimizer, policy="auto")
        seen.append([look(model, optimizer, step(model, optimizer, index)) for index in range(6)])
        assert folder is None or is_bypassed(model)
    assert_same(*seen)
    tieroff.unwrap(model)


def test_everything_comes_back_when_a_kind_of_step_moves(tmp_path: Path) -> None:
    """Small batches fit, and large ones do not; they come in turns."""
    batches = [4] * 6 + [4096] * 4 + [4, 4, 4096, 4, 4096, 4]

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[int], None]) -> list[dict[str, Any]]:
        seen = []
        for index, batch in enumerate(batches):
            seen.append(look(model, optimizer, step(model, optimizer, index, batch)))
            after(batch)
        return seen

    plain = loop(*made(), lambda batch: None)
    model, optimizer, engine = wrapped(tmp_path, "7MiB")
    phases: dict[int, list[str]] = {4: [], 4096: []}

    def note(batch: int) -> None:
        stats = engine.stats()
        phases[batch].append(stats.phase)
        assert is_bypassed(model) == (stats.phase == "nothing moved")
        assert (sum(stats.moved_bytes.values()) > 0) == (stats.phase != "nothing moved")
        assert stats.fallbacks == 0

    assert_same(plain, loop(model, optimizer, note))
    assert phases[4] == ["traced", "measured"] + ["nothing moved"] * 8
    assert phases[4096] == ["traced", "measured"] + ["planned"] * 4
    tieroff.unwrap(model)


@pytest.mark.parametrize("part", range(4, 100, 19))
@pytest.mark.parametrize("batch", [4, 4096], ids=["goes aside", "comes back"])
def test_interrupted_on_the_way_it_is_whole_again(tmp_path: Path, batch: int, part: int) -> None:
    """Ctrl-C in the step in which the hooks go, and in the one in which they come back."""
    injector = Injector()

    def until_then(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, Engine]:
        folder.mkdir()
        model, optimizer, engine = wrapped(folder, "7MiB")
        for index, size in enumerate([4] * 3 + [4096] * 3 + [4] * (batch != 4)):
            step(model, optimizer, index, size)
        return model, optimizer, engine

    model, optimizer, _ = until_then(tmp_path / "counted")
    assert not injector.run(lambda: step(model, optimizer, 9, batch))
    tieroff.unwrap(model)
    model, optimizer, engine = until_then(tmp_path / "interrupted")
    injector.run(lambda: step(model, optimizer, 9, batch), injector.seen * part // 100)  # or ended before, in fewer lines
    optimizer.zero_grad()
    for size, phase in ((4, "nothing moved"), (4096, "planned")):
        for index in range(3):
            step(model, optimizer, index, size)
        assert engine.stats().phase == phase
        assert is_bypassed(model) == (size == 4) and (hooked(model) == 10 or size == 4)
    tieroff.unwrap(model)
    assert hooked(model) == 0
    assert {type(module.__dict__["_parameters"]) for module in model.modules()} == {dict}


def test_two_forwards_before_one_backward_are_one_step(tmp_path: Path) -> None:
    def pair(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        torch.manual_seed(index)
        loss = model(torch.randn(4, 32)).square().mean() + model(torch.randn(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, engine = wrapped(tmp_path)
    for index in range(8):
        pair(model, optimizer, index)
        assert len(engine.history.steps) == index + 1
    assert is_bypassed(model)
    plain, its = made()
    for index in range(8):
        pair(plain, its, index)
    assert_same([look(plain, its)], [look(model, optimizer)])
    tieroff.unwrap(model)


def test_a_first_step_unlike_the_others_keeps_no_hooks(tmp_path: Path) -> None:
    model, optimizer, engine = wrapped(tmp_path)
    model(torch.randn(4, 32)).sum().backward()
    for index in range(6):
        step(model, optimizer, index)
    assert [seen.phase for seen in engine.history.steps[:4]] == ["traced", "measured", "traced", "measured"]
    assert is_bypassed(model)
    tieroff.unwrap(model)


def test_a_step_without_an_update_is_one(tmp_path: Path) -> None:
    model, optimizer, engine = wrapped(tmp_path)
    for index in range(5):
        step(model, optimizer, index)
    for _ in range(3):
        model(torch.randn(4, 32)).sum().backward()
        optimizer.zero_grad()
    step(model, optimizer, 9)
    assert len(engine.history.steps) == 9
    tieroff.unwrap(model)


def by_parts(model: Any, optimizer: torch.optim.Optimizer, index: int) -> torch.Tensor:
    """A step without the model's forward."""
    torch.manual_seed(index)
    x = torch.randn(4, 32)
    for part in model:
        x = part(x)
    loss = x.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _nothing(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Changes nothing."""


def _evaluate(model: nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(torch.ones(2, 32))


def _doze(model: nn.Module, _: torch.optim.Optimizer) -> None:
    if type(model.__dict__["_parameters"]) is not dict:
        tieroff.sleep(model)


@pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")
@pytest.mark.parametrize("change", [_nothing, _in_place, _assign, _replace, _freeze, _other_memory, _evaluate, _doze])
@pytest.mark.parametrize("device", ["50%", "min", "1KiB", "1GiB"])
def test_a_model_whose_forward_is_never_called_is_let_be_where_there_is_room(
    device: str, change: Change, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[list[dict[str, Any]]] = []
    for is_wrapped in (False, True):
        model, optimizer = made()
        if is_wrapped:
            Setting(tmp_path, device=device).wrap(model, optimizer, policy="auto")
        seen.append([])
        for index in range(14):
            if index == BEFORE:
                change(model, optimizer)
            seen[-1].append(look(model, optimizer, (by_parts if index < 8 else step)(model, optimizer, index)))
            if is_wrapped and index == BEFORE - 1:
                assert type(model._parameters) is (QuietDict if device in ("50%", "1GiB") else FetchingDict)
        if is_wrapped:
            assert tieroff.engine(model).stats().phase in ("planned", "nothing moved")
            tieroff.unwrap(model)
    assert_same(*seen)
    (told,) = [message for message in caplog.messages if "its forward was never called" in message]
    assert told.endswith("call the model itself, not its parts")
