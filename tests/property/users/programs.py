"""Programs of user actions on a model of a few parameters: run plain and wrapped, they must show the same numbers.

A `Person` owns one model, its optimizer and whatever a person keeps besides (aliases, snapshots, a loss whose backward has not
run), and knows one method per action. The same actions on a plain and on a wrapped `Person` are compared after each of them.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import nn

import tieroff
from tests.property.users.parts import WIDTH, Planned
from tests.property.users.side import Side


def _differs(tensor: torch.Tensor, expected: torch.Tensor) -> int:
    """1 when a tensor has other values; 0 also when this process is told that it cannot have them."""
    try:
        return int(not torch.equal(tensor, expected))
    except tieroff.StateError:
        return 0


class Person(Side):
    """What people do with a model and its optimizer, one method per action."""

    # -- training --------------------------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(number)
        loss.backward()
        self.optimizer.step()
        self.said = loss

    def accumulate(self, number: int) -> None:
        loss = self.loss(number)
        loss.backward()
        self.said = loss

    def forward(self, number: int) -> None:
        self.pending = self.said = self.loss(number)

    def backward(self, number: int) -> None:
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.backward()

    def update(self, number: int) -> None:
        self.optimizer.step()

    def clear(self, number: int) -> None:
        self.optimizer.zero_grad(set_to_none=bool(number % 2))

    def clip(self, number: int) -> None:
        # One gradient after the other: over several, torch's sums depend on where they lie.
        for p in self.model.parameters():
            if p.grad is not None:
                nn.utils.clip_grad_norm_([p], 0.01)

    def evaluate(self, number: int) -> None:
        with torch.no_grad() if number % 2 else torch.inference_mode():
            self.said = self.model(self.batch(number)).clone()

    def fail_in_forward(self, number: int) -> None:
        self.model.fails = True
        try:
            self.loss(number)
        except Planned:
            self.said = "failed"
        finally:
            self.model.fails = False

    def fail_in_backward(self, number: int) -> None:
        def fail(grad: torch.Tensor) -> None:
            raise Planned

        p = self.model.second.weight
        if not p.requires_grad:
            return
        handle = p.register_hook(fail)
        try:
            self.loss(number).backward()
        except Planned:
            self.said = "failed"
        finally:
            handle.remove()

    def fail_in_update(self, number: int) -> None:
        def fail(*args: Any) -> None:
            raise Planned

        self.loss(number).backward()
        handle = self.optimizer.register_step_pre_hook(fail)
        try:
            self.optimizer.step()
        except Planned:
            self.said = "failed"
        finally:
            handle.remove()

    def step_with_closure(self, number: int) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(number)
            loss.backward()
            return loss

        self.said = self.optimizer.step(closure)  # type: ignore[arg-type]

    def step_in_saved_hooks(self, number: int) -> None:
        """What is saved for backward is kept in another type by hooks round the step."""
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.to(torch.float32)):
            self.step(number)

    def penalty(self, number: int) -> None:
        """A backward through gradients."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if trained:
            gradients = torch.autograd.grad(self.loss(number), trained, create_graph=True)
            self.said = loss = torch.stack([grad.square().sum() for grad in gradients]).sum()
            loss.backward()

    def hook(self, number: int) -> None:
        p = self.parameter(number)
        if self.hooks:
            self.hooks.pop().remove()
        elif p.requires_grad:
            self.hooks.append(p.register_hook(lambda grad: grad * 0.5))

    # -- values ----------------------------------------------------------------------------------------------------

    def write_data(self, number: int) -> None:
        if self.pending is None:
            self.parameter(number).data.mul_(0.5)

    def write_in_place(self, number: int) -> None:
        if self.pending is None:
            with torch.no_grad():
                self.parameter(number).add_(0.01)

    def write_gradient(self, number: int) -> None:
        grad = self.parameter(number).grad
        if grad is not None:
            grad.data.mul_(0.5) if number % 2 else grad.mul_(0.5)

    def assign_data(self, number: int) -> None:
        p = self.parameter(number)
        if self.pending is None:
            p.data = p.data * 0.5

    def assign_slice(self, number: int) -> None:
        """`p.data` becomes a part of a larger tensor that is kept."""
        p = self.parameter(number)
        if self.pending is None:
            flat = torch.cat([p.data.reshape(-1), p.data.reshape(-1)])
            self.aliases.append(flat)
            p.data = flat[p.numel() :].view_as(p.data)

    def assign_gradient(self, number: int) -> None:
        p = self.parameter(number)
        p.grad = None if number % 3 == 0 else torch.full_like(p, 0.01)

    def write_state(self, number: int) -> None:
        entries = self.optimizer.state.get(self.parameter(number), {})
        for key, value in entries.items():
            if key != "step" and isinstance(value, torch.Tensor):
                if number % 3 == 0:
                    value.mul_(0.5)
                elif number % 3 == 1:
                    value.data.mul_(0.5)
                else:
                    value.data = value.data * 0.5

    # -- aliases ---------------------------------------------------------------------------------------------------

    def alias(self, number: int) -> None:
        p = self.parameter(number // 5)
        made = (
            lambda: p.data,
            lambda: p.detach().view(-1),
            lambda: p.detach().numpy(),
            lambda: p.grad.data if p.grad is not None else p.data,
            lambda: next((v.data for v in self.optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)), p.data),
        )
        self.aliases.append(made[number % 5]())

    def alias_all(self, number: int) -> None:
        self.aliases.extend(self.model.state_dict().values() if number % 2 else [p.data for p in self.model.parameters()])

    def write_alias(self, number: int) -> None:
        if self.aliases and self.pending is None:
            alias = self.aliases[number % len(self.aliases)]
            alias *= 0.5

    def drop_alias(self, number: int) -> None:
        if self.aliases:
            del self.aliases[number % len(self.aliases)]

    def drop_aliases(self, number: int) -> None:
        self.aliases.clear()

    def share(self, number: int) -> None:
        """What sending a `state_dict()` to another process does to its storages."""
        shared = list(self.model.state_dict().values())
        shared[number % len(shared)].share_memory_()
        if number % 2:
            self.aliases.append(shared[number % len(shared)])

    # -- a model's life --------------------------------------------------------------------------------------------

    def save(self, number: int) -> None:
        self.saved = [copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())]

    def load(self, number: int) -> None:
        if self.saved and self.pending is None:
            if number % 3:
                self.model.load_state_dict(self.saved[0])
            if number % 3 != 1 and len(self.saved[1]["param_groups"]) == len(self.optimizer.param_groups):
                self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def load_assigned(self, number: int) -> None:
        if self.saved and self.pending is None:
            self.model.load_state_dict({k: v.clone() for k, v in self.saved[0].items()}, assign=True)

    def copy(self, number: int) -> None:
        twin = copy.deepcopy(self.model)
        loss = twin(self.batch(number)).square().mean()
        loss.backward()
        self.said = loss + sum(p.grad.sum() for p in twin.parameters() if p.grad is not None)

    def freeze(self, number: int) -> None:
        p = self.parameter(number)
        if self.pending is None:
            p.requires_grad_(not p.requires_grad)

    def rate(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * (1 + number % 3)

    def add_group(self, number: int) -> None:
        if len(self.optimizer.param_groups) == 1:
            self.extra.grad = torch.ones_like(self.extra)
            self.optimizer.add_param_group({"params": [self.extra], "lr": 0.1})
        self.said = self.extra

    def rewrap(self, number: int) -> None:
        """`unwrap` and `wrap`, with the same budget or another."""
        self.rewrapped((None, "100%", "70%", "min")[number % 4])

    def sleep(self, number: int) -> None:
        if self.wrap is not None:
            tieroff.sleep(self.model)
            if number % 2:
                tieroff.wake(self.model)

    def replace_layer(self, number: int) -> None:
        """Another layer in the place of one, and in the optimizer."""
        if self.pending is None and len(self.optimizer.param_groups) == 1:
            self.model.second = nn.Linear(2 * WIDTH, WIDTH)
            self.set_group(list(self.model.parameters()))

    def narrow_group(self, number: int) -> None:
        """The optimizer leaves the last layer alone, or takes it back."""
        if len(self.optimizer.param_groups) == 1:
            parameters = list(self.model.parameters())
            is_narrow = len(self.optimizer.param_groups[0]["params"]) < len(parameters)
            self.set_group(parameters if is_narrow else parameters[:-1])

    def fork(self, number: int) -> None:
        """A child compares all that it can read with the values of the fork."""
        held = [*self.model.parameters(), *(v for e in self.optimizer.state.values() for v in e.values() if torch.is_tensor(v))]
        expected = [tensor.detach().clone() for tensor in held]
        child = os.fork()
        if child == 0:
            status = 2
            try:
                status = max(map(_differs, held, expected))
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0

    # -- threads ---------------------------------------------------------------------------------------------------

    def read_in_thread(self, number: int) -> None:
        self.said = self.in_thread(lambda: torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]))

    def evaluate_in_thread(self, number: int) -> None:
        self.said = self.in_thread(lambda: self.without_grad(number))

    def backward_in_thread(self, number: int) -> None:
        loss = self.loss(number)
        self.in_thread(loss.backward)
        self.said = loss

    def step_in_thread(self, number: int) -> None:
        self.in_thread(lambda: self.step(number))
