"""Starts the observer process of this user's agents on this host again, after it was killed.

Running agents do that themselves. If none can, as all have ended or hang, nobody else serves what they left in shared
memory.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from pathlib import Path

from kvctl.client.endpoints import probe
from kvctl_agent.contract.admin import OBSERVER_SOCKET

_WAIT_S = 2.0


def restart_observer(directory: Path) -> None:
    """Starts an observer for a socket directory if the last one was killed; waits until it serves, at most two seconds.

    An observer that ends by itself removes its socket; the socket of a killed one refuses connections.
    """
    try:
        killed = probe(directory / OBSERVER_SOCKET) == errno.ECONNREFUSED
    except OSError:  # another user could have put the socket there
        return
    if not killed:
        return
    import subprocess  # nearly never needed

    with contextlib.suppress(OSError, subprocess.SubprocessError):  # then the agents' sockets count as stale
        subprocess.run(
            [sys.executable, "-P", "-m", "kvctl_agent.observer", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_WAIT_S,
            check=False,
        )
