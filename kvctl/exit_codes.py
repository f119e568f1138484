"""Exit codes of `kvctl`. Scripts and cron jobs rely on these numbers: do not change them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of all commands except `kvctl check`, which uses `CheckState`."""

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
    """States and exit codes of `kvctl check`, as defined by the monitoring-plugin guidelines."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3

    @property
    def label(self) -> str:
        """Lower-case name of the state, for tables and JSON."""
        return self.name.lower()

    @property
    def gravity(self) -> int:
        """Severity rank for comparison: larger is worse, and UNKNOWN ranks between WARNING and CRITICAL."""
        return (CheckState.OK, CheckState.WARNING, CheckState.UNKNOWN, CheckState.CRITICAL).index(self)


FINDING_EXITS: tuple[tuple[str, ExitCode, CheckState], ...] = (
    ("no finding, or only info; ignored findings do not count", ExitCode.OK, CheckState.OK),
    ("a warning", ExitCode.FAILED, CheckState.WARNING),
    ("a critical finding", ExitCode.FAILED, CheckState.CRITICAL),
    ("an agent that does not answer", ExitCode.FAILED, CheckState.CRITICAL),
    ("no agent", ExitCode.NO_AGENT, CheckState.CRITICAL),
)
"""Exit codes by situation: description, code of `kvctl doctor` and `kvctl health`, code of `kvctl check`."""
