"""Where a pool's bytes are: the little a peer must know to write into our pages, and the arithmetic on it.

A decode rank sends its `PoolAddresses` once, in Hello; writers compute every destination from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import RemoteProtocolError

K = 0
V = 1

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolAddresses:
    """Base addresses and row sizes of one pool; layers are numbered from the pool's own first.

    A page of layer l is `page_size` tokens of `heads` heads of `k_row_bytes` (V: `v_row_bytes`) each,
    contiguous, at base + page x page bytes. `aux_base` is 0 when the pool has no aux rows.
    """

    k_bases: tuple[int, ...]
    v_bases: tuple[int, ...]
    page_size: int
    heads: int
    k_row_bytes: int
    v_row_bytes: int
    num_pages: int
    aux_base: int
    aux_row_bytes: int
    aux_slots: int

    def base(self, layer: int, kv: int) -> int:
        """Address of page 0 of `layer`'s K (kv 0) or V (kv 1)."""
        return (self.v_bases if kv else self.k_bases)[layer]

    def row_bytes(self, kv: int) -> int:
        """Bytes of one head of one token."""
        return self.v_row_bytes if kv else self.k_row_bytes

    def token_bytes(self, kv: int) -> int:
        """Bytes of all local heads of one token."""
        return self.heads * self.row_bytes(kv)

    def page_bytes(self, kv: int) -> int:
        """Bytes of one page of one layer's K or V."""
        return self.page_size * self.token_bytes(kv)

    def page_addrs(self, layer: int, kv: int, pages: Indices) -> Indices:
        """Address of each page, int64 `[len(pages)]`."""
        return self.base(layer, kv) + pages * self.page_bytes(kv)

    def token_addrs(self, layer: int, kv: int, pages: Indices, head: int = 0) -> Indices:
        """Address of local head `head` in every token of `pages`, int64 `[len(pages) * page_size]`."""
        tokens = (pages[:, None] * self.page_size + np.arange(self.page_size, dtype=np.int64)).reshape(-1)
        start = self.base(layer, kv) + head * self.row_bytes(kv)
        return start + tokens * self.token_bytes(kv)

    def aux_addr(self, slot: int) -> int:
        """Address of one aux row."""
        return self.aux_base + slot * self.aux_row_bytes

    def to_wire(self) -> dict[str, Any]:
        """A dict of ints and lists of ints, for the codec."""
        wire = asdict(self)
        wire["k_bases"], wire["v_bases"] = list(self.k_bases), list(self.v_bases)
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> PoolAddresses:
        """Parse what a peer sent; raises RemoteProtocolError on anything but exactly `to_wire`'s shape."""
        names = {field.name for field in fields(cls)}
        if set(wire) != names:
            odd = sorted(map(str, set(wire) ^ names))
            raise RemoteProtocolError(f"pool addresses: missing or unknown fields {odd}; match the versions")
        values: dict[str, Any] = {}
        for name in names:
            value = wire[name]
            if name in ("k_bases", "v_bases"):
                if not isinstance(value, list | tuple) or not value or not all(map(_is_address, value)):
                    raise RemoteProtocolError(f"pool addresses: {name} is not a non-empty list of addresses")
                values[name] = tuple(value)
            elif not _is_address(value):
                raise RemoteProtocolError(f"pool addresses: {name} is {value!r}, not an unsigned integer")
            else:
                values[name] = value
        parsed = cls(**values)
        if len(parsed.k_bases) != len(parsed.v_bases):
            raise RemoteProtocolError(
                f"pool addresses: {len(parsed.k_bases)} K layers but {len(parsed.v_bases)} V layers"
            )
        for name in ("page_size", "heads", "k_row_bytes", "v_row_bytes", "num_pages"):
            if values[name] == 0:
                raise RemoteProtocolError(f"pool addresses: {name} is 0")
        return parsed


def _is_address(value: object) -> bool:
    # Signed 64 bits: user-space addresses fit, and the arithmetic above is int64.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
