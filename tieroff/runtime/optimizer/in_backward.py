"""Updates in backward: a bucket of the optimizer is stepped as soon as its gradients are final, and they are gone then.

Nothing but the optimizer may use gradients, and nothing may come between backward and the optimizer's step, so this is for
loops that ask for it. A loop that does otherwise must not train otherwise silently: an `AppliedGradient` in a gradient's place
refuses to be computed with, and `EarlyUpdates.check` finds one that was cleared or replaced, and options or parameters that
changed meanwhile.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from tieroff.errors import StateError
from tieroff.runtime.items.offloaded import untouched
from tieroff.runtime.movable import why_unmovable
from tieroff.runtime.optimizer.trial import is_same

_RULES = (
    "with [plan] update_in_backward = true parameters are updated in backward, and some have been by now: go on from a "
    "checkpoint, with false if this loop clips or scales gradients, leaves out or repeats updates, or changes "
    "options or parameters between backward and step (zero_grad needs set_to_none=True), or with the number of backward "
    "passes per update if their gradients add up"
)


class AppliedGradient(torch.Tensor):
    """Stands where a gradient was that has been applied; has its shape, and no memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> AppliedGradient:
        """Returns the stand-in for the gradient of a parameter, or of one of another type or device."""
        made: AppliedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=dtype or like.dtype, device=device or like.device
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten._to_copy.default:  # of a model that is converted before its gradients are cleared
            return AppliedGradient(args[0], **{key: kwargs[key] for key in ("dtype", "device") if (kwargs or {}).get(key)})
        raise _refusal(f"{func} wants a gradient that was applied in backward and is gone")

    def data_ptr(self) -> int:
        """Refuses: there is no memory."""
        raise _refusal("somebody asks for the memory of a gradient that was applied in backward and is gone")

    def share_memory_(self) -> AppliedGradient:
        """Refuses: there is no memory to share."""
        raise _refusal("somebody shares the memory of a gradient that was applied in backward and is gone")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses: there are no values to save."""
        raise _refusal("somebody saves a gradient that was applied in backward and is gone")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it stands for."""
        return f"AppliedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def _refusal(what: str) -> StateError:
    return StateError(f"{what}: {_RULES}")


class EarlyUpdater(Protocol):
    """Updates buckets in backward."""

    def update_early(self, number: int) -> None:
        """Updates the bucket of this number, and takes its gradients away with `EarlyUpdates.note`."""

    def end_updates(self) -> None:
        """A backward ends in which something was updated: user code runs next."""


class EarlyUpdates:
    """Which buckets of the step are due, which are done, and that nothing undoes it.

    Attributes:
        done: numbers of the buckets that were updated in this step's backward.
        updated: ids of parameters that were updated in the backward that runs.
    """

    def __init__(self, updater: EarlyUpdater, updated: set[int], rounds: int = 1) -> None:
        """Nothing is due before the first `begin`.

        Args:
            updater: updates the buckets.
            updated: see the class; shared with whoever refuses reads of them.
            rounds: backward passes per update, whose gradients add up; a gradient is final when it arrives in the last one.
        """
        self._updater, self.updated, self._rounds = updater, updated, rounds
        self._reset()

    def _reset(self, buckets: Sequence[Iterable[torch.Tensor]] = ()) -> None:
        self.done: set[int] = set()
        self.updated.clear()
        self._due: deque[tuple[int, int]] = deque()
        self._applied: list[tuple[torch.Tensor, AppliedGradient, int]] = []
        self._options: list[dict[str, Any]] | None = None
        self._has_failed = False
        self._missing = [{id(p) for p in bucket if p.requires_grad} for bucket in buckets]
        self._number_of = {key: number for number, keys in enumerate(self._missing) for key in keys}
        self._rounds_left = dict.fromkeys(self._number_of, self._rounds)

    def begin(self, buckets: Sequence[Iterable[torch.Tensor]]) -> None:
        """A step begins, in which these are updated in backward; none are, when there is no bucket.

        Where a gradient is there by now, in memory that it shares, backward adds to that, and the program may scale or clip it
        as one, which uses no gradient: `optimizer.step` updates such a bucket.
        """
        self._reset([() if any(map(_has_shared_gradient, bucket)) else bucket for bucket in buckets])

    def end(self) -> None:
        """The optimizer's step is over."""
        self._reset()

    def check_forward(self) -> None:
        """Sees whether a forward may run now.

        Raises:
            StateError: parameters were updated in backward, and the optimizer's step was left out, or comes later.
        """
        if self.done or self._has_failed:
            self._reset()
            raise _refusal("forward was called before optimizer.step(), and backward has already updated parameters")

    def arrived(self, parameter: torch.Tensor) -> bool:
        """A gradient arrives; True when a bucket is due. Hooks of users may write it next, so it is applied later: `run`."""
        number = self._number_of.get(id(parameter))
        if number is None:
            return False
        self._rounds_left[id(parameter)] -= 1
        if self._rounds_left[id(parameter)]:
            return False
        del self._number_of[id(parameter)]
        self._missing[number].discard(id(parameter))
        if self._missing[number]:
            return False
        self._due.append((number, threading.get_ident()))
        return True

    def run(self, *, is_last: bool = False) -> None:
        """Updates what is due: when the next gradient arrives in the same thread, or backward ends.

        Autograd has a thread for each device, and hooks of users may still run in another one.
        """
        while self._due and (is_last or self._due[0][1] == threading.get_ident()):
            number, _ = self._due.popleft()
            self._has_failed = True
            self._updater.update_early(number)
            self._has_failed = False
            self.done.add(number)

    def note(self, parameters: Iterable[torch.Tensor], groups: list[dict[str, Any]]) -> None:
        """These were updated, with the options of these groups: their gradients are gone."""
        if self._options is None:
            self._options = _options_of(groups)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = stand_in = AppliedGradient(parameter)
                self._applied.append((parameter, stand_in, parameter._version))
                self.updated.add(id(parameter))

    def finish(self) -> None:
        """Updates the rest of what is due: backward ends."""
        self.run(is_last=True)
        self.updated.clear()

    def backward_ended(self) -> None:
        """Does what `finish` does, and says so where something was updated."""
        self.finish()
        if self.done:
            self._updater.end_updates()

    def check(self, groups: list[dict[str, Any]], device_type: str) -> None:
        """Sees whether the optimizer's step would have done what was done in backward.

        Raises:
            StateError: gradients were cleared or replaced since, or options or parameters changed; or an update failed.
        """
        wrong = self._what_is_wrong(groups, device_type)
        if wrong:
            self._reset()
            raise _refusal(wrong)

    def _what_is_wrong(self, groups: list[dict[str, Any]], device_type: str) -> str:
        if self._has_failed:
            return "expected a backward without errors before optimizer.step(), got one whose update failed"
        if self._options is None:
            return ""
        if torch.is_autocast_enabled(device_type):
            return "expected optimizer.step() outside of autocast, where updates in backward compute, got it inside"
        if any(parameter.grad is not stand_in for parameter, stand_in, _ in self._applied):
            return "expected gradients as backward left them in optimizer.step(), got some cleared or replaced"
        if any(parameter._version != version for parameter, _, version in self._applied):
            return "expected parameters as backward left them in optimizer.step(), got one that was written"
        if not is_same(_options_of(groups), self._options):
            return "expected the options of the optimizer that it had in backward, got others in optimizer.step()"
        return ""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hides the gradients of parameters that were updated, while all are stepped."""
        for parameter, _, _ in self._applied:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, stand_in, _ in self._applied:
                parameter.grad = stand_in


def _has_shared_gradient(parameter: torch.Tensor) -> bool:
    with untouched():
        return type(parameter.grad) is torch.Tensor and bool(why_unmovable(parameter.grad))


def _options_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [copy.deepcopy({key: value for key, value in group.items() if key != "params"}) for group in groups]
