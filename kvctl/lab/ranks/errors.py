"""Failures of a fleet, each with the rank's name, the cause and the phase in which it happened."""

from __future__ import annotations

import signal


class FleetError(Exception):
    """The fleet cannot go on; the text is for people."""


class RankDied(FleetError):
    """A rank's process ended although it had not been told to."""

    def __init__(self, name: str, pid: int, returncode: int, doing: str, last_words: str) -> None:
        self.rank = name
        how = f"was killed by {_signal_name(-returncode)}" if returncode < 0 else f"exited with code {returncode}"
        words = f"; its last words:\n{_indented(last_words)}" if last_words else "; it left no last words"
        super().__init__(f'rank "{name}" (pid {pid}) {how} during {doing}{words}')


class RankFailed(FleetError):
    """A rank reported the error that it ends with; `code` is the error's class name."""

    def __init__(self, name: str, code: str, message: str, doing: str) -> None:
        self.rank = name
        self.code = code
        super().__init__(f'rank "{name}" gave up during {doing}: {message} ({code})')


class RankOverdue(FleetError):
    """A rank did not answer in time."""

    def __init__(self, name: str, doing: str, timeout_s: float, last: str, others: int) -> None:
        self.rank = name
        more = f" (and {others} more)" if others else ""
        state = f"; last heard: {last}" if last else ""
        super().__init__(f'rank "{name}"{more} did not finish {doing} within {timeout_s:g} s{state}')


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
