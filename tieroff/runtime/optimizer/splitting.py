"""Whether an optimizer may be stepped in parts: foreign ones are tried."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

_TRIAL_STEPS = 12


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Returns the optimizer class's `step` without the wrapper that fires the hooks."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def split_differs(optimizer: torch.optim.Optimizer) -> str:
    """Tries some steps on small tensors, whole and split; returns what differs, or ""."""
    outcomes = []
    for parts in (((0, 1, 2),), ((0,), (1, 2))):
        clone = copy.copy(optimizer)
        clone.state = defaultdict(dict)
        generator = torch.Generator().manual_seed(0)
        params = [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(3)]
        options = {k: copy.deepcopy(v) for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
        clone.param_groups = [{**options, "params": params}]
        try:
            for _ in range(_TRIAL_STEPS):
                for param in params:
                    param.grad = torch.randn(4, 4, generator=generator)
                for part in parts:
                    clone.param_groups[0]["params"] = [params[i] for i in part]
                    raw_step(clone)(clone)
        except Exception as error:  # noqa: BLE001  any failure of foreign code on foreign tensors means: do not split it
            return f"a trial on small tensors failed: {type(error).__name__}: {error}"
        clone.param_groups[0]["params"] = params
        own = {k: v for k, v in clone.__dict__.items() if isinstance(v, (int, float, torch.Tensor))}
        by_any_key: dict[Any, Any] = clone.state
        shared = {str(k): v for k, v in by_any_key.items() if not isinstance(k, torch.Tensor)}
        outcomes.append((params, [clone.state[p] for p in params], clone.param_groups[0], own, shared))
    (whole, states, group, own, shared), (split, split_states, split_group, split_own, split_shared) = outcomes
    if not all(map(torch.equal, whole, split)):
        return "parameters differ"
    if not all(is_same(a, b) for a, b in zip(states, split_states, strict=True)):
        return "state differs"
    if not is_same(own, split_own) or not is_same(shared, split_shared):
        return "attributes of the optimizer, or state shared by its parameters, differ"
    return "" if is_same({**group, "params": 0}, {**split_group, "params": 0}) else "entries of the group differ"


def is_same(a: Any, b: Any) -> bool:
    """Returns whether two values are equal, tensors in them bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)
