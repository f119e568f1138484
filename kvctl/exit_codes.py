"""What `kvctl` exits with: scripts and cron jobs rely on these numbers, so they live in one place and never change."""

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
    """Exit status of `kvctl check`, as monitoring plugins have it."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def gravity(self) -> int:
        """Larger is worse: not to know is worse than a warning, and better than to know of a disaster."""
        return (CheckState.OK, CheckState.WARNING, CheckState.UNKNOWN, CheckState.CRITICAL).index(self)


FINDING_EXITS: tuple[tuple[str, ExitCode, CheckState], ...] = (
    ("no finding, or only info; muted findings do not count", ExitCode.OK, CheckState.OK),
    ("a warning", ExitCode.FAILED, CheckState.WARNING),
    ("a critical finding", ExitCode.FAILED, CheckState.CRITICAL),
    ("an agent that does not answer", ExitCode.FAILED, CheckState.CRITICAL),
    ("no agent", ExitCode.NO_AGENT, CheckState.CRITICAL),
)
"""What commands that judge the fleet exit with: the situation, `kvctl doctor` and `kvctl health`, `kvctl check`."""
