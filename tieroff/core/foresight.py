"""The seam between the runtime, which sees what a step uses, and whoever guesses what a step without a plan uses next."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol


class Foresight(Protocol):
    """Guesses which tensors come next. A wrong guess costs time, never a number."""

    def begin(self) -> None:
        """A step begins."""

    def used(self, key: Hashable) -> None:
        """Forward uses a parameter."""

    def saved(self, key: Hashable) -> None:
        """Autograd saved a tensor for backward, which may be saved several times."""

    def wanted(self, key: Hashable) -> None:
        """Backward uses what was saved."""

    def ahead(self) -> Iterator[Hashable]:
        """Yields what is probably used next, nearest first, each key once."""
