"""The buckets of an optimizer: which of its parameters are updated together."""

from __future__ import annotations

import logging

import torch

from tieroff.core.buckets import buckets_of
from tieroff.runtime.items.homes import local_of
from tieroff.runtime.optimizer.splitting import split_differs

log = logging.getLogger("tieroff")

# Optimizers of torch whose update of one parameter does not depend on the others: splitting them was tried, bit for bit.
PER_PARAMETER = frozenset(
    {
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "ASGD",
        "Adagrad",
        "Adadelta",
        "Adafactor",
        "SparseAdam",
    }
)


class Buckets:
    """The parameters of an optimizer in update order, in lists of bounded size; one list when it cannot be split.

    Attributes:
        is_split: the optimizer may be stepped in parts.
        current: what `all` returned last.
        position: id of a parameter -> its place in the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._ids: tuple[int, ...] = ()
        self.current: list[list[torch.Tensor]] = []
        self.is_split = _can_be_split(optimizer)
        self.position: dict[int, int] = {}

    def all(self) -> list[list[torch.Tensor]]:
        """Returns the buckets of the parameters that the optimizer has now."""
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        ids = tuple(map(id, params))
        if ids != self._ids:
            ranges = buckets_of([local_bytes(p) for p in params]) if self.is_split else [range(len(params))]
            self.current, self._ids = [params[r.start : r.stop] for r in ranges], ids
            self.position = {key: position for position, key in enumerate(ids)}
        return self.current


def local_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes that a tensor has on this rank."""
    tensor = local_of(tensor)
    return tensor.numel() * tensor.element_size()


def _can_be_split(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") and kind.__name__ in PER_PARAMETER:
        return True
    if sum("step" in base.__dict__ for base in kind.__mro__[:-1]) > 2:  # its own, torch's abstract one, and another
        log.warning("%s builds on the step of another optimizer: it is stepped whole", kind.__name__)
        return False
    reason = split_differs(optimizer)
    if reason:
        log.warning(
            "%s couples its parameters (%s): it is stepped whole, so all of them, their gradients and their state "
            "have to fit the device at once",
            kind.__name__,
            reason,
        )
    return not reason
