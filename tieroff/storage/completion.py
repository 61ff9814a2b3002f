"""What is under way: copies between the device and a tier below, and between a tier and memory."""

from __future__ import annotations

from typing import Protocol


class Timed(Protocol):
    """Something under way, or ended, and when it moved bytes."""

    @property
    def start_ns(self) -> int:
        """When its first byte was moved, CLOCK_MONOTONIC; 0 until then."""

    @property
    def stop_ns(self) -> int:
        """When it ended; 0 until then."""

    def done(self) -> bool:
        """Returns whether it has ended, well or not."""


class Completion(Timed, Protocol):
    """One copy. After one that failed or was cancelled the source is as it was; the target mixes old and new bytes."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when it has ended well, and work given to the device from now on sees its bytes. Other threads run meanwhile.

        Raises:
            StoreError: it failed, was cancelled (errno ECANCELED), read something else than was written (EBADMSG), or
                has not ended in time (ETIMEDOUT; it is then still under way).
        """
