"""Replays recorded inputs through the real state machines, finds the first violated invariant and shortens its trace.

The tests that `kvctl replay --write-test` writes call `first_breach`.
"""

from __future__ import annotations

from pathlib import Path

from kvctl.lab.replay.player import Breach, play
from kvctl.lab.replay.recordings import load

__all__ = ["Breach", "first_breach"]


def first_breach(path: Path) -> Breach | None:
    """Replays all agents of a recording; returns the first violation of an invariant, or None.

    Raises:
        RecordingError: the recording cannot be read.
        RecordingVersionError: it was made by a build with other state machines.
    """
    with path.open("rb") as file:
        agents = load(file)
    for agent in agents:
        agent.check_versions()
        for segment in agent.segments():
            if (breach := play(segment.start, segment.inputs()).breach) is not None:
                return breach
    return None
