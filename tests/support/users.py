"""Sockets of another user, for tests that run as root."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def listen_as(uid: int, path: Path) -> socket.socket:
    """Returns a socket that listens at `path`, to all appearances in a process of another user."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    path.chmod(0o666)
    os.seteuid(uid)
    try:
        listener.listen()  # the kernel stores the user of this call
    finally:
        os.seteuid(0)
    return listener
