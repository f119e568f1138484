"""Exit codes of `kvctl`. Scripts and cron jobs rely on these numbers: do not change them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of every command except `kvctl check`, which follows the monitoring-plugin rule."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_AGENT = 3
    TIMEOUT = 4
    NOT_PERMITTED = 5
    PROTOCOL = 6
    PARTIAL = 7
    INTERRUPTED = 130


class CheckState(IntEnum):
    """Exit status of `kvctl check`, according to the monitoring-plugin guidelines."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3

    @property
    def label(self) -> str:
        """Name in output and JSON."""
        return self.name.lower()

    @property
    def gravity(self) -> int:
        """Rank for comparison, larger is worse; UNKNOWN ranks between WARNING and CRITICAL."""
        return (CheckState.OK, CheckState.WARNING, CheckState.UNKNOWN, CheckState.CRITICAL).index(self)


FINDING_EXITS: tuple[tuple[str, ExitCode, CheckState], ...] = (
    ("no finding, or only info; muted findings do not count", ExitCode.OK, CheckState.OK),
    ("a warning", ExitCode.FAILED, CheckState.WARNING),
    ("a critical finding", ExitCode.FAILED, CheckState.CRITICAL),
    ("an agent that does not answer", ExitCode.FAILED, CheckState.CRITICAL),
    ("no agent", ExitCode.NO_AGENT, CheckState.CRITICAL),
)
"""Exit codes by situation: description, code of `kvctl doctor` and `kvctl health`, code of `kvctl check`."""
