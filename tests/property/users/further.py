"""What people do besides: `torch.func`, hooks on modules, parametrizations, scaled losses, averages, files, shared memory."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations, parametrize

import tieroff
from tests.property.users.parts import WIDTH, Planned
from tests.property.users.programs import Person


class Halved(nn.Module):
    """A parametrization: the weight is half of what is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


def _halved(gradients: Any) -> tuple[torch.Tensor, ...]:
    return tuple(gradient * 0.5 for gradient in gradients)


class Versed(Person):
    """A `Person` who knows more of torch.

    Attributes:
        average: an `AveragedModel` of the model, once there is one.
        on_modules: handles of hooks on modules.
        scaler: scales losses.
        was_parametrized: a layer has, or had, a parametrization.
    """

    def __init__(self, optimizer: str, wrap: Callable[[Any, Any, str | None], Any] | None) -> None:
        super().__init__(optimizer, wrap)
        self.average: Any = None
        self.on_modules: list[Any] = []
        self.was_parametrized = False
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def look(self) -> dict[str, Any]:
        shown = super().look()
        if self.average is not None:
            shown |= {f"average of {name}": p.detach().clone() for name, p in self.average.named_parameters()}
        return shown

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    # -- training --------------------------------------------------------------------------------------------------

    def accumulate_and_step(self, number: int) -> None:
        self.optimizer.zero_grad()
        for micro in range(2 + number % 2):
            loss = self.loss(number + micro)
            loss.backward()
        self.optimizer.step()
        self.said = loss

    def clip_all(self, number: int) -> None:
        self.said = tieroff.clip_grad_norm_(self.model.parameters(), 0.01)

    def step_clipped(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.loss(number).backward()
        self.clip_all(number)
        self.optimizer.step()

    def step_scaled(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(number)
        self.scaler.scale(loss).backward()
        if number % 5 == 0 and self.model.third.weight.grad is not None:
            self.model.third.weight.grad[0, 0] = torch.inf  # this step is skipped
        if number % 2:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.said = loss

    def step_in_autocast(self, number: int) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(number)
        loss.backward()
        self.optimizer.step()
        self.said = loss

    def backward_twice(self, number: int) -> None:
        loss = self.loss(number)
        loss.backward(retain_graph=True)
        loss.backward()

    def backward_to_one(self, number: int) -> None:
        p = self.parameter(number)
        if p.requires_grad:
            self.loss(number).backward(inputs=[p])

    def grad_of_all(self, number: int) -> None:
        trained = list(self._trained().values())
        if trained:
            gradients = torch.autograd.grad(self.loss(number), trained)
            self.said = torch.cat([gradient.reshape(-1) for gradient in gradients])

    def penalise_input(self, number: int) -> None:
        x = self.batch(number).requires_grad_()
        (of_input,) = torch.autograd.grad(self.model(x).sum(), x, create_graph=True)
        self.said = loss = of_input.square().sum()
        if loss.requires_grad and self._trained():
            loss.backward()

    def step_another_optimizer(self, number: int) -> None:
        """One that the engine does not know of."""
        if self.pending is None:
            self.accumulate(number)
            torch.optim.SGD(self.model.parameters(), 0.01).step()

    def change_mode(self, number: int) -> None:
        self.model.train(not self.model.training)

    def change_forward(self, number: int) -> None:
        flag = ("runs_again", "writes", "counts_anew")[number % 3]
        if self.pending is None:
            setattr(self.model, flag, not getattr(self.model, flag))

    # -- torch.func ------------------------------------------------------------------------------------------------

    def _value(self, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functional_call(self._still(), parameters, (x,))
        return out.square().mean()

    def _still(self) -> nn.Module:
        """The part of the model that draws and counts nothing."""
        return self.model.second

    def _own(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.second.named_parameters()}

    def func_grad(self, number: int) -> None:
        found = grad(self._value)(self._own(), torch.randn(4, 2 * WIDTH))
        self.said = torch.cat([gradient.reshape(-1) for gradient in found.values()])

    def per_sample_gradients(self, number: int) -> None:
        found = vmap(grad(self._value), in_dims=(None, 0))(self._own(), torch.randn(4, 2 * WIDTH))
        self.said = torch.cat([gradient.reshape(-1) for gradient in found.values()])

    def forward_mode(self, number: int) -> None:
        own = self._own()
        ones = {name: torch.ones_like(p) for name, p in own.items()}
        self.said = jvp(lambda parameters: self._value(parameters, torch.ones(1, 2 * WIDTH)), (own,), (ones,))[1]

    def call_with_others(self, number: int) -> None:
        others = {name: p.detach() * 0.5 for name, p in self.model.named_parameters()}
        self.said = functional_call(self.model, others, (self.batch(number),))

    # -- hooks -----------------------------------------------------------------------------------------------------

    def hook_module(self, number: int) -> None:
        if self.on_modules:
            self.on_modules.pop().remove()
            return
        ways: tuple[Callable[[], Any], ...] = (
            lambda: self.model.second.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,)),
            lambda: self.model.second.register_forward_hook(lambda module, inputs, out: out * 0.5),
            lambda: self.model.second.register_full_backward_hook(lambda module, inputs, outs: _halved(inputs)),
            lambda: self.model.second.register_full_backward_pre_hook(lambda module, outs: _halved(outs)),
            lambda: self.model.register_forward_hook(lambda module, inputs, out: out * 0.5),
            lambda: self.model.register_full_backward_hook(lambda module, inputs, outs: None),
            lambda: self.model.first.register_state_dict_post_hook(lambda module, values, prefix, local: None),
        )
        self.on_modules.append(ways[number % len(ways)]())

    def hook_accumulated(self, number: int) -> None:
        def write(p: torch.Tensor) -> None:
            assert p.grad is not None
            if number % 3 == 0:
                p.grad.mul_(0.5)
            elif number % 3 == 1:
                p.grad.data.mul_(0.5)
            else:
                p.grad = p.grad * 0.5

        p = self.parameter(number)
        if p.requires_grad:
            self.hooks.append(p.register_post_accumulate_grad_hook(write))

    def fail_in_module_hook(self, number: int) -> None:
        def fail(*args: Any) -> None:
            raise Planned

        place = (self.model.first, self.model.third, self.model)[number % 3]
        handle = place.register_forward_hook(fail) if number % 2 else place.register_forward_pre_hook(fail)
        try:
            self.loss(number)
        except Planned:
            self.said = "failed"
        finally:
            handle.remove()

    def interrupt_after_update(self, number: int) -> None:
        def fail(*args: Any) -> None:
            raise KeyboardInterrupt

        self.loss(number).backward()
        handle = self.optimizer.register_step_post_hook(fail)
        try:
            self.optimizer.step()
        except KeyboardInterrupt:
            self.said = "interrupted"
        finally:
            handle.remove()

    # -- values ----------------------------------------------------------------------------------------------------

    def assign_vector(self, number: int) -> None:
        """All parameters become parts of one vector."""
        if self.pending is None:
            vector = nn.utils.parameters_to_vector(self.model.parameters()).detach() * 0.9
            self.aliases.append(vector)
            nn.utils.vector_to_parameters(vector, self.model.parameters())

    def rebind(self, number: int) -> None:
        """A new parameter in the place of one, in the optimizer or beside it."""
        if self.pending is None and not parametrize.is_parametrized(self.model.second):
            name = ("weight", "bias")[number % 2]
            setattr(self.model.second, name, nn.Parameter(getattr(self.model.second, name).detach() * 0.5))
            if number % 3 and len(self.optimizer.param_groups) == 1:
                self.set_group(list(self.model.parameters()))

    def rebind_state(self, number: int) -> None:
        for entries in self.optimizer.state.values():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    entries[key] = value.clone()

    def drop_state(self, number: int) -> None:
        if number % 2:
            self.optimizer.state.clear()
        else:
            self.optimizer.state.pop(self.parameter(number), None)

    def share_gradient(self, number: int) -> None:
        """Two parameters get one tensor as their gradient."""
        if self.model.second.bias is not None:
            self.extra.grad = self.model.second.bias.grad

    def swap_gradients(self, number: int) -> None:
        weight = self.model.second.weight
        weight.grad = torch.full_like(weight, 0.02) if weight.grad is None else weight.grad.clone().mul_(2)

    def write_buffer(self, number: int) -> None:
        if number % 2:
            self.model.seen.data.add_(1)
        else:
            self.model.seen = self.model.seen * 2

    def write_held(self, number: int) -> None:
        """Through a NumPy array made for the moment, also while a backward is due."""
        p = self.parameter(number)
        if self.pending is None:
            array = p.detach().numpy()
            array *= 0.9

    def write_data_any_time(self, number: int) -> None:
        self.parameter(number).data.mul_(0.9)

    def update_average(self, number: int) -> None:
        if parametrize.is_parametrized(self.model.second):
            return
        if self.average is None:
            self.average = torch.optim.swa_utils.AveragedModel(self.model, avg_fn=lambda a, p, n: a.lerp(p, 0.1))
        self.average.update_parameters(self.model)

    # -- a model's life --------------------------------------------------------------------------------------------

    def through_a_file(self, number: int) -> None:
        """Saved to a file and loaded from it."""
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], file)
        file.seek(0)
        if self.pending is None:
            model, optimizer = torch.load(file, weights_only=True)
            self.model.load_state_dict(model, assign=number % 4 == 0)
            self.optimizer.load_state_dict(optimizer)

    def copy_shallow(self, number: int) -> None:
        twin = copy.copy(self.model)
        with torch.no_grad():
            self.said = twin(self.batch(number)).clone()

    def copy_both(self, number: int) -> None:
        """Model and optimizer are copied together, and the copies trained."""
        if self.hooks or self.on_modules:
            return
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        loss = model(self.batch(number)).square().mean()
        loss.backward()
        optimizer.step()
        self.said = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def parametrize(self, number: int) -> None:
        if self.pending is not None or len(self.optimizer.param_groups) != 1:
            return
        self.was_parametrized = True
        if parametrize.is_parametrized(self.model.second):
            parametrize.remove_parametrizations(self.model.second, "weight", leave_parametrized=bool(number % 2))
        elif number % 3 == 0:
            parametrize.register_parametrization(self.model.second, "weight", Halved())
        elif number % 3 == 1:
            parametrizations.weight_norm(self.model.second)
        else:
            parametrizations.spectral_norm(self.model.second)
        self.set_group(list(self.model.parameters()))

    def fork(self, number: int) -> None:
        """Not where a parameter lies on the memory of one before it (weight norm): a child does not have that."""
        if not self.was_parametrized:
            super().fork(number)

    def share_all(self, number: int) -> None:
        self.model.share_memory()

    def clear_all(self, number: int) -> None:
        self.model.zero_grad()

    def freeze_all(self, number: int) -> None:
        if self.pending is None:
            is_frozen = not self.model.first.weight.requires_grad
            self.model.requires_grad_(is_frozen)

    def step_unwrapped(self, number: int) -> None:
        self.rewrapped(None, lambda: self.step(number))

    def on_host(self, number: int) -> None:
        if self.wrap is None:
            self.said = nn.utils.parameters_to_vector(self.model.parameters()).detach()
            return
        with tieroff.on_host(self.model):
            self.said = nn.utils.parameters_to_vector(self.model.parameters()).detach()


ACTIONS = tuple(
    name
    for name, value in {**vars(Person), **vars(Versed)}.items()
    if callable(value) and not name.startswith("_") and name != "look"
)
