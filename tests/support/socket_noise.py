"""Sends random bytes to every listening socket of a process: control, registry, admin, and those of its engine.

Raw bytes fail in a listener's handshake; frames of a ZMQ peer pass it and reach the decoder.
"""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path
from typing import NamedTuple

import zmq

_LISTENS_UNIX = 0x10000  # __SO_ACCEPTCON in /proc/net/unix
_LISTENS_TCP = "0A"
_CONNECT_S = 0.2
_LINGER_MS = 200
_MOST_BYTES = 4096
_MOST_FRAMES = 5


class Listener(NamedTuple):
    """Listening socket: the path of a Unix socket, or a TCP port of this host."""

    path: str
    port: int

    @property
    def address(self) -> str:
        """ZMQ address of the socket."""
        return f"ipc://{self.path}" if self.path else f"tcp://127.0.0.1:{self.port}"


def listeners(pid: int) -> list[Listener]:
    """Returns the listening Unix and TCP sockets of a process on this machine."""
    inodes: set[str] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    return sorted({*_unix(pid, inodes), *_tcp(pid, inodes)})


class SocketNoise:
    """Sender of random bytes; does not wait for answers."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"noise {seed}")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def make(self, pid: int) -> int:
        """Sends raw bytes and ZMQ frames to each listener of a process; returns the number of listeners."""
        found = listeners(pid)
        for listener in found:
            self._raw(listener)
            self._frames(listener)
        return len(found)

    def close(self) -> None:
        """Closes all sockets, and drops everything that has not been sent."""
        self._context.destroy(linger=0)

    def _raw(self, listener: Listener) -> None:
        family = socket.AF_UNIX if listener.path else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as line, contextlib.suppress(OSError):
            line.settimeout(_CONNECT_S)
            line.connect(listener.path or ("127.0.0.1", listener.port))
            line.send(self._draw.randbytes(self._draw.randint(1, _MOST_BYTES)))

    def _frames(self, listener: Listener) -> None:
        line: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        line.setsockopt(zmq.LINGER, _LINGER_MS)
        line.setsockopt(zmq.IDENTITY, b"n" + self._draw.randbytes(self._draw.randint(1, 20)))
        with contextlib.suppress(zmq.ZMQError):
            line.connect(listener.address)
            for _ in range(8):
                frames = [
                    self._draw.randbytes(self._draw.randint(0, 200)) for _ in range(self._draw.randint(1, _MOST_FRAMES))
                ]
                line.send_multipart(frames, zmq.NOBLOCK)
        line.close()


def _unix(pid: int, inodes: set[str]) -> list[Listener]:
    found = []
    for line in _lines(Path(f"/proc/{pid}/net/unix")):
        fields = line.split(maxsplit=7)
        # Num RefCount Protocol Flags Type St Inode Path; abstract names begin with @.
        if len(fields) == 8 and int(fields[3], 16) & _LISTENS_UNIX and fields[6] in inodes and fields[7][0] == "/":
            found.append(Listener(fields[7], 0))
    return found


def _tcp(pid: int, inodes: set[str]) -> list[Listener]:
    found = []
    for name in ("tcp", "tcp6"):
        for line in _lines(Path(f"/proc/{pid}/net/{name}")):
            fields = line.split()
            if fields[3] == _LISTENS_TCP and fields[9] in inodes:
                found.append(Listener("", int(fields[1].rsplit(":", 1)[1], 16)))
    return found


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return []
