"""How sure the clock is, and what a step takes besides its kernels where it nearly fills the card."""

from __future__ import annotations

import math

from tieroff.core.machine import Machine
from tieroff.core.trace import Trace
from tieroff.tracing.clock.model import Constants
from tieroff.units import NS_PER_S

COVERAGE = 0.9
DEVIATIONS = 2.55
"""Root mean squares of the errors of unseen steps that hold nine in ten: their tails are heavier than those of a normal
distribution, of which 1.75 would do. Of 17 errors the largest is the one that the next stays below nine times in ten: 2.54
times the root mean square of the others where models were left out, 2.31 where GPUs were (scripts/evidence/fit_machines.py)."""
_FULL = 0.7


def interval(machine: Machine, constants: Constants) -> tuple[float, float]:
    """Returns the factors between which a measured step lies of the predicted one, in nine cases of ten.

    They come from the fit's own errors: of models left out where the GPU was among those fitted or was calibrated (its
    file then gives `log_error`), else of whole GPUs left out.
    """
    error = machine.clock.get("log_error", constants.log_error_unseen)
    return math.exp(-DEVIATIONS * error), math.exp(DEVIATIONS * error)


def refill_ns(trace: Trace, machine: Machine, constants: Constants) -> int:
    """Returns what torch's allocator adds to a step in which nothing is moved, in ns.

    It holds more memory than tensors take (half as much again is usual). Where those of a step take 70 % of the card, it
    has to give blocks back to the driver and ask anew in each step, which takes time in proportion to what is allocated.
    """
    if not machine.device_bytes or trace.peak_bytes <= _FULL * machine.device_bytes:
        return 0
    kept_bytes = sum(tensor.size_bytes for tensor in trace.tensors if tensor.is_persistent)
    return round((trace.peak_bytes - kept_bytes) * constants.refill_s_per_byte * NS_PER_S)
