"""What can be read of a host: files under a root, the environment, limits. Tests give another root."""

from __future__ import annotations

import os
import resource
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


def _packages() -> dict[str, str]:
    """Installed distributions by name; nothing of them is imported."""
    import importlib.metadata

    return {found.metadata["Name"].lower(): found.version for found in importlib.metadata.distributions() if found.name}


@dataclass(frozen=True, slots=True)
class LocalAgent:
    """An agent whose socket is on this host.

    Attributes:
        pid: as this process sees it; None where it cannot: the agent is in another PID namespace, or gone.
        own_pid: as the agent itself sees it.
    """

    name: str
    pid: int | None
    own_pid: int


@dataclass(frozen=True, slots=True)
class HostView:
    """Where to look."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    packages: Callable[[], Mapping[str, str]] = _packages
    cores: Callable[[], int] = lambda: len(os.sched_getaffinity(0))
    agents: tuple[LocalAgent, ...] = ()

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """What stands in a file; None where it cannot be read."""
        try:
            return self.path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """What is in a directory; nothing where it cannot be read."""
        try:
            return sorted(entry.name for entry in self.path(path).iterdir())
        except OSError:
            return []

    def target(self, path: str) -> str | None:
        """Where a link points."""
        try:
            return os.readlink(self.path(path))  # noqa: PTH115 - "pid:[4026531836]" is no path
        except OSError:
            return None


def listener_pid(path: Path) -> int | None:
    """Who listens on a Unix socket, as this process sees it; None where nobody does, or it cannot see them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as knock:
        if knock.connect_ex(os.fspath(path)) != 0:
            return None
        pid: int = struct.unpack("3i", knock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid or None
