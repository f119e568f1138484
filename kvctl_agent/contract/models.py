"""KV geometry of well-known models, so that a bench can be run with a model's name in place of five numbers.

The figures are those of the models' published configurations. Only models whose KV is one full-attention pool of equal
heads in every layer are listed: latent and sliding-window ones need more than these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from kvctl_agent.errors import UnknownModel


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """One model's KV geometry; `num_kv_heads` over the whole model, `head_dim` of K and of V alike."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bf16"


MODELS: dict[str, ModelPreset] = {
    preset.name: preset
    for preset in (
        ModelPreset("llama-3.1-8b", 32, 8, 128),
        ModelPreset("llama-3.1-70b", 80, 8, 128),
        ModelPreset("llama-3.1-405b", 126, 8, 128),
        ModelPreset("llama-3.2-1b", 16, 8, 64),
        ModelPreset("llama-3.2-3b", 28, 8, 128),
        ModelPreset("mistral-7b", 32, 8, 128),  # v0.2 and later; v0.1 had a sliding window
        ModelPreset("mixtral-8x7b", 32, 8, 128),
        ModelPreset("mixtral-8x22b", 56, 8, 128),
        ModelPreset("qwen2.5-7b", 28, 4, 128),
        ModelPreset("qwen2.5-14b", 48, 8, 128),
        ModelPreset("qwen2.5-32b", 64, 8, 128),
        ModelPreset("qwen2.5-72b", 80, 8, 128),
        ModelPreset("qwen3-8b", 36, 8, 128),
        ModelPreset("qwen3-32b", 64, 8, 128),
        ModelPreset("qwen3-30b-a3b", 48, 4, 128),
        ModelPreset("qwen3-235b-a22b", 94, 4, 128),
    )
}


def find_model(name: str) -> ModelPreset:
    """Look a model up by its name; upper or lower case and a leading "vendor/" do not matter.

    Raises:
        UnknownModel: no such preset; the message suggests the nearest names.
    """
    key = name.strip().lower().rpartition("/")[2]
    if key in MODELS:
        return MODELS[key]
    near = get_close_matches(key, MODELS, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known models: {', '.join(MODELS)}."
    raise UnknownModel(
        f"unknown model {name!r:.80}: {hint} For any other model give --layers, --kv-heads, --head-dim and --dtype."
    )
