"""Runs the copy kernel in Triton's interpreter, on host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvctl_agent.device.base import Batch, BlockRanges
from kvctl_agent.device.kernels import Tile, Variant, constants, variant

interpreter = pytest.importorskip("triton.runtime.interpreter")
tl = pytest.importorskip("triton.language")


def interpret(variant: Variant, programs: int, arguments: Sequence[int]) -> None:
    """Runs one launch."""
    from kvctl_agent.device.kernel import copy_rows

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        # Triton 3.6 makes an index of an array of one, which numpy 2.4 no longer does.
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    kernel = interpreter.InterpretedFunction(copy_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        # Compiled code of Triton's own library, unless TRITON_INTERPRET was set when it was imported.
        patch.setattr(tl, "sum", lambda tensor, axis: tl.reduce(tensor, axis, tl.standard._sum_combine))
        kernel[(programs,)](*arguments, **constants(variant))


def launch(
    batch: Batch | BlockRanges, pages: np.ndarray, tile: Tile, programs: int = 3, total: np.ndarray | None = None
) -> None:
    """Runs one batch, as `CudaRowCopies` does; with `total`, uint32 `[1]`, adds its checksum to it."""
    checksum = total is not None
    if isinstance(batch, BlockRanges):
        table = batch.table
        tables = np.stack((table.paged, table.before), axis=1)
        ranges = np.array(batch.ranges, np.int64)
        bits = table.bits | int(np.bitwise_or.reduce(ranges[:, 2:4], axis=None))
        chosen = variant(table.geometry, bits, tile, True, checksum)
        most, count = int((ranges[:, 1] - ranges[:, 0]).max()), int(ranges[:, 4].max())
        blocks = most * len(ranges)
        more = ranges.ctypes.data, most
    else:
        tables = np.ascontiguousarray(batch.blocks)
        chosen = variant(batch.geometry, int(np.bitwise_or.reduce(tables[:, :2], axis=None)), tile, False, checksum)
        blocks, count = len(tables), int(tables[:, 4].max())
        more = 0, 1
    tiles = -(-count * chosen.page_units // chosen.tile_units)
    sum_at = 0 if total is None else total.ctypes.data
    interpret(
        chosen, programs, [tables.ctypes.data, more[0], pages.ctypes.data, blocks * tiles, tiles, more[1], sum_at]
    )
