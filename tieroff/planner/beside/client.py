"""The trainer's side of a planner in another process. See [Note: a planner beside the steps]."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import select
import socket
import subprocess
import threading
import weakref
from typing import Any

from tieroff.core.io.interpreter import module_command
from tieroff.core.seams import Made
from tieroff.errors import StateError
from tieroff.planner.beside.channel import Channel
from tieroff.planner.beside.messages import read_answer, write_error, write_request
from tieroff.planner.beside.work import Order, Question

log = logging.getLogger("tieroff")

NICENESS = 10
"""Of the process, on top of the trainer's."""

_TRIES = 2  # processes that may end over one request
_LOOK_S = 0.1
_END_S = 1.0


class Job:
    """A request that was sent, and its answer once it is there. One that nobody holds any more is forgotten.

    Attributes:
        refusal: why no process can answer here, "" where one can: it cannot be started, or ends by itself. The answer is an
            error then.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.tries = 0
        self.answer: dict[str, Any] | None = None
        self.refusal = ""

    @property
    def is_done(self) -> bool:
        """True when `take` does not wait."""
        if self.answer is None:
            _planner.look()
        return self.answer is not None

    def wait(self, timeout_s: float) -> None:
        """Waits until there may be an answer, at most this long."""
        _planner.wait(min(timeout_s, _LOOK_S))

    def take(self) -> Made | tuple[int, int]:
        """Returns the answer, for which it waits.

        Raises:
            TieroffError: as the planner raised it.
        """
        while not self.is_done:
            self.wait(_LOOK_S)
        assert self.answer is not None
        return read_answer(self.answer)


class PlannerProcess:
    """One process that plans."""

    def __init__(self, niceness: int) -> None:
        """Starts it.

        Args:
            niceness: added to the trainer's.

        Raises:
            OSError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        quiet = subprocess.DEVNULL
        try:
            numbers = map(str, (theirs.fileno(), os.getpid(), niceness))
            command, environment = module_command("tieroff.planner.beside.server", *numbers)
            environment["OMP_NUM_THREADS"] = "1"
            self._process = subprocess.Popen(
                command, env=environment, stdin=quiet, stdout=quiet, pass_fds=(theirs.fileno(),), process_group=0
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def is_readable(self, timeout_s: float) -> bool:
        """True when there is something to receive, perhaps the end."""
        ready = select.poll()  # `select` takes no descriptor above 1023
        ready.register(self.channel.end, select.POLLIN)
        return bool(ready.poll(timeout_s * 1e3))

    def why_ended(self) -> str:
        """Returns how the process ended by itself; "" for one that was killed, or that runs."""
        try:
            status = self._process.wait(_END_S)  # it closes its end of the channel a moment before
        except subprocess.TimeoutExpired:
            return ""
        return f"it ended with exit status {status}" if status >= 0 else ""

    def close(self) -> None:
        """Ends the process, whatever it does: it has nothing to lose."""
        self.channel.close()
        self._process.kill()
        self._process.wait()


class Planner:
    """The planner of this process: started when it is wanted, shared by all engines, ended with the last of them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # engines may be in several threads
        self._users = 0
        self._niceness = NICENESS
        self._process: PlannerProcess | None = None
        self._numbers = itertools.count()
        self._jobs: weakref.WeakValueDictionary[int, Job] = weakref.WeakValueDictionary()

    @property
    def pid(self) -> int | None:
        """Of the process that plans, None while there is none."""
        return self._process.pid if self._process is not None else None

    def open(self, *, is_waited_for: bool = False) -> None:
        """Somebody is going to plan; the process starts, so that it is ready by then.

        Args:
            is_waited_for: steps will wait for it, so a process that starts has the trainer's own priority.

        Raises:
            OSError: no process can be started here.
        """
        with self._lock:
            self._niceness = 0 if is_waited_for else self._niceness
            self._started()
            self._users += 1

    def close(self) -> None:
        """Somebody who opened the planner is done with it."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._niceness = NICENESS
                self.end()

    def end(self) -> None:
        """Ends the process."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.close()

    def forget(self) -> None:
        """This is a forked child: the process is its parent's."""
        if self._process is not None:
            self._process.channel.close()
        self.__init__()  # type: ignore[misc]  # its lock may be held by a thread that is not here

    def ask(self, request: Order | Question) -> Job:
        """Sends a request, and returns at once."""
        job = Job(write_request(request))
        with self._lock:
            number = next(self._numbers)
            self._jobs[number] = job
            self._send(number, job)
        return job

    def look(self) -> None:
        """Takes the answers that are there."""
        with self._lock:
            while self._process is not None and self._process.is_readable(0.0):
                try:
                    document = self._process.channel.receive()
                except OSError as error:  # there is no descriptor left for the answer
                    self.end()
                    self._again(str(error))
                    continue
                except BaseException:  # an answer may be lost, such as by Ctrl-C: all are asked for again
                    self.end()
                    self._again("")
                    raise
                if document is None:
                    self._again(self._ended())
                else:
                    self.answered(document)

    def wait(self, timeout_s: float) -> None:
        """Waits until there may be an answer, at most this long."""
        process = self._process
        if process is not None:
            process.is_readable(timeout_s)

    def answered(self, document: dict[str, Any]) -> None:
        """An answer came: what was logged on the way is said here, and whoever asked has it."""
        for level, line in document.pop("log"):
            log.log(level, "%s", line)
        job = self._jobs.pop(document.pop("number"), None)
        if job is not None:
            job.answer = document

    def _started(self) -> PlannerProcess:
        if self._process is None:
            self._process = PlannerProcess(self._niceness)
        return self._process

    def _send(self, number: int, job: Job) -> None:
        while job.answer is None:
            job.tries += 1
            try:
                self._started().channel.send({"number": number, "request": job.request})
                return
            except ConnectionError:
                self._give_up(job, self._ended())
            except OSError as error:
                self.end()
                self._give_up(job, str(error))

    def _again(self, why: str) -> None:
        """The process has ended, or was ended: what it had to do is asked of another one."""
        for number, job in list(self._jobs.items()):
            self._give_up(job, why)
            self._send(number, job)

    def _ended(self) -> str:
        """Ends what is left of a process that ended, and returns how it did: as `PlannerProcess.why_ended`."""
        why = self._process.why_ended() if self._process is not None else ""
        self.end()
        return why

    def _give_up(self, job: Job, refusal: str) -> None:
        if job.tries >= _TRIES:
            job.refusal = refusal
            why = refusal or "the process that plans ended; was it killed for want of memory? Free some, or raise its limit"
            job.answer = write_error(StateError(f"no plan could be made: {why}"))


_planner = Planner()
atexit.register(_planner.end)
os.register_at_fork(after_in_child=_planner.forget)


def planner() -> Planner:
    """Returns the planner of this process."""
    return _planner
