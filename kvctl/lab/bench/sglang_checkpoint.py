"""A Llama or Qwen3 with random weights as a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

VOCABULARY = 512
LAYERS = 4
HEAD_DIM = 16
_HIDDEN = 128
# With this hidden size, weights of this size give logits far apart: the order of a sum, which differs between TP sizes,
# changes no token.
_DEVIATION = 0.2


class Llama(NamedTuple):
    """Shape of a Llama; the default is the tiny one of tests and of the demo.

    Attributes:
        positions: the longest request, in tokens.
        qwen3: a Qwen3, which is a Llama with norms of q and k: SGLang has DP attention for it.
    """

    layers: int = LAYERS
    hidden: int = _HIDDEN
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = HEAD_DIM
    intermediate: int = 256
    vocabulary: int = VOCABULARY
    positions: int = 4096
    dtype: str = "float32"
    qwen3: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM" if self.qwen3 else "LlamaForCausalLM"],
            "model_type": "qwen3" if self.qwen3 else "llama",
            "vocab_size": self.vocabulary,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": self.dtype,
        }


CONFIG = Llama().config


def write_checkpoint(
    folder: Path, seed: int = 7, head_dim: int = HEAD_DIM, layers: int = LAYERS, shape: Llama | None = None
) -> None:
    """Writes config.json and the weights into a new folder; the same seed gives the same weights.

    Args:
        head_dim, layers: of the tiny model, which takes 3 MB.
        shape: of another model, in a file per layer.
    """
    generator = torch.Generator().manual_seed(seed)
    llama = shape or Llama(layers, head_dim=head_dim)
    deviation = _DEVIATION * (_HIDDEN / llama.hidden) ** 0.5
    dtype: torch.dtype = getattr(torch, llama.dtype)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(deviation).to(dtype)

    def save(tensors: Mapping[str, torch.Tensor], name: str) -> None:
        save_file(dict(tensors), folder / name, metadata={"format": "pt"})

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama.config, indent=2))
    hidden, inner, kv = llama.hidden, llama.heads * llama.head_dim, llama.kv_heads * llama.head_dim
    tensors = {
        "model.embed_tokens.weight": weight(llama.vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
        "lm_head.weight": weight(llama.vocabulary, hidden),
    }
    for layer in range(llama.layers):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": tensor
            for name, tensor in {
                "input_layernorm": torch.ones(hidden, dtype=dtype),
                "self_attn.q_proj": weight(inner, hidden),
                "self_attn.k_proj": weight(kv, hidden),
                "self_attn.v_proj": weight(kv, hidden),
                "self_attn.o_proj": weight(hidden, inner),
                "post_attention_layernorm": torch.ones(hidden, dtype=dtype),
                "mlp.gate_proj": weight(llama.intermediate, hidden),
                "mlp.up_proj": weight(llama.intermediate, hidden),
                "mlp.down_proj": weight(hidden, llama.intermediate),
            }.items()
        }
        if llama.qwen3:
            norm = torch.ones(llama.head_dim, dtype=dtype)
            tensors |= {f"model.layers.{layer}.self_attn.{name}_norm.weight": norm.clone() for name in "qk"}
        if shape is not None:  # a large model is never in memory as a whole
            save(tensors, f"layer{layer}.safetensors")
            tensors = {}
    if tensors:
        save(tensors, "model.safetensors")
