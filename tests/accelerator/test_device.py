"""What the simulated device is as a PyTorch device: memory, copies, streams, events, errors, random numbers."""

from __future__ import annotations

import ctypes
import gc
import mmap
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accelerator import sim

COUNT = 1 << 16
MIB = 1 << 20
PAGE = mmap.PAGESIZE


def run_apart(project: Path, code: str) -> subprocess.CompletedProcess[str]:
    text = f"import ctypes, os, torch\nfrom tests.accelerator import sim\nsim.load()\n{code}"
    return subprocess.run([sys.executable, "-c", text], cwd=project, capture_output=True, text=True)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("access", ["ctypes.string_at(x.data_ptr(), 4)", "ctypes.memset(x.data_ptr(), 0, 4)"])
def test_host_access_of_device_memory_faults(access: str, project: Path) -> None:
    done = run_apart(project, f"x = torch.ones(4, device='sim')\nassert x.sum().item() == 4\n{access}")
    assert done.returncode == -signal.SIGSEGV, done.stderr


def test_device_cannot_be_used_in_a_forked_process(project: Path) -> None:
    code = """
torch.ones(4, device="sim")
pid = os.fork()
if pid == 0:
    try:
        torch.ones(4, device="sim")
    except RuntimeError as error:
        os._exit(7 if "forked" in str(error) else 1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""
    done = run_apart(project, code)
    assert done.returncode == 0, done.stderr


def test_new_memory_is_poisoned() -> None:
    assert torch.empty(COUNT, device="sim").isnan().all().item()
    assert torch.empty(COUNT, device="sim", dtype=torch.int64).eq(-1).all().item()


def test_freed_memory_is_poisoned_in_the_order_of_its_stream_and_given_again() -> None:
    x = torch.ones(COUNT, device="sim")
    address = x.data_ptr()
    total = x.sum()
    del x
    again = torch.empty(COUNT, device="sim")
    assert again.data_ptr() == address
    assert again.isnan().all().item() and total.item() == COUNT


def test_memory_of_another_stream_is_not_given() -> None:
    x = torch.ones(COUNT, device="sim")
    address = x.data_ptr()
    del x
    with torch.Stream("sim"):
        assert torch.empty(COUNT, device="sim").data_ptr() != address


def test_recorded_memory_returns_when_its_users_are_done() -> None:
    x, other, gate = torch.ones(COUNT, device="sim"), torch.Stream("sim"), torch.zeros(COUNT).pin_memory()
    address = x.data_ptr()
    sim.set_late_links(0.05)
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        gate.copy_(x, non_blocking=True)
    x.record_stream(other)
    del x
    assert other.query() or torch.empty(COUNT, device="sim").data_ptr() != address
    other.synchronize()
    assert torch.empty(COUNT, device="sim").data_ptr() == address


def test_figures_of_memory() -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="sim")
    y = torch.empty(1, device="sim")
    assert torch.accelerator.memory_allocated() - before == 3 * MIB + 512
    del x
    assert torch.accelerator.memory_allocated() - before == 512
    assert torch.accelerator.max_memory_allocated() - before == 3 * MIB + 512
    held = torch.accelerator.memory_reserved()
    free, total = torch.accelerator.get_memory_info()
    assert free == total - held
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == held - 3 * MIB
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() - before == 512
    assert torch.accelerator.memory_allocated("sim:1") == 0
    del y


def test_full_device_takes_back_its_cache_and_then_refuses() -> None:
    torch.accelerator.empty_cache()
    sim.set_device_bytes(torch.accelerator.memory_reserved() + 8 * MIB)
    try:
        x = torch.empty(5 * MIB, dtype=torch.uint8, device="sim")
        del x
        kept = torch.empty(6 * MIB, dtype=torch.uint8, device="sim")  # in the place of what was cached
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 4194304 bytes on sim:0"):
            torch.empty(4 * MIB, dtype=torch.uint8, device="sim")
        assert torch.accelerator.memory_stats()["num_ooms"] >= 1
        del kept
    finally:
        sim.set_device_bytes(8 << 30)


def test_storages_are_resized_and_set() -> None:
    x = torch.arange(8.0, device="sim")
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0 and x.untyped_storage().data_ptr() == 0
    x.untyped_storage().resize_(32)
    x.copy_(torch.arange(8.0))
    x.resize_(12)
    assert x[:8].tolist() == list(range(8)) and x[8:].isnan().all().item()
    y = torch.empty(0, device="sim").set_(x.untyped_storage(), 2, (3,), (2,))
    assert y.tolist() == [2, 4, 6] and y.is_set_to(x[2:8:2])


def test_data_is_set_across_devices_as_with_cuda() -> None:
    p = torch.nn.Parameter(torch.ones(4, device="sim"))
    node = torch.autograd.graph.get_gradient_edge(p).node
    p.data = torch.zeros(4)
    assert p.device.type == "cpu" and torch.autograd.graph.get_gradient_edge(p).node is not node
    p.data = torch.full((4,), 2.0, device="sim:1")
    assert p.device == torch.device("sim:1") and p.sum().item() == 8


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asks_async", [False, True])
@pytest.mark.parametrize("to_type", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["dense", "transposed", "strided", "broadcast"])
def test_copies_keep_values(layout: str, to_type: torch.dtype, asks_async: bool) -> None:
    source = torch.arange(64.0).reshape(8, 8)
    given = {"dense": source, "transposed": source.t(), "strided": source[:, ::2], "broadcast": source[:1].expand(8, 8)}[layout]
    there = torch.empty_like(given, dtype=to_type, device="sim").copy_(given, non_blocking=asks_async)
    assert torch.equal(there.cpu(), given.to(to_type))
    back = torch.empty(given.shape, dtype=torch.float32).copy_(there, non_blocking=asks_async)
    assert torch.equal(back, given)
    assert torch.equal(there.to("sim:1").cpu(), given.to(to_type))


def test_copy_of_pinned_memory_does_not_hold_up_the_host() -> None:
    target, x = torch.zeros(COUNT).pin_memory(), torch.ones(COUNT, device="sim")
    torch.accelerator.synchronize()
    sim.reset()
    target.copy_(x, non_blocking=True)
    counted = sim.counters()
    assert counted["host_waits"] == counted["blocking_copies"] == counted["unpinned_async_copies"] == 0
    torch.accelerator.synchronize()
    assert target.sum().item() == COUNT


def test_pinned_memory_outlives_its_copies() -> None:
    gc.collect()  # engines of tests before, which are garbage, have staging buffers
    before = sim.counters()["pinned_bytes"]
    sim.set_late_links(0.01)
    x = torch.empty(COUNT, device="sim")
    for value in range(8):
        x.copy_(torch.full((COUNT,), float(value)).pin_memory(), non_blocking=True)  # the host lets it go at once
        x.to("cpu", non_blocking=True, copy=True)  # into memory that is let go before a byte has come
    assert x.eq(7).all().item()
    torch.accelerator.synchronize()
    assert sim.counters()["pinned_bytes"] == before


def test_memory_is_registered_with_the_codes_of_cuda() -> None:
    area = mmap.mmap(-1, 4 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert sim.host_register(address, 2 * PAGE) == 0
    assert sim.is_pinned(address + PAGE, PAGE) and not sim.is_pinned(address + PAGE, 2 * PAGE)
    assert torch.frombuffer(area, dtype=torch.uint8, count=PAGE).is_pinned()
    assert sim.host_register(address + PAGE, 2 * PAGE) == 712
    assert sim.host_register(address, 0) == 1
    assert sim.host_unregister(address + PAGE) == 713
    assert sim.take_last_error() == 713 and sim.take_last_error() == 0
    assert sim.host_unregister(address) == 0
    assert sim.counters()["refused_registrations"] == 3


def test_refusal_that_nobody_takes_is_raised_by_the_next_kernel() -> None:
    sim.set_pin_limit(PAGE)
    area = mmap.mmap(-1, 2 * PAGE)
    assert sim.host_register(ctypes.addressof(ctypes.c_char.from_buffer(area)), 2 * PAGE) == 2
    with pytest.raises(RuntimeError, match="sim error 2"):
        torch.ones(4, device="sim")
    assert torch.ones(4, device="sim").sum().item() == 4


def test_memory_that_is_unregistered_under_a_copy_is_counted() -> None:
    area = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    target, x = torch.frombuffer(area, dtype=torch.uint8), torch.zeros(PAGE, dtype=torch.uint8, device="sim")
    for waits in (False, True):
        assert sim.host_register(address, PAGE) == 0
        target.copy_(x, non_blocking=True)
        if waits:
            torch.accelerator.synchronize()
        assert sim.host_unregister(address) == 0
        torch.accelerator.synchronize()
    assert sim.counters()["unregistered_in_flight"] == 1


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_kernels_do_not_hold_up_the_host() -> None:
    x = torch.ones(64, 64, device="sim")
    sim.reset()
    for _ in range(50):
        x = torch.nn.functional.gelu(x @ x / 64)
    counted = sim.counters()
    assert counted["kernels"] >= 150
    assert counted["host_waits"] == counted["synchronous_kernels"] == 0


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
def test_results_have_the_geometry_of_the_cpus_in_every_call(default: torch.dtype) -> None:
    """Meta kernels are asked once: what tells two calls apart must be all that shapes, strides and types follow from."""
    whole, half, turned = (
        torch.arange(6).reshape(2, 3),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.arange(6).reshape(3, 2).t(),
    )
    calls: list[Callable[[Tensor], Tensor]] = [
        *(lambda x, y=y: x * y for y in (2, 2.5, True, torch.tensor(2.5, dtype=torch.float64), torch.tensor(2))),
        lambda x: (x if x.dtype is torch.int64 else x.float()) * 2.5j,  # since torch 2.14 no CPU kernel has bfloat16's product
        *(lambda x, dim=dim: x.sum(dim) for dim in (0, 1, -1, [0, 1])),
        *(lambda x, keeps=keeps: x.float().amax(0, keepdim=keeps) for keeps in (False, True)),
        *(lambda x, count=count: torch.stack([x] * count) for count in (1, 2)),
        *(lambda x, dim=dim: torch.cat([x, x], dim) for dim in (0, 1)),
        *(
            lambda x, like=like: torch.empty_like(x, memory_format=like)
            for like in (torch.contiguous_format, torch.preserve_format)
        ),
        *(lambda x, kind=kind: x.sum(dtype=kind) for kind in (None, torch.float64)),
        lambda x: x / 2,
        lambda x: x.float().mul_(x),
    ]

    def geometry(x: Tensor) -> tuple[Any, ...]:
        return x.dtype, x.shape, x.stride()

    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        pairs = [(number, call, x) for number, call in enumerate(calls) for x in (whole, half, turned)]
        assert [number for number, call, x in pairs if geometry(call(x.to("sim"))) != geometry(call(x))] == []
    finally:
        torch.set_default_dtype(before)


def test_host_waits_where_shapes_depend_on_data() -> None:
    x = torch.arange(10, device="sim")
    sim.reset()
    assert x[x > 6].tolist() == [7, 8, 9]
    assert x.nonzero().shape == (9, 1)
    assert torch.unique(x // 5).tolist() == [0, 1]
    assert sim.counters()["synchronous_kernels"] >= 2


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda a, b, host: a + host, "found at least two devices, sim:0 and cpu"),
        (lambda a, b, host: torch.mm(a, host), "found at least two devices, sim:0 and cpu"),
        (lambda a, b, host: a + b, "found at least two devices, sim:0 and sim:1"),
        (lambda a, b, host: torch.cat([a, b]), "found at least two devices, sim:0 and sim:1"),
        (lambda a, b, host: host.add_(a), "two devices"),
        (lambda a, b, host: a + b.sum(), "found at least two devices, sim:0 and sim:1"),
        (lambda a, b, host: torch.mm(a, a[:1]), "mat1 and mat2 shapes cannot be multiplied"),
        (lambda a, b, host: a.add_(torch.ones(7, device="sim")), "must match the size"),
        (lambda a, b, host: torch.empty(4, device="sim", pin_memory=True), "pinned"),
    ],
)
def test_wrong_calls_are_refused_when_they_are_made(call: object, told: str) -> None:
    a, b, host = torch.ones(4, 4, device="sim"), torch.ones(4, 4, device="sim:1"), torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=told):
        call(a, b, host)  # type: ignore[operator]
    assert (a * torch.tensor(2.0)).sum().item() == 32  # a scalar of the host is welcome


def test_failure_of_a_queued_kernel_is_raised_by_what_comes_after() -> None:
    table = torch.ones(4, 4, device="sim")
    torch.nn.functional.embedding(torch.tensor([9], device="sim"), table)
    with pytest.raises(RuntimeError, match="aten::index_select failed after it was queued"):
        torch.accelerator.synchronize()
    sim.reset()
    assert table.sum().item() == 16


def test_results_given_as_arguments_get_their_size() -> None:
    a, b = torch.ones(3, 4, device="sim"), torch.ones(4, 5, device="sim")
    out = torch.empty(0, device="sim")
    assert torch.mm(a, b, out=out) is out
    assert out.shape == (3, 5) and out.eq(4).all().item()
    picked = torch.empty(0, dtype=torch.int64, device="sim")
    torch.nonzero(a[0], out=picked)
    assert picked.flatten().tolist() == [0, 1, 2, 3]


def test_views_share_their_bytes() -> None:
    x = torch.arange(24.0, device="sim").reshape(2, 3, 4)
    for view in (x.transpose(0, 2), x[:, 1:], x.unfold(2, 2, 1), x.view(torch.int32), x.unsqueeze(0).expand(2, -1, -1, -1)):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    x[:, 1:].zero_()
    assert x.sum().item() == sum(range(4)) + sum(range(12, 16))
    z = torch.view_as_complex(torch.ones(3, 2, device="sim"))
    assert z.conj().imag.tolist() == [-1, -1, -1] and torch.view_as_real(z).shape == (3, 2)


# -- streams, events, threads --------------------------------------------------------------------------------------------


def test_streams_run_beside_each_other() -> None:
    slow, x = torch.zeros(COUNT).pin_memory(), torch.ones(COUNT, device="sim")
    torch.accelerator.synchronize()
    sim.set_late_links(0.2)
    side = torch.Stream("sim")
    with side:
        slow.copy_(x, non_blocking=True)
    y = x * 2
    torch.accelerator.current_stream().synchronize()
    assert y.sum().item() == 2 * COUNT
    side.synchronize()


def test_events_tell_time_only_where_asked() -> None:
    start, stop, plain = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True), torch.Event("sim")
    start.record()
    torch.ones(COUNT, device="sim").sum()
    stop.record()
    plain.record()
    stop.synchronize()
    assert start.elapsed_time(stop) > 0
    plain.synchronize()
    with pytest.raises(ValueError, match="enable_timing=True"):
        start.elapsed_time(plain)
    with pytest.raises(ValueError, match="recorded before"):
        start.elapsed_time(torch.Event("sim", enable_timing=True))


def test_waits_across_devices_are_counted() -> None:
    event = torch.Event("sim:1")
    event.record(torch.accelerator.current_stream("sim:1"))
    torch.accelerator.current_stream("sim:0").wait_event(event)
    assert sim.counters()["cross_device_waits"] == 1


@pytest.mark.parametrize("is_threaded", [True, False])
def test_backward_runs_in_the_thread_that_pytorch_gives_it(is_threaded: bool) -> None:
    import threading

    seen: list[str] = []
    with torch.autograd.set_multithreading_enabled(is_threaded):
        x = torch.ones(4, device="sim", requires_grad=True)
        y = x * 2
        y.register_hook(lambda gradient: seen.append(threading.current_thread().name))
        y.sum().backward()
    assert (seen[0] == "MainThread") == (not is_threaded)


def test_devices_are_current_by_thread_and_context() -> None:
    with torch.sim.device(1):  # type: ignore[attr-defined]
        assert torch.accelerator.current_device_index() == 1
        assert torch.ones(1, device="sim").device == torch.device("sim:1")
    assert torch.accelerator.current_device_index() == 0
    with torch.Stream("sim:1"):
        assert torch.accelerator.current_device_index() == 1
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(1, device="sim:2")


# -- random numbers -----------------------------------------------------------------------------------------------------


def test_random_numbers_follow_the_seed_and_not_the_host() -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        first = torch.randn(100, device="sim")
        torch.rand(50)  # the host's generator is another one
        others = (
            torch.nn.functional.dropout(torch.ones(100, device="sim")),
            torch.randperm(20, device="sim"),
            torch.multinomial(torch.ones(9, device="sim"), 4),
        )
        drawn.append([first.cpu(), *(other.cpu() for other in others)])
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    assert not torch.equal(drawn[0][0], torch.randn(100, device="sim").cpu())


def test_state_of_the_generator_is_kept_and_set() -> None:
    torch.manual_seed(5)
    state = torch.sim.get_rng_state()  # type: ignore[attr-defined]
    first = torch.rand(10, device="sim").cpu()
    torch.sim.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(torch.rand(10, device="sim").cpu(), first)
    own = torch.Generator("sim").manual_seed(9)
    twin = own.clone_state()
    assert torch.equal(torch.rand(5, device="sim", generator=own).cpu(), torch.rand(5, device="sim", generator=twin).cpu())
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(5, device="sim", generator=torch.Generator())
