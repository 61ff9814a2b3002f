"""Compute's streams: nearly always one, and where a model uses more of them, each is in order with what the engine does."""

from __future__ import annotations

from collections.abc import Callable

import torch

_stream_of: Callable[[int], torch.Stream] = torch._C._accelerator_getStream
"""As `torch.accelerator.current_stream`, without the calls in Python around it: a step asks some hundred times."""


class ComputeStreams:
    """The streams of one device that the running step was seen to compute on.

    [Note: several streams] In the plain program a parameter is there for every stream, and user code orders two streams only
    where one uses what the other has made. What the engine moves has to be in order with all of them: a copy out comes behind
    what any stream wrote, every stream comes behind a copy in, and memory is freed behind the last use by any. A stream is
    met where it raises an event of the step (it reads a parameter, or saves a tensor) and comes behind the others then. So
    a model on several streams is right, and runs as if on one wherever something moves.

    Args:
        device: whose streams; in each thread another one may be the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index  # PyTorch looks a device up by its name at each call, for microseconds
        self._met: list[torch.Stream] = []  # appended to, or replaced: another thread may walk through it

    def current(self) -> torch.Stream:
        """Returns the one that this thread computes on."""
        stream = _stream_of(self._index)
        if stream not in self._met:
            # What the others made before is moved and freed by the engine as if on one stream: see [Note: several streams].
            for other in self._met:
                stream.wait_stream(other)
            self._met = [*self._met, stream]
        return stream

    @property
    def callers(self) -> torch.Stream:
        """This thread's stream, whether or not it is one of them."""
        return _stream_of(self._index)

    @property
    def first(self) -> torch.Stream:
        """The one that the running step began on."""
        return self._met[0]

    def has(self, stream: torch.Stream) -> bool:
        """True for one that the running step was seen to compute on."""
        return stream in self._met

    def lead(self, other: torch.Stream) -> None:
        """Brings a stream that is none of them behind what they were given so far."""
        for stream in self._met:
            other.wait_event(stream.record_event())

    def follow(self, event: torch.Event) -> None:
        """Brings all of them behind an event of a stream that is none of them."""
        for stream in self._met:
            stream.wait_event(event)

    def begin_step(self) -> None:
        """A step begins on this thread's stream, behind what the last one did."""
        self.join()
        self._met = [self.current()]

    def join(self) -> None:
        """Brings each behind what all of them were given so far."""
        met = self._met
        if len(met) < 2:
            return
        # All events first: each would otherwise wait for waits that were given to the others a moment before.
        events = [stream.record_event() for stream in met]
        for stream in met:
            for event in events:
                stream.wait_event(event)

    def wait_event(self, event: torch.Event) -> None:
        """Brings all of them, and what they are given next, behind an event; under a stream that is none of them, that one."""
        current = self.callers
        if self.has(current):
            self.follow(event)
        else:
            current.wait_event(event)


def entry_of(stream: torch.Stream) -> torch.Stream:
    """Returns what makes a stream this thread's current one inside of `with`.

    PyTorch's object for a stream remembers, while it is entered, where its thread came from. Two threads must not enter the
    same one: each would go on with the other one's stream and device.
    """
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
