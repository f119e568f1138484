"""Pools over numpy arrays whose axes are in any order, with padding between and around their elements.

The arrays are the oracle: tests read and write their elements by index and never by strides of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import numpy as np

from kvctl_agent.memory.pool import KVPool

Array = np.ndarray

ORDERS = (
    *(f"lk{''.join(inner)}" for inner in permutations("pth")),
    *("lpkth", "lpkht", "lphtk", "lpthk", "lhptk", "plkth", "plkht", "plhtk", "plthk", "pklht", "klpht", "hlkpt"),
)
"""Orders of layer, K|V, page, token and head. With K|V last, K and V are fused rows."""
_AXES = ("pages tokens heads dim", "pages heads tokens dim", "heads pages tokens dim")


class EnginePool:
    """A pool of random bytes.

    Attributes:
        planes: For each layer, K and V as `[pages, tokens, heads, dim]`.
        raw: All memory, with padding.
        pool: The pool.
    """

    def __init__(self, random: np.random.Generator, order: str, sizes: Mapping[str, int], total_heads: int) -> None:
        """Builds a pool.

        Args:
            random: Source of bytes, padding and of the order in which dimensions are passed.
            order: One of `ORDERS`.
            sizes: Sizes of the axes l, p, t and h, and the dims of K and V as k and v.
            total_heads: KV heads of the model.
        """
        k_dim, v_dim = sizes["k"], sizes["v"]
        fused = order.endswith("k")
        if not fused and k_dim != v_dim:
            order = "k" + order.replace("k", "")  # planes of unlike sizes are arrays of their own
        counts = {**sizes, "k": 2}
        dims = [axis for axis in order if axis != "k"] if fused or k_dim != v_dim else list(order)
        widths = [k_dim + v_dim] if fused else [k_dim, v_dim] if k_dim != v_dim else [k_dim]
        padding = {axis: int(random.integers(0, 2)) for axis in dims}
        shapes = [(*(counts[axis] + padding[axis] for axis in dims), width) for width in widths]
        self.raw = random.integers(0, 256, 64 + sum(int(np.prod(shape)) for shape in shapes) + 64, np.uint8)
        arrays, at = [], 64 - int(random.integers(0, 9))
        for shape in shapes:
            array = self.raw[at : at + int(np.prod(shape))].reshape(shape)
            at += array.size
            arrays.append(array[tuple(slice(padding[axis], None) for axis in dims)])
        if fused:
            k, v = arrays[0][..., :k_dim], arrays[0][..., k_dim:]
        elif k_dim != v_dim:
            k, v = arrays
        else:
            k, v = np.moveaxis(arrays[0], dims.index("k"), 0)
            dims.remove("k")
        places = [dims.index(axis) for axis in "lpth"]
        k, v = (plane.transpose(*places, len(dims)) for plane in (k, v))
        self.planes = list(zip(k, v, strict=True))
        axes = _AXES[random.integers(len(_AXES))]
        dimensions = [("pages", "tokens", "heads", "dim").index(axis) for axis in axes.split()]
        self.pool = KVPool.from_tensors(
            [plane.transpose(dimensions) for plane in k],
            [plane.transpose(dimensions) for plane in v],
            page_size=sizes["t"],
            total_kv_heads=total_heads,
            axes=axes,
        )

    def part(self, layer: int, plane: int, split: int) -> Array:
        """Returns a copy of one plane in transfer pages, `[pages * split, tokens / split, heads, dim]`."""
        array = self.planes[layer][plane]
        pages, tokens, heads, dim = array.shape
        return array.reshape(pages * split, tokens // split, heads, dim)

    def store(self, layer: int, plane: int, split: int, pages: Array, heads: slice, values: Array) -> None:
        """Overwrites heads of transfer pages with `values`, `[pages, tokens, heads, dim]`."""
        array = self.planes[layer][plane]
        rows = array.shape[1] // split
        for page, value in zip(pages.tolist(), values, strict=True):
            first = page % split * rows
            array[page // split, first : first + rows, heads] = value
