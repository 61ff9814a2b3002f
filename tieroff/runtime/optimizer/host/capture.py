"""A parameter's next update, as the native kernels take it: options and counter as they are at that moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tieroff.updates import rule as rules
from tieroff.updates.rule import Rule

_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_ADAM_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Capture:
    """The update that the optimizer's next step would make to one parameter.

    Attributes:
        rule: what it computes.
        type_name: of all its tensors.
        tensors: the parameter, its gradient, then state, in the rule's order.
        kind: what decides how it is rounded: class, implementation, rule and type.
    """

    rule: Rule
    type_name: str
    tensors: tuple[torch.Tensor, ...]
    kind: tuple[Any, ...]


def capture(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> Capture | None:
    """Returns the next update of a parameter, or None where no kernel is known to make it.

    None too before the parameter's first update, which makes its state; moments that are zero would not tell roundings apart.

    Args:
        optimizer: whose class is known exactly: a subclass may do anything.
        group: the parameter's group.
        parameter: with a gradient.
    """
    state, gradient = optimizer.state.get(parameter) or {}, parameter.grad
    make = _MAKERS.get(type(optimizer))
    if make is None or gradient is None or not _are_plain(group) or parameter.dtype not in _TYPES:
        return None
    made = make(group, state)
    if made is None:
        return None
    rule, below = made
    tensors = (parameter.detach(), gradient.detach(), *below)
    if len(tensors) != rule.tensor_count or not all(_is_like(tensor, tensors[0]) for tensor in tensors):
        return None
    kind = (type(optimizer), group.get("foreach"), group.get("fused"), rule.kind, _TYPES[parameter.dtype])
    return Capture(rule, _TYPES[parameter.dtype], tensors, kind)


def _are_plain(group: dict[str, Any]) -> bool:
    """True where options are plain numbers, and the update is no part of a graph."""
    is_captured = group.get("capturable") or group.get("differentiable")
    return not is_captured and not any(torch.is_tensor(value) for key, value in group.items() if key != "params")


def _is_like(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """True for a dense tensor whose elements lie as the parameter's do, without gaps."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    is_dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    is_alike = tensor.dtype is parameter.dtype and tensor.shape == parameter.shape and tensor.stride() == parameter.stride()
    return is_dense and is_alike


_Made = tuple[Rule, list[torch.Tensor]] | None


def _adam(group: dict[str, Any], state: dict[str, Any], *, decouples: bool) -> _Made:
    below = [state[key] for key in _ADAM_STATE if torch.is_tensor(state.get(key))]
    if len(below) < 2 or any(torch.is_tensor(beta) for beta in group["betas"]):
        return None
    options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")}
    is_decoupled = group.get("decoupled_weight_decay", decouples)
    return rules.adam(float(state["step"]) + 1, **options, decouples=is_decoupled), below


def _sgd(group: dict[str, Any], state: dict[str, Any]) -> _Made:
    options = {key: group[key] for key in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")}
    if not group["momentum"]:
        return rules.sgd(**options), []
    buffer = state.get("momentum_buffer")
    return (rules.sgd(**options), [buffer]) if torch.is_tensor(buffer) else None


def _adagrad(group: dict[str, Any], state: dict[str, Any]) -> _Made:
    if not float(state.get("step", 0)):
        return None
    options = {key: group[key] for key in ("lr", "lr_decay", "eps", "weight_decay", "maximize")}
    return rules.adagrad(float(state["step"]) + 1, **options), [state["sum"]]


_MAKERS: dict[type, Any] = {
    torch.optim.Adam: lambda group, state: _adam(group, state, decouples=False),
    torch.optim.AdamW: lambda group, state: _adam(group, state, decouples=True),
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}
