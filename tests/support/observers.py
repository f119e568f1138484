"""The observer process of a socket directory, for tests: who it is, and its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

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
