"""Gradient clipping whose norms are taken on the device, so that they are those of the plain run to the last bit.

A norm is a sum, and the host adds in another order than the device. torch's own `clip_grad_norm_` takes the norm of a gradient
where it lies, so with a home on the host it can differ in the last bit from a run in which everything is on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol
from weakref import WeakSet

import torch

_EXACT_ON_HOST = (torch.float32, torch.float64)  # narrower types are multiplied in a wider one, each device in its own way


class Owner(Protocol):
    """What knows the parameters of a wrapped model."""

    @property
    def names(self) -> Mapping[int, str]:
        """By id: parameters that live as long as the model."""

    @property
    def device(self) -> torch.device:
        """Where its step computes."""


# Not a mapping with weak references to parameters: torch.utils.swap_tensors refuses tensors that have some.
_owners: WeakSet[Owner] = WeakSet()


def add_owner(owner: Owner) -> None:
    """Notes where the step of a model's parameters computes, wherever their homes are."""
    _owners.add(owner)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clips the norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` does, with the device's sums.

    Equal to it in a plain run, bit for bit, for gradients of one dtype. One gradient at a time is on the device.

    Args:
        parameters: whose gradients are clipped in place; those without one are left out. Parameters that no wrapped model has
            are computed with where their gradients are.
        max_norm: of the gradients' norm, afterwards.
        norm_type: order of the norm; may be `inf`.
        error_if_nonfinite: raise where the norm is not finite.

    Returns:
        The norm before clipping, of shape [], on the device; 0 if there is no gradient.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite` is set; gradients are unchanged.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [(p.grad, _device_of(p, p.grad)) for p in listed if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    first = gradients[0][1]
    with torch.no_grad():
        norms = [_norm(gradient, device, norm_type).to(first) for gradient, device in gradients]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"expected the gradients' norm of order {norm_type} to be finite, got {total.item()}; find the op that "
                "overflows with torch.autograd.detect_anomaly(), or pass error_if_nonfinite=False to go on"
            )
        factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        for gradient, device in gradients:
            _scale(gradient, factor.to(device))
    return total


def _device_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.device:
    return next((owner.device for owner in _owners if id(parameter) in owner.names), gradient.device)


def _norm(gradient: torch.Tensor, device: torch.device, order: float) -> torch.Tensor:
    norms: Sequence[torch.Tensor] = torch._foreach_norm([gradient.to(device)], order)  # what torch's own function calls
    return norms[0]


def _scale(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    if gradient.device == factor.device:
        torch._foreach_mul_([gradient], factor)
    elif gradient.dtype in _EXACT_ON_HOST:
        gradient.mul_(factor.to(gradient.device))
    else:
        gradient.copy_(gradient.to(factor.device).mul_(factor))
