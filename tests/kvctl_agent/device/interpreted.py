"""The copy kernel in Triton's interpreter, on host memory; for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvctl_agent.device.base import Batch
from kvctl_agent.device.compiler import constants
from kvctl_agent.device.variant import Tile, Variant, variant

interpreter = pytest.importorskip("triton.runtime.interpreter")


def interpret(variant: Variant, programs: int, blocks_at: int, pages_at: int, items: int, tiles: int) -> None:
    """One launch."""
    from kvctl_agent.device.kernel import copy_rows

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        # Triton 3.6 makes an index of an array of one, which numpy 2.4 no longer does.
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    kernel = interpreter.InterpretedFunction(copy_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        kernel[(programs,)](blocks_at, pages_at, items, tiles, **constants(variant))


def launch(batch: Batch, pages: np.ndarray, tile: Tile, programs: int = 3) -> None:
    """One batch, as `CudaCopies` does it."""
    blocks = np.ascontiguousarray(batch.blocks)
    chosen = variant(batch.geometry, int(np.bitwise_or.reduce(blocks[:, :2], axis=None)), tile)
    tiles = chosen.tiles(int(blocks[:, 4].max()))
    interpret(chosen, programs, blocks.ctypes.data, pages.ctypes.data, len(blocks) * tiles, tiles)
