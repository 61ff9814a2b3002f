"""A parameter's next update, as the native kernels take it: options and counter as they are at that moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tieroff.core.buckets import has_kernels
from tieroff.updates import rule as rules
from tieroff.updates.rule import Rule

COUNTER = "step"
"""The key of the state that counts a parameter's updates."""

_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_ADAM_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

Kind = tuple[Any, ...]
"""What decides how an update is rounded: class, implementation, rule and type."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the optimizer's next step would do to one parameter, of which only the type is known.

    Attributes:
        rule: what it computes.
        state: keys of the state tensors that it takes, in the rule's order.
        type_name: of all its tensors.
        kind: see there.
    """

    rule: Rule
    state: tuple[str, ...]
    type_name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Capture:
    """The update that the optimizer's next step would make to one parameter.

    Attributes:
        rule: what it computes.
        type_name: of all its tensors.
        tensors: the parameter, its gradient, then state, in the rule's order.
        kind: see there.
    """

    rule: Rule
    type_name: str
    tensors: tuple[torch.Tensor, ...]
    kind: Kind


def counts(optimizer: torch.optim.Optimizer) -> bool:
    """True where updates of this optimizer depend on how many were made."""
    return type(optimizer) is not torch.optim.SGD


def asked(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], state: Mapping[str, Any], dtype: torch.dtype, updates: float
) -> Asked | None:
    """Returns the next update of a parameter of this type, or None where no kernel is known to make it.

    None too before the parameter's first update, which makes its state; moments that are zero would not tell roundings apart.

    Args:
        optimizer: whose class is known exactly: a subclass may do anything.
        group: the parameter's group.
        state: the parameter's.
        dtype: of the parameter.
        updates: that were made to it, where they count.
    """
    make = _MAKERS.get(type(optimizer))
    if make is None or dtype not in _TYPES or not _are_plain(group):
        return None
    made = make(group, state, updates)
    if made is None:
        return None
    rule, keys = made
    if len(keys) + 2 != rule.tensor_count:
        return None
    kind = (type(optimizer), group.get("foreach"), group.get("fused"), rule.kind, _TYPES[dtype])
    return Asked(rule, keys, _TYPES[dtype], kind)


def capture(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> Capture | None:
    """Returns the next update of a parameter with a gradient, all of whose tensors are where the update would find them.

    None as `asked` gives it, and where the tensors are not alike.
    """
    state, gradient = optimizer.state.get(parameter) or {}, parameter.grad
    if gradient is None or not has_kernels(type(optimizer)):
        return None
    updates = float(state[COUNTER]) if COUNTER in state else 0.0
    found = asked(optimizer, group, state, parameter.dtype, updates)
    if found is None:
        return None
    tensors = (parameter.detach(), gradient.detach(), *(state[key] for key in found.state))
    if not all(_is_like(tensor, tensors[0]) for tensor in tensors):
        return None
    return Capture(found.rule, found.type_name, tensors, found.kind)


def _are_plain(group: Mapping[str, Any]) -> bool:
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


_Made = tuple[Rule, tuple[str, ...]] | None


def _adam(group: Mapping[str, Any], state: Mapping[str, Any], updates: float, *, decouples: bool) -> _Made:
    keys = tuple(key for key in _ADAM_STATE if torch.is_tensor(state.get(key)))
    if len(keys) < 2 or any(torch.is_tensor(beta) for beta in group["betas"]):
        return None
    options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")}
    is_decoupled = group.get("decoupled_weight_decay", decouples)
    return rules.adam(updates + 1, **options, decouples=is_decoupled), keys


def _sgd(group: Mapping[str, Any], state: Mapping[str, Any], _updates: float) -> _Made:
    options = {key: group[key] for key in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")}
    if not group["momentum"]:
        return rules.sgd(**options), ()
    return (rules.sgd(**options), ("momentum_buffer",)) if torch.is_tensor(state.get("momentum_buffer")) else None


def _adagrad(group: Mapping[str, Any], state: Mapping[str, Any], updates: float) -> _Made:
    if not updates or not torch.is_tensor(state.get("sum")):
        return None
    options = {key: group[key] for key in ("lr", "lr_decay", "eps", "weight_decay", "maximize")}
    return rules.adagrad(updates + 1, **options), ("sum",)


_MAKERS: dict[type, Any] = {
    torch.optim.Adam: lambda group, state, updates: _adam(group, state, updates, decouples=False),
    torch.optim.AdamW: lambda group, state, updates: _adam(group, state, updates, decouples=True),
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}
