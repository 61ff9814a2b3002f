"""Casts: parameters that are computed with in another type. See [Note: computed in another type] in reads.py."""

from __future__ import annotations

import torch

from tieroff.core.seams import Recorder
from tieroff.errors import StateError
from tieroff.runtime.tensors import probe_of


class Casts:
    """The casts that the running forward was given.

    Attributes:
        dtype: what floating parameters are cast to for computing; None leaves them as they are.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._given: list[tuple[str, torch.Tensor, int]] = []

    def applies_to(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that is computed with in another type than its own."""
        return self.dtype is not None and tensor.is_floating_point() and tensor.dtype is not self.dtype

    def give(self, name: str, value: torch.Tensor, recorder: Recorder | None) -> None:
        """Notes a cast that forward gets, so that a write to it is found."""
        probe = probe_of(value)
        self._given.append((name, probe, probe._version))
        if recorder is not None:
            recorder.bind(value.untyped_storage(), ("cast", name), is_new=True)

    def check(self, recorder: Recorder | None) -> None:
        """Returns when nobody wrote to a cast of the running forward; in a recorded step, in whatever way.

        Raises:
            StateError: somebody did, and the parameter does not have what was written.
        """
        written = set()
        if self._given and recorder is not None:
            written = recorder.written({("cast", name) for name, _, _ in self._given})
        for name, probe, version in self._given:
            if probe._version != version or ("cast", name) in written:
                raise StateError(
                    f"expected that forward only reads parameters under compute_dtype, but {name} was written in place: what "
                    "was written is lost with the cast it was written to; write parameters outside of forward, or leave "
                    "compute_dtype out"
                )

    def forget(self) -> bool:
        """The forward that got them is over; True when there were any."""
        had_any = bool(self._given)
        self._given.clear()
        return had_any
