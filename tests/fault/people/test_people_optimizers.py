"""What people do with optimizers: groups, closures, hooks, schedulers, scalers, and optimizers of their own."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import tieroff
from tests.support.twins import Mlp, Setting, adam, check_twins, equal, follow, look, loss_of, mlp_and_adam, sgd
from tests.support.twins import usual_step as usual
from tieroff.core.tensor import TensorClass
from tieroff.errors import StateError

pytestmark = pytest.mark.timeout(60)


def test_add_param_group_later(each_setting: Setting) -> None:
    def make() -> Any:
        model = Mlp()
        return model, torch.optim.Adam(model.first.parameters(), 0.01)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        if index == 4:
            optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.1})
        model.second.zero_grad()
        return usual(model, optimizer)

    check_twins(make, step, each_setting, steps=12, moves=("parameter", "optimizer", "gradient"))


def test_zero_grad_without_setting_to_none(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        return loss

    check_twins(mlp_and_adam, step, each_setting, moves=("parameter", "optimizer", "gradient"))


def test_gradients_accumulated_over_steps_and_zeroed_by_hand(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = loss_of(model)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()
        if index % 2:
            for parameter in model.parameters():
                parameter.grad.zero_()
        return loss

    check_twins(mlp_and_adam, step, each_setting, steps=6, moves=("parameter", "optimizer", "gradient"))


def test_a_closure_runs_once(each_setting: Setting) -> None:
    calls: list[int] = []

    def step(model: Any, optimizer: Any, index: int) -> Any:
        x = torch.randn(4, 8)

        def closure() -> torch.Tensor:
            calls.append(index)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure) if index % 2 else optimizer.step(closure=closure)

    check_twins(mlp_and_adam, step, each_setting, steps=5)
    assert calls == [0, 1, 2, 3, 4] * 2


def test_step_hooks_fire_once_and_see_the_arguments(each_setting: Setting) -> None:
    fired: list[str] = []

    def make() -> Any:
        model = Mlp(32)
        optimizer = adam(model)
        optimizer.register_step_pre_hook(lambda o, args, kwargs: fired.append(f"before {len(o.param_groups[0]['params'])}"))
        optimizer.register_step_post_hook(lambda o, args, kwargs: fired.append(f"after {len(o.param_groups[0]['params'])}"))
        return model, optimizer

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, width=32)
        loss.backward()
        optimizer.step()
        return loss

    check_twins(make, step, each_setting, steps=4)
    assert fired == ["before 4", "after 4"] * 8


def test_step_hooks_that_change_weights_and_gradients(each_setting: Setting) -> None:
    def make() -> Any:
        model = Mlp()
        optimizer = adam(model)

        def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.99)

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(shrink)
        return model, optimizer

    check_twins(make, usual, each_setting)


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_made_before_and_after_wrap(each_setting: Setting, when: str) -> None:
    schedulers: dict[int, Any] = {}

    def schedule(optimizer: Any) -> Any:
        first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.9)], [3])

    def make() -> Any:
        model, optimizer = mlp_and_adam()
        if when == "before":
            schedulers[id(optimizer)] = schedule(optimizer)
        return model, optimizer

    def step(model: Any, optimizer: Any, index: int) -> Any:
        if index == 0 and when == "after":
            schedulers[id(optimizer)] = schedule(optimizer)
        loss = usual(model, optimizer)
        schedulers[id(optimizer)].step()
        return loss, schedulers[id(optimizer)].get_last_lr()

    check_twins(make, step, each_setting, steps=6)


def test_one_cycle_momentum_and_plateau(each_setting: Setting) -> None:
    schedulers: dict[int, Any] = {}

    def make() -> Any:
        model, optimizer = mlp_and_adam()
        cycle = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        schedulers[id(optimizer)] = (cycle, lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
        return model, optimizer

    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        cycle, plateau = schedulers[id(optimizer)]
        cycle.step()
        plateau.step(float(loss.detach()))
        return loss, optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]

    check_twins(make, step, each_setting, steps=6)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_with_a_skipped_step(each_setting: Setting, fused: bool) -> None:
    scalers: dict[int, Any] = {}

    def make() -> Any:
        model = Mlp()
        return model, torch.optim.Adam(model.parameters(), 0.01, fused=fused)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        if index == 0:
            scalers[id(optimizer)] = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        scaler = scalers[id(optimizer)]
        optimizer.zero_grad()
        loss = loss_of(model)
        if index == 4:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if index != 5:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        finite = [torch.nan_to_num(p.grad) for p in model.parameters()]
        if index == 4:
            optimizer.zero_grad()
        return scaler.get_scale(), finite

    check_twins(make, step, each_setting, steps=9)


class CountingSgd(torch.optim.Optimizer):
    """Keeps one step counter per group, on which the update depends."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["count"])


class NormedSgd(torch.optim.Optimizer):
    """Divides by the norm of all gradients of a group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.stack([g.norm() for g in grads]).norm()
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / norm, alpha=group["lr"])
                    self.state[parameter]["seen"] = self.state[parameter].get("seen", torch.zeros(())) + 1


class CountingWithin(torch.optim.Optimizer):
    """Counts its steps in an attribute."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"] / self.count)


@pytest.mark.parametrize(("build", "is_whole"), [(CountingSgd, False), (NormedSgd, True), (CountingWithin, False)])
def test_an_optimizer_that_couples_parameters_is_stepped_whole_with_a_warning(
    each_setting: Setting, build: Any, is_whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        model = Mlp()
        return model, build(model.parameters(), 0.1)

    with caplog.at_level(logging.WARNING, "tieroff"):
        check_twins(make, usual, each_setting)
    told = [r.getMessage() for r in caplog.records if "stepped whole" in r.getMessage()]
    assert len(told) == is_whole
    assert all(message.startswith(f"{build.__name__} is stepped whole (aten.stack") for message in told)


class Lion(torch.optim.Optimizer):
    """An optimizer of somebody's own that treats each parameter by itself."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                parameter.sub_(state["average"].lerp(parameter.grad, 0.1).sign_(), alpha=group["lr"])
                state["average"].lerp_(parameter.grad, 0.01)


def test_an_optimizer_of_ones_own_is_split_after_its_trial(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        model = Mlp()
        return model, Lion(model.parameters(), 0.01)

    check_twins(make, usual, each_setting, moves=("parameter", "optimizer"))
    assert "stepped whole" not in caplog.text


def test_an_optimizer_of_a_librarys_base_class_is_split(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    class Base(torch.optim.Optimizer):
        """Says what its optimizers have to have, and does nothing."""

        def step(self, closure: Any = None) -> Any:
            raise NotImplementedError("each has its own")

    kind: Any = type("OfALibrary", (Base,), {"step": Lion.step})

    def make() -> Any:
        model = Mlp()
        return model, kind(model.parameters(), {"lr": 0.01})

    check_twins(make, usual, setting, moves=("parameter", "optimizer"))
    assert "stepped whole" not in caplog.text


def test_an_optimizer_on_top_of_another(each_setting: Setting) -> None:
    class Averaged(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            out = super().step(closure)
            self.updates = getattr(self, "updates", 0) + 1
            return out

    def make() -> Any:
        model = Mlp()
        return model, Averaged(model.parameters(), 0.01)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        return usual(model, optimizer), optimizer.updates

    check_twins(make, step, each_setting)


def test_an_optimizer_that_replaces_its_state_every_step(each_setting: Setting) -> None:
    class Rebinding(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    old = self.state[parameter].get("average", torch.zeros_like(parameter))
                    self.state[parameter]["average"] = old * 0.9 + parameter.grad
                    parameter.sub_(self.state[parameter]["average"], alpha=0.01)

    def make() -> Any:
        model = Mlp()
        return model, Rebinding(model.parameters())

    check_twins(make, usual, each_setting, moves=("parameter", "optimizer"))


def test_parameters_outside_the_model(each_setting: Setting) -> None:
    class WithLoss(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.weights = {"a": torch.randn(16, requires_grad=True), "b": torch.randn(16, requires_grad=True)}

    def make() -> Any:
        model = WithLoss()
        return model, torch.optim.Adam([*model.parameters(), *model.weights.values()], 0.01)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model) * (model.weights["a"] * model.weights["b"]).sum()
        loss.backward()
        optimizer.step()
        return loss, dict(model.weights)

    check_twins(make, step, each_setting, moves=("parameter", "optimizer"))


def test_parameters_that_only_some_groups_update(each_setting: Setting) -> None:
    def make() -> Any:
        model = Mlp()
        decay, rest = [model.first.weight], [model.first.bias, model.second.bias]
        groups: list[dict[str, Any]] = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.1}, {"params": []}]
        return model, torch.optim.AdamW(groups, 0.01, amsgrad=True)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        model.zero_grad()
        return usual(model, optimizer)

    check_twins(make, step, each_setting)


def test_two_optimizers_of_which_one_is_attached(each_setting: Setting) -> None:
    def make() -> Any:
        model = Mlp()
        model.other = {"optimizer": torch.optim.Adam(model.second.parameters(), 0.02)}  # type: ignore[assignment]
        return model, torch.optim.Adam(model.first.parameters(), 0.01)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()
        model.other["optimizer"].step()
        optimizer.step()
        return loss, model.other["optimizer"].state_dict()["state"]

    check_twins(make, step, each_setting)


def test_state_loaded_in_mid_training(each_setting: Setting) -> None:
    files: list[io.BytesIO] = []

    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        if index == 2:
            files.append(io.BytesIO())
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(kept, files[-1])
        if index == 4:
            files[-1].seek(0)
            kept = torch.load(files[-1], weights_only=True)
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
        return loss

    check_twins(mlp_and_adam, step, each_setting, steps=9)


def test_state_that_was_there_before_wrap_lies_below_like_any_other(each_setting: Setting) -> None:
    def trained() -> Any:
        model, optimizer = mlp_and_adam()
        for _ in range(2):
            usual(model, optimizer)
        return model, optimizer

    torch.manual_seed(0)
    model, optimizer = trained()
    each_setting.wrap(model, optimizer)
    engine = tieroff.engine(model)
    assert engine.device_bytes == 0
    for _ in range(3):
        usual(model, optimizer)
    held = [t.holds for t in engine.trace.tensors if t.kind is TensorClass.OPTIMIZER]
    update = next(i for i, op in enumerate(engine.trace.ops) if op.name == "bucket:0")
    assert held and all(start >= update for holds in held for start, _ in holds)
    tieroff.unwrap(model)
    check_twins(trained, usual, each_setting, steps=6, moves=("parameter", "optimizer"))


def test_state_loaded_between_steps_lies_below_when_the_next_step_begins(each_setting: Setting) -> None:
    model, optimizer = mlp_and_adam()
    each_setting.wrap(model, optimizer)
    for _ in range(4):
        usual(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    loss = loss_of(model)
    states = tieroff.engine(model).executor.homes.states
    moved = {id(item.tensor): item for item in states.values()}
    for state in optimizer.state.values():
        assert moved[id(state["exp_avg"])].device is None
    loss.backward()
    optimizer.step()
    tieroff.unwrap(model)


def test_the_optimizer_attached_later_and_released_plain(each_setting: Setting) -> None:
    plain = follow(mlp_and_adam, usual, 5)
    torch.manual_seed(0)
    model, optimizer = mlp_and_adam()
    each_setting.wrap(model)
    tieroff.engine(model).attach(optimizer)
    for index in range(5):
        torch.manual_seed(1000 + index)
        usual(model, optimizer)
    with pytest.raises(StateError, match="attached already"):
        tieroff.engine(model).attach(sgd(model))
    other = Mlp()
    with pytest.raises(StateError, match="none of Mlp"):
        each_setting.wrap(other, optimizer)
    tieroff.unwrap(model)
    assert "step" not in optimizer.__dict__
    seen = look(model, optimizer)
    assert all(equal(seen[name], plain.seen[-1][name]) for name in seen if name != "out")
