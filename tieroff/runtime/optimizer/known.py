"""Optimizers that are known to update each parameter by itself, and why.

Stepping an optimizer in buckets is right when what it does to one parameter depends on nothing of another: no value, no
number of calls, no place in a list. A class is known by its exact type. A subclass may do anything, so it is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

_Class = TypeVar("_Class", bound=type)
_DECLARED = "_tieroff_is_per_parameter"


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of an optimizer that may be stepped in buckets.

    Attributes:
        why: what makes it right, for people.
        counts_calls: its groups or attributes hold counters that each call of `step` moves on.
        writes_gradients: its step may write gradients.
        may_run_early: its buckets may be stepped in any order, and while other gradients are missing.
        is_read: its code was read: all its updates do the same, beside making state in the first, and write in place.
    """

    why: str
    counts_calls: bool = False
    writes_gradients: bool = False
    may_run_early: bool = True
    is_read: bool = True


TRIED = Known(
    "its first update was tried, whole and in parts",
    counts_calls=True,
    writes_gradients=True,
    may_run_early=False,
    is_read=False,
)
_DECLARATION = Known("declared with tieroff.per_parameter", counts_calls=True, writes_gradients=True, is_read=False)
_TORCH = Known("torch's own: elementwise, state and step counter per parameter")
_MATRICES = Known("torch's own: takes 2-d matrices alone, and orthogonalizes each by itself")
_FACTORED = Known("torch's own: row and column means, and the root mean square, of one parameter each")
_ROWS = Known("torch's own: rows of one embedding; state and step counter per parameter")

# By the class itself: a subclass, or a class of the same name, is another one.
_OF_TORCH: dict[type, Known] = {
    **dict.fromkeys(
        (
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.Adamax,
            torch.optim.NAdam,
            torch.optim.RAdam,
            torch.optim.RMSprop,
            torch.optim.Rprop,
            torch.optim.ASGD,
            torch.optim.Adagrad,
            torch.optim.Adadelta,
        ),
        _TORCH,
    ),
    torch.optim.Adafactor: _FACTORED,
    torch.optim.SparseAdam: _ROWS,
    **({torch.optim.Muon: _MATRICES} if hasattr(torch.optim, "Muon") else {}),
}


def _always(_optimizer: Any) -> bool:
    return True


def _has_no_overrides(optimizer: Any) -> bool:
    """True for an optimizer of bitsandbytes without options for single parameters, which it finds by their place."""
    manager = optimizer.mng
    return not (manager.pid2config or manager.index2config or manager.module_weight_config_triple)


def _has_no_master_weights(optimizer: Any) -> bool:
    """True for a fused optimizer of apex without a second list of parameters, which goes by their place."""
    return not getattr(optimizer, "master_weights", False) and not getattr(optimizer, "capturable", False)


_BITS = tuple(
    f"{name}{bits}"
    for name in ("Adam", "AdamW", "Lion", "SGD", "RMSprop", "Adagrad", "PagedAdam", "PagedAdamW", "PagedLion")
    for bits in ("", "8bit", "32bit")
)

# (package, names of classes in it, what is known, what must hold of the instance)
_OF_OTHERS: tuple[tuple[str, tuple[str, ...], Known, Callable[[Any], bool]], ...] = (
    (
        "bitsandbytes.optim",
        _BITS,
        Known("one parameter at a time; state, counter and norms per parameter", writes_gradients=True, may_run_early=False),
        _has_no_overrides,
    ),
    (
        "torchao.optim",
        ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8", "_Adam", "_AdamW"),
        Known("one parameter at a time; state and counter per parameter", may_run_early=False),  # may round at random
        _always,
    ),
    ("lion_pytorch", ("Lion",), Known("one parameter at a time, without a counter"), _always),
    ("transformers.optimization", ("Adafactor",), Known("one parameter at a time; counter and norms per parameter"), _always),
    (
        "schedulefree",
        ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"),
        Known("elementwise; counters per group", counts_calls=True, writes_gradients=True, may_run_early=False),
        _always,
    ),
    (
        "apex.optimizers",
        ("FusedAdam",),
        Known("elementwise; a counter per group", counts_calls=True, writes_gradients=True, may_run_early=False),
        _has_no_master_weights,
    ),
)


def per_parameter(kind: _Class) -> _Class:
    """Declares that an optimizer of your own updates each parameter by itself, so that it may be stepped in buckets.

    As a decorator of the class, or as a call: `tieroff.per_parameter(MyOptimizer)`. It holds for this class and not for its
    subclasses. What it promises: what `step` does to one parameter depends on this parameter, its gradient, its state, the
    options of its group, and on plain values (numbers, strings) that groups and attributes of the optimizer hold and that
    every call of `step` changes alike, such as counters. `step` calls its closure at most once, before it updates. It may
    be called with groups whose `params` are empty, or hold some of their parameters only.

    Args:
        kind: a subclass of `torch.optim.Optimizer`.

    Returns:
        The same class.

    Raises:
        TypeError: this is no class of an optimizer.
    """
    given: Any = kind
    if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
        raise TypeError(f"expected a subclass of torch.optim.Optimizer, got {kind!r}; declare the class, not an instance of it")
    setattr(kind, _DECLARED, kind)
    return kind


def known_of(optimizer: torch.optim.Optimizer) -> Known | None:
    """Returns what is known of an optimizer by its class, or None."""
    kind = type(optimizer)
    if vars(kind).get(_DECLARED) is kind:
        return _DECLARATION
    if kind in _OF_TORCH:
        return _OF_TORCH[kind]
    for package, names, known, holds in _OF_OTHERS:
        if kind.__qualname__ in names and f"{kind.__module__}.".startswith(f"{package}."):
            return known if holds(optimizer) else None
    return None
