"""Order of the elements in a block of vLLM's KV cache.

On GPUs a block of one head is rows of tokens, K and V of a token in one row. On CPUs it is K of all tokens and then V
of all tokens, and kernels for x86 have K in columns: one row for each dimension, one column for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec

# vLLM's names of elements that it stores as uint8, if they are not the agent's.
_FP8 = {"auto": "", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_K_IN_COLUMNS = ("vec", "vec16")  # instruction sets of vLLM's attention on CPUs


@dataclass(frozen=True)
class BlockFormat:
    """The format of the blocks of a worker.

    Attributes:
        dtype: elements, such as bfloat16, as the agent names them; also the name of the format with rows of tokens.
        kernels: vLLM's name of the instruction set whose kernels read the blocks, on a CPU; "" for rows of tokens.
        tokens: tokens of a block that the kernels read; 0 for rows of tokens.
    """

    dtype: str
    kernels: str
    tokens: int

    @classmethod
    def of(cls, tensor: torch.Tensor, spec: Any, cache_dtype: str) -> BlockFormat:
        """Returns the format of a layer's KV cache; `cache_dtype` is vLLM's name of its dtype."""
        stored = _FP8.get(cache_dtype, cache_dtype)
        dtype = stored if tensor.dtype == torch.uint8 else str(tensor.dtype).removeprefix("torch.")
        if tensor.device.type != "cpu" or isinstance(spec, MLAAttentionSpec):
            return cls(dtype, "", 0)
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        tokens = tensor.shape[2]
        return cls(dtype, _get_attn_isa(spec.dtype, tokens, spec.head_size, cache_dtype), tokens)

    @property
    def name(self) -> str:
        """Format of the blocks, as peers compare it."""
        return f"{self.dtype} cpu-{self.kernels}-{self.tokens}" if self.kernels else self.dtype

    @property
    def received(self) -> str:
        """Formats that can be received, as `KVPool.from_tensors` takes them: rows of tokens too, if K is in columns."""
        return f"{self.name}, {self.dtype}" if self.kernels in _K_IN_COLUMNS else self.name

    def split(self, layer: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of a layer, each `[pages, heads, tokens, dim]`; K in columns has the shape of rows."""
        if not self.kernels:
            return layer[..., :dim], layer[..., dim:]
        pages, heads, tokens, _ = layer.shape
        halves = layer.view(pages, heads, 2 * tokens, -1)
        return halves[:, :, :tokens], halves[:, :, tokens:]

    def convert(self, layers: Sequence[torch.Tensor], pages: Sequence[int], received: str | None) -> bool:
        """Brings K of received pages from another format into this one; returns whether it can.

        Args:
            layers: K of each layer.
            pages: the pages.
            received: the format in which they were received; "" is this one, None unknown.
        """
        if received in ("", self.name):
            return True
        if received != self.dtype or self.kernels not in _K_IN_COLUMNS:
            return False
        index = torch.tensor(pages)
        for k in layers:
            rows = k[index]
            k[index] = rows.transpose(-1, -2).reshape(rows.shape)
        return True
