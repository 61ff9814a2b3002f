"""Refusals: tensors that were to leave the device while somebody held or used them, which are asked again.

[Note: refusals]
Whoever has a tensor leave is told no while a call uses its device copy, or something besides the engine holds that memory:
what a checkpoint's recomputation saved, a view of the program's, a thread beside the step. That lasts as long as the holder
likes, so the answer is for now: at each tick those that refused are asked again, in every mode, until they have left or are
used. A trace therefore ends a hold at the op in which it ended, and a plan can have the tensor leave there. Whatever uses a
tensor lifts or wants it, which takes its refusal back (`Item.is_refused`): then its user decides again when it leaves. One that
is still held when its step has ended is as a rule held for good, as an alias that the program keeps: it is asked when user code
runs next, and costs later ticks nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from tieroff.runtime.execution.runner import PlanRunner
from tieroff.runtime.execution.state import StepState
from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.item import Item
from tieroff.runtime.items.traffic import Traffic


class Refusals:
    """Asks those that could not leave, again and again."""

    def __init__(self, state: StepState, traffic: Traffic, runner: PlanRunner) -> None:
        self._state, self._traffic, self._runner = state, traffic, runner
        self._lasting: list[Item] = []  # refused in an earlier step

    def ask(self) -> None:
        """Asks those that refused in this step: ticks went by since."""
        refused = self._traffic.refused  # those that refuse again come behind; see [Note: refusals]
        count = len(refused)
        self._ask(refused[:count])
        del refused[:count]  # last: after an interruption all are asked again

    def ask_all(self) -> None:
        """Asks those that refused in earlier steps, too: user code runs next, and has run."""
        self._traffic.refused += self._lasting
        self._lasting = []
        self.ask()

    def step_ended(self) -> None:
        """What is still held now is asked where `ask_all` is called, and at no tick."""
        self._lasting += dict.fromkeys(self._traffic.refused)
        self._traffic.refused.clear()

    def _ask(self, refused: Iterable[Item]) -> None:
        for item in dict.fromkeys(refused):
            # Who was given other memory meanwhile has none of the engine's on the device.
            if not item.is_refused or item.device is None or self._runner.keeps(item):
                continue
            was_lent = isinstance(item, ActivationItem) and item.is_lent
            item.leave(self._traffic)
            recorder = self._state.record.recorder
            if item.device is None and isinstance(item, HomeItem):
                self._state.record.bind(item)
            elif item.device is None and was_lent:
                self._state.record.wrote(item.key)  # up to here, by whoever had it
            elif isinstance(item, HomeItem) and recorder is not None and recorder.is_on:
                # It came up for a call of user code, which counts nowhere; held beyond the op it counts until it leaves.
                recorder.bind(item.device.untyped_storage(), item.key)
