"""A job of the pool that updates parameters in host memory, as what whoever wants their bytes waits for."""

from __future__ import annotations

import errno

from tieroff.errors import StoreError
from tieroff.updates.native import _native


class Job:
    """Complete when the native threads are through with it.

    Args:
        pool: that it was submitted to.
        ticket: which it got there.
    """

    start_ns = stop_ns = 0  # nobody asks: it moves nothing over a link

    def __init__(self, pool: _native.UpdatePool, ticket: int) -> None:
        self._pool, self._ticket, self._is_over = pool, ticket, False

    def done(self) -> bool:
        self._is_over = self._is_over or self._pool.is_done(self._ticket)
        return self._is_over

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the host until it has ended.

        Raises:
            StoreError: it has not in time.
        """
        if not self.wait_ended(timeout_s):
            raise StoreError(
                f"expected the update of parameters in host memory to end within {timeout_s} s, it still runs; the machine "
                "may be overloaded",
                errno=errno.ETIMEDOUT,
            )

    def wait_ended(self, timeout_s: float | None = None) -> bool:
        """Does the same, and returns whether it has ended: what a store asks before it gives memory to somebody else."""
        if not self.done():
            self._pool.wait(self._ticket, timeout_s if timeout_s is not None else float("inf"))
        return self.done()
