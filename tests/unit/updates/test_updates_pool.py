"""Threads that run updates: order, gates, tickets, counters, forks."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tieroff.errors import StateError
from tieroff.updates import rule as rules
from tieroff.updates.native import HAS_UPDATES, _native
from tieroff.updates.pool import make_pool, thread_count

pytestmark = pytest.mark.skipif(not HAS_UPDATES, reason="built without updates in host memory")

WAIT_S = 30.0


@pytest.fixture
def pool() -> Iterator[_native.UpdatePool]:
    made = _native.UpdatePool(2, [])
    yield made
    made.close()


class Bucket:
    """A parameter that one update by SGD takes from 1 to 0."""

    def __init__(self, count: int = 200_000) -> None:
        self.parameter, self.gradient = torch.ones(count), torch.ones(count)
        self.counter = torch.tensor(3.0)
        addresses = [self.parameter.data_ptr(), self.gradient.data_ptr()]
        self.part = rules.sgd(lr=1.0).part("contracted", "float32", count, addresses, addresses)

    def submit(self, pool: _native.UpdatePool, *gates: _native.UpdateGate) -> int:
        return pool.submit([self.part], gates, [self.counter.data_ptr()])

    @property
    def times_updated(self) -> float:
        found = self.parameter.unique()
        assert len(found) == 1, "part of it was updated"
        return 1.0 - found.item()


def affinities() -> list[set[int]]:
    """Returns the processors of each of this process's threads that update."""
    tasks = Path("/proc/self/task").iterdir()
    return [os.sched_getaffinity(int(task.name)) for task in tasks if (task / "comm").read_text().startswith("tieroff-upd-")]


def test_threads_run_on_the_processors_that_are_named() -> None:
    allowed = os.sched_getaffinity(0)
    bound = make_pool({max(allowed)})
    try:
        assert (affinities(), bound.threads) == ([{max(allowed)}], 1)
        bucket = Bucket()
        assert bound.wait(bucket.submit(bound), WAIT_S) and bucket.times_updated == 1.0
    finally:
        bound.close()
    free = make_pool()
    try:
        assert affinities() == [allowed] * thread_count() == [allowed] * free.threads
    finally:
        free.close()


def test_processors_that_are_not_there_leave_threads_where_they_may_run() -> None:
    pool = make_pool({1023})
    try:
        assert affinities() == [os.sched_getaffinity(0)]
    finally:
        pool.close()


def test_half_of_the_processors_update() -> None:
    assert [thread_count(range(count)) for count in (1, 2, 8, 32, 64)] == [1, 1, 4, 16, 16]


def test_a_job_is_done_once_it_was_waited_for(pool: _native.UpdatePool) -> None:
    buckets = [Bucket() for _ in range(5)]
    tickets = [bucket.submit(pool) for bucket in buckets]
    assert tickets == [1, 2, 3, 4, 5] and pool.last_ticket == 5
    for bucket, ticket in zip(buckets, tickets, strict=True):
        assert pool.wait(ticket, WAIT_S) and pool.is_done(ticket) and not pool.has_failed(ticket)
        assert bucket.times_updated == 1.0 and bucket.counter.item() == 4.0
    assert not pool.is_done(6)
    assert pool.moved_bytes == 5 * buckets[0].part.moved_bytes and pool.busy_ns > 0


def test_a_counter_is_raised_before_its_job_begins(pool: _native.UpdatePool) -> None:
    bucket, gate = Bucket(), _native.UpdateGate()
    ticket = bucket.submit(pool, gate)
    assert bucket.counter.item() == 4.0 and bucket.times_updated == 0.0 and not pool.is_done(ticket)
    gate.open()
    assert pool.wait(ticket, WAIT_S) and bucket.times_updated == 1.0 and gate.is_open


def test_others_pass_a_job_that_waits_for_a_gate(pool: _native.UpdatePool) -> None:
    first, second, gate = Bucket(), Bucket(), _native.UpdateGate()
    waiting, free = first.submit(pool, gate), second.submit(pool)
    assert pool.wait(free, WAIT_S) and second.times_updated == 1.0
    assert not pool.wait(waiting, 0.0) and not pool.settle(0.0) and first.times_updated == 0.0
    gate.open()
    assert pool.settle(WAIT_S) and first.times_updated == 1.0


def test_a_job_whose_gate_fails_does_nothing_and_says_so(pool: _native.UpdatePool) -> None:
    bucket, gates = Bucket(), [_native.UpdateGate(), _native.UpdateGate()]
    ticket = bucket.submit(pool, *gates)
    gates[0].open()
    gates[1].fail()
    gates[1].open()  # too late: a gate says one thing, once
    assert pool.wait(ticket, WAIT_S) and pool.has_failed(ticket) and bucket.times_updated == 0.0


def test_a_call_that_is_refused_changes_nothing(pool: _native.UpdatePool) -> None:
    bucket = Bucket()
    with pytest.raises(TypeError):
        pool.submit([bucket.part], [], [bucket.counter.data_ptr(), "no address"])  # type: ignore[list-item]
    assert bucket.counter.item() == 3.0 and bucket.times_updated == 0.0 and pool.last_ticket == 0


def test_closing_runs_what_may_run_and_refuses_more() -> None:
    pool = _native.UpdatePool(1, [0])
    late, gated, after = Bucket(), Bucket(), Bucket()
    pool.delay(60 * 10**9)
    tickets = late.submit(pool), gated.submit(pool, _native.UpdateGate())
    pool.close()
    assert late.times_updated == 1.0 and gated.times_updated == 0.0
    assert [pool.has_failed(ticket) for ticket in tickets] == [False, True]
    with pytest.raises(StateError, match="closed"):
        after.submit(pool)
    assert after.counter.item() == 3.0


def test_ctrl_c_ends_a_wait(pool: _native.UpdatePool) -> None:
    bucket, gate = Bucket(), _native.UpdateGate()
    ticket = bucket.submit(pool, gate)
    sender = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        pool.wait(ticket, WAIT_S)
    sender.join()
    gate.open()
    assert pool.wait(ticket, WAIT_S) and bucket.times_updated == 1.0


def test_a_forked_child_is_refused_and_leaves(pool: _native.UpdatePool) -> None:
    bucket = Bucket()
    ticket = bucket.submit(pool)
    assert pool.wait(ticket, WAIT_S)
    child = os.fork()
    if child == 0:
        try:
            bucket.submit(pool)
        except StateError:
            pool.close()  # does nothing there
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        _native.UpdatePool(0, [])


OUT_OF_THREADS = """
import resource
from pathlib import Path
from tieroff.updates.native import _native

tasks = Path("/proc/self/task")
before = len(list(tasks.iterdir()))
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 100 * 2**20  # some stacks
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    _native.UpdatePool(1000, [])
except OSError as error:
    print(error.errno, len(list(tasks.iterdir())) - before)
"""


def test_threads_that_the_system_refuses_are_an_error() -> None:
    """Those that were started before are joined; a process does not survive that one is forgotten."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_THREADS], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{errno.EAGAIN} 0\n", "")


@pytest.mark.parametrize("is_beside", [False, True])
def test_numbers_next_to_zero_count_though_the_program_flushes_them(is_beside: bool) -> None:
    """It flushes what its own thread computes; a device whose updates these stand for does not."""
    parameter, gradient = torch.full((1000,), 1e-39), torch.full((1000,), 1e-40)
    expected, addresses = parameter - gradient, [parameter.data_ptr(), gradient.data_ptr()]
    assert expected.count_nonzero() == 1000
    part = rules.sgd(lr=1.0).part("contracted", "float32", 1000, addresses, addresses)
    flushes = torch.set_flush_denormal(True)
    try:
        if is_beside:
            pool = _native.UpdatePool(1, [])
            assert pool.wait(pool.submit([part], [], []), WAIT_S)
            pool.close()
        else:
            part.run()
        flushed = (torch.full((1,), 1e-39) * 1.0).count_nonzero().item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(parameter, expected)
    assert flushed == flushes  # as before, in the program's own thread
