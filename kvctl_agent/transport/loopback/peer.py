"""One incarnation of a loopback peer: its process, its memory, and a queue of tags that its socket cannot take yet."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from kvctl_agent.errors import PeerDisconnected, TransportError
from kvctl_agent.memory.region import Region
from kvctl_agent.transport.descriptors import Ranges

_OUTBOX_MAX = 65536


def pack_metadata(ident: str, path: Path, regions: Sequence[Region]) -> bytes:
    """Return the metadata of this process's agent, which `Peer` parses."""
    metadata = {"loopback": ident, "pid": os.getpid(), "socket": str(path), "regions": regions}
    return json.dumps(metadata).encode()


class Peer:
    """A peer that can be written to.

    Attributes:
        ident: random name of this incarnation, in front of each of its datagrams.
        sent: number of the last tag that left.
    """

    def __init__(self, key: str, metadata: bytes) -> None:
        self.key = key
        self.metadata = metadata
        self.sent = 0
        self._closed = False
        self._queued = 0
        self._outbox: deque[bytes] = deque()
        self._lock = threading.Lock()
        try:
            told = json.loads(metadata)
            self.ident = str(told["loopback"])
            self.pid = int(told["pid"])
            self._path = Path(told["socket"])
            self.ranges = Ranges("loopback", [Region(*map(int, region)) for region in told["regions"]])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise TransportError(f"loopback: the metadata of peer {key!r} is malformed: {error!r}") from error
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(self.pid)
            self._socket.connect(str(self._path))
        except OSError as error:
            self.close()
            raise PeerDisconnected(f"loopback: peer {key!r} (process {self.pid}) is gone: {error}") from error

    def check_alive(self) -> None:
        """Raise PeerDisconnected if the peer's process or its transport has ended.

        Without this check a write by process number could hit another process with the same number, or freed memory.
        """
        # A transport that closes removes its socket; a process's descriptor becomes readable when it exits.
        if self._closed or not self._path.exists() or select.select([self._pidfd], [], [], 0)[0]:
            raise PeerDisconnected(f"loopback: peer {self.key!r} (process {self.pid}) is gone")

    def enqueue(self, datagram: bytes) -> int:
        """Send a tag or queue it; return its number, which `sent` reaches when the tag has been sent."""
        with self._lock:
            if len(self._outbox) >= _OUTBOX_MAX:
                raise TransportError(f"loopback: peer {self.key!r} leaves {_OUTBOX_MAX} tags uncollected")
            self._queued += 1
            number = self._queued
            self._outbox.append(datagram)
        self.flush()
        return number

    def flush(self) -> bool:
        """Send queued tags as far as the peer's socket accepts them; return True when none is left."""
        with self._lock:
            while self._outbox:
                try:
                    self._socket.send(self._outbox[0])
                except BlockingIOError:
                    return False
                except OSError as error:
                    raise PeerDisconnected(f"loopback: peer {self.key!r} is gone: {error}") from error
                self._outbox.popleft()
                self.sent += 1
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._socket.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
