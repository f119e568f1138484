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
