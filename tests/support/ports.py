"""Ports for ranks that meet."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Gives a port that a server may listen on, and that nobody is given who asks for any port, until the context ends.

    A port that was free when it was asked for may be another's when ranks meet there. A socket that is bound and does not
    listen holds it: the kernel gives it to nobody else, and lets a server bind to it by its number, since both reuse addresses.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]
