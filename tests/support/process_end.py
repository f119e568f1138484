"""Waits for processes that are nobody's child here, such as grandchildren, to end."""

from __future__ import annotations

import time
from pathlib import Path


def wait_for_end(pid: int, timeout_s: float = 60.0) -> None:
    """Waits until a process has ended; one that nobody reaped counts as ended.

    Raises:
        AssertionError: it still runs after the timeout.
    """
    deadline = time.monotonic() + timeout_s
    while _runs(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs after {timeout_s:g} s"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
