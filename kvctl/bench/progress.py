"""Tells people on stderr how far the bench is: a bar on a terminal, lines for `-v` elsewhere, nothing otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Steps:
    """The steps of one bench."""

    def __init__(self, quiet: bool, detail: Callable[[str], None]) -> None:
        """`detail` takes a line that only `-v` wants to see."""
        self._detail = detail
        self._bar: Progress | None = None
        if not quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
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
        if self._bar is not None:
            self._bar.update(self._task, total=total, completed=0)

    def lap(self) -> None:
        """One more is done."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
