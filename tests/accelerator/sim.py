"""A simulated accelerator as the PyTorch device "sim": two devices, with memory, streams and a clock of their own.

`load()` registers it, once and for the life of the process; the rest is for tests. docs/accelerator-testing.md says what is
simulated and what is not.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

from tests.accelerator import build, threads
from tieroff.core.machine import Machine, load_machine

NAME = "sim"
STACK_FRAMES = 8
# What a right program never does; a host access of device memory would be a fault.
NEVER = ("unpinned_async_copies", "cross_device_waits", "unregistered_in_flight", "unordered_frees", "dropped_accesses")

_native: Any = None


class RaceError(AssertionError):
    """Accesses that nothing orders; the text says both places of each."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an engine of a device did, on the device's clock.

    Attributes:
        engine: compute, h2d or d2h.
        start_ns, stop_ns: ns since the last `reset`.
    """

    device: int
    engine: str
    stream: int
    name: str
    start_ns: int
    stop_ns: int


def is_available() -> bool:
    """True once `load` has run."""
    return _native is not None


def load() -> None:
    """Builds the device where it is not built yet, and registers it.

    It has to run before the process's first `backward`: autograd makes its threads for the devices that it then finds.
    """
    global _native
    if _native is not None:
        return
    native = build.load()
    native.register()
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(native))
    backend_registration.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    native.set_stack_depth(STACK_FRAMES)
    threads.watch(native)
    _native = native


def _module(native: Any) -> types.ModuleType:
    """What `torch.sim` is: the functions that PyTorch looks for in a device's module."""
    made = types.ModuleType(f"torch.{NAME}")
    module: Any = made
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._initialized = True  # checkpoint asks before it keeps the generators' states
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = native.device_count
    module.current_device = native.current_device
    module.set_device = lambda device: native.set_device(_index(device))
    module.device = _device_context(native)
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = lambda stream: stream  # a context by itself
    module.manual_seed = module.manual_seed_all = native.seed_all
    module.get_rng_state = lambda device=NAME: _generator(device).get_state()
    module.set_rng_state = lambda state, device=NAME: _generator(device).set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return made


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    place: Any = torch.device(device)
    return int(_native.current_device() if place.index is None else place.index)


def _generator(device: Any) -> Any:
    return _native.default_generator(_index(device))


def _device_context(native: Any) -> type:
    class Device:
        """Makes a device the current one inside of `with`."""

        def __init__(self, device: Any) -> None:
            self._index = _index(device)
            self._before = 0

        def __enter__(self) -> None:
            self._before = native.current_device()
            if self._index >= 0:
                native.set_device(self._index)

        def __exit__(self, *error: object) -> None:
            native.set_device(self._before)

    return Device


def reset() -> None:
    """Waits for all streams, then forgets races, counters, failures, the device's clock and the machine."""
    _native.reset()


# -- races -------------------------------------------------------------------------------------------------------------


def races() -> list[str]:
    """Returns the races found since `reset`, each with both places."""
    found: list[str] = _native.races()
    return found


def forget_races() -> None:
    """Forgets the races that were found, for tests that plant them."""
    _native.forget_races()


def check() -> None:
    """Raises what was found.

    Raises:
        RaceError: with all races.
    """
    found = races()
    if found:
        raise RaceError("\n".join(found))


def set_raising(is_on: bool) -> None:
    """Whether a race is raised (as RuntimeError) by the call that completes it, not only kept.

    What an operator of the host did with pinned memory is raised by the next call of the device from that thread.
    """
    _native.set_raising(is_on)


def set_stacks(frames: int) -> None:
    """How many frames of Python's stack each access keeps; 0 is fastest."""
    _native.set_stack_depth(frames)


@contextmanager
def label(text: str) -> Iterator[None]:
    """Names what this thread does inside of `with`, for the reports of races."""
    before = _native.set_label(text)
    try:
        yield
    finally:
        _native.set_label(before)


def note_host_access(address: int, size_bytes: int, write: bool, name: str = "host access") -> None:
    """Tells that this thread reads or writes memory now, by other means than PyTorch's operators."""
    _native.note_host_access(address, size_bytes, write, name, None)


@contextmanager
def host_io(address: int, size_bytes: int, write: bool, name: str = "I/O") -> Iterator[None]:
    """Somebody else (a drive) reads or writes memory until the end of `with`: nobody may meanwhile."""
    agent = begin_host_io(address, size_bytes, write, name)
    try:
        yield
    finally:
        end_host_io(agent)


def begin_host_io(address: int, size_bytes: int, write: bool, name: str = "I/O") -> int:
    """Begins what `host_io` does; returns what `end_host_io` takes, in whichever thread knows that it is over."""
    agent: int = _native.begin_agent(name)
    _native.note_host_access(address, size_bytes, write, name, agent)
    return agent


def end_host_io(agent: int) -> None:
    """The calling thread knows that this I/O is over."""
    _native.end_agent(agent)


# -- memory ------------------------------------------------------------------------------------------------------------


def host_register(address: int, size_bytes: int) -> int:
    """Pins memory; returns a code of CUDA's runtime (0, or 1, 2, 712)."""
    return int(_native.host_register(address, size_bytes))


def host_unregister(address: int) -> int:
    """Unpins memory; returns a code of CUDA's runtime (0 or 713)."""
    return int(_native.host_unregister(address))


def take_last_error() -> int:
    """Returns and clears what a refused call has left; the next kernel raises it otherwise."""
    return int(_native.take_last_error())


def forbid_access(storage: torch.UntypedStorage, message: str) -> None:
    """Has every access of a storage's memory raise, as `torch._C._set_storage_data_ptr_access_error_msg` of CUDA's builds."""
    _native.forbid_access(storage._cdata, message)


def is_pinned(address: int, size_bytes: int) -> bool:
    """True where all of these bytes are pinned by one registration."""
    return bool(_native.is_pinned(address, size_bytes))


def set_pin_limit(size_bytes: int | None) -> None:
    """Registering more than this is refused; None: no limit."""
    _native.set_pin_limit(sys.maxsize if size_bytes is None else size_bytes)


def set_device_bytes(size_bytes: int) -> None:
    """How much memory each device has."""
    _native.set_total(size_bytes)


# -- time --------------------------------------------------------------------------------------------------------------


def set_machine(machine: Machine | str | Path | None, *, kernel_s: float = 0.0) -> None:
    """Has events tell the device's time by a machine's rates; None: real time again.

    Args:
        machine: a machine, or the path of its file. Kernels take the longer of their arithmetic and their memory traffic,
            copies their latency and their bytes over the link. A rate of 0 takes no time.
        kernel_s: seconds that every kernel takes besides.
    """
    if machine is None:
        _native.forget_machine()
        return
    m = machine if isinstance(machine, Machine) else load_machine(machine)
    _native.set_machine(
        m.fp32_flops_per_s,
        m.bf16_flops_per_s,
        m.device_memory_bytes_per_s,
        m.h2d_bytes_per_s,
        m.d2h_bytes_per_s,
        m.h2d_latency_s,
        m.d2h_latency_s,
        m.duplex_share,
        kernel_s,
    )


def set_late_links(seconds: float) -> None:
    """Copies of pinned memory take up to this long, in real time, before they move a byte."""
    _native.set_late_links(seconds)


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """What a stream is given inside of `with` begins at its end; nobody may wait for it before."""
    held = _native.hold(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        _native.let_go(held)


def host_time_ns() -> int:
    """Returns by when, on the device's clock, all is over that this thread has waited for."""
    return int(_native.host_time_ns())


def advance_host(ns: int) -> None:
    """Has this thread spend time of the device's clock: for a drive or a kernel of the host that is simulated too."""
    _native.advance_host(ns)


def stream_time_ns(stream: torch.Stream) -> int:
    """Returns by when, on the device's clock, all that a stream was given is over."""
    return int(_native.stream_time_ns(stream.device_index, stream.stream_id))


@contextmanager
def timeline() -> Iterator[list[Work]]:
    """Collects what the engines do inside of `with`; the list is filled at its end."""
    works: list[Work] = []
    _native.keep_timeline(True)
    try:
        yield works
        works.extend(Work(*entry) for entry in _native.timeline())
    finally:
        _native.keep_timeline(False)


# -- counters ----------------------------------------------------------------------------------------------------------


def counters() -> dict[str, int]:
    """Returns what was counted since `reset`; docs/accelerator-testing.md names each."""
    return dict(_native.counters())


def mistakes() -> dict[str, int]:
    """Returns, of the counters, those that are not 0 and are in every right program."""
    counted = counters()
    return {name: counted[name] for name in NEVER if counted[name]}


def synchronous_operators() -> dict[str, int]:
    """Returns, by operator, how often the host waited for a kernel to know its results, since `load`."""
    return dict(_native.synchronous_operators())
