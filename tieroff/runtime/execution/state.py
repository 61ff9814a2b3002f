"""What the parts of a running step share and change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch

from tieroff.core.seams import Recorder, Subject
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.offloaded import SubclassCalls
from tieroff.runtime.step.kinds import StepKind
from tieroff.runtime.step.mode import IDLE


class StepRecord:
    """The events and tensors of a step that has no plan yet.

    Attributes:
        recorder: watches the step while it is traced; otherwise None.
        keys, names: the events so far; names only while a recorder watches.
        subjects: activations and gradients of the step, while a recorder watches.
        passes: how many passes without gradients made events in it.
        places: per activation, how many tensors autograd had saved in the step before it; while a recorder watches.
    """

    __slots__ = ("keys", "names", "passes", "places", "recorder", "subjects")

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, recorder: Recorder | None) -> None:
        """A step begins."""
        self.recorder, self.passes = recorder, 0
        self.keys: list[Hashable] = []
        self.names: list[str] = []
        self.subjects: list[Subject] = []
        self.places: list[int] = []

    def event(self, key: Hashable, name: Callable[[], str], phase: str) -> None:
        """An op begins."""
        self.keys.append(key)
        if self.recorder is not None:
            self.names.append(name())
            self.recorder.event(self.names[-1], phase)

    def add(self, subject: Subject) -> None:
        """Lists a tensor that the step made."""
        if self.recorder is not None:
            self.subjects.append(subject)

    def bind(self, item: HomeItem, is_new: bool = True) -> None:
        """Says where an item's bytes lie; `is_new`: the engine made the device copy, not the program."""
        if self.recorder is None or (is_new and not self.recorder.is_on):
            return  # what is fetched after the update is no part of the trace
        if item.device is not None:
            self.recorder.bind(item.device.untyped_storage(), item.key, is_new=is_new)
        if item.lower is not None:
            self.recorder.bind(item.lower.untyped_storage(), item.key, is_below=True)

    def bind_copy(self, device: torch.Tensor, key: Hashable, is_new: bool) -> None:
        """Says where the device copy of a subject lies."""
        if self.recorder is not None and (self.recorder.is_on or not is_new):
            self.recorder.bind(device.untyped_storage(), key, is_new=is_new)

    def wrote(self, key: Hashable) -> None:
        """The running op may have written a subject's bytes on the device, in code that is not watched."""
        if self.recorder is not None:
            self.recorder.wrote(key)

    def died(self, key: Hashable) -> None:
        """A subject's tensor is gone."""
        if self.recorder is not None:
            self.recorder.died(key)


class StepState:
    """The step that runs.

    Attributes:
        mode: what happens at its events.
        kind: of the step that runs or ran last; None before the first, and after one that broke off.
        record: what is noted of it while it has no plan.
        saw_backward: a backward has begun in it.
        saw_gradient: a gradient has arrived in it.
        updated: ids of parameters that were updated in the backward that runs.
        lock: held while items move.
        thread: that runs the steps: the one that wrapped the model, then whichever began the last step.
        subclass_calls: of the thread that runs the steps.
        inside: hooks of the engine that run; one that an exception left still counts, see `lifecycle/repair.py`.
    """

    __slots__ = (
        "inside",
        "kind",
        "lock",
        "mode",
        "record",
        "saw_backward",
        "saw_gradient",
        "subclass_calls",
        "thread",
        "updated",
    )

    def __init__(self) -> None:
        self.mode = IDLE
        self.inside = 0
        self.subclass_calls = SubclassCalls()
        self.kind: StepKind | None = None
        self.record = StepRecord()
        self.saw_backward = self.saw_gradient = False
        self.updated: set[int] = set()
        # Autograd runs hooks in its own thread of each device while the thread of the loop may still be in a forward or a
        # hook. Re-entrant: an event moves items, which ends others.
        self.lock = threading.RLock()
        self.thread = threading.get_ident()
