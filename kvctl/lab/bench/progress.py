"""Tells people on stderr how far the bench is and how long it takes: a bar on a terminal, lines for `-v` elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_SAY_EVERY_S = 10.0


class Steps:
    """The steps of one bench."""

    def __init__(self, quiet: bool, detail: Callable[[str], None]) -> None:
        """`detail` takes a line that only `-v` wants to see."""
        self._detail = detail
        self._bar: Progress | None = None
        self._total = self._done = 0
        self._first_at = self._said_at = time.monotonic()
        if not quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                # Ranks need the cores more than the picture does.
                refresh_per_second=2,
            )
            self._task = self._bar.add_task("planning", total=None)

    def step(self, text: str) -> None:
        """What is done next."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            self._detail(text)

    def laps(self, total: int) -> None:
        """How many laps there will be."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total, completed=0)

    def lap(self) -> None:
        """One more is done."""
        now = time.monotonic()
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)
        elif self._done == 1:
            self._first_at = self._said_at = now
        elif now - self._said_at > _SAY_EVERY_S:
            self._said_at = now
            left_s = (now - self._first_at) / (self._done - 1) * max(0, self._total - self._done)
            self._detail(f"{self._done} of {self._total} laps, about {left_s:.0f} s left")

    def end(self) -> None:
        """Nothing more is to be told: the place is somebody else's."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
