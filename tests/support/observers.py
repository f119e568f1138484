"""The observer process of a socket directory, for tests: who it is, and its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvctl_agent.contract.admin import LOCK_SUFFIX, OBSERVER_SOCKET

END_S = 30


def observer_pid(directory: Path) -> int | None:
    """Returns the process id of the observer of a socket directory; None if none runs."""
    try:
        pid = int((directory / f"{OBSERVER_SOCKET}{LOCK_SUFFIX}").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if b"kvctl_agent.observer" in command else None


def end_observer(directory: Path, number: int = signal.SIGTERM) -> None:
    """Ends the observer of a socket directory, if one runs, and waits for its end."""
    if (pid := observer_pid(directory)) is None:
        return
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, number)
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)
            assert select.select([descriptor], [], [], END_S)[0], f"observer {pid} has not ended"
        finally:
            os.close(descriptor)


def until(found: Callable[[], Any], what: str, within_s: float = 60) -> Any:
    """Waits until `found` returns something, and returns it."""
    deadline = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < deadline, f"no {what} within {within_s:g} s"
        time.sleep(0.005)
    return value
