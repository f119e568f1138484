"""Tiny models of several kinds, whose tokens depend on every token of the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvctl.lab.bench.sglang_checkpoint import CONFIG, VOCABULARY, write_checkpoint

__all__ = ["VOCABULARY", "write_model"]

# The smallest that vLLM's attention on CPUs has kernels for.
HEAD_DIM = 32
# With dummy weights, which `engine.py` makes large enough.
DUMMY: dict[str, dict[str, Any]] = {
    # More layers than are always sent at once.
    "deep": {**CONFIG, "num_hidden_layers": 12, "head_dim": HEAD_DIM},
    # Two layers in three see the last 48 tokens only.
    "windows": {
        **CONFIG,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "head_dim": HEAD_DIM,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD_DIM,
        "rope_local_base_freq": 10000.0,
    },
}


def write_model(folder: Path, kind: str) -> None:
    """Writes the configuration of a model into a new folder, and of the Llama also the weights."""
    if kind == "llama":
        write_checkpoint(folder, head_dim=HEAD_DIM)
        return
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DUMMY[kind], indent=2))
