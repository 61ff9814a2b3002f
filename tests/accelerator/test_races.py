"""The race detector: it finds every planted race in every run, and nothing in programs that order what they do."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.accelerator import sim

COUNT = 4096


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def side() -> torch.Stream:
    return torch.Stream("sim")


def zeros(*size: int, device: str = "sim") -> torch.Tensor:
    return torch.zeros(size or (COUNT,), device=device)


def pinned() -> torch.Tensor:
    return torch.zeros(COUNT).pin_memory()


def finished(stream: torch.Stream) -> torch.Event:
    event = torch.Event("sim")
    event.record(stream)
    return event


# -- planted races: what is done, and what the report has to say ----------------------------------------------------------


def writes_on_two_streams() -> None:
    x, other = zeros(), side()
    other.wait_stream(current())
    with other:
        x.add_(1)
    x.mul_(2)


def read_beside_a_write() -> None:
    x, other = zeros(), side()
    other.wait_stream(current())
    with other:
        x.sum()
    x.mul_(2)


def write_beside_a_read_of_a_view() -> None:
    x, other = zeros(8, COUNT), side()
    other.wait_stream(current())
    with other:
        x[3].sum()
    x[2:5].mul_(2)


def source_rewritten_by_the_host() -> None:
    source, x = pinned(), zeros()
    x.copy_(source, non_blocking=True)
    source.fill_(1)


def target_read_by_the_host() -> None:
    target, x = pinned(), zeros()
    target.copy_(x, non_blocking=True)
    target.sum()


def target_read_after_the_wrong_event() -> None:
    target, x = pinned(), zeros()
    early = finished(current())
    target.copy_(x, non_blocking=True)
    early.synchronize()
    target.sum()


def freed_while_another_stream_reads() -> None:
    x, other = zeros(), side()
    other.wait_stream(current())
    with other:
        x.sum()
    del x
    zeros()


def used_before_it_is_allocated() -> None:
    x = torch.empty(COUNT, device="sim")
    with side():
        x.fill_(1)


def two_copies_into_one_block() -> None:
    target, x, other = pinned(), zeros(), side()
    other.wait_stream(current())
    with other:
        target.copy_(x, non_blocking=True)
    target.copy_(x, non_blocking=True)


def event_recorded_too_early() -> None:
    x, other = zeros(), side()
    other.wait_stream(current())
    early = finished(other)
    with other:
        x.add_(1)
    current().wait_event(early)
    x.sum()


def wait_on_the_wrong_device() -> None:
    source, x = pinned(), zeros(device="sim:1")
    away = torch.Stream("sim:1")
    away.wait_stream(torch.accelerator.current_stream("sim:1"))
    with away:
        x.copy_(source, non_blocking=True)
    current().wait_event(finished(away))  # of device 0, which is the current one
    x.sum()


def told_of_but_not_ordered() -> None:
    target, x = pinned(), zeros()
    target.copy_(x, non_blocking=True)
    sim.note_host_access(target.data_ptr(), target.nbytes, write=False, name="checksum")


def drive_reads_while_the_block_is_filled_again() -> None:
    block, x = pinned(), zeros()
    with sim.host_io(block.data_ptr(), block.nbytes, write=False, name="drive"):
        block.copy_(x, non_blocking=True)


def drive_fills_while_the_block_is_copied() -> None:
    block, x = pinned(), zeros()
    agent = sim.begin_host_io(block.data_ptr(), block.nbytes, write=True, name="drive")
    x.copy_(block, non_blocking=True)
    sim.end_host_io(agent)


def scale_read_where_gradients_are_of_the_host() -> None:
    # What GradScaler does for such gradients: PyTorch gives an asynchronous copy to the host pinned memory.
    scale = zeros().to("cpu", non_blocking=True, copy=True)
    scale.sum()


def another_thread_does_not_know() -> None:
    target, x, told = pinned(), zeros(), threading.Event()

    def read() -> None:
        target.sum()
        told.set()

    thread = threading.Thread(target=read)
    target.copy_(x, non_blocking=True)
    thread.start()
    told.wait()
    current().synchronize()
    thread.join()


PLANTED = {
    writes_on_two_streams: ("aten::add_", "aten::mul_", "device memory"),
    read_beside_a_write: ("aten::sum", "aten::mul_", "device memory"),
    write_beside_a_read_of_a_view: ("aten::sum", "aten::mul_", "device memory"),
    source_rewritten_by_the_host: ("copy to device", "aten::fill_", "pinned memory"),
    target_read_by_the_host: ("copy to host", "aten::sum", "pinned memory"),
    target_read_after_the_wrong_event: ("copy to host", "aten::sum", "pinned memory"),
    freed_while_another_stream_reads: ("aten::sum", "allocate", "device memory"),
    used_before_it_is_allocated: ("allocate", "aten::fill_", "device memory"),
    two_copies_into_one_block: ("copy to host", "copy to host", "pinned memory"),
    event_recorded_too_early: ("aten::add_", "aten::sum", "device memory"),
    wait_on_the_wrong_device: ("copy to device", "aten::sum", "device memory"),
    told_of_but_not_ordered: ("copy to host", "checksum", "pinned memory"),
    drive_reads_while_the_block_is_filled_again: ("drive", "copy to host", "pinned memory"),
    drive_fills_while_the_block_is_copied: ("drive", "copy to device", "pinned memory"),
    scale_read_where_gradients_are_of_the_host: ("copy to host", "aten::sum", "pinned memory"),
    another_thread_does_not_know: ("copy to host", "aten::sum", "pinned memory"),
}


@pytest.mark.parametrize("late_s", [0, 0.002], ids=["", "late"])
@pytest.mark.parametrize("program", PLANTED, ids=lambda program: program.__name__)
def test_planted_race_is_found(program: Callable[[], None], late_s: float) -> None:
    sim.set_late_links(late_s)
    with sim.label("the planted one"):
        program()
    torch.accelerator.synchronize()
    found = sim.races()
    sim.forget_races()
    first, second, memory = PLANTED[program]
    assert len(found) == 1, found
    lines = found[0].splitlines()
    assert memory in lines[0]
    begins = [line for line in lines if line.startswith(("  first", "  second"))]
    assert f"by {first} (" in begins[0] and f"by {second} (" in begins[1]
    assert all("in the planted one" in line for line in begins if "host:" not in line)
    assert "test_races.py" in found[0]


# -- programs that order what they do ---------------------------------------------------------------------------------


def streams_wait_for_each_other() -> None:
    x, other = zeros(), side()
    other.wait_stream(current())
    with other:
        x.add_(1)
    current().wait_stream(other)
    x.mul_(2)


def order_goes_through_a_third_stream() -> None:
    x, one, two = zeros(), side(), side()
    one.wait_stream(current())
    with one:
        x.add_(1)
    two.wait_event(finished(one))
    current().wait_event(finished(two))
    x.mul_(2)


def both_only_read() -> None:
    x, other = zeros(), side()
    other.wait_stream(current())
    with other:
        x.sum()
    x.mean()
    current().wait_stream(other)


def different_rows() -> None:
    x, other = zeros(2, COUNT), side()
    other.wait_stream(current())
    with other:
        x[0].add_(1)
    x[1].mul_(2)
    current().wait_stream(other)


def different_columns() -> None:
    x, other = zeros(COUNT, 4), side()
    other.wait_stream(current())
    with other:
        x[:, 0].add_(1)
    x[:, 1].mul_(2)
    current().wait_stream(other)


def recorded_before_it_is_freed() -> None:
    x, other = zeros(), side()
    other.wait_stream(current())
    with other:
        x.sum()
    x.record_stream(other)
    del x
    zeros()


def ordered_before_it_is_used_again() -> None:
    x, other = zeros(), side()
    other.wait_stream(current())
    with other:
        x.sum()
    del x
    current().wait_stream(other)
    zeros()


def host_waits_for_an_event() -> None:
    target, x = pinned(), zeros()
    target.copy_(x, non_blocking=True)
    finished(current()).synchronize()
    target.add_(1)


def host_asks_until_it_is_over() -> None:
    target, x = pinned(), zeros()
    target.copy_(x, non_blocking=True)
    event = finished(current())
    while not event.query():
        pass
    target.add_(1)


def views_of_a_target_are_made_at_once() -> None:
    target, x = pinned(), zeros()
    target.copy_(x, non_blocking=True)
    rows = target.view(-1, 8)[1:].detach()
    current().synchronize()
    rows.sum()


def drive_is_done_before_the_copy() -> None:
    block, x = pinned(), zeros()
    with sim.host_io(block.data_ptr(), block.nbytes, write=True, name="drive"):
        pass
    x.copy_(block, non_blocking=True)


def between_devices() -> None:
    x = zeros().add_(1)
    y = x.to("sim:1").mul_(2)
    x.zero_()
    assert y.to("sim:0").sum().item() == 2 * COUNT


def a_thread_waits_for_another_one() -> None:
    target, x = pinned(), zeros()
    jobs: queue.Queue[Any] = queue.Queue()
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        event = jobs.get()
        event.synchronize()
        answers.put(None)

    thread = threading.Thread(target=work)
    thread.start()
    target.copy_(x, non_blocking=True)
    jobs.put(finished(current()))
    answers.get()
    target.add_(1)
    thread.join()


def a_future_is_waited_for() -> None:
    target, x = pinned(), zeros()
    target.copy_(x, non_blocking=True)
    event = finished(current())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(event.synchronize).result()
        target.add_(1)


def a_hook_in_backward_waits() -> None:
    target, x = pinned(), zeros().requires_grad_()
    y = x * 2

    def keep(gradient: torch.Tensor) -> None:
        target.copy_(gradient, non_blocking=True)
        current().synchronize()

    y.register_hook(keep)
    y.sum().backward()
    target.add_(1)


ORDERED = (
    streams_wait_for_each_other,
    order_goes_through_a_third_stream,
    both_only_read,
    different_rows,
    different_columns,
    recorded_before_it_is_freed,
    ordered_before_it_is_used_again,
    host_waits_for_an_event,
    host_asks_until_it_is_over,
    views_of_a_target_are_made_at_once,
    drive_is_done_before_the_copy,
    between_devices,
    a_thread_waits_for_another_one,
    a_future_is_waited_for,
    a_hook_in_backward_waits,
)


@pytest.mark.parametrize("late_s", [0, 0.002], ids=["", "late"])
@pytest.mark.parametrize("program", ORDERED, ids=lambda program: program.__name__)
def test_ordered_program_has_no_race(program: Callable[[], None], late_s: float) -> None:
    sim.set_late_links(late_s)
    program()
    torch.accelerator.synchronize()
    assert sim.races() == []
    assert sim.counters()["dropped_accesses"] == 0


# -- what is around it ------------------------------------------------------------------------------------------------


def test_race_is_raised_where_it_is_asked_for() -> None:
    sim.set_raising(True)
    with pytest.raises(RuntimeError, match="nothing orders the two"):
        writes_on_two_streams()
    sim.forget_races()


def test_race_is_an_error_of_the_test_that_has_it() -> None:
    writes_on_two_streams()
    with pytest.raises(sim.RaceError, match=r"race in a block of \d+ bytes of device memory"):
        sim.check()
    sim.forget_races()


def test_free_that_nothing_orders_is_counted() -> None:
    x, other = zeros(), side()
    other.wait_stream(current())
    with other:
        x.sum()
    del x
    assert sim.counters()["unordered_frees"] == 1
    current().wait_stream(other)


def test_memory_outside_of_pinned_blocks_is_nobodys_concern() -> None:
    host, x = torch.zeros(COUNT), zeros()
    x.copy_(host, non_blocking=True)
    host.fill_(1)  # the driver has taken the bytes
    assert x.sum().item() == 0
    assert sim.counters()["unpinned_async_copies"] == 1
