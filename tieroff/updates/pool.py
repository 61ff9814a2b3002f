"""The threads that update parameters in host memory: as many for a run as for the measurement that its plan counts on."""

from __future__ import annotations

import os
from collections.abc import Collection

from tieroff.updates.native import _native

_THREADS_MAX = 16  # a few saturate the memory of one node; more would take cores from whoever loads data


def thread_count(cpus: Collection[int] = ()) -> int:
    """Returns half of these processors, or of all that this process may use: others load data and launch kernels."""
    return max(1, min(len(cpus or os.sched_getaffinity(0)) // 2, _THREADS_MAX))


def make_pool(cpus: Collection[int] = ()) -> _native.UpdatePool:
    """Returns that many threads, without work, on these processors or, without any, where the process runs."""
    return _native.UpdatePool(thread_count(cpus), sorted(cpus))
