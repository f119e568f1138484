"""One layer's work, done by PyTorch with one set of random weights that stands for those of all layers.

The only module of a rank that needs torch, and so the only one that imports it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from kvctl.lab.ranks.layer import LayerWork
from kvctl_agent.errors import DeviceUnavailable


def import_torch() -> Any:
    """PyTorch, which a rank's process keeps out until somebody computes.

    Raises:
        DeviceUnavailable: it is not installed.
    """
    if sys.modules.get("torch", ...) is None:
        del sys.modules["torch"]
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise DeviceUnavailable(f"--compute gpu needs PyTorch ({error}): pip install torch") from error


class TorchLayer:
    """Weights, and memory for what goes in and comes out: nothing is allocated while a forward runs.

    Products take what happens to be in memory for their input: what is computed does not matter, that it takes the
    time it takes does.
    """

    def __init__(self, work: LayerWork, device: str, tokens: int, prompt: int) -> None:
        """
        Args:
            device: as torch names it: "cuda:0", "cpu".
            tokens: most of one chunk.
            prompt: most of one prompt.
        """
        torch = self._torch = import_torch()
        self.work = work
        self.tokens, self.prompt = tokens, prompt
        options = {"device": device, "dtype": torch.bfloat16}
        random = torch.Generator(device=device).manual_seed(0)

        def values(*sizes: int) -> Any:
            return torch.randn(*sizes, generator=random, **options)

        # Outputs of unit variance, as behind a norm.
        self._weights = [values(width, out) / width**0.5 for width, out in work.products]
        self._inputs = {width: values(tokens, width) for width, _ in work.products}
        self._outputs = {out: torch.empty(tokens, out, **options) for _, out in work.products}
        self._q = values(1, work.q_heads, tokens, work.head_dim)
        self._k, self._v = (values(1, work.kv_heads, prompt, work.head_dim) for _ in "kv")

    def compute(self, tokens: int, before: int) -> None:
        """Puts one layer of a chunk of so many tokens, behind `before` others of its prompt, on the current stream."""
        torch = self._torch
        with torch.inference_mode():
            for weight in self._weights:
                width, out = weight.shape
                torch.mm(self._inputs[width][:tokens], weight, out=self._outputs[out][:tokens])
            # In two, whose sum is the same work: every fast kernel knows a square mask, few one behind a prefix.
            if before:
                self._attend(tokens, slice(before), False)
            self._attend(tokens, slice(before, before + tokens), True)

    def _attend(self, tokens: int, seen: slice, causal: bool) -> None:
        self._torch.nn.functional.scaled_dot_product_attention(
            self._q[:, :, :tokens],
            self._k[:, :, seen],
            self._v[:, :, seen],
            is_causal=causal,
            enable_gqa=self.work.q_heads != self.work.kv_heads,
        )
