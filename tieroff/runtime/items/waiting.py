"""Factors that wait: a tensor was multiplied while it lay below, and is when it comes up.

[Note: factors that wait]
Clipping multiplies every gradient by one number, between backward and update. Where a gradient lies below, that would bring it
up, or read and write it through its mapping, and send it down again, right before its update brings it up once more. So the
factor waits. What lies below is then without it, and the tensor's value is the bytes below times its factors, in their order:
the very `mul_` of the program, made later.
Factors belong to the copy below, so they count only while that is valid (states LOWER, ARRIVING, BOTH); bytes of the
device in other states have them. A copy that comes up gets them before anybody sees it. Whatever else wants the bytes below has
them multiplied there first. An exception may come between any two lines: how many factors are in is told by the version counter
of the memory that was multiplied, which moves with the multiplication itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

Factor = torch.Tensor | float


@dataclass(frozen=True, slots=True)
class Waiting:
    """The factors of one tensor, oldest first.

    Attributes:
        factors: numbers, or tensors of shape [] that nobody writes.
        below_version: of the memory below, before the first of them.
    """

    factors: tuple[Factor, ...]
    below_version: int

    def and_then(self, factor: Factor) -> Waiting:
        """Returns these with one more."""
        return Waiting((*self.factors, factor), self.below_version)

    def apply(self, memory: torch.Tensor, version: int) -> None:
        """Multiplies memory by all of them that are not in yet; `version`: its version when none was.

        It is no op of the step that may be recorded just now: it stands for one of user code.
        """
        with torch.no_grad(), _disable_current_modes():
            for factor in self.factors[memory._version - version :]:
                memory.mul_(factor)
