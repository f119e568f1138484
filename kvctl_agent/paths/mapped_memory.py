"""A peer's memory in our address space, for as long as a kernel of ours may be running on it.

The control loop drops a connection when its peer is lost, was replaced, or has said Bye; workers may have kernels
on it just then. Those drain, and only behind the last of them the memory is unmapped.
"""

from __future__ import annotations

import contextlib
import threading

from kvctl_agent.device.base import Blocks, Mapping
from kvctl_agent.errors import DeviceError, PeerDisconnected


class MappedMemory:
    """One connection's mapping and its users; safe from any thread.

    Attributes:
        lane: how the memory is reached; see `device.base.Mapping`.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.lane = mapping.lane
        self._mapping = mapping
        self._lock = threading.Lock()
        self._users = 0
        self._dropped = False

    @property
    def users(self) -> int:
        """How many have taken it and not given it back."""
        return self._users

    def translate(self, addr: int, nbytes: int = 1) -> int:
        """As `device.base.Mapping`; while it is open."""
        return self._mapping.translate(addr, nbytes)

    def translate_all(self, addrs: Blocks, nbytes: Blocks | int = 1) -> Blocks:
        """As `device.base.Mapping`; while it is open."""
        return self._mapping.translate_all(addrs, nbytes)

    def take(self) -> None:
        """Before a kernel is begun.

        Raises:
            PeerDisconnected: the connection was dropped; nothing may be begun on it any more.
        """
        with self._lock:
            if self._dropped:
                raise PeerDisconnected("its memory is no longer mapped here: the peer is gone, or has come back")
            self._users += 1

    def give(self) -> None:
        """After a kernel has ended, once for each `take`."""
        with self._lock:
            self._users -= 1
            last = self._dropped and not self._users
        if last:
            self._unmap()

    def close(self) -> None:
        """Unmap now, or when the last kernel has ended; idempotent."""
        with self._lock:
            idle = not self._dropped and not self._users
            self._dropped = True
        if idle:
            self._unmap()

    def _unmap(self) -> None:
        with contextlib.suppress(DeviceError):  # on a device that is lost, nothing is mapped either
            self._mapping.close()
