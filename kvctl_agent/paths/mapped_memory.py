"""Mapping of a peer's memory that stays open while kernels may use it.

The control loop drops a connection when its peer is lost, was replaced or has sent Bye. Workers may have kernels
running on the mapping at that time, so the memory is unmapped only after the last of them has ended.
"""

from __future__ import annotations

import contextlib
import threading

from kvctl_agent.device.base import Blocks, Mapping
from kvctl_agent.errors import DeviceError, PeerDisconnected


class MappedMemory:
    """The mapping of one connection with a count of its users; thread-safe.

    Attributes:
        lane: The interconnect to the memory, as in `device.base.Mapping`.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.lane = mapping.lane
        self._mapping = mapping
        self._lock = threading.Lock()
        self._users = 0
        self._dropped = False

    @property
    def users(self) -> int:
        """Number of kernels that use the mapping."""
        return self._users

    def translate(self, addr: int, nbytes: int = 1) -> int:
        """Translate as `device.base.Mapping.translate`; only while the mapping is open."""
        return self._mapping.translate(addr, nbytes)

    def translate_all(self, addrs: Blocks, nbytes: Blocks | int = 1) -> Blocks:
        """Translate as `device.base.Mapping.translate_all`; only while the mapping is open."""
        return self._mapping.translate_all(addrs, nbytes)

    def take(self) -> None:
        """Count one more user; call before launching a kernel.

        Raises:
            PeerDisconnected: the connection was dropped; no kernel may be launched on the mapping any more.
        """
        with self._lock:
            if self._dropped:
                raise PeerDisconnected("the peer's memory is no longer mapped: the peer is gone or has restarted")
            self._users += 1

    def give(self) -> None:
        """Count one user less; call once for each `take`, after the kernel has ended."""
        with self._lock:
            self._users -= 1
            last = self._dropped and not self._users
        if last:
            self._unmap()

    def close(self) -> None:
        """Unmap the memory now, or when the last kernel has ended; idempotent."""
        with self._lock:
            idle = not self._dropped and not self._users
            self._dropped = True
        if idle:
            self._unmap()

    def _unmap(self) -> None:
        with contextlib.suppress(DeviceError):  # a lost device has no mappings any more
            self._mapping.close()
