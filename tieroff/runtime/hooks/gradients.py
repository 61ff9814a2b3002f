"""The gradients of moved parameters: where they go when they arrive, and that they are there when more is added."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tieroff.core.seams import Subject
from tieroff.core.tensor import TensorClass
from tieroff.errors import StateError
from tieroff.runtime.items.homes import HomeItem, ParameterItem, why_unmovable
from tieroff.runtime.step.program import Mode

if TYPE_CHECKING:
    from tieroff.runtime.execution.executor import Executor


class Gradients(dict[int, HomeItem]):
    """The gradients under the engine's care, by the position of their parameter."""

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self._executor = executor

    def arrived(self, item: ParameterItem) -> None:
        """A gradient reached the home of a moved parameter."""
        self._executor.saw_backward = True
        if self._executor.mode is Mode.IDLE or self._executor.mode is Mode.PASS:
            return
        home = item.tensor
        grad = home.grad if home is not None else None
        self._executor.watch_backward()
        self._executor.tick(("grad", item.position), lambda: f"grad:{item.name}", "backward")
        with self._executor.lock:
            known = self.get(item.position)
            if grad is None or TensorClass.GRADIENT not in self._executor.covers:
                return
            if known is not None and known.tensor is grad:
                known.refresh(self._executor.traffic)
            else:
                known = self._take(item, grad)
                if known is not None and self._executor.mode is Mode.PLANNED:  # hooks of users run next, and may write it
                    self._executor.overdue.took(known, self._executor.cursor, wait_ticks=1)
            if known is not None and self._executor.mode is Mode.DEMAND:
                known.leave(self._executor.traffic)  # at once: hooks of users run next, and may write it
                self._executor.bind(known)
            self._executor.resume()

    def _take(self, item: ParameterItem, grad: torch.Tensor) -> HomeItem | None:
        old = self.pop(item.position, None)
        if old is not None:
            self._executor.unassign(old)
            old.detach(self._executor.traffic)
        if why_unmovable(grad):
            return None  # sparse, or a view of somebody's bucket (DDP): it stays as it is
        name = f"gradient of {item.name}"
        tier = self._executor.tier_for(grad.numel() * grad.element_size())
        known = HomeItem(("gradient", item.position), name, TensorClass.GRADIENT, grad, tier)
        self[item.position] = known
        self._executor.assign(known)
        known.adopt(self._executor.traffic)
        if known.index >= 0:
            self._executor.unborn_bytes -= known.size_bytes
        self._executor.bind(known, is_new=False)
        if self._executor.recorder is not None:
            self._executor.recorded.append(Subject(known.key, name, known.size_bytes, known.kind, owner=item.key))
        return known

    def about_to_accumulate(self, item: ParameterItem) -> None:
        """Backward has a gradient for a moved home: an earlier one that left comes back to be added to."""
        known, home = self.get(item.position), item.tensor
        if known is None or known.tensor is None or home is None or home.grad is not known.tensor:
            return
        if home.device != item.compute_device:
            return  # gradients of a host home are summed on the host, where it lies
        self._executor.tick(("accumulate", item.position), lambda: f"accumulate:{item.name}", "backward")
        with self._executor.lock:
            known.refresh(self._executor.traffic)
            known.lift(self._executor.traffic)
            self._executor.bind(known)
            self._executor.resume()

    def to_home(self, grad: torch.Tensor, item: ParameterItem) -> torch.Tensor:
        """Returns a gradient where its parameter's home is."""
        home = item.tensor
        if home is None:
            raise StateError(f"the parameter {item.name} died while its gradient was computed")
        return grad.to(home.device)

    def sweep(self) -> None:
        """Ends the care for gradients that were cleared or replaced."""
        homes = {item.position: item.tensor for item in self._executor.gate.items.values()}
        for position, known in list(self.items()):
            home = homes.get(position)
            if known.tensor is None:
                self._executor.traffic.end(known)
            elif home is None or home.grad is not known.tensor or not known.is_current():
                known.detach(self._executor.traffic)
            else:
                continue
            del self[position]
            self._executor.on_demand.forget(known)
            self._executor.unassign(known)
            if self._executor.recorder is not None:
                self._executor.recorder.died(known.key)

    def recorded_subjects(self) -> list[Subject]:
        """Returns the activations and gradients of the step that was recorded.

        A gradient that was not cleared before the next forward is persistent: it wraps round the step.
        """
        alive = {known.key for known in self.values()}
        # Those that were there before the step, and are only added to.
        older = [
            Subject(known.key, known.name, known.size_bytes, known.kind, owner=("param", position))
            for position, known in self.items()
        ]
        unique = {subject.key: subject for subject in (*older, *self._executor.recorded)}
        return [replace(s, is_persistent=True) if s.key in alive else s for s in unique.values()]
