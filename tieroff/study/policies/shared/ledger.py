"""What planned transfers leave of each link during each op: the bandwidth ledger of greedy planners."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tieroff.core.tensor import Tier
from tieroff.planner.problem.problem import Problem
from tieroff.units import NS_PER_S

Amounts = npt.NDArray[np.float64]


class Ledger:
    """Bytes that each link can still move during each op, had every op just its own duration.

    Transfers to and from the NVMe also fill the host link, and a host link with less left than the NVMe's leaves the
    NVMe no more than that. Ops are those of the ring: op `n + i` is op i of the next step.
    """

    def __init__(self, problem: Problem) -> None:
        self._op_count = problem.op_count
        durations = np.diff(problem.starts_ns).astype(np.float64)
        self._free: dict[tuple[Tier, bool], Amounts] = {}
        for tier in problem.tiers:
            for leaves, link in zip((True, False), problem.links(tier), strict=True):
                self._free[tier, leaves] = durations * (link.bytes_per_s / NS_PER_S)

    def prefix(self, tier: Tier, *, leaves: bool) -> Amounts:
        """Returns the sums of what is left before each op, over two steps: 2 n + 1 values, bytes."""
        return np.concatenate(([0.0], np.cumsum(np.tile(self._free[tier, leaves], 2))))

    def is_full(self, tier: Tier, start: int, stop: int) -> bool:
        """True when the link away from the device has nothing left in ops [start, stop) of one step, or there are none."""
        return not (self._free[tier, True][start:stop] > 0.0).any()

    def finish(self, tier: Tier, start: int, stop: int, size_bytes: int) -> int:
        """Returns the op within which bytes are out when they leave from op `start` on; `stop` if not before it."""
        left = np.cumsum(self._span(tier, True, start, stop))
        return start + int(np.searchsorted(left, size_bytes))

    def latest(self, tier: Tier, start: int, stop: int, size_bytes: int) -> int:
        """Returns the last op from which on bytes can be back before op `stop`; `start - 1` if from none."""
        left = np.cumsum(self._span(tier, False, start, stop)[::-1])
        return stop - 1 - int(np.searchsorted(left, size_bytes))

    def book(self, tier: Tier, first: int, size_bytes: int, *, leaves: bool) -> None:
        """Takes bytes from a link, from op `first` on round the ring, as far as it has them."""
        order = np.roll(np.arange(self._op_count), -(first % self._op_count))
        own = self._free[tier, leaves][order]
        before = np.cumsum(own) - own
        taken = np.clip(size_bytes - before, 0.0, own)
        self._free[tier, leaves][order] = own - taken
        host, nvme = self._free.get((Tier.HOST, leaves)), self._free.get((Tier.NVME, leaves))
        if host is None or nvme is None:
            return
        if tier is Tier.NVME:
            host[order] = np.maximum(host[order] - taken, 0.0)
        else:
            np.minimum(nvme, host, out=nvme, where=host < nvme)

    def _span(self, tier: Tier, leaves: bool, start: int, stop: int) -> Amounts:
        return np.take(self._free[tier, leaves], np.arange(start, stop), mode="wrap")
