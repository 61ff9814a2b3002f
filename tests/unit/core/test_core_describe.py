"""What people are told about a plan."""

from __future__ import annotations

from tieroff.core.explain.describe import describe
from tieroff.core.plan import HostUpdate, Plan, Repeat, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
_TRACE = Trace(
    ops=(Op("make", 1_000_000, (), (0,)), Op("use", 1_000_000, (0,), ()), Op("update", 1_000_000, (), (1,), phase="optimizer")),
    tensors=(Tensor("x", 4096, TensorClass.ACTIVATION), Tensor("w", 2048, TensorClass.PARAMETER, is_persistent=True)),
)


def _plan(**changes: object) -> Plan:
    residencies = (Residency(0, DEVICE, 0, 2), Residency(1, DEVICE, 0, 3))
    values: dict[str, object] = {"residencies": residencies, "transfers": (), **changes}
    budget = {DEVICE: 8192, HOST: 8192}
    return Plan("hand", _TRACE.digest, 3, budget, {DEVICE: 6144, HOST: 0}, **values)  # type: ignore[arg-type]


def test_parts_are_counted_once_per_tier_and_named() -> None:
    below = (Residency(0, HOST, 1, 2, 0, 1024), Residency(0, HOST, 2, 3, 512, 2048), Residency(0, NVME, 1, 3))
    lines = describe(_TRACE, _plan(residencies=below, transfers=(Transfer(0, DEVICE, HOST, 1, 2, 0, 1024),)))
    assert "  activation: 4.00 KiB in all; 2.00 KiB to host, 4.00 KiB to nvme." in lines
    assert "Bytes per step: device to host 3.00 KiB." in lines
    assert lines[-1] == "Biggest that move: x (4.00 KiB) to host (part of it, 2.00 KiB) and nvme."


def test_repeats_and_updates_on_the_host_are_told_with_their_time() -> None:
    lines = describe(_TRACE, _plan(repeats=(Repeat(0, 2),), host_updates=(HostUpdate(2, 2, 3, 5_000_000),)))
    assert "Ops that run again: 1, 1.0 ms per step; they make 4.00 KiB again instead of moving it." in lines
    assert "Updates of the optimizer that the CPU runs: 1, on 2.00 KiB in host memory, 5.0 ms per step." in lines
