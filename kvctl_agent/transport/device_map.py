"""Where memory is, by address: what an engine must be told of every list of descriptors, its own and a peer's.

Engines check addresses themselves, so this keeps no sizes: only from which address on memory is of which device. An
address of no registered memory is called whatever lies below it, and refused by the engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from kvctl_agent.contract.memory import HOST
from kvctl_agent.errors import TransportError
from kvctl_agent.transport.base import Addresses, Region

_MAX_DEVICE = 1 << 16
MAX_ROWS = 1 << 14
"""Rows of a packed map; more than any sane mix of kinds has, and far less than a peer's metadata may hold."""

_ROW = np.dtype([("addr", "<u8"), ("device", "<i8")])


class DeviceMap:
    """The devices of some regions of one process."""

    def __init__(self, regions: Iterable[Region]) -> None:
        addrs: list[int] = []
        devices: list[int] = []
        for addr, _, device in sorted(regions):
            if not devices or device != devices[-1]:  # neighbours of one device are one row, however far apart
                addrs.append(addr)
                devices.append(device)
        self._addrs = addrs
        self._devices = devices
        self._only = devices[0] if len(devices) == 1 else None

    def of(self, addrs: Addresses, whose: str) -> int:
        """The one device that all of `addrs` are on, or HOST.

        Args:
            addrs: at least one.
            whose: for errors.

        Raises:
            TransportError: they are on several: an engine takes one kind of memory for a list.
        """
        if self._only is not None:
            return self._only
        if not self._devices:
            return HOST
        # As a rule all lie within one row, which their ends tell: 10 µs for 32,768 of them.
        first, last = (self._row(int(end)) for end in ((addrs[0],) * 2 if len(addrs) == 1 else _ends(addrs)))
        if first == last:
            return self._devices[first]
        rows = np.searchsorted(np.array(self._addrs, np.uint64), addrs, side="right").astype(np.int64) - 1
        found: set[int] = {self._devices[max(row, 0)] for row in np.unique(rows).tolist()}
        if len(found) > 1:
            names = " and ".join(map(device_name, sorted(found)))
            raise TransportError(
                f"a list of {len(addrs)} addresses of {whose} mixes memory of {names}: write each alone"
            )
        return found.pop()

    def pack(self) -> bytes:
        """For a peer's `unpack`."""
        rows = np.empty(len(self._addrs), _ROW)
        rows["addr"], rows["device"] = self._addrs, self._devices
        if len(rows) > MAX_ROWS:
            raise TransportError(f"memory of several devices lies mixed in {len(rows)} places; at most {MAX_ROWS}")
        return len(rows).to_bytes(4, "little") + rows.tobytes()

    @classmethod
    def unpack(cls, packed: bytes) -> tuple[DeviceMap, bytes]:
        """What `pack` made of another process's regions, and what follows it.

        Raises:
            ValueError: it is none.
        """
        count = int.from_bytes(packed[:4], "little")
        end = 4 + count * _ROW.itemsize
        if len(packed) < max(end, 4) or count > MAX_ROWS:
            raise ValueError(f"{count} rows in {len(packed)} bytes")
        rows = np.frombuffer(packed[4:end], _ROW)
        devices = rows["device"].tolist()
        if not all(HOST <= device < _MAX_DEVICE for device in devices):
            raise ValueError(f"no such devices: {devices[:8]}")
        regions = zip(rows["addr"].tolist(), devices, strict=True)
        return cls(Region(addr, 0, device) for addr, device in regions), packed[end:]

    def _row(self, addr: int) -> int:
        return max(bisect_right(self._addrs, addr) - 1, 0)


def device_name(device: int) -> str:
    """For people."""
    return "the host" if device == HOST else f"GPU {device}"


def _ends(addrs: Addresses) -> tuple[int, int]:
    return int(addrs.min()), int(addrs.max())
