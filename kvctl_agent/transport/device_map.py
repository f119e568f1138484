"""Maps addresses to devices, for engines that need the device of every local and remote descriptor list.

The map has no sizes, because engines check addresses themselves: it has only the first address of each range of one
device. An address outside registered memory gets the device of the range below it, and the engine rejects it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import TransportError
from kvctl_agent.memory.region import Region
from kvctl_agent.transport.base import Addresses

_MAX_DEVICE = 1 << 16
MAX_ROWS = 1 << 14
"""Maximum rows of a packed map; more than real memory layouts need, and far less than a peer's metadata may hold."""

_ROW = np.dtype([("addr", "<u8"), ("device", "<i8")])


class DeviceMap:
    """Maps addresses in the registered regions of one process to their device.

    Attributes:
        only: The device that has all of the memory; None if there are several, or no memory.
    """

    def __init__(self, regions: Iterable[Region]) -> None:
        addrs: list[int] = []
        devices: list[int] = []
        for addr, _, device in sorted(regions):
            if not devices or device != devices[-1]:  # consecutive regions of one device are one row, gaps included
                addrs.append(addr)
                devices.append(device)
        self._addrs = addrs
        self._devices = devices
        self.only = devices[0] if len(devices) == 1 else None

    def of(self, addrs: Addresses, whose: str) -> int:
        """Returns the number of the device that has all `addrs`, or HOST.

        Args:
            addrs: Addresses, at least one.
            whose: Owner of the memory, for error texts.

        Raises:
            TransportError: the addresses are on several devices; an engine accepts one kind of memory per list.
        """
        if self.only is not None:
            return self.only
        if not self._devices:
            return HOST
        # Usually all are in one row, which the lowest and highest address show: 10 µs for 32,768 addresses.
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
        """Returns the map as bytes for a peer's `unpack`.

        Raises:
            TransportError: the map has more than `MAX_ROWS` rows.
        """
        rows = np.empty(len(self._addrs), _ROW)
        rows["addr"], rows["device"] = self._addrs, self._devices
        if len(rows) > MAX_ROWS:
            raise TransportError(f"memory of several devices lies mixed in {len(rows)} places; at most {MAX_ROWS}")
        return len(rows).to_bytes(4, "little") + rows.tobytes()

    @classmethod
    def unpack(cls, packed: bytes) -> tuple[DeviceMap, bytes]:
        """Returns the map at the start of `packed`, which a peer created with `pack`, and the bytes after it.

        Raises:
            ValueError: the bytes are not a packed map.
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
    """Returns the display name of a device: "the host" or "GPU 0"."""
    return "the host" if device == HOST else f"GPU {device}"


def _ends(addrs: Addresses) -> tuple[int, int]:
    return int(addrs.min()), int(addrs.max())
