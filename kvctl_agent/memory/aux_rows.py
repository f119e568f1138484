"""Aux rows: an engine's data of a request besides KV and state, in one or several buffers of host memory.

The aux row of a slot is the concatenation of one row of each buffer.
"""

from __future__ import annotations

from typing import Any

from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.values import integer, shown
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.tensors import TensorInfo, inspect_tensor

_MAX_BUFFERS = 1024
_MAX_ADDRESS = 1 << 63


def inspect_aux(aux: Any) -> list[TensorInfo]:
    """Checks the `aux` argument of `KVPool.from_tensors`; returns its buffers, all with equally many rows.

    Raises:
        MemoryLayoutError: a buffer is unusable or has another number of rows; the text names the buffer.
    """
    if aux is None:
        return []
    several = isinstance(aux, list | tuple)
    if several and len(aux) > _MAX_BUFFERS:
        raise MemoryLayoutError(f"aux: {len(aux)} buffers; a pool may have {_MAX_BUFFERS}")
    infos = [_buffer(each, f"aux {index}") for index, each in enumerate(aux)] if several else [_buffer(aux, "aux")]
    for info in infos[1:]:
        if info.shape[0] != infos[0].shape[0]:
            raise MemoryLayoutError(
                f"{info.name}: {info.shape[0]} rows, but {infos[0].name} has {infos[0].shape[0]}; "
                "every aux buffer needs one row for each slot"
            )
    return infos


def _buffer(aux: Any, name: str) -> TensorInfo:
    """Returns one buffer, a tensor or (address, nbytes, item_bytes), as uint8 `[slots, row bytes]`."""
    if isinstance(aux, list | tuple):
        numbers = [integer(value) for value in aux]
        if len(numbers) != 3 or None in numbers:
            raise MemoryLayoutError(f"{name} is {shown(aux)}: it must be a tensor, or (address, nbytes, item_bytes)")
        addr, nbytes, item_bytes = (number or 0 for number in numbers)
        if min(addr, nbytes, item_bytes) <= 0 or addr + nbytes >= _MAX_ADDRESS or nbytes % item_bytes:
            raise MemoryLayoutError(
                f"{name}: {nbytes} bytes at address {addr} are not rows of {item_bytes} bytes: give an address in host "
                "memory, and a multiple of item_bytes"
            )
        return TensorInfo(name, (nbytes // item_bytes, item_bytes), "uint8", 1, addr, nbytes)
    info = inspect_tensor(aux, name)
    if info.device != HOST:
        raise MemoryLayoutError(f"{name}: on {info.device_name}; aux rows must be on the CPU")
    slots = info.shape[0]
    return TensorInfo(name, (slots, info.nbytes // slots), "uint8", 1, info.addr, info.nbytes)
