"""Gradient clipping, one gradient at a time, with the sums that PyTorch's own takes over a list of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tieroff.runtime.movable import local_of, with_local


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clips the norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` does, with the device's sums.

    Equal to it in a plain run, bit for bit, for gradients of one dtype. One gradient at a time is on the device.

    Args:
        parameters: whose gradients are clipped in place; those without one are left out.
        max_norm: of the gradients' norm, afterwards.
        norm_type: order of the norm; may be `inf`.
        error_if_nonfinite: raise where the norm is not finite.

    Returns:
        The norm before clipping, of shape [], on the device; 0 if there is no gradient.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite` is set; gradients are unchanged.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [p.grad for p in listed if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    with torch.no_grad():
        norms = [_norm(gradient, norm_type) for gradient in gradients]
        norms = [norm.to(norms[0].device) for norm in norms]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"expected the gradients' norm of order {norm_type} to be finite, got {total.item()}; find the op that "
                "overflows with torch.autograd.detect_anomaly(), or pass error_if_nonfinite=False to go on"
            )
        factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        for gradient in gradients:
            torch._foreach_mul_([gradient], factor.to(gradient.device))
    return total


def _norm(gradient: torch.Tensor, order: float) -> torch.Tensor:
    norms: Sequence[torch.Tensor] = torch._foreach_norm([gradient], order)  # what torch's own function calls
    mesh = getattr(norms[0], "device_mesh", None)
    if mesh is None or mesh.device_type == norms[0].device.type:
        return norms[0]
    # FSDP2's own offloading has the shards of a device's mesh on the host, where the mesh has nobody to sum norms.
    return with_local(norms[0], local_of(norms[0]).to(mesh.device_type))
