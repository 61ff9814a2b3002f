"""Steps that leave the traced sequence: right numbers, one message, recovered by the next step, traced anew if it recurs."""

from __future__ import annotations

import gc
import logging
import random
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.twins import Mlp, Run, Setting, adam, assert_same, follow, look, loss_of, mlp_and_adam
from tests.support.twins import usual_step as usual
from tieroff.api import engine_of

pytestmark = pytest.mark.timeout(60)

LEFT = "left the traced sequence"


class Branching(nn.Module):
    """Takes another way through its layers when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.other_way = False
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        if self.fails:
            raise ValueError("in the middle of forward")
        y = torch.tanh(self.second(y)) if not self.other_way else torch.sigmoid(self.third(y)) * y
        return self.third(y)


class Skipping(nn.Module):
    """Skips layers at random, as stochastic depth and LayerDrop do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.random = random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.random.random() < 0.7:
                x = torch.tanh(layer(x))
        return x


def skipping_and_adam() -> Any:
    model = Skipping()
    return model, adam(model)


def branching_and_adam() -> Any:
    model = Branching()
    return model, adam(model)


def phases_of(
    make: Callable[[], Any], step: Callable[[Any, Any, int], Any], steps: int, setting: Setting, log: Any
) -> list[str]:
    """Runs a loop plain and wrapped, asserts equal bits, and returns the phase of every wrapped step."""
    phases: list[str] = []
    plain = follow(make, step, steps)

    def noted(model: Any, optimizer: Any, index: int) -> Any:
        out = step(model, optimizer, index)
        phases.append(tieroff.engine(model).stats().phase)
        return out

    with log.at_level(logging.INFO, "tieroff"):
        wrapped: Run = follow(make, noted, steps, setting)
    assert_same(plain.seen, wrapped.seen)
    return phases


def messages(log: Any) -> list[str]:
    return [record.getMessage() for record in log.records if LEFT in record.getMessage()]


def test_steps_that_skip_layers_at_random_have_no_plan_and_it_is_said_where_they_differ(
    each_setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    phases = phases_of(skipping_and_adam, usual, 40, each_setting, caplog)
    assert "planned" not in phases
    assert phases[-1] == "on demand"
    told = [record for record in caplog.records if "do not repeat" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"]
    found = re.search(r"two in a row differed from op param:layers\.(\d)\.weight on", told[0].getMessage())
    assert found is not None, told[0].getMessage()


def test_another_batch_size_has_a_trace_of_its_own(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch=5 if index in (4, 7, 9, 11) else 4)
        loss.backward()
        optimizer.step()
        return loss

    phases = phases_of(mlp_and_adam, step, 12, each_setting, caplog)
    large = [phases[i] for i in (4, 7, 9, 11)]
    assert large == ["traced", "measured", "planned", "planned"]
    assert phases[:4] == ["traced", "measured", "planned", "planned"]
    assert [phases[i] for i in (5, 6, 8, 10)] == ["planned"] * 4
    assert messages(caplog) == []


@pytest.mark.timeout(300)  # 80 steps, and 20 plans
def test_plans_of_many_shapes_take_bounded_memory(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    traces: list[weakref.ref[Any]] = []
    kept: list[int] = []

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch=1 + index // 4)  # 20 shapes, four steps of each
        loss.backward()
        optimizer.step()
        if (engine := engine_of(model)) is not None and index % 4 == 3:
            traces.append(weakref.ref(engine.trace))
            gc.collect()
            kept.append(sum(trace() is not None for trace in traces))
        return loss

    phases = phases_of(mlp_and_adam, step, 80, setting, caplog)
    of_late = ["on demand", "traced", "measured", "planned"]  # with many kinds, one that comes again is worth a trace
    assert phases == ["traced", "measured", "planned", "planned"] * 16 + of_late * 4
    assert kept == [*range(1, 17), 16, 16, 16, 16]


def test_another_branch_once(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        model.other_way = index == 4
        return usual(model, optimizer)

    phases = phases_of(branching_and_adam, step, 8, each_setting, caplog)
    assert phases == ["traced", "measured", "planned", "planned", "on demand", "planned", "planned", "planned"]
    assert len(messages(caplog)) == 1
    assert "expected param:second.weight but got param:third.weight" in messages(caplog)[0]


def test_what_leaves_in_each_step_in_the_same_place_is_said_once(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        x = torch.randn(4, 8)
        model(x).square().mean().backward()  # as SAM, whose first gradients only move the weights
        with torch.no_grad():
            held = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(p.grad)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p, kept in zip(model.parameters(), held, strict=True):
                p.copy_(kept)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert phases_of(branching_and_adam, step, 8, setting, caplog)[3:] == ["planned"] * 5
    (told,) = [record for record in caplog.records if LEFT in record.getMessage() and record.levelno == logging.WARNING]
    assert "expected bucket:0 but got the end of the step" in told.getMessage()


class Narrowing(Mlp):
    """Saves more or fewer values of one op."""

    width = 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x).narrow(1, 0, self.width))


def test_a_saved_tensor_of_another_size_is_told_apart_from_the_one_expected(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> tuple[Any, torch.optim.Optimizer]:
        model = Narrowing()
        return model, adam(model)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        model.width = 16 if index == 4 else 8
        return usual(model, optimizer)

    assert phases_of(make, step, 6, setting, caplog)[3:] == ["planned", "on demand", "planned"]
    (told,) = messages(caplog)
    assert "expected pack:0 but got another size there" in told


def test_another_branch_for_good_is_traced_again(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        model.other_way = index >= 4
        return usual(model, optimizer)

    phases = phases_of(branching_and_adam, step, 14, each_setting, caplog)
    assert phases[:5] == ["traced", "measured", "planned", "planned", "on demand"]
    again = phases.index("traced", 5)
    assert set(phases[4:again]) == {"on demand"}
    assert phases[again:] == ["traced", "measured"] + ["planned"] * (12 - again)
    assert len(messages(caplog)) == 1


def test_branches_that_alternate_stay_right(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        model.other_way = bool(torch.rand(()) < 0.5)
        return usual(model, optimizer)

    phases = phases_of(branching_and_adam, step, 24, each_setting, caplog)
    assert len(phases) == 24
    assert set(phases) <= {"traced", "measured", "planned", "on demand"}


def test_another_number_of_micro_batches(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        for _ in range(3 if index == 4 else 1 if index == 6 else 2):
            loss = loss_of(model)
            loss.backward()
        optimizer.step()
        return loss

    phases = phases_of(mlp_and_adam, step, 9, each_setting, caplog)
    assert phases[:4] == ["traced", "measured", "planned", "planned"]
    assert phases[5] == phases[7] == phases[8] == "planned"


def fails_in_forward(model: Any, optimizer: Any) -> None:
    model.fails = True
    with pytest.raises(ValueError, match="in the middle of forward"):
        model(torch.randn(4, 8))
    model.fails = False


class Bomb(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ValueError("in the middle of backward")


class Explosive(Mlp):
    """Fails in the middle of its backward when told so."""

    armed = False
    error: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.error is not None:
            raise self.error("in forward")
        return self.second(Bomb.apply(hidden) if self.armed else hidden)  # type: ignore[no-untyped-call]


def explosive_and_adam() -> Any:
    model = Explosive()
    return model, adam(model)


def fails_in_backward(model: Any, optimizer: Any) -> None:
    model.armed = True
    loss = loss_of(model)
    with pytest.raises(ValueError, match="in the middle of backward"):
        loss.backward()
    model.armed = False
    optimizer.zero_grad()


def interrupted_in_forward(model: Any, optimizer: Any) -> None:
    model.error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 8))
    model.error = None


TROUBLES = {
    "exception in forward": (branching_and_adam, fails_in_forward),
    "exception in backward": (explosive_and_adam, fails_in_backward),
    "KeyboardInterrupt in forward": (explosive_and_adam, interrupted_in_forward),
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("at", [0, 1, 4], ids=["traced step", "measured step", "planned step"])
def test_trouble_and_then_right_steps(each_setting: Setting, caplog: pytest.LogCaptureFixture, trouble: str, at: int) -> None:
    make, fails = TROUBLES[trouble]

    def step(model: Any, optimizer: Any, index: int) -> Any:
        if index == at:
            fails(model, optimizer)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        return usual(model, optimizer)

    phases = phases_of(make, step, at + 6, each_setting, caplog)
    assert phases[-1] == "planned"
    assert len(messages(caplog)) <= 1


def test_the_state_after_an_exception_is_whole(each_setting: Setting) -> None:
    torch.manual_seed(0)
    model, optimizer = explosive_and_adam()
    each_setting.wrap(model, optimizer)
    for _ in range(4):
        usual(model, optimizer)
    optimizer.zero_grad()
    before = look(model, optimizer)
    for fails in (fails_in_backward, interrupted_in_forward):
        fails(model, optimizer)
        assert_same([before], [look(model, optimizer)])
    tieroff.unwrap(model)
    assert_same([before], [look(model, optimizer)])


def test_an_error_in_the_optimizer_step_is_passed_on_and_loses_nothing(each_setting: Setting) -> None:
    torch.manual_seed(0)
    model, optimizer = mlp_and_adam()
    each_setting.wrap(model, optimizer)
    for _ in range(4):
        usual(model, optimizer)
    loss_of(model).backward()
    before = look(model, optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("in the hook")))
    with pytest.raises(ValueError, match="in the hook"):
        optimizer.step()
    assert_same([before], [look(model, optimizer)])
    handle.remove()
    optimizer.step()
    assert not torch.equal(before["parameter first.weight"], model.get_parameter("first.weight"))
    for _ in range(2):
        usual(model, optimizer)
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_an_evaluation_pass_anywhere_leaves_the_plan_alone(
    each_setting: Setting, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]

    def evaluate(model: Any) -> torch.Tensor:
        model.eval()
        with context():
            out = model(torch.randn(6, 8)).clone()
        model.train()
        return out

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        between_steps = evaluate(model) if index % 2 else None
        loss = loss_of(model)
        after_forward = evaluate(model) if index in (1, 4) else None
        loss.backward()
        after_backward = evaluate(model) if index in (2, 5) else None
        optimizer.step()
        return loss, between_steps, after_forward, after_backward

    phases = phases_of(mlp_and_adam, step, 8, each_setting, caplog)
    assert phases == ["traced", "measured"] + ["planned"] * 6
    assert messages(caplog) == []


def test_an_evaluation_in_every_other_step_is_no_part_of_the_plan(
    each_setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model)
        with torch.no_grad():
            seen = None if index % 2 else model(torch.randn(6, 8)).clone()
        loss.backward()
        optimizer.step()
        return loss, seen

    phases = phases_of(mlp_and_adam, step, 8, each_setting, caplog)
    assert phases == ["traced", "measured", "traced", "measured"] + ["planned"] * 4


def test_a_forward_whose_graph_is_thrown_away(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        extra = loss_of(model).detach() if index == 4 else None  # with a graph, and no backward
        return usual(model, optimizer), extra

    phases = phases_of(mlp_and_adam, step, 8, each_setting, caplog)
    assert phases[:4] == ["traced", "measured", "planned", "planned"]
    assert phases[4] != "planned"  # it begins with the gradients of the step before, and is another kind
    assert phases[5:] == ["planned"] * 3
    assert messages(caplog) == []


def test_a_graph_that_outlives_its_step(each_setting: Setting) -> None:
    held: list[torch.Tensor] = []

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        x = torch.randn(4, 8, requires_grad=True)
        loss = model(torch.tanh(x).square()).square().mean()
        held.append(loss)
        loss.backward(retain_graph=True)
        if len(held) > 3:
            held.pop(0)
        optimizer.step()
        return loss, x.grad

    plain = follow(mlp_and_adam, step, 6)
    held.clear()
    wrapped = follow(mlp_and_adam, step, 6, each_setting)
    held.clear()
    assert_same(plain.seen, wrapped.seen)


def test_unwrap_between_forward_and_backward(each_setting: Setting) -> None:
    def run(setting: Setting | None) -> list[Any]:
        torch.manual_seed(0)
        model, optimizer = mlp_and_adam()
        if setting is not None:
            setting.wrap(model, optimizer)
        for _ in range(4):
            usual(model, optimizer)
        optimizer.zero_grad()
        loss = loss_of(model)
        if setting is not None:
            tieroff.unwrap(model)
        loss.backward()
        optimizer.step()
        return [look(model, optimizer, loss)]

    assert_same(run(None), run(each_setting))


class Cells(nn.Module):
    """A loop of one cell, whose gates are views of one storage that count their versions apart (`unsafe_chunk`)."""

    def __init__(self, build: type[nn.LSTMCell] | type[nn.GRUCell]) -> None:
        super().__init__()
        self.cell, self.head = build(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, outputs = None, []
        for part in x.unbind(1):
            state = self.cell(part, state)
            outputs.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.cat(outputs, 1)


@pytest.mark.parametrize("budget", ["90%", "75%", "60%", "50%"])
@pytest.mark.parametrize("build", [nn.LSTMCell, nn.GRUCell])
def test_steps_of_which_some_views_of_a_storage_move_follow_their_plan(
    build: type[nn.LSTMCell] | type[nn.GRUCell], budget: str
) -> None:
    batch = torch.randn(32, 12, 16, generator=torch.Generator().manual_seed(0))

    def train(wraps: bool) -> tuple[list[torch.Tensor], list[str]]:
        torch.manual_seed(0)
        model, losses, phases = Cells(build), [], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if wraps:
            config = {"device": "cpu", "budget": {"device": budget, "host": "64MiB"}, "plan": {"min_bytes": 1}}
            tieroff.wrap(model, optimizer, config)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
            phases.append(tieroff.engine(model).stats().phase if wraps else "")
        return losses, phases

    losses, _ = train(wraps=False)
    wrapped_losses, phases = train(wraps=True)
    assert phases[2:] == ["planned"] * 3
    assert all(map(torch.equal, wrapped_losses, losses))
