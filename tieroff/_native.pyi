"""Types of the native module (native/bindings/module.cpp); a test compares them with what is built."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

Integers = NDArray[np.int64]
Reals = NDArray[np.float64]

class Transfer:
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def cancel(self) -> bool: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def done_bytes(self) -> int: ...
    @property
    def errno(self) -> int: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def stop_ns(self) -> int: ...
    @property
    def checksum(self) -> int | None: ...

class Pages(Buffer):
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

class PagePool:
    def __init__(self, reserved_bytes: int, has_huge_pages: bool) -> None: ...
    def take(self, size_bytes: int) -> Pages: ...
    def owns(self, address: int) -> bool: ...
    def set_limit(self, limit_bytes: int) -> None: ...
    @property
    def in_use_bytes(self) -> int: ...
    @property
    def kept_bytes(self) -> int: ...

def process_pool(reserved_bytes: int, has_huge_pages: bool) -> PagePool: ...
def serve_library(library: str) -> bool: ...
def serve_from(size_bytes: int) -> None: ...

class UpdateGate:
    def __init__(self) -> None: ...
    def open(self) -> None: ...
    def fail(self) -> None: ...
    @property
    def is_open(self) -> bool: ...

class UpdatePart:
    # The names are in native/bindings/update.cpp, what they mean in native/include/tieroff/update/job.hpp.
    def __init__(
        self,
        rule: str,
        arithmetic: str,
        type: str,
        decay: str,
        flags: Sequence[str],
        count: int,
        inputs: Sequence[int],
        outputs: Sequence[int],
        scalars: Sequence[tuple[str, float]],
        factors: Sequence[float],
    ) -> None: ...
    def run(self) -> None: ...
    def run_with(self, instructions: str) -> None: ...
    @property
    def moved_bytes(self) -> int: ...

class UpdatePool:
    def __init__(self, threads: int, cpus: Sequence[int]) -> None: ...
    def submit(self, parts: Sequence[UpdatePart], gates: Sequence[UpdateGate], counters: Sequence[int]) -> int: ...
    def is_done(self, ticket: int) -> bool: ...
    def has_failed(self, ticket: int) -> bool: ...
    def wait(self, ticket: int, timeout_s: float) -> bool: ...
    def settle(self, timeout_s: float) -> bool: ...
    def delay(self, delay_ns: int) -> None: ...
    def close(self) -> None: ...
    @property
    def last_ticket(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def busy_ns(self) -> int: ...
    @property
    def moved_bytes(self) -> int: ...

def update_instructions() -> list[str]: ...

class Engine:
    def read(
        self,
        fd: int,
        offset: int,
        address: int,
        size_bytes: int,
        block_bytes: int,
        memory_alignment: int,
        with_crc: bool = False,
        is_flushed_first: bool = False,
    ) -> Transfer: ...
    def write(
        self,
        fd: int,
        offset: int,
        address: int,
        size_bytes: int,
        block_bytes: int,
        memory_alignment: int,
        with_crc: bool = False,
    ) -> Transfer: ...
    def copy(self, target: int, source: int, size_bytes: int, is_for_readers: bool) -> Transfer: ...
    def settle(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...
    def inject(
        self,
        kind: str,
        errno: int = 0,
        after: int = 0,
        count: int = 1,
        short_bytes: int | None = None,
        hang: bool = False,
        flip: bool = False,
    ) -> None: ...
    def clear_faults(self) -> None: ...
    def release(self) -> None: ...
    def wait_hanging(self, count: int, timeout_s: float) -> bool: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def peak_call_count(self) -> int: ...
    @property
    def bounced_bytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...

class ThreadEngine(Engine):
    def __init__(self, read_threads: int = 4, write_threads: int = 4, chunk_bytes: int = 8388608) -> None: ...
    @property
    def read_threads(self) -> int: ...
    @property
    def write_threads(self) -> int: ...

class RingEngine(Engine):
    def __init__(self, queue_depth: int = 8, bounce_count: int = 4, chunk_bytes: int = 8388608) -> None: ...
    @property
    def queue_depth(self) -> int: ...
    @property
    def bounce_count(self) -> int: ...

class PageReturner:
    def __init__(self, address: int, size_bytes: int, interval_ns: int) -> None: ...
    def set_interval(self, interval_ns: int) -> None: ...
    def wait_rounds(self, count: int, timeout_s: float) -> bool: ...
    def close(self) -> None: ...
    @property
    def round_count(self) -> int: ...
    @property
    def errno(self) -> int: ...

def crc32c(data: Buffer, crc: int = 0) -> int: ...
def crc32c_table(data: Buffer, crc: int = 0) -> int: ...
def crc32c_combine(first: int, second: int, second_size_bytes: int) -> int: ...
def crc32c_is_hardware() -> bool: ...
def ring_refusal() -> int: ...
def direct_alignment(fd: int) -> tuple[int, int]: ...

class SimulationResult:
    # Rows: stalls (op, duration_ns, cause: a transfer, the number of transfers and an update, or -1 for communication), the
    # others (index, start_ns, stop_ns). native/include/tieroff/simulate/simulate.hpp says more.
    @property
    def step_ns(self) -> int: ...
    @property
    def first_step_ns(self) -> int: ...
    @property
    def cycle(self) -> int: ...
    @property
    def recompute_ns(self) -> int: ...
    @property
    def stalls(self) -> Integers: ...
    @property
    def ops(self) -> Integers: ...
    @property
    def repeats(self) -> Integers: ...
    @property
    def transfers(self) -> Integers: ...
    @property
    def updates(self) -> Integers: ...

# Rows: transfers (source, target, issue_at, ready_by, rank, size_bytes), updates (issue_at, ready_by, duration_ns),
# repeats (op, at), links d2h, h2d, nvme_write, nvme_read (bytes_per_s, latency_ns), queues (is_communication, awaits) of all
# ops or of none. Tiers are 0 device, 1 host, 2 nvme. `memory` has the four numbers of SimulatedMemory.
def simulate(
    op_ns: Integers,
    transfers: Integers,
    updates: Integers,
    repeats: Integers,
    links: Integers,
    duplex_share_millionths: int,
    nvme_shares_host_link: bool,
    memory: Integers,
    has_exclusive_link: bool,
    step_count_max: int,
    with_spans: bool,
    queues: Integers = ...,
) -> SimulationResult: ...

# Rows: residencies (tier, start, stop, size_bytes), and an address each or none at all. Returns a line per tier.
def memory_per_op(
    transient_bytes: Integers, residencies: Integers, repeats: Integers, addresses: Integers
) -> tuple[Integers, Integers, Integers]: ...
def pack(
    lower: list[int],
    upper: list[int],
    size: list[int],
    above: list[int],
    ring: int = 0,
    alignment: int = 1,
    capacity: int = -1,
    node_budget: int = 1_000_000,
    fit_budget: int = 20_000_000,
    seed: int = 1,
    time_limit_ns: int = 0,
    splits: bool = True,
    stacks: bool = True,
    dominates: bool = True,
    bounds: bool = True,
    remembers: bool = True,
    orders_twins: bool = True,
) -> tuple[list[int], int, int, int, int]: ...

# A step's line of bytes per op and spans of ops with the bytes that are held there; both return the most at an op of them.
def most_bytes(usage: Integers, spans: Sequence[tuple[int, int, int]]) -> int: ...
def hold_bytes(usage: Integers, spans: Sequence[tuple[int, int, int]]) -> int: ...
def drop_bytes(usage: Integers, spans: Sequence[tuple[int, int, int]]) -> None: ...
def fit_windows(
    usage: Integers,
    starts_ns: Integers,
    budget_bytes: int,
    start: Integers,
    stop: Integers,
    size_bytes: Integers,
    away_start: Integers,
    away_stop: Integers,
    repair: int,
    load_order: Integers,
    release_order: Integers,
    load_from: Integers,
    release_until: Integers,
    passes: str,
) -> bool: ...
def sweep_windows(
    usage: Integers,
    starts_ns: Integers,
    budget_bytes: int,
    lead_ns: int,
    tensor: Integers,
    tier: Integers,
    start: Integers,
    release_limit: Integers,
    deadline: Integers,
    copy_tick: Integers,
    size_bytes: Integers,
    out_ns: Integers,
    back_ns: Integers,
    is_boundary: Integers,
    is_last: Integers,
    late_limit: Integers,
) -> tuple[Integers, Integers]: ...
def serve_in_turn(limits_ns: Reals, takes_ns: Reals, is_backwards: bool) -> Reals: ...
def dispatch(
    duration_ns: Integers,
    link: Integers,
    issue_from: Integers,
    ready_by: Integers,
    size_bytes: Integers,
    bytes_per_ns: Sequence[float],
    latency_ns: Sequence[float],
    nvme_shares_host_link: bool,
    duplex_share: float,
    step_count: int,
) -> tuple[float, list[float], Integers, Integers]: ...
def improve(
    *,
    usage: Integers,
    duration_ns: Integers,
    bytes_per_ns: Sequence[float],
    latency_ns: Sequence[float],
    nvme_shares_host_link: bool,
    duplex_share: float,
    device_bytes: int,
    lower_bytes: Sequence[int],
    granule_bytes: int,
    piece: Integers,
    start: Integers,
    stop: Integers,
    size_bytes: Integers,
    is_last: Integers,
    copy_from: Integers,
    is_persistent: Integers,
    away_start: Integers,
    away_stop: Integers,
    tier: Integers,
    seed: int,
    work: int,
) -> tuple[float, float, int]: ...
def shard(
    *,
    first_strategy: Integers,
    cost: Integers,
    usage: Integers,
    start: Integers,
    stop: Integers,
    source: Integers,
    target: Integers,
    first_entry: Integers,
    entry: Integers,
    limit: int,
    time_limit_s: float,
    seed: int,
) -> tuple[bool, float, list[int], int]: ...
