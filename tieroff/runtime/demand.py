"""What stays on the device for a moment while nothing is planned."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tieroff.runtime.activations import ActivationItem
from tieroff.runtime.homes import ParameterItem
from tieroff.runtime.state import State

if TYPE_CHECKING:
    from tieroff.runtime.executor import Executor

# How many fetched parameters are kept at hand: enough for a weight and its bias.
_PARAMETERS_HELD = 2
# More tensors than any op saves of its inputs before its kernel runs, and fills in that kernel.
_TICKS_OF_ONE_OP = 3


class OnDemand:
    """The last parameters that were read, and saved tensors that their op may not have filled yet."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._parameters: deque[ParameterItem] = deque()
        self._incomplete: deque[tuple[ActivationItem, int]] = deque()
        self._ticks = 0

    def hold(self, item: ParameterItem) -> None:
        """Keeps a fetched parameter at hand for a moment: whoever uses it holds its memory himself."""
        if item in self._parameters:
            return
        self._parameters.append(item)
        while len(self._parameters) > _PARAMETERS_HELD:
            self._drop(self._parameters.popleft())

    def wait_for(self, item: ActivationItem) -> None:
        """Keeps a saved tensor until the ticks of its own op are over."""
        self._incomplete.append((item, self._ticks + _TICKS_OF_ONE_OP))

    def tick(self, ticks: int = 1) -> None:
        """So many ticks went by: what was incomplete is complete after some, and leaves."""
        self._ticks += ticks
        while self._incomplete and self._incomplete[0][1] <= self._ticks:
            item, _ = self._incomplete.popleft()
            if item.device is not None and item.state is not State.ARRIVING:
                self._executor.traffic.leave(item)

    def let_go(self) -> None:
        """Lets everything leave."""
        self.tick(_TICKS_OF_ONE_OP)
        while self._parameters:
            self._drop(self._parameters.popleft())

    def _drop(self, item: ParameterItem) -> None:
        if item.device is not None and not self._executor.keeps(item):
            item.leave(self._executor.traffic)
