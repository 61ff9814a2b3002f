"""What people do with autograd, inside a wrapped model with everything moved out: the numbers of the plain run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tieroff
from tests.support.twins import Mlp, Setting, adam, assert_same, check_twins, follow, look, loss_of, mlp_and_adam, sgd
from tests.support.twins import usual_step as usual

# Forward mode loads torch's own scripted decompositions, and torch warns of itself.
pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")]


def test_autograd_grad_over_parameters(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        grads = torch.autograd.grad(loss_of(model), list(model.parameters()))
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            assert parameter.grad is None or index
            parameter.grad = grad
        optimizer.step()
        return grads

    check_twins(mlp_and_adam, step, each_setting)


def test_backward_with_inputs_leaves_the_others_alone(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss_of(model).backward(inputs=[model.second.weight, model.first.bias])
        assert model.first.weight.grad is None
        optimizer.step()

    check_twins(mlp_and_adam, step, each_setting)


def test_gradient_penalty_on_the_input(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        x = torch.randn(4, 8, requires_grad=True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.square().mean() + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss, x.grad

    check_twins(mlp_and_adam, step, each_setting)


def test_gradient_penalty_on_the_parameters(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        total = loss + sum(g.square().sum() for g in grads)
        total.backward()
        optimizer.step()
        return total

    check_twins(mlp_and_adam, step, each_setting)


def test_backward_with_create_graph(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = loss_of(model)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        vector = [torch.ones_like(g) for g in grads]
        product = torch.autograd.grad(grads, list(model.parameters()), vector, allow_unused=True)  # a Hessian's
        for parameter, grad in zip(model.parameters(), product, strict=True):
            parameter.grad = grad
        optimizer.step()
        return product

    check_twins(mlp_and_adam, step, each_setting)


def test_parameter_hooks_change_gradients_and_fire_once(each_setting: Setting) -> None:
    fired: list[str] = []

    def make() -> Any:
        model = Mlp()

        def change(name: str, grad: torch.Tensor) -> torch.Tensor:
            fired.append(name)
            return grad * 2 + 1

        for name, parameter in model.named_parameters():
            parameter.register_hook(partial(change, name))
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(f"{name} {p.grad.sum()}"))
        return model, adam(model)

    check_twins(make, usual, each_setting, steps=4)
    assert len(fired) == 2 * 4 * 8
    assert sorted(fired[:32]) == sorted(fired[32:])


def test_hooks_put_on_parameters_after_wrap(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        sums: list[float] = []
        handles = [p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in model.parameters()]
        handles += [
            p.register_post_accumulate_grad_hook(lambda p: sums.append(float(p.grad.sum() + p.detach().sum())))
            for p in model.parameters()
        ]
        loss = usual(model, optimizer)
        for handle in handles:
            handle.remove()
        return loss, sorted(sums)

    check_twins(mlp_and_adam, step, each_setting)


def test_a_hook_registered_on_a_weight_inside_forward(each_setting: Setting) -> None:
    class Hooked(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            handle = self.first.weight.register_hook(lambda g: g * 3) if self.first.weight.requires_grad else None
            y = super().forward(x)
            self.handles = [handle]
            return y

    def make() -> Any:
        model = Hooked()
        return model, sgd(model)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        model.handles.pop().remove()
        return loss

    check_twins(make, step, each_setting)


def test_optimizer_in_backward(each_setting: Setting) -> None:
    def make() -> Any:
        model = Mlp()
        each: dict[torch.Tensor, torch.optim.Adam] = {p: torch.optim.Adam([p], 0.01) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            each[parameter].step()
            each[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        return model, each

    def step(model: Any, each: Any, index: int) -> Any:
        loss = loss_of(model)
        loss.backward()
        return loss, [o.state_dict()["state"][0] for o in each.values()]

    check_twins(make, step, each_setting, steps=6)


def test_freezing_and_unfreezing_after_wrap(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        model.first.requires_grad_(not 4 <= index < 8)
        return usual(model, optimizer)

    check_twins(mlp_and_adam, step, each_setting, steps=12)


def test_freezing_at_wrap_and_unfreezing_later(each_setting: Setting) -> None:
    def make() -> Any:
        model = Mlp()
        model.first.requires_grad_(False)
        return model, adam(model)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        model.first.weight.requires_grad_(index >= 3)
        return usual(model, optimizer)

    check_twins(make, step, each_setting, steps=7)


class Scaled(torch.autograd.Function):
    """Keeps its tensors as attributes instead of save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.weight, (grads[0] * ctx.x).sum(0)


def test_a_function_that_keeps_tensors_as_attributes(each_setting: Setting) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scaled.apply(Scaled.apply(self.inner(x), self.scale).tanh(), self.scale)  # type: ignore[no-untyped-call]

    def make() -> Any:
        model = Model()
        return model, adam(model)

    check_twins(make, usual, each_setting)


def test_save_on_cpu_inside(each_setting: Setting) -> None:
    class Model(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu():
                hidden = torch.tanh(self.first(x))
            return self.second(hidden).tanh()

    def make() -> Any:
        model = Model()
        return model, adam(model)

    check_twins(make, usual, each_setting)


Pair = tuple[Any, Any]
ROUND: dict[str, Pair] = {
    "another type": (lambda t: t.to(torch.bfloat16), lambda t: t.to(torch.float32)),
    "halved": (lambda t: t * 0.5, lambda t: t),
    "unchanged": (lambda t: t, lambda t: t),
    "an object": (lambda t: [t.detach().clone()], lambda kept: kept[0]),
}


@pytest.mark.parametrize("pair", ROUND.values(), ids=ROUND)
def test_saved_tensor_hooks_round_the_model_stay_in_force(pair: Pair, each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(*pair):
            loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    check_twins(mlp_and_adam, step, each_setting)


def test_disabled_saved_tensor_hooks_are_an_error_that_says_so(each_setting: Setting) -> None:
    torch.manual_seed(0)
    model, optimizer = mlp_and_adam()
    each_setting.wrap(model, optimizer)
    usual(model, optimizer)
    disabled = torch.autograd.graph.disable_saved_tensors_hooks("none of these")
    with pytest.raises(tieroff.StateError, match=r'under "none of these": leave .*disable_saved_tensors_hooks out'), disabled:
        model(torch.randn(4, 8))
    usual(model, optimizer)
    tieroff.unwrap(model)


def test_mutation_of_saved_tensors_that_is_allowed(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            hidden = torch.sigmoid(model(torch.randn(4, 8)))
            loss = model(hidden).square().mean()
            hidden.mul_(0.5)
            loss.backward()
        optimizer.step()
        return loss

    assert_same(follow(mlp_and_adam, step, 5).seen, follow(mlp_and_adam, step, 5, each_setting).seen)


def test_functional_call_with_other_parameters(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        other = {name: p * 0.5 for name, p in model.named_parameters() if index != 2 or "first" in name}
        loss = functional_call(model, other, (torch.randn(4, 8),)).square().mean()
        loss.backward()
        optimizer.step()
        seen = look(model, optimizer)
        return loss, seen, usual(model, optimizer) if index > 1 else None

    check_twins(mlp_and_adam, step, each_setting, steps=8)


def test_functional_call_with_detached_parameters(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        other = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        loss = functional_call(model, other, (torch.randn(4, 8),)).square().mean()
        return torch.autograd.grad(loss, list(other.values())), usual(model, optimizer)

    check_twins(mlp_and_adam, step, each_setting)


def test_functional_call_of_a_part_inside_forward(each_setting: Setting) -> None:
    class Model(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = {name: p * 2 for name, p in self.first.named_parameters()}
            return self.second(functional_call(self.first, doubled, (x,)).tanh()) + self.first(x).sum()

    def make() -> Any:
        model = Model()
        return model, adam(model)

    check_twins(make, usual, each_setting)


def _sample_loss(model: Any, parameters: Any, x: torch.Tensor) -> torch.Tensor:
    return functional_call(model, parameters, (x.unsqueeze(0),)).square().mean()


def test_func_grad_vmap_and_jvp_between_steps(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        x = torch.randn(3, 8)
        one = torch.func.grad(lambda p: _sample_loss(model, p, x[0]))(parameters)
        each = torch.func.vmap(torch.func.grad(lambda p, row: _sample_loss(model, p, row)), (None, 0))(parameters, x)
        along = torch.func.jvp(lambda v: model(v), (x,), (torch.ones_like(x),))
        many = torch.func.vmap(lambda row: model(row))(x)
        del parameters  # what is held is not moved
        return usual(model, optimizer), one, each, along, many

    check_twins(mlp_and_adam, step, each_setting)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_torch_func_inside_forward_is_right_or_a_clear_error(each_setting: Setting, transform: str) -> None:
    class Model(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if transform == "grad":
                extra = torch.func.grad(lambda v: self.first(v).sin().sum())(x)
            elif transform == "vmap":
                extra = torch.func.vmap(lambda row: self.first(row).sin().sum().expand(8))(x)
            else:
                extra = torch.func.jvp(lambda v: self.first(v).sin()[:, :8], (x,), (torch.ones_like(x),))[1]
            return super().forward(x) + extra

    def make() -> Any:
        model = Model()
        return model, adam(model)

    plain = follow(make, usual, 5)
    try:
        wrapped = follow(make, usual, 5, each_setting)
    except tieroff.errors.StateError as error:
        assert "torch.func" in str(error)
    else:
        assert_same(plain.seen, wrapped.seen)


def test_a_failed_transform_inside_forward_leaves_model_and_numbers_intact(each_setting: Setting) -> None:
    class Model(Mlp):
        transforms = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y + torch.func.grad(lambda v: self.first(v).sin().sum())(x) if self.transforms else y

    torch.manual_seed(0)
    model = Model()
    optimizer = adam(model)
    each_setting.wrap(model, optimizer)
    for _ in range(4):
        usual(model, optimizer)
    before = look(model, optimizer)
    model.transforms = True
    try:
        model(torch.randn(4, 8))
    except tieroff.errors.StateError as error:
        assert "torch.func" in str(error)
    assert_same([before], [look(model, optimizer)])
    model.transforms = False
    usual(model, optimizer)
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)


def test_forward_mode_over_a_whole_training_step(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        x = torch.randn(4, 8)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            along = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
            assert along is not None
            along = along.detach().clone()
        return usual(model, optimizer), along

    check_twins(mlp_and_adam, step, each_setting, steps=6)


def test_two_backward_passes_over_one_graph(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        return loss

    check_twins(mlp_and_adam, step, each_setting)


def test_an_update_between_forward_and_backward_raises_as_it_does_plain(each_setting: Setting) -> None:
    model, optimizer = mlp_and_adam()
    each_setting.wrap(model, optimizer)
    for _ in range(3):
        usual(model, optimizer)
    loss = loss_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    tieroff.unwrap(model)


def saved_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def test_selective_checkpointing_inside_counts_only_the_models_own_ops(each_setting: Setting) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Mlp() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            contexts = partial(create_selective_checkpoint_contexts, saved_products)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return x

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Model()
        return model, adam(model)

    check_twins(make, usual, each_setting)
