"""Updates in backward: a bucket of the optimizer is stepped as soon as its gradients are final, and they are gone then.

Nothing but the optimizer may use gradients, so this is for loops that ask for it. What uses one all the same finds an
`AppliedGradient` in its place, which refuses everything: a clipped or accumulated step must not turn into another one silently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tieroff.errors import StateError


class AppliedGradient(torch.Tensor):
    """Stands where a gradient was that has been applied; has its shape, and no memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> AppliedGradient:
        """Returns the stand-in for a parameter's gradient."""
        made: AppliedGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.size(), strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise StateError(
            f"{func} wants a gradient that was applied in backward and is gone: with [plan] update_in_backward = true nothing "
            "but the optimizer may use gradients, after one backward per step (no clipping, no GradScaler, no accumulation; "
            "zero_grad with set_to_none=True before the next backward); set it to false for such a loop"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it stands for."""
        return f"AppliedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


class EarlyUpdates:
    """Which buckets of the step are due, and which are done.

    Attributes:
        done: numbers of the buckets that were updated in this step's backward.
    """

    def __init__(self, update: Callable[[int], None], end_backward: Callable[[], None]) -> None:
        """Nothing is due before the first `begin`.

        Args:
            update: updates the bucket of this number, and takes its gradients away.
            end_backward: called when a backward ends in which something was updated: user code runs next.
        """
        self._update, self._end_backward = update, end_backward
        self.done: set[int] = set()
        self._number_of: dict[int, int] = {}
        self._missing: list[set[int]] = []
        self._due: deque[int] = deque()

    def begin(self, buckets: Sequence[Iterable[torch.Tensor]]) -> None:
        """A step begins, in which these are updated in backward; none are, when there is no bucket."""
        self.done, self._due = set(), deque()
        self._missing = [{id(p) for p in bucket if p.requires_grad} for bucket in buckets]
        self._number_of = {key: number for number, keys in enumerate(self._missing) for key in keys}

    def arrived(self, parameter: torch.Tensor) -> bool:
        """A gradient is final; True when a bucket is due. Hooks of users may write it next, so it is applied later: `run`."""
        number = self._number_of.pop(id(parameter), None)
        if number is None:
            return False
        self._missing[number].discard(id(parameter))
        if self._missing[number]:
            return False
        self._due.append(number)
        return True

    def run(self) -> None:
        """Updates what is due: when the next gradient arrives, or backward ends."""
        while self._due:
            number = self._due.popleft()
            self.done.add(number)
            self._update(number)

    def backward_ended(self) -> None:
        """Updates the rest of what is due."""
        self.run()
        if self.done:
            self._end_backward()
