"""Habits of training loops that reach round the module's forward, each plain and wrapped: the same numbers."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, stack_module_state, vjp, vmap
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import from_dlpack

from tests.support.twins import Setting, assert_same, follow, loss_of
from tests.support.twins import usual_step as usual

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "cpu-floor": {"nvme": True},
    "cpu-auto-100": {"policy": "auto", "device": "100%"},
    "delayed-auto-50": {"policy": "auto", "device": "50%", "delayed": True},
}
LOOPS: dict[str, tuple[type[nn.Module], Callable[[Any, Any, int], Any]]] = {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.third = nn.LayerNorm(8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Any) -> Any:
        return self.third(torch.relu(self.third(self.norm(self.second(torch.tanh(self.first(x)))))))


def loop(kind: type[nn.Module] = Net) -> Callable[[Callable[[Any, Any, int], Any]], Callable[[Any, Any, int], Any]]:
    def add(step: Callable[[Any, Any, int], Any]) -> Callable[[Any, Any, int], Any]:
        LOOPS[step.__name__] = kind, step
        return step

    return add


def take_all(model: Any, optimizer: Any) -> None:
    """The optimizer gets the parameters that the model has now."""
    parameters = list(model.parameters())
    for gone in optimizer.state.keys() - set(parameters):
        del optimizer.state[gone]
    optimizer.param_groups[0]["params"] = parameters


# -- functional calls, gradients by hand -------------------------------------------------------------------------


@loop()
def gradients_of_each_sample(model: Any, optimizer: Any, index: int) -> Any:
    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (x[None],)).square().mean()

    usual(model, optimizer)
    values = {name: p.detach() for name, p in model.named_parameters()}
    found = vmap(grad(loss), in_dims=(None, 0))(values, torch.randn(5, 8))
    for name, p in model.named_parameters():
        p.grad = found[name].clamp(-1, 1).mean(0)
    optimizer.step()
    return found


@loop()
def forward_under_vmap_and_vjp(model: Any, optimizer: Any, index: int) -> Any:
    usual(model, optimizer)
    pulled: Any = vjp(model, torch.randn(4, 8))
    out, back = pulled
    optimizer.zero_grad()
    loss = vmap(model)(torch.randn(3, 4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    return loss, out, back(torch.ones_like(out))


@loop()
def ensemble_with_a_copy(model: Any, optimizer: Any, index: int) -> Any:
    loss = usual(model, optimizer)
    values, buffers = stack_module_state([model, copy.deepcopy(model)])
    many = vmap(lambda p, b: functional_call(model, (p, b), (torch.ones(4, 8),)))(values, buffers)
    return loss, many


@loop()
def inner_loop_of_maml(model: Any, optimizer: Any, index: int) -> Any:
    optimizer.zero_grad()
    values = dict(model.named_parameters())
    inner = functional_call(model, values, (torch.randn(4, 8),)).square().mean()
    slopes = torch.autograd.grad(inner, list(values.values()), create_graph=True)
    fast = {name: p - 0.1 * slope for (name, p), slope in zip(values.items(), slopes, strict=True)}
    outer = functional_call(model, fast, (torch.randn(4, 8),)).square().mean()
    outer.backward()
    optimizer.step()
    return inner, outer


@loop()
def conflicting_gradients(model: Any, optimizer: Any, index: int) -> Any:
    out = model(torch.randn(4, 8))
    losses = out[:, :4].square().mean(), out[:, 4:].abs().mean()
    ours, theirs = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses)
    for p, a, b in zip(model.parameters(), ours, theirs, strict=True):
        along = (a * b).sum()
        p.grad = a + (b - along / (a.square().sum() + 1e-9) * a if along < 0 else b)
    optimizer.step()
    return losses


@loop()
def gradients_as_parts_of_one_vector(model: Any, optimizer: Any, index: int) -> Any:
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p)
    loss = loss_of(model)
    loss.backward()
    flat.mul_(0.5)
    optimizer.step()
    return loss, flat


# -- hooks -------------------------------------------------------------------------------------------------------


@loop()
def hooks_on_every_module_of_the_process(model: Any, optimizer: Any, index: int) -> Any:
    handle = register_module_forward_hook(lambda module, inputs, out: out * 1.5 if isinstance(module, nn.Linear) else None)
    try:
        return usual(model, optimizer)
    finally:
        handle.remove()


@loop()
def hooks_that_come_and_go(model: Any, optimizer: Any, index: int) -> Any:
    if index == 3:
        model.handles = [
            model.second.register_forward_hook(lambda module, inputs, out: out * 2),
            model.third.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,)),
            model.norm.register_full_backward_hook(lambda module, inputs, outs: (inputs[0] * 0.9,)),
        ]
    if index == 6:
        for handle in model.handles:
            handle.remove()
    return usual(model, optimizer)


class OwnHooks(Net):
    def forward(self, x: Any) -> Any:
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            h = self.second(torch.tanh(self.first(x)))
        with torch.autograd.graph.save_on_cpu():
            return self.third(torch.relu(self.third(self.norm(h))))


@loop(OwnHooks)
def hooks_on_saved_tensors_inside_and_outside(model: Any, optimizer: Any, index: int) -> Any:
    with saved_tensors_hooks(lambda t: ("kept", t), lambda kept: kept[1]):
        return usual(model, optimizer)


class Nested(Net):
    def _inner(self, x: Any) -> Any:
        return torch.tanh(self.first(x))

    def _outer(self, x: Any) -> Any:
        return self.norm(self.second(checkpoint(self._inner, x, use_reentrant=False)))

    def forward(self, x: Any) -> Any:
        return self.third(torch.relu(self.third(checkpoint(self._outer, x, use_reentrant=False))))


@loop(Nested)
def checkpoints_in_checkpoints(model: Any, optimizer: Any, index: int) -> Any:
    return usual(model, optimizer)


# -- the model changes -------------------------------------------------------------------------------------------


@loop()
def orthogonal_for_some_steps(model: Any, optimizer: Any, index: int) -> Any:
    if index == 3:
        parametrizations.orthogonal(model.third)
    if index == 6:
        parametrize.remove_parametrizations(model.third, "weight")
    take_all(model, optimizer)
    with parametrize.cached():
        return usual(model, optimizer)


@loop()
def pruned_for_some_steps(model: Any, optimizer: Any, index: int) -> Any:
    if index == 3:
        prune.l1_unstructured(model.second, "weight", 0.5)
    if index == 6:
        prune.remove(model.second, "weight")
    take_all(model, optimizer)
    return usual(model, optimizer)


@loop()
def other_layers_trained_in_each_step(model: Any, optimizer: Any, index: int) -> Any:
    for number, p in enumerate(model.parameters()):
        p.requires_grad_(number % 3 != index % 3)
    return usual(model, optimizer)


@loop()
def frozen_between_forward_and_backward(model: Any, optimizer: Any, index: int) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model)
    model.first.weight.requires_grad_(index % 2 == 0)
    loss.backward()
    model.first.weight.requires_grad_(True)
    optimizer.step()
    return loss


@loop()
def its_own_state_dict_assigned(model: Any, optimizer: Any, index: int) -> Any:
    loss = usual(model, optimizer)
    model.load_state_dict(model.state_dict(), assign=True)
    take_all(model, optimizer)
    return loss


class Adapted(nn.Module):
    """A layer with an addition of low rank, which is merged into its weight and taken out again."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.full((4, 16), 0.1)), nn.Parameter(torch.full((8, 4), 0.1))

    def forward(self, x: Any) -> Any:
        return self.base(x) + x @ self.a.t() @ self.b.t()


@loop()
def an_adapter_put_in_and_merged_for_evaluation(model: Any, optimizer: Any, index: int) -> Any:
    if index == 2:
        model.second = Adapted(model.second)
        take_all(model, optimizer)
    loss = usual(model, optimizer)
    if index < 2:
        return loss
    model.second.base.weight.data += model.second.b.data @ model.second.a.data
    with torch.no_grad():
        out = model.second.base(torch.ones(2, 16))
    model.second.base.weight.data -= model.second.b.data @ model.second.a.data
    return loss, out


# -- copies and averages -----------------------------------------------------------------------------------------


@loop()
def a_shallow_copy_trains_too(model: Any, optimizer: Any, index: int) -> Any:
    loss = usual(model, optimizer)
    again = copy.copy(model)(torch.randn(4, 8)).square().mean() + copy.copy(model.second)(torch.randn(4, 16)).mean()
    again.backward()
    optimizer.step()
    return loss, again


class Scaled(Net):
    scale = 1.0

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.scale


@loop(Scaled)
def a_shallow_copy_computes_otherwise(model: Any, optimizer: Any, index: int) -> Any:
    other = copy.copy(model)
    other.scale = 3.0
    usual(model, optimizer)
    loss = other(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    return loss, copy.deepcopy(other)(torch.ones(2, 8)).detach()


def with_weights_of(module: Any, stepped: dict[Any, Any]) -> Any:
    """Returns a copy as meta-learning makes them: another module of the same attributes, with tensors in the weights' place."""
    clone = module.__new__(type(module))
    clone.__dict__ = {**module.__dict__, "_modules": {n: with_weights_of(m, stepped) for n, m in module.named_children()}}
    own = {name: stepped[p] for name, p in module.named_parameters(recurse=False)}
    clone.__dict__["_parameters"] = {"bias": None, **own} if own else {}
    return clone


@loop()
def copies_with_weights_of_their_own(model: Any, optimizer: Any, index: int) -> Any:
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(loss_of(model), parameters, create_graph=True)
    clone = with_weights_of(model, {p: p - 0.1 * slope for p, slope in zip(parameters, slopes, strict=True)})
    optimizer.zero_grad()
    loss = loss_of(clone)
    loss.backward()
    optimizer.step()
    return loss


@loop()
def copies_in_the_middle_of_a_step(model: Any, optimizer: Any, index: int) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model)
    before = copy.deepcopy(model)
    loss.backward()
    after = copy.deepcopy(model)
    optimizer.step()
    return loss, [p.detach() for p in before.parameters()], [p.grad for p in after.parameters()]


@loop()
def an_average_of_all_at_once(model: Any, optimizer: Any, index: int) -> Any:
    if index == 0:
        optimizer.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    loss = usual(model, optimizer)
    optimizer.average.update_parameters(model)
    return loss, [p.detach().clone() for p in optimizer.average.module.parameters()]


@loop()
def half_way_back_to_old_weights(model: Any, optimizer: Any, index: int) -> Any:
    old = {name: value.clone() for name, value in model.state_dict().items()}
    usual(model, optimizer)
    loss = usual(model, optimizer)
    model.load_state_dict({name: old[name].lerp(value, 0.5) for name, value in model.state_dict().items()})
    return loss


# -- memory that is held -----------------------------------------------------------------------------------------


@loop()
def written_through_a_storage_and_dlpack(model: Any, optimizer: Any, index: int) -> Any:
    if index == 2:
        optimizer.held = model.second.weight.untyped_storage(), from_dlpack(model.third.weight.detach())
    loss = usual(model, optimizer)
    if index >= 2:
        storage, alias = optimizer.held
        torch.tensor([], dtype=torch.float32).set_(storage).mul_(0.9)
        alias.mul_(0.9)
    return loss


# -- forwards of another kind ------------------------------------------------------------------------------------


class Trains(Net):
    def forward(self, x: Any) -> Any:
        loss = super().forward(x).square().mean()
        loss.backward()
        return loss.detach()


@loop(Trains)
def backward_inside_forward(model: Any, optimizer: Any, index: int) -> Any:
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8))
    optimizer.step()
    return loss


class Recursive(Net):
    def forward(self, x: Any, depth: int = 2) -> Any:
        out = super().forward(x)
        return self(out, depth - 1) if depth else out


@loop(Recursive)
def a_model_that_calls_itself(model: Any, optimizer: Any, index: int) -> Any:
    return usual(model, optimizer)


class InParts(Net):
    def forward(self, x: Any) -> Any:
        h = torch.tanh(self.first(x))
        yield h
        yield self.third(self.norm(self.second(h)))


@loop(InParts)
def a_forward_that_is_a_generator(model: Any, optimizer: Any, index: int) -> Any:
    optimizer.zero_grad()
    early, late = model(torch.randn(4, 8))
    loss = early.mean() + late.square().mean()
    loss.backward()
    optimizer.step()
    return loss


@loop()
def batches_of_nothing(model: Any, optimizer: Any, index: int) -> Any:
    optimizer.zero_grad()
    loss = model(torch.randn((4, 0, 7, 1)[index % 4], 8)).square().sum()
    loss.backward()
    optimizer.step()
    return loss


@loop()
def collected_at_every_stage(model: Any, optimizer: Any, index: int) -> Any:
    def collect() -> None:
        if index % 3 == 0:  # in the recorded step and two planned ones: each pass takes long
            gc.collect()

    optimizer.zero_grad()
    loss = loss_of(model)
    collect()
    with torch.autograd.set_detect_anomaly(True):
        loss.backward()
    collect()
    optimizer.step()
    collect()
    return loss


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", LOOPS)
def test_habits_of_training_loops(name: str, setting: str, tmp_path: Any) -> None:
    kind, step = LOOPS[name]

    def make() -> tuple[Any, Any]:
        model = kind()
        return model, torch.optim.AdamW(model.parameters(), 1e-2)

    plain = follow(make, step, 8)
    assert_same(plain.seen, follow(make, step, 8, Setting(tmp_path, **SETTINGS[setting])).seen)
