"""Optimizers that people wrote: what may be stepped in buckets, and that everything else is stepped as it is."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import tieroff
from tests.support.twins import Mlp, Setting, assert_same, equal, follow, look, with_plans
from tieroff.runtime.optimizer.buckets import Buckets
from tieroff.runtime.optimizer.known import known_of

pytestmark = pytest.mark.timeout(60)


class Deep(nn.Module):
    """Layers whose activations take most of the memory, so that half of it is enough for any op and any update."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def step_of(model: Any, optimizer: Any, index: int) -> torch.Tensor:
    """An ordinary step; the gradients stay, to be looked at."""
    optimizer.zero_grad()
    loss: torch.Tensor = model(torch.randn(256, 8)).square().sum()
    loss.backward()
    optimizer.step()
    return loss


def with_closure(model: Any, optimizer: Any, index: int) -> Any:
    x = torch.randn(256, 8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure)


def check(make: Any, step: Any, setting: Setting, steps: int = 5) -> None:
    """Asserts that a loop does the same wrapped as plain, whatever moved."""
    plain, wrapped = follow(make, step, steps), follow(make, step, steps, setting)
    assert_same(plain.seen, wrapped.seen)


class Own(torch.optim.Optimizer):
    """The frame of an optimizer: options, and `update` for a list of parameters with gradients."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr})
        self.__dict__.update(options)

    def __getattr__(self, name: str) -> Any:
        """Says to the type checker that there are more attributes."""
        raise AttributeError(name)

    def active(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


class ClippedByAttribute(Own):
    """Clips by the norm of all gradients when an attribute of the instance says so."""

    clip = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        factor = 1.0
        if self.clip:
            factor = min(1.0, self.clip / float(torch.stack([p.grad.norm() for p in self.active()]).norm()))
        for p in self.active():
            p.add_(p.grad, alpha=-1e-2 * factor)


class ClippedAbove(Own):
    """Clips where the norm of all gradients is above a threshold, without a look from Python."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        norms = torch._foreach_norm([p.grad for p in self.active()])
        factor = (self.threshold / torch.stack(norms).norm()).clamp(max=1.0)
        for p in self.active():
            p.sub_(p.grad * factor, alpha=1e-2)


class ReadsInPython(Own):
    """Passes a value from parameter to parameter in Python, and does so only where a gradient is large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        largest = max(sum(map(abs, p.grad.flatten().tolist())) for p in self.active())
        for p in self.active():
            p.add_(p.grad, alpha=-1e-2 if largest < 1e30 else 0.0)


class ReadsByNumpy(Own):
    """As above, by NumPy."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        largest = max(numpy.abs(p.grad.numpy()).max() for p in self.active())
        for p in self.active():
            p.add_(p.grad, alpha=-1e-2 if largest < 1e30 else 0.0)


class Flattened(Own):
    """Updates one flat copy of everything, as fused optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        active = self.active()
        flat = torch.cat([p.grad.flatten() for p in active]) * 1e-2
        for p, part in zip(active, flat.split([p.numel() for p in active]), strict=True):
            p.sub_(part.view_as(p))


class Chained(Own):
    """Each parameter's step uses a buffer that the one before left."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.active():
            self.buffer = getattr(self, "buffer", torch.zeros(())) * 0.5 + p.grad.mean()
            p.sub_(p.grad + self.buffer * 0, alpha=1e-2)


class CountsInClass(Own):
    """Counts its calls in the class."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        type(self).calls += 1
        for p in self.active():
            p.add_(p.grad, alpha=-1e-2 / (1 + type(self).calls // 1000))


_calls = [0]


class CountsInModule(Own):
    """Counts its calls in a global list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        _calls[0] += 1
        for p in self.active():
            p.add_(p.grad, alpha=-1e-2 / (1 + _calls[0] // 1000))


class KnowsTheModel(Own):
    """Holds the model, and so parameters that its groups do not show."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.active():
            p.add_(p.grad, alpha=-1e-2)
        if self.model.first.bias.abs().max() > 1e30:
            self.model.second[0].bias.zero_()


class CountsItsParameters(Own):
    """Divides by the number of parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.active():
            p.add_(p.grad, alpha=-1e-2 / len(self.active()))


class LastByPlace(Own):
    """Treats the last parameter of all in another way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        active = self.active()
        for p in active:
            p.add_(p.grad, alpha=-1e-2 if p is active[-1] else -1e-3)


class CountsByTheFirst(Own):
    """Counts for each parameter, and goes by the first one's count in all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.active():
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
        for p in self.active():
            p.add_(p.grad, alpha=-1e-2 / self.state[self.active()[0]]["step"])


class NeedsGradients(Own):
    """Cannot be called where no parameter has a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch._foreach_add_(self.active(), [p.grad for p in self.active()], alpha=-1e-2)


COUPLED = [
    (ClippedByAttribute, {"clip": 0.1}),
    (ClippedAbove, {"threshold": 1e30}),
    (ClippedAbove, {"threshold": 1.0}),
    (ReadsInPython, {}),
    (ReadsByNumpy, {}),
    (Flattened, {}),
    (Chained, {}),
    (CountsInClass, {}),
    (CountsInModule, {}),
    (CountsItsParameters, {}),
    (LastByPlace, {}),
    (CountsByTheFirst, {}),
    (NeedsGradients, {}),
]


@pytest.mark.parametrize(("build", "options"), COUPLED, ids=[f"{build.__name__}-{options}" for build, options in COUPLED])
def test_an_optimizer_whose_parameters_reach_each_other_is_stepped_whole_even_where_nothing_shows_yet(
    build: Any, options: Any, each_setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        CountsInClass.calls = _calls[0] = 0
        model = Deep()
        return model, build(model.parameters(), **options)

    with caplog.at_level(logging.WARNING, "tieroff"):
        check(make, step_of, each_setting)
    told = [record.getMessage() for record in caplog.records if "is stepped whole" in record.getMessage()]
    assert len(told) == 1, told


def test_why_a_first_update_cannot_be_tried_is_said_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 4, bias=False)
    tieroff.wrap(model, CountsInGroup(model.parameters(), lr=0.1), {"device": "cpu", "plan": {"min_bytes": 0}}, budget="min")
    step_of(model, tieroff.engine(model).optimizer, 0)
    tieroff.unwrap(model)
    (told,) = (record.getMessage() for record in caplog.records if "is stepped whole" in record.getMessage())
    assert "takes two gradients, and there are 1" in told


def test_an_optimizer_that_holds_the_model_is_stepped_whole(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        model = Deep()
        return model, KnowsTheModel(model.parameters(), model=model)

    check(make, step_of, each_setting)
    assert "its attribute model holds a Deep" in caplog.text


def clipping(clip: Any) -> Any:
    def make() -> Any:
        model = Deep()
        return model, ClippedByAttribute(model.parameters(), clip=clip)

    return make


def test_a_setting_on_the_instance_counts_under_every_plan(planned_setting: Setting) -> None:
    check(clipping(0.1), step_of, planned_setting)


class FirstGroup(Own):
    """Reads the options of the first group for all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.active():
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


def test_options_of_the_first_group_read_for_all(planned_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        model = Deep()
        rates = ((model.second, 1e-1), (model.first, 1e-3))
        return model, FirstGroup([{"params": list(part.parameters()), "lr": lr} for part, lr in rates])

    check(make, step_of, planned_setting)
    assert "stepped whole" not in caplog.text


class ReadsAttributes(Own):
    """Reads what the program hung on each parameter, and counts there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.active():
            p.options["updates"] += 1
            rate = p.rate(p.options["updates"]) if p.partner is None else float(p.partner.grad.abs().sum() > 0) * 1e-2
            p.sub_(p.grad * p.mask, alpha=rate)


@pytest.mark.parametrize("are_coupled", [False, True])
def test_what_the_program_hung_on_parameters_is_there_in_the_trial(
    are_coupled: bool, planned_setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        model: Any = Deep()
        for p in model.parameters():
            p.options, p.rate, p.mask, p.partner = {"updates": 0}, lambda count: 1e-2 / count, (p > 0).float(), None
            p.module = model  # for others: nothing of the optimizer, and not copied
        if are_coupled:
            model.first.weight.partner = model.first.bias
        return model, ReadsAttributes(model.parameters())

    def step(model: Any, optimizer: Any, index: int) -> Any:
        return step_of(model, optimizer, index), [p.options["updates"] for p in model.parameters()]

    check(make, step, planned_setting)
    assert ("is stepped whole" in caplog.text) == are_coupled


class Polyak(Own):
    """Its step size is the loss that its closure returns."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for p in self.active():
            p.add_(p.grad, alpha=-1e-2 * float(loss))
        return loss


@with_plans(is_declared=(False, True))
def test_the_loss_of_the_closure_reaches_the_update(is_declared: bool, planned_setting: Setting) -> None:
    kind = tieroff.per_parameter(type("Declared", (Polyak,), {"step": Polyak.step})) if is_declared else Polyak

    def make() -> Any:
        model = Deep()
        return model, kind(model.parameters())

    check(make, with_closure, planned_setting)


class Sam(Own):
    """Climbs, evaluates its closure again there, comes back by putting the old values in place, and descends."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        norm = torch.stack([p.grad.norm() for p in self.active()]).norm()
        for p in self.active():
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad / norm, alpha=0.05)
        evaluate()
        for p in self.active():
            if self.rebinds:
                p.data = self.state[p]["old"]
            else:
                p.copy_(self.state[p]["old"])
            p.sub_(p.grad, alpha=0.1)
        return loss


@pytest.mark.filterwarnings("ignore::tieroff.errors.BudgetWarning")  # half of what two tiny evaluations take is too little
@with_plans(rebinds=(False, True))
def test_an_optimizer_that_evaluates_the_model_twice(rebinds: bool, planned_setting: Setting) -> None:
    def make() -> Any:
        model = Deep()
        return model, Sam(model.parameters(), rebinds=rebinds)

    check(make, with_closure, planned_setting, steps=6)


@pytest.mark.filterwarnings("ignore::tieroff.errors.BudgetWarning")
def test_lbfgs_with_a_line_search(planned_setting: Setting) -> None:
    def make() -> Any:
        model = Deep()
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

    plain, wrapped = follow(make, with_closure, 3), follow(make, with_closure, 3, planned_setting)
    assert_same(plain.seen, wrapped.seen)
    assert wrapped.phase in ("planned", "nothing moved")  # each evaluation is a step


def test_a_step_replaced_on_the_instance_is_what_runs(planned_setting: Setting) -> None:
    def make() -> Any:
        model = Deep()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        inner = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(0.1)
            return inner(*args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]
        return model, optimizer

    check(make, step_of, planned_setting)


def test_a_replaced_step_is_there_again_after_unwrap(each_setting: Setting) -> None:
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls: list[int] = []
    optimizer.step = lambda closure=None: calls.append(1)  # type: ignore[method-assign]
    own = optimizer.step
    each_setting.wrap(model, optimizer)
    kept = optimizer.step
    step_of(model, optimizer, 0)
    tieroff.unwrap(model)
    assert optimizer.step is own
    kept()
    assert calls == [1, 1]


class Langevin(Own):
    """Adds noise to each parameter, one after the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.active():
            p.add_(p.grad, alpha=-1e-2).add_(torch.randn_like(p), alpha=1e-3 * (1 + random.random() + numpy.random.rand()))


class LangevinInTwoPasses(Own):
    """Draws all noise before it updates anything."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        noise = [torch.randn_like(p) for p in self.active()]
        for p, drawn in zip(self.active(), noise, strict=True):
            p.add_(p.grad, alpha=-1e-2).add_(drawn * torch.rand(()), alpha=1e-3)


@with_plans(build=(Langevin, LangevinInTwoPasses))
def test_an_optimizer_that_draws_random_numbers_draws_those_of_the_plain_run(build: Any, planned_setting: Setting) -> None:
    def make() -> Any:
        random.seed(7)
        numpy.random.seed(7)
        model = nn.Sequential(Deep(), nn.Dropout(0.3))
        return model, build(model.parameters())

    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = step_of(model, optimizer, index)
        return loss, torch.rand(3), random.random(), float(numpy.random.rand())

    check(make, step, planned_setting)


def test_wrap_draws_no_random_number(each_setting: Setting) -> None:
    model = Deep()
    optimizer = Langevin(model.parameters())
    before = torch.get_rng_state(), random.getstate()
    each_setting.wrap(model, optimizer)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    tieroff.unwrap(model)


class CountsInGroup(Own):
    """Elementwise, with a counter and a sum in each group and a counter in an attribute, as fused optimizers have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["weight"] = group.get("weight", 0.0) + group["lr"] / self.calls
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_(average.lerp_(p.grad, 0.1), alpha=group["weight"] / group["step"])


class CountsInTensors(Own):
    """Has a counter in a tensor for each parameter, raised by one tensor for all, and reads it, as torch's own do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        active = self.active()
        for p in active:
            self.state[p].setdefault("step", torch.zeros(()))
            self.state[p].setdefault("average", torch.zeros_like(p))
        if active:
            torch._foreach_add_([self.state[p]["step"] for p in active], torch.ones(()), alpha=1.0)
        for p in active:
            p.sub_(self.state[p]["average"].lerp_(p.grad, 0.1), alpha=1e-2 / (1 - 0.9 ** self.state[p]["step"].item()))


class DerivedAdamW(torch.optim.AdamW):
    """Has options of its own and torch's update."""


def of_torch(**options: Any) -> Any:
    def make(parameters: Any) -> Any:
        torch.optim.AdamW([nn.Parameter(torch.zeros(2))])  # the first of a class has torch replace its `step`
        return DerivedAdamW(parameters, lr=1e-2, **options)

    return make


@with_plans(
    make_optimizer=(CountsInTensors, of_torch(foreach=False), of_torch(foreach=True), of_torch(fused=True)),
    is_later=(False, True),
)
def test_counters_in_tensors_that_are_read_couple_nothing(
    make_optimizer: Any, is_later: bool, planned_setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        model = Deep()
        optimizer = make_optimizer(model.parameters())
        if is_later:  # as one that was resumed
            step_of(model, optimizer, 0)
        return model, optimizer

    def step(model: Any, optimizer: Any, index: int) -> Any:
        model.first.requires_grad_(index > 1)  # counters of its parameters stay behind
        return step_of(model, optimizer, index)

    check(make, step, planned_setting, steps=7)
    assert "stepped whole" not in caplog.text


class AsksForNoGradient(Own):
    """Takes it that each parameter has one, as many written by hand do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.sub_(average.lerp_(p.grad, 0.1), alpha=1e-2)


@with_plans()
def test_one_that_needs_all_gradients_is_stepped_in_buckets(planned_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        model = Deep()
        return model, AsksForNoGradient(model.parameters())

    check(make, step_of, planned_setting, steps=5)
    assert "stepped whole" not in caplog.text


class Evaluates(Own):
    """Evaluates the model once as it begins, as torch's own do; Lightning gives a closure in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.evaluate(closure) if closure is not None else None
        for p in self.active():
            p.sub_(self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1), alpha=1e-2)
        return loss

    def evaluate(self, closure: Any) -> Any:
        with torch.enable_grad():
            return closure()


class EvaluatesTwice(Evaluates):
    def evaluate(self, closure: Any) -> Any:
        return super().evaluate(closure) + super().evaluate(closure)


class EvaluatesTwiceAtTimes(Evaluates):
    """In each fifth of its steps."""

    def evaluate(self, closure: Any) -> Any:
        loss = super().evaluate(closure)
        self.param_groups[0]["steps"] = steps = self.param_groups[0].get("steps", 0) + 1
        return loss if steps % 5 else super().evaluate(closure)


class EvaluatesElsewhere(Evaluates):
    """Evaluates where it will be after a step of the gradients that it finds."""

    def evaluate(self, closure: Any) -> Any:
        for p in self.active():
            p.sub_(p.grad, alpha=1e-3)
        return super().evaluate(closure)


class UsesWhatItGives(Evaluates):
    def evaluate(self, closure: Any) -> Any:
        loss = super().evaluate(closure)
        self.param_groups[0]["lr"] = 1e-3 * float(loss)
        return loss


def buckets_in(model: Any) -> int:
    return sum(op.name.startswith("bucket:") for op in tieroff.engine(model).trace.ops)


@pytest.mark.parametrize(
    ("build", "is_split"),
    [
        (Evaluates, True),
        *((build, False) for build in (EvaluatesTwice, EvaluatesTwiceAtTimes, EvaluatesElsewhere, UsesWhatItGives)),
    ],
)
def test_with_a_closure_one_that_evaluates_once_as_it_begins_is_stepped_in_buckets(
    build: Any, is_split: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    runs = []
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
        optimizer = build(model.parameters())
        if is_wrapped:
            Setting(tmp_path, device="100%").wrap(model, optimizer)
        losses = []
        for index in range(7):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(index))

            def closure(x: torch.Tensor = x, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(x).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        if is_wrapped:
            assert (buckets_in(model) > 1) == is_split
            tieroff.unwrap(model)
        runs.append([losses, *(p.tolist() for p in model.parameters())])
    assert runs[0] == runs[1]
    assert "stepped whole" not in caplog.text


@with_plans(is_declared=(False, True))
def test_counters_of_groups_and_instances_move_once_per_update(
    is_declared: bool, planned_setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"step": CountsInGroup.step}
    kind = tieroff.per_parameter(type("Declared", (CountsInGroup,), body)) if is_declared else CountsInGroup

    def make() -> Any:
        model = Deep()
        return model, kind([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(model.parameters())])

    def step(model: Any, optimizer: Any, index: int) -> Any:
        return step_of(model, optimizer, index), optimizer.calls, [(g["step"], g["weight"]) for g in optimizer.param_groups]

    check(make, step, planned_setting)
    assert "stepped whole" not in caplog.text


def test_a_wrong_declaration_is_an_error_where_it_shows(each_setting: Setting) -> None:
    class Chain(Own):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.active():
                self.last = getattr(self, "last", 0.0) + float(p.grad.sum())
                p.sub_(p.grad, alpha=self.last)

    tieroff.per_parameter(Chain)
    model = Mlp(32)
    optimizer = Chain(model.parameters())
    each_setting.wrap(model, optimizer)
    model(torch.randn(4, 32)).sum().backward()
    with pytest.raises(tieroff.StateError, match="couples its parameters and cannot be stepped in parts"):
        optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == 4
    tieroff.unwrap(model)


def test_a_declaration_is_for_its_class_alone() -> None:
    @tieroff.per_parameter
    class Mine(Own):
        pass

    class Sub(Mine):
        pass

    params = [nn.Parameter(torch.zeros(2))]
    assert known_of(Mine(params)) is not None
    assert known_of(Sub(params)) is None
    with pytest.raises(TypeError, match="declare the class"):
        tieroff.per_parameter(Mine(params))  # type: ignore[type-var]


def test_classes_are_known_by_themselves_and_not_by_their_names() -> None:
    params = [nn.Parameter(torch.zeros(2, 2))]
    assert known_of(torch.optim.AdamW(params)) is not None

    class AdamW(torch.optim.AdamW):
        pass

    assert known_of(AdamW(params)) is None
    AdamW.__module__ = "torch.optim.adamw"
    assert known_of(AdamW(params)) is None


def test_a_library_whose_options_go_by_place_is_not_known_while_it_has_such() -> None:
    class Manager:
        def __init__(self) -> None:
            self.pid2config: dict[int, Any] = {}
            self.index2config: dict[Any, Any] = {}
            self.module_weight_config_triple: list[Any] = []

    manager = Manager()
    kind = type("Adam8bit", (Own,), {"__module__": "bitsandbytes.optim.adam", "mng": manager})
    optimizer = kind([nn.Parameter(torch.zeros(2))])
    assert known_of(optimizer) is not None
    manager.pid2config = {1: {"optim_bits": 32}}
    assert known_of(optimizer) is None


def test_the_trial_leaves_the_optimizer_as_it_is() -> None:
    model = Deep()
    optimizer = CountsInGroup(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    before = look(model, optimizer)
    buckets = Buckets(optimizer, is_replaced=False)
    buckets.settle(torch.Tensor.detach, (), {})
    assert buckets.is_split
    assert not buckets.is_trusted
    assert equal(before, look(model, optimizer))
    assert not hasattr(optimizer, "calls")


def test_a_table_that_all_state_has_leaves_buckets_as_they_are() -> None:
    """bitsandbytes keeps the map of its 8-bit numbers so; a moment that two parameters share joins them."""
    parameters = [nn.Parameter(torch.zeros(1 << 20)) for _ in range(4)]
    optimizer = torch.optim.AdamW(parameters)
    table = torch.zeros(256)
    for parameter in parameters:
        optimizer.state[parameter] = {"table": table, "mean": torch.zeros_like(parameter)}
    buckets = Buckets(optimizer, is_replaced=False)
    count = len(buckets.all())
    assert count > 1
    optimizer.state[parameters[0]]["mean"] = optimizer.state[parameters[3]]["mean"]
    assert len(buckets.all()) == count - 1
