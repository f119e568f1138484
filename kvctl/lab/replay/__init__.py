"""Runs recorded inputs through the real machines again: names the first broken invariant, shrinks, writes a test.

`play` and `recorded` are what a written test calls.
"""

from __future__ import annotations

from pathlib import Path

from kvctl.lab.replay.inputs import Input, Start
from kvctl.lab.replay.player import Breach, Played, play
from kvctl.lab.replay.recordings import load

__all__ = ["Breach", "Input", "Played", "Start", "play", "recorded"]


def recorded(path: Path) -> tuple[Start, list[Input]]:
    """The first stretch of the first agent of a recording: all there is beside a written test.

    Raises:
        RecordingError: it cannot be read.
    """
    stretch = load(path)[0].stretches()[0]
    return stretch.start, list(stretch.inputs())
