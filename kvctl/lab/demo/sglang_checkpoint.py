"""A Llama with random weights as a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 512
LAYERS = 4
HIDDEN = 128
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 16
INTERMEDIATE = 256
# Weights of this size give logits far apart: the order of a sum, which differs between TP sizes, changes no token.
DEVIATION = 0.2

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_checkpoint(folder: Path, seed: int = 7, head_dim: int = HEAD_DIM, layers: int = LAYERS) -> None:
    """Writes config.json and model.safetensors (3 MB) into a new folder; the same seed gives the same weights."""
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * DEVIATION

    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": weight(VOCABULARY, HIDDEN),
    }
    for layer in range(layers):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": tensor
            for name, tensor in {
                "input_layernorm": torch.ones(HIDDEN),
                "self_attn.q_proj": weight(HEADS * head_dim, HIDDEN),
                "self_attn.k_proj": weight(KV_HEADS * head_dim, HIDDEN),
                "self_attn.v_proj": weight(KV_HEADS * head_dim, HIDDEN),
                "self_attn.o_proj": weight(HIDDEN, HEADS * head_dim),
                "post_attention_layernorm": torch.ones(HIDDEN),
                "mlp.gate_proj": weight(INTERMEDIATE, HIDDEN),
                "mlp.up_proj": weight(INTERMEDIATE, HIDDEN),
                "mlp.down_proj": weight(HIDDEN, INTERMEDIATE),
            }.items()
        }
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "head_dim": head_dim, "num_hidden_layers": layers}, indent=2)
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
