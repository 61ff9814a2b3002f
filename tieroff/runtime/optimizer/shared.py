"""Plain values that the parameters of an optimizer share: counters in its groups and in its attributes.

Stepped in buckets, `step` is called more than once for one update. Each call finds these values as they were before the first
one, and leaves the same new ones: those count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tieroff.errors import StateError

_PLAIN = (int, float, complex, str, bytes, type(None))
_GONE = object()


def is_plain(value: Any) -> bool:
    """True for values that nobody can change in place."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def _namespaces(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[Any, Any]]]:
    yield "attribute", optimizer.__dict__
    for number, group in enumerate(optimizer.param_groups):
        yield f"entry of group {number}", group
    state: dict[Any, Any] = optimizer.state  # some keep what parameters share under strings
    for key, value in state.items():
        if isinstance(value, dict) and not isinstance(key, torch.Tensor):
            yield f"state {key!r}", value
    yield "state", state


def _plain_in(namespace: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in namespace.items() if isinstance(key, str) and is_plain(value)}


class SharedValues:
    """The plain values before an update, and what its calls of `step` make of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before = [(where, space, _plain_in(space)) for where, space in _namespaces(optimizer)]
        self._changed: list[dict[Any, Any]] = [{} for _ in self._before]

    def take_back(self) -> None:
        """After a call of `step`: notes what it changed, and puts the values before the update back.

        Raises:
            StateError: two calls changed a value differently, so the optimizer couples its parameters.
        """
        for (where, space, before), changed in zip(self._before, self._changed, strict=True):
            after = _plain_in(space)
            for key in before.keys() | after.keys():
                new = after.get(key, _GONE)
                if new is before.get(key, _GONE) or _is_equal(new, before.get(key, _GONE)):
                    continue
                if key in changed and not _is_equal(changed[key], new):
                    raise StateError(
                        f"expected every part of {type(self._optimizer).__name__}'s update to leave the same {where} {key!r}, "
                        f"got {changed[key]!r} and {new!r}: it couples its parameters and cannot be stepped in parts; "
                        "go on from a checkpoint, and do not declare it with tieroff.per_parameter"
                    )
                changed[key] = new
                _put(space, key, before.get(key, _GONE))

    def finish(self) -> None:
        """The update is over, or broke off: the new values count."""
        for (_, space, _), changed in zip(self._before, self._changed, strict=True):
            for key, value in changed.items():
                _put(space, key, value)


def _is_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _put(space: dict[Any, Any], key: Any, value: Any) -> None:
    if value is _GONE:
        space.pop(key, None)
    else:
        space[key] = value
