"""What stays on the device and why: the program refers to it, or it is not managed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.units import format_bytes

_NAMED = 3  # tensors of one line


def held(trace: Trace, plan: Plan) -> list[str]:
    """Returns a line on what the program itself keeps on the device where the plan has the most there, if it keeps any."""
    if not trace.ops:
        return []
    on_device = _on_device(trace, plan)
    at = max(range(len(on_device)), key=on_device.__getitem__)
    kept = sorted((t for t in trace.tensors if any(a <= at < b for a, b in t.holds)), key=lambda t: -t.size_bytes)
    transient_bytes = trace.ops[at].transient_bytes
    if not kept and not transient_bytes:
        return []
    more = f" and {len(kept) - _NAMED} more" if len(kept) > _NAMED else ""
    names = ", ".join(tensor.shown for tensor in kept[:_NAMED]) + more
    referred = f"the program refers to {format_bytes(sum(t.size_bytes for t in kept))} ({names}), " if kept else ""
    own = f"{format_bytes(transient_bytes)} are what ops make and take for themselves, with what is not managed"
    return [f"Held, and why: at its peak ({trace.ops[at].name}) {referred}{own}."]


def not_managed(unmanaged: Mapping[str, int]) -> list[str]:
    """Returns a line on what stays on the device whatever a plan says; none if nothing does."""
    reasons = sorted(unmanaged.items(), key=lambda reason: -reason[1])
    named = "; ".join(f"{format_bytes(size_bytes)} ({why})" for why, size_bytes in reasons)
    return [f"Not managed, and why: {named}."] if named else []


def _on_device(trace: Trace, plan: Plan) -> list[int]:
    """Returns what the plan has on the device at each op."""
    count = len(trace.ops)
    change = [0] * (count + 1)
    for residency in plan.residencies:
        if residency.tier is Tier.DEVICE:
            size_bytes = trace.tensors[residency.tensor].part_bytes(residency.first_byte, residency.stop_byte)
            change[residency.start] += size_bytes
            change[min(residency.stop, count)] -= size_bytes
            if residency.stop > count:  # it goes on in the next step
                change[0] += size_bytes
                change[residency.stop - count] -= size_bytes
    return [a + op.transient_bytes for a, op in zip(itertools.accumulate(change), trace.ops, strict=False)]
