"""The optimizer's buckets in a dry step: stepped one by one, at the end or as soon as their gradients are final."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tieroff.core.buckets import buckets_of


class Buckets:
    """An optimizer in parts, each of which updates neighbouring parameters.

    Attributes:
        params: of each part.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # Of other optimizers nobody knows whether they can be stepped in parts.
        is_split = type(optimizer).__module__.startswith("torch.optim")
        sizes = [param.numel() * param.element_size() for param in params]
        ranges = buckets_of(sizes) if is_split else [range(len(params))]
        self.params: list[list[torch.Tensor]] = [params[part.start : part.stop] for part in ranges]

    def step(self, number: int) -> None:
        """Steps the optimizer for one part alone."""
        wanted = {id(param) for param in self.params[number]}
        groups = self._optimizer.param_groups
        whole = [list(group["params"]) for group in groups]
        for group, params in zip(groups, whole, strict=True):
            group["params"] = [param for param in params if id(param) in wanted]
        self._optimizer.step()
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


class EarlyUpdates:
    """Updates in backward: a bucket is due once the gradients of all its parameters came, and runs when the next one comes.

    By then hooks of users on its last gradient have run.
    """

    def __init__(self, params: Sequence[Sequence[torch.Tensor]], update: Callable[[int], None]) -> None:
        self._missing = [{id(param) for param in part if param.requires_grad} for part in params]
        self._bucket_of = {id(param): number for number, part in enumerate(params) for param in part}
        self._update = update
        self._due: list[int] = []
        self._done: set[int] = set()

    def arrived(self, param: torch.Tensor) -> None:
        """The last gradient of a parameter in this step is there."""
        self._run_due()
        number = self._bucket_of.get(id(param))
        if number is not None:
            self._missing[number].discard(id(param))
            if not self._missing[number]:
                self._due.append(number)

    def finish(self) -> None:
        """Backward is over: runs what is left, parameters without gradients included."""
        self._run_due()
        self._due = [number for number in range(len(self._missing)) if number not in self._done]
        self._run_due()

    def _run_due(self) -> None:
        for number in self._due:
            self._done.add(number)
            self._update(number)
        self._due = []
