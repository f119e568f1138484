"""Cache of block tables on the device, uploaded on first use."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvctl_agent.device.base import Table
from kvctl_agent.device.driver import Context, checked, load


class TableCache:
    """The tables of one stream. All are kept until `close`, because they are few and small."""

    def __init__(self, context: Context, stream: Any) -> None:
        self._driver = load()
        self._context = context
        self._stream = stream
        self._addresses: dict[Table, int] = {}
        self._memory: list[Any] = []

    def address(self, table: Table) -> int:
        """Return the device address of the table's pairs (`paged`, `before`). The first call waits for the stream.

        Raises:
            DeviceError: the memory cannot be allocated.
        """
        address = self._addresses.get(table)
        return self._upload(table) if address is None else address

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
        """Free the memory; idempotent. All work on the stream must have ended."""
        memory, self._memory = self._memory, []
        self._addresses.clear()
        with self._context.visit():
            for each in memory:
                self._driver.cuMemFree(each)
