"""An update of one parameter in slices: some of its rows at a time, each as a parameter of its own.

[Note: slices]
An elementwise update may be made of any part of a parameter. So the optimizer's own step runs once for each slice, with a
stand-in for the parameter: rows of its value and its gradient where they lie on the device, and state of its own for these
rows. State of the parameter's shape comes and goes with its rows. What else there is in its state (a counter of steps) each
slice finds as it was before the update, and leaves the same: that counts.

Slices begin at multiples of 64 elements, so that whatever kernels do to the last elements of a vector they do to the same ones.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tieroff.errors import StateError
from tieroff.runtime.items.offloaded import own_class
from tieroff.runtime.optimizer.buckets import Narrowed
from tieroff.runtime.optimizer.trial import is_same

_ELEMENTS = 64  # no vector of any kernel is wider


def slices_of(parameter: torch.Tensor, size_bytes: int) -> list[range]:
    """Returns the rows of each slice, of about so many bytes of the parameter; the last one takes what is left over."""
    rows, row = parameter.shape[0], parameter.numel() // parameter.shape[0]
    unit = _ELEMENTS // math.gcd(row, _ELEMENTS)
    length = max(size_bytes // (row * parameter.element_size()) // unit, 1) * unit
    starts = [*range(0, rows, length)]
    if len(starts) > 1 and rows - starts[-1] < length:
        starts.pop()
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], rows], strict=True)]


class RowsOfState:
    """The state of one parameter while it is updated in slices, all of it on the device.

    Attributes:
        whole: by key, where tensors of the parameter's shape have their values.
        made: by key, those that this update makes, since it is the first.
        stand_in: for the parameter, in the optimizer's state while a slice is updated.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        self._optimizer, self._parameter = optimizer, parameter
        self.whole: dict[str, torch.Tensor] = {}
        self._shared: dict[str, Any] = {}
        self.made: dict[str, torch.Tensor] = {}
        self.stand_in: torch.Tensor | None = None
        for key, value in (optimizer.state.get(parameter) or {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                self.whole[key] = self.values_of(key, value)

    def values_of(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns where a state tensor of the parameter's shape has its values."""
        return tensor.detach()

    def load(self, values: torch.Tensor) -> torch.Tensor:
        """Returns rows of such values on the device."""
        return values

    def store(self, key: str, values: torch.Tensor, updated: torch.Tensor) -> None:
        """Takes what the update made of these rows."""
        if values.data_ptr() != updated.data_ptr():
            values.copy_(updated)

    def make(self, key: str, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a new state tensor of the parameter's shape, and where it has its values."""
        made = torch.empty_like(self._parameter, dtype=like.dtype)
        return made, made

    def of(self, rows: range) -> dict[str, Any] | None:
        """Returns the state that the update of a slice finds; None before the first."""
        state = self._optimizer.state.get(self._parameter)
        if not state:
            return None
        return {
            key: self.load(self.whole[key][rows.start : rows.stop]) if key in self.whole else copy.deepcopy(value)
            for key, value in state.items()
        }

    def keep(self, rows: range, state: dict[str, Any]) -> None:
        """Takes the state that the update of a slice leaves.

        Raises:
            StateError: slices leave what they share differently.
        """
        for key, value in state.items():
            if self._is_of_rows(rows, value):
                if key not in self.whole:
                    self.made[key], self.whole[key] = self.make(key, value)
                self.store(key, self.whole[key][rows.start : rows.stop], value)
            elif key in self.whole or not is_same(self._shared.setdefault(key, value), value) or _has_elements(value):
                raise StateError(
                    f"expected every slice of {type(self._optimizer).__name__}'s update to leave the same state {key!r}, got "
                    "others: it does not update each element by itself; go on from a checkpoint"
                )

    def _is_of_rows(self, rows: range, value: Any) -> bool:
        shape = (len(rows), *self._parameter.shape[1:])
        return own_class(value) is torch.Tensor and value.layout is torch.strided and tuple(value.shape) == shape

    def finish(self) -> None:
        """All slices are updated: what they left is the parameter's state."""
        if not self._shared and not self.made:
            return  # as of SGD without momentum
        state = self._optimizer.state[self._parameter]
        for key, value in self._shared.items():
            known = state.get(key)
            if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
                known.copy_(value)  # the same object, as an update of the whole leaves it
            else:
                state[key] = value
        state.update(self.made)

    def take_back(self) -> None:
        """The optimizer's state is of its own parameters again."""
        if self.stand_in is not None:
            self._optimizer.state.pop(self.stand_in, None)
            self.stand_in = None


def _has_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() != 1


def step_in_slices(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    slices: Sequence[range],
    step: Callable[[], Any],
    state: RowsOfState,
    narrowed: Narrowed,
) -> Any:
    """Updates one parameter, slice by slice; see [Note: slices].

    Args:
        optimizer: has the parameter, which lies on the device with its gradient.
        parameter: the one.
        slices: its rows.
        step: runs the optimizer's step on what its groups hold.
        state: the parameter's.
        narrowed: the groups of the optimizer.

    Returns:
        What the last step returned.
    """
    value, gradient, out = parameter.detach(), parameter.grad, None
    assert gradient is not None
    own, gradient = [any(one is parameter for one in group["params"]) for group in optimizer.param_groups], gradient.detach()
    states: Any = optimizer.state
    for rows in slices:
        part = torch.nn.Parameter(value[rows.start : rows.stop], requires_grad=parameter.requires_grad)
        part.grad = gradient[rows.start : rows.stop]
        vars(part).update(vars(parameter))  # what the program hung on it
        found = state.of(rows)
        try:
            state.stand_in = part
            if found is not None:
                states[part] = found
            narrowed.narrow([[part] if is_own else [] for is_own in own])
            out = step()
            left = states.get(part)
            if vars(part) != vars(parameter):
                raise StateError(
                    f"expected {type(optimizer).__name__} to leave what the program hung on a parameter as it is where it "
                    "updates it in slices, and it does not; go on from a checkpoint, with a device budget that is a share"
                )
        finally:
            narrowed.restore()
            state.take_back()
        if left:
            state.keep(rows, left)
    state.finish()
    return out
