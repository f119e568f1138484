"""What one rank computes for one layer of a prefill: matrix products and attention, of the model's own sizes.

Left out is what a forward spends little on, or waits for: norms, activations, rotary embedding, the router, reductions
between tensor-parallel ranks. Of a mixture of experts all experts of a token are one product, as wide as they together.
"""

from __future__ import annotations

from typing import NamedTuple

from kvctl.lab.ranks.bench_messages import PlannedShape
from kvctl_agent.layout.parallel import ParallelConfig

# DeepSeek's latent attention: q_lora_rank; the rotary part of the latent; qk_nope_head_dim + rotary, and v_head_dim.
_Q_LORA, _ROPE, _NOPE, _V = 1536, 64, 128, 128


class LayerWork(NamedTuple):
    """One rank's share of one layer.

    Attributes:
        products: (width in, width out) of each weight that every token is multiplied with.
        q_heads, kv_heads, head_dim: of attention; a narrower V is padded, as engines do.
    """

    products: tuple[tuple[int, int], ...]
    q_heads: int
    kv_heads: int
    head_dim: int

    def flops(self, tokens: int, before: int) -> int:
        """Floating-point operations for so many tokens behind `before` others."""
        weights = sum(width * out for width, out in self.products)
        seen = tokens * before + tokens * (tokens + 1) // 2
        return 2 * tokens * weights + 4 * self.q_heads * self.head_dim * seen


def layer_work(shape: PlannedShape, side: ParallelConfig) -> LayerWork:
    """The share of a rank of an instance of these sizes; `shape` has widths."""
    widths, tp = shape["widths"], side.tp
    hidden, q_heads = widths["hidden"], max(1, widths["q_heads"] // tp)
    intermediate = max(1, widths["intermediate"] // tp)
    mlp = ((hidden, 2 * intermediate), (intermediate, hidden))
    attention: tuple[tuple[int, int], ...]
    if shape["kind"] == "mla":
        latent = shape["head_dim"]
        attention = (
            (hidden, _Q_LORA + latent),
            (_Q_LORA, q_heads * (_NOPE + _ROPE)),
            (latent - _ROPE, q_heads * (_NOPE + _V)),
            (q_heads * _V, hidden),
        )
        return LayerWork(attention + mlp, q_heads, q_heads, _NOPE + _ROPE)
    kv_heads, dim = max(1, shape["kv_heads"] // tp), shape["head_dim"]
    # Where several ranks hold a head of KV, whole groups of query heads go with it.
    q_heads = max(1, q_heads // kv_heads) * kv_heads
    attention = ((hidden, (q_heads + 2 * kv_heads) * dim), (q_heads * dim, hidden))
    return LayerWork(attention + mlp, q_heads, kv_heads, dim)
