"""The model's KV geometry as both sides must agree on it; per-rank shapes follow from it, never the reverse."""

from __future__ import annotations

from dataclasses import dataclass

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.sizes import check_size


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's KV cache.

    `num_kv_heads` comes from the model's configuration, not from "heads on this rank times tp", which is wrong as soon
    as heads are replicated. `k_dim` and `v_dim` may differ. `kind` is "mha" (per-head rows; MQA and GQA included).

    Raises:
        LayoutError: a size is not a positive whole number, or the kind is not served.
    """

    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype_bytes: int
    kind: str = "mha"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "k_dim", "v_dim", "dtype_bytes"):
            check_size(name, getattr(self, name))
        if self.kind == "mla":
            raise LayoutError("kind 'mla': latent pools are not supported yet by this version; use an MHA or GQA model")
        if self.kind != "mha":
            raise LayoutError(f"kind {self.kind!r:.40} is unknown: it must be 'mha'")

    @property
    def k_head_bytes(self) -> int:
        """Bytes of K of one token and one head in one layer."""
        return self.k_dim * self.dtype_bytes

    @property
    def v_head_bytes(self) -> int:
        """Bytes of V of one token and one head in one layer."""
        return self.v_dim * self.dtype_bytes

    @property
    def token_head_bytes(self) -> int:
        """Bytes of K and V of one token and one head in one layer."""
        return self.k_head_bytes + self.v_head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token: all layers, all heads, counted once."""
        return self.num_layers * self.num_kv_heads * self.token_head_bytes
