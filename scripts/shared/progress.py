"""What the scripts show of a run: a bar on a terminal or a line every few steps elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

LINE_INTERVAL_S = 10.0


class Progress:
    """Shows steps done, loss and tokens per second of one run on standard error."""

    def __init__(self, title: str, steps: int) -> None:
        self._console = Console(stderr=True)
        self._title = title
        self._steps = steps
        self._line_at = 0.0
        self._bar = Bar(
            TextColumn("{task.description:>8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=steps, detail="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Shows that `step` steps are done."""
        detail = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, detail=detail)
        now = time.monotonic()
        if not self._console.is_terminal and (step in (1, self._steps) or now - self._line_at >= LINE_INTERVAL_S):
            self._line_at = now
            self._console.print(f"{self._title:>8}  step {step}/{self._steps}  {detail}", highlight=False)
