"""How an update may be rounded: what PyTorch's implementations are known or believed to do.

Which one an optimizer's results are is found by comparison, never assumed; see [Note: arithmetics] in
native/include/tieroff/update/job.hpp for what each rounds.
"""

from __future__ import annotations

from types import MappingProxyType

from tieroff.updates.rule import Rule

ARITHMETICS = MappingProxyType(
    {
        "contracted": "fused kernels of the CPU",
        "plain": "fused kernels of a CPU without fused multiply-adds",
        "contracted-ops": "op by op, as the CPU has them",
        "device-ops": "op by op, as devices have them (foreach)",
        "device-ops-reciprocal": "op by op, as devices have them (for-loop)",
        "double-first": "fused kernels of devices, scalars in fp64, the first product joined to the sum",
        "double-second": "the same, the second product joined",
        "double-apart": "the same, products and sums apart",
    }
)
"""Name -> whose it is; the likeliest first."""


def candidates(rule: Rule) -> tuple[str, ...]:
    """Returns the arithmetics that there are for a rule, the likeliest first."""
    if rule.name in ("adagrad", "lion"):
        return tuple(name for name in ARITHMETICS if not name.startswith("double"))
    return tuple(ARITHMETICS)
