"""A channel between two processes: documents in unnamed files, whose descriptors go over a socket.

A socket holds some hundred KiB, and a request can be larger; a file takes it at once, whether or not the other side reads.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from typing import IO, Any

_MARK = b"."  # a descriptor travels with at least one byte


class Channel:
    """One end of a channel.

    Attributes:
        end: the socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, document: dict[str, Any]) -> None:
        """Sends a document.

        Raises:
            OSError: the other end is closed, or no file can be made.
        """
        with _unnamed_file() as file:
            file.write(json.dumps(document, separators=(",", ":")).encode())
            file.flush()
            socket.send_fds(self.end, [_MARK], [file.fileno()])

    def receive(self) -> dict[str, Any] | None:
        """Returns the next document, for which it waits; None when the other end is closed.

        Raises:
            OSError: the descriptor could not be taken: this process has as many open files as it may.
        """
        try:
            mark, descriptors, _, _ = socket.recv_fds(self.end, 1, 1)
        except ConnectionError:
            return None
        if not mark:
            return None
        if not descriptors:
            raise OSError("a message came without its file: too many open files")
        with os.fdopen(descriptors[0], "rb") as file:
            file.seek(0)  # the sender has written it, and both share the place
            document: dict[str, Any] = json.loads(file.read())
        return document

    def close(self) -> None:
        """Closes this end; the other one receives None."""
        self.end.close()


def _unnamed_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tieroff-plan", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()
