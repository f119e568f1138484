"""Tables that stay on the device: uploaded when a launch first asks for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvctl_agent.device.base import Table
from kvctl_agent.device.driver import Context, checked, load


class TableCache:
    """Of one stream; kept until it ends, for tables are few and small."""

    def __init__(self, context: Context, stream: Any) -> None:
        self._driver = load()
        self._context = context
        self._stream = stream
        self._addresses: dict[Table, int] = {}
        self._memory: list[Any] = []

    def address(self, table: Table) -> int:
        """Where `paged` and `before` of each block are, side by side; waits for the stream the first time.

        Raises:
            DeviceError: there is no memory for it.
        """
        found = self._addresses.get(table)
        return self._upload(table) if found is None else found

    def _upload(self, table: Table) -> int:
        pairs = np.stack((table.paged, table.before), axis=1)
        with self._context.visit():
            memory = checked(self._driver.cuMemAlloc(pairs.nbytes), f"cannot allocate {pairs.nbytes} bytes for a table")
            self._memory.append(memory)
            address = int(memory)
            checked(
                self._driver.cuMemcpyHtoDAsync(address, pairs.ctypes.data, pairs.nbytes, self._stream),
                "cannot upload a table",
            )
            checked(self._driver.cuStreamSynchronize(self._stream), "cannot upload a table")
        self._addresses[table] = address
        return address

    def close(self) -> None:
        """Gives the memory back; idempotent. The stream must have come to its end."""
        memory, self._memory = self._memory, []
        self._addresses.clear()
        with self._context.visit():
            for each in memory:
                self._driver.cuMemFree(each)
