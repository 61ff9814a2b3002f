"""The device's clock: what a machine's rates say, whatever the host's clock says."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tests.accelerator import sim
from tieroff.core.machine import Machine

MIB = 1 << 20
GIB = 1 << 30
MACHINE = Machine(
    name="round numbers",
    h2d_bytes_per_s=16 * GIB,
    d2h_bytes_per_s=8 * GIB,
    h2d_latency_s=10e-6,
    d2h_latency_s=20e-6,
    duplex_share=0.75,
    fp32_flops_per_s=1e12,
    bf16_flops_per_s=4e12,
    device_memory_bytes_per_s=1024 * GIB,
)
SIZE = 64 * MIB
H2D_S = 10e-6 + SIZE / (16 * GIB)
D2H_S = 20e-6 + SIZE / (8 * GIB)


def mark(stream: torch.Stream | None = None) -> torch.Event:
    event = torch.Event("sim", enable_timing=True)
    event.record(stream or torch.accelerator.current_stream())
    return event


def seconds(start: torch.Event, stop: torch.Event) -> float:
    torch.accelerator.synchronize()
    return start.elapsed_time(stop) / 1e3


def device_bytes() -> torch.Tensor:
    return torch.empty(SIZE, dtype=torch.uint8, device="sim")


def host_bytes() -> torch.Tensor:
    return torch.empty(SIZE, dtype=torch.uint8).pin_memory()


@pytest.mark.parametrize(
    ("call", "expected_s"),
    [
        (lambda: device_bytes().copy_(host_bytes(), non_blocking=True), H2D_S),
        (lambda: host_bytes().copy_(device_bytes(), non_blocking=True), D2H_S),
        (lambda: torch.empty(512, 1024, device="sim") @ torch.empty(1024, 256, device="sim"), 2 * 512 * 1024 * 256 / 1e12),
        (
            lambda: (
                torch.empty(512, 1024, device="sim", dtype=torch.bfloat16)
                @ torch.empty(1024, 256, device="sim", dtype=torch.bfloat16)
            ),
            2 * 512 * 1024 * 256 / 4e12,
        ),
        (lambda: device_bytes().add_(1), 2 * SIZE / (1024 * GIB)),
        (lambda: torch.empty(SIZE, device="sim", dtype=torch.uint8), 0),
        (
            lambda: torch.conv2d(torch.empty(4, 8, 32, 32, device="sim"), torch.empty(16, 8, 3, 3, device="sim"), padding=1),
            2 * 4 * 16 * 32 * 32 * 8 * 9 / 1e12,
        ),
    ],
    ids=["h2d", "d2h", "product", "half product", "memory", "allocation", "convolution"],
)
def test_work_takes_what_the_machine_says(call: Callable[[], object], expected_s: float) -> None:
    sim.set_machine(MACHINE)
    start = mark()
    call()
    # Of in-place arithmetic, what is read and what is written are one argument and one result.
    assert seconds(start, mark()) == pytest.approx(expected_s, rel=1e-3, abs=2e-9)


def test_every_kernel_takes_what_a_launch_takes() -> None:
    sim.set_machine(Machine(), kernel_s=3e-6)
    start, x = mark(), torch.ones(4, device="sim")  # one kernel
    for _ in range(9):
        x = x + 1
    assert seconds(start, mark()) == pytest.approx(30e-6)


def test_work_on_one_device_is_one_after_the_other_and_copies_are_beside_it() -> None:
    sim.set_machine(MACHINE)
    side, x, y, host, into = torch.Stream("sim"), device_bytes(), device_bytes(), host_bytes(), device_bytes()
    torch.accelerator.synchronize()
    start = mark()
    side.wait_event(start)
    into.copy_(host, non_blocking=True)
    with side:
        x.add_(1)
        y.add_(1)
    torch.accelerator.current_stream().wait_event(mark(side))
    assert seconds(start, mark()) == pytest.approx(max(H2D_S, 4 * SIZE / (1024 * GIB)), rel=1e-3)


def test_both_directions_share_what_the_machine_says() -> None:
    sim.set_machine(MACHINE)
    inward, outward = torch.Stream("sim"), torch.Stream("sim")
    source, target, there, here = host_bytes(), device_bytes(), device_bytes(), host_bytes()
    torch.accelerator.synchronize()
    start = mark()
    inward.wait_event(start)
    outward.wait_event(start)
    with outward:
        for _ in range(8):
            here.copy_(there, non_blocking=True)
    with inward:
        for _ in range(8):
            target.copy_(source, non_blocking=True)
    both = torch.accelerator.current_stream()
    both.wait_event(mark(inward))
    both.wait_event(mark(outward))
    # While both are busy they move 0.75 of 24 GiB/s together: 8 out and 10 in.
    in_both_s = seconds(start, mark(outward))
    assert in_both_s == pytest.approx(8 * D2H_S, rel=1e-3)
    left = 8 * SIZE - (in_both_s - 8 * 10e-6) * 10 * GIB
    assert seconds(start, mark(inward)) == pytest.approx(max(in_both_s, in_both_s + left / (16 * GIB)), rel=0.01)


def test_a_stream_that_waits_holds_up_no_other() -> None:
    sim.set_machine(MACHINE)
    waiting, source, into, x = torch.Stream("sim"), host_bytes(), device_bytes(), device_bytes()
    torch.accelerator.synchronize()
    start = mark()
    waiting.wait_event(start)
    with waiting:
        into.copy_(source, non_blocking=True)
        into.add_(1)  # submitted first, and ready after the copy
    x.add_(1)
    assert seconds(start, mark()) == pytest.approx(2 * SIZE / (1024 * GIB), rel=1e-3)


def test_work_begins_no_earlier_than_what_the_host_has_waited_for() -> None:
    sim.set_machine(MACHINE)
    x, y, side = device_bytes(), device_bytes(), torch.Stream("sim")
    torch.accelerator.synchronize()
    begun = sim.host_time_ns()
    x.add_(1)
    assert sim.host_time_ns() == begun  # the host ran ahead
    torch.accelerator.current_stream().synchronize()
    kernel_ns = 2 * SIZE / (1024 * GIB) * 1e9
    assert sim.host_time_ns() - begun == pytest.approx(kernel_ns, rel=1e-3)
    sim.advance_host(1_000_000)
    with side:
        y.add_(1)
    assert sim.stream_time_ns(side) - begun == pytest.approx(2 * kernel_ns + 1_000_000, rel=1e-3)


def test_timeline_has_what_the_engines_did() -> None:
    sim.set_machine(MACHINE)
    source, x = host_bytes(), device_bytes()
    with sim.timeline() as works:
        x.copy_(source, non_blocking=True)
        x.add_(1)
    assert [(work.engine, work.name) for work in works] == [("h2d", "copy to device"), ("compute", "aten::add_")]
    assert works[0].stop_ns - works[0].start_ns == pytest.approx(H2D_S * 1e9, rel=1e-3)
    assert works[1].start_ns == works[0].stop_ns


def test_times_of_the_device_are_the_same_however_late_the_host_is() -> None:
    taken = []
    for late_s in (0.0, 0.02):
        sim.reset()
        sim.set_machine(MACHINE)
        sim.set_late_links(late_s)
        source, x = host_bytes(), device_bytes()
        start = mark()
        x.copy_(source, non_blocking=True)
        time.sleep(late_s)
        x.add_(1)
        taken.append(seconds(start, mark()))
    assert taken[0] == taken[1]


def test_without_a_machine_events_tell_real_time() -> None:
    sim.set_late_links(0.05)
    source, x = host_bytes(), device_bytes()
    torch.accelerator.synchronize()
    start, begun = mark(), time.perf_counter()
    for _ in range(8):
        x.copy_(source, non_blocking=True)
    took_s = seconds(start, mark())
    assert 0 < took_s <= time.perf_counter() - begun + 0.01


def test_machine_is_read_from_a_file(project: object) -> None:
    sim.set_machine(f"{project}/configs/machines/h100_80gb.toml")
    start, x = mark(), torch.empty(1024, 1024, device="sim", dtype=torch.bfloat16)
    x @ x
    assert 0 < seconds(start, mark()) < 1e-4
