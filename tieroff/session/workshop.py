"""Where plans are made: in a process beside training, or in the trainer itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from tieroff.core.seams import Made, Pending
from tieroff.errors import StateError
from tieroff.planner.beside.client import Job, planner
from tieroff.planner.beside.work import Order, Question, answer, carry_out

log = logging.getLogger("tieroff")

steps_wait = False
"""Every step waits for the plan that is under way, so that which step is the first with a plan does not depend on how long
planning takes. Several ranks always do; tests do."""

PATIENCE_S = 2.0
"""So long after it was asked for, steps wait for the first plan of their kind: a program of a few short steps has plans too."""

_Found = TypeVar("_Found")
Finish = Callable[[Callable[[], Made]], Made]


class _Asked(Generic[_Found]):
    """Implements `core.seams.Pending`."""

    def __init__(self, job: Job | None, take: Callable[[], _Found], *, waits: bool, patience_s: float = 0.0) -> None:
        self._job, self._take, self._waits = job, take, waits
        self._deadline_s = time.monotonic() + patience_s

    @property
    def is_due(self) -> bool:
        if self._waits or self._job is None:
            return True
        while not self._job.is_done:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._job.wait(left_s)
        return True

    def take(self) -> _Found:
        return self._take()


class Workshop:
    """Answers the questions of one wrapped model.

    Args:
        is_beside: a process of its own does it, where one can be started.

    Attributes:
        waits: steps wait for it.
    """

    def __init__(self, *, is_beside: bool, waits: bool) -> None:
        self._is_beside, self.waits = is_beside, waits
        self._is_open = False

    def open(self) -> None:
        """There is going to be a question; the process starts, so that it is ready by then."""
        if self._is_open or not self._is_beside:
            return
        try:
            planner().open(is_waited_for=self.waits)
            self._is_open = True
        except OSError as error:
            self._plan_here(str(error))

    def _plan_here(self, why: str) -> None:
        if self._is_beside:
            log.warning("no process could be started to plan in (%s): the trainer plans, and its steps wait", why)
        self._is_beside = False

    @overload
    def ask(self, request: Order, finish: Finish, *, is_first: bool = False, is_trivial: bool = False) -> Pending[Made]: ...

    @overload
    def ask(self, request: Question) -> Pending[tuple[int, int]]: ...

    def ask(
        self, request: Order | Question, finish: Finish | None = None, *, is_first: bool = False, is_trivial: bool = False
    ) -> Pending[Any]:
        """Asks for a plan or a forecast.

        Args:
            finish: is given what returns the plan, and returns it or raises.
            is_first: there is no plan yet to go on with.
            is_trivial: the answer takes no longer than to ask.
        """
        if not is_trivial:
            self.open()

        def work() -> Any:
            return carry_out(request) if isinstance(request, Order) else answer(request)

        if is_trivial or not self._is_beside:
            return _Asked(None, work if finish is None else lambda: finish(work), waits=True)
        job = planner().ask(request)

        def take() -> Any:
            try:
                return job.take()
            except StateError:
                if not job.refusal:
                    raise
            self._plan_here(job.refusal)
            return work()

        patience_s = PATIENCE_S if is_first else 0.0
        waits = self.waits or steps_wait
        return _Asked(job, take if finish is None else lambda: finish(take), waits=waits, patience_s=patience_s)

    def close(self) -> None:
        """No more questions."""
        if self._is_open:
            self._is_open = False
            planner().close()


class Known(Generic[_Found]):
    """Implements `core.seams.Pending` for what needs no work.

    Args:
        take: returns it.
    """

    def __init__(self, take: Callable[[], _Found]) -> None:
        self.take = take

    @property
    def is_due(self) -> bool:
        """True."""
        return True
