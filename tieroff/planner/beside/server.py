"""The planner's process: `python -m tieroff.planner.beside.server SOCKET PARENT NICENESS`; see the note in `__init__.py`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from tieroff.planner.beside.channel import Channel
from tieroff.planner.beside.messages import read_request, write_answer, write_error
from tieroff.planner.beside.work import Order, answer, carry_out

log = logging.getLogger("tieroff")

_LOOK_S = 0.25  # how often the parent is looked for


class _Lines(logging.Handler):
    """Keeps what is logged, for the trainer to say."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))

    def take(self) -> list[tuple[int, str]]:
        taken, self.lines = self.lines, []
        return taken


def serve(channel: Channel) -> None:
    """Answers one request after another until the other end is closed."""
    lines = _Lines()
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False
    while (document := channel.receive()) is not None:
        channel.send({"number": document["number"], **_answer(document["request"]), "log": lines.take()})


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        wanted = read_request(request)
        return write_answer(carry_out(wanted) if isinstance(wanted, Order) else answer(wanted))
    except Exception as error:  # noqa: BLE001  whatever it is, the trainer is to know it
        return write_error(error)


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, also where somebody else still holds the other end of the channel."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def main() -> None:
    """Serves the trainer that started this process."""
    descriptor, parent, niceness = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(niceness)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        serve(Channel(socket.socket(fileno=descriptor)))
    except ConnectionError:
        return  # the trainer ended, or wants no answer any more


if __name__ == "__main__":
    main()
