"""Mooncake's first engine in a process."""

from __future__ import annotations

import contextlib
import time
from functools import cache
from pathlib import Path

from kvctl_agent.transport.registry import open_transport


@cache
def start_mooncake() -> None:
    """Starts Mooncake, once in this process: the resources of its first engine live until the process ends.

    They belong to no test. One of its threads opens a socket, on a busy machine only after the engine has been closed.
    """
    before = _sockets()
    open_transport("mooncake", "first").close()
    deadline = time.monotonic() + 5
    while _sockets() <= before and time.monotonic() < deadline:
        time.sleep(0.01)


def _sockets() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(link.readlink()))
    return {target for target in found if target.startswith("socket:")}
