"""KV-cache geometry of well-known models, so that a bench can name a model instead of its layers and heads.

The figures are from the models' published configurations; where a figure is not obvious, a comment names its field.
`num_layers` counts the layers whose KV grows with the prompt. Layers of other kinds (sliding windows, linear
attention, an indexer) are listed as state components.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvctl.lab.ranks.request import State
from kvctl_agent.contract.values import near
from kvctl_agent.errors import UnknownModel


@dataclass(frozen=True, slots=True)
class Widths:
    """Matrix widths of one transformer layer, before tensor parallelism splits them.

    Attributes:
        intermediate: width of the MLP; for a mixture of experts, the sum over the experts that compute one token.
    """

    hidden: int
    q_heads: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """KV-cache geometry of one model, before tensor parallelism splits the heads.

    Attributes:
        head_dim: elements of a K head, and of a V head unless `v_head_dim` is set. For kind "mla", elements of a latent
            row; such a model has one KV head and no V.
        kind: "mha" (separate K and V, which includes GQA) or "mla" (a latent).
        states: per-request state other than the KV cache.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    widths: Widths
    dtype: str = "bf16"
    kind: str = "mha"
    v_head_dim: int | None = None
    states: tuple[State, ...] = ()


# Eight of the routed experts and the shared one, moe_intermediate_size 2048 each; the first three layers are dense.
_DEEPSEEK = Widths(7168, 128, (8 + 1) * 2048)


def _latent(name: str, num_layers: int, states: tuple[State, ...] = ()) -> ModelPreset:
    """Returns a preset with DeepSeek's MLA: a token's row has kv_lora_rank 512 + qk_rope_head_dim 64 elements."""
    return ModelPreset(name, num_layers, 1, 576, _DEEPSEEK, kind="mla", states=states)


def _window(heads: int, head_dim: int, window: int, layers: tuple[int, ...]) -> State:
    """Returns the state component of sliding-window layers; an item is a page with a K and a V row per token (bf16).

    Args:
        layers: for each sliding-window layer, the KV layer beside which it runs.
    """
    return State("window", rows=2, heads=heads, head_bytes=2 * head_dim, layers=layers, kind="window", window=window)


# DeepSeek sparse attention: for each token of every layer a key of index_head_dim 128 in fp8 and its float32 scale.
_INDEXER = State("index", rows=1, heads=1, head_bytes=128 + 4, kind="pages")

# Gated delta net, linear_num_value_heads 32, linear_{key,value}_head_dim 128, float32; linear_num_key_heads 16, so that
# a key head's share of the convolved channels is 128 of q, 128 of k and 2 * 128 of v, linear_conv_kernel_dim - 1 = 3
# steps of each, bf16. full_attention_interval 4: three such layers before each one with KV.
_DELTA_LAYERS = tuple(layer for layer in range(12) for _ in range(3))
_DELTA_NET = (
    State("conv", rows=1, heads=16, head_bytes=(128 + 128 + 2 * 128) * 3 * 2, layers=_DELTA_LAYERS),
    State("ssm", rows=1, heads=32, head_bytes=128 * 128 * 4, layers=_DELTA_LAYERS),
)

# sliding_window_pattern 6: five layers of a window before each of the 10 full ones, and two after the last.
_GEMMA_LAYERS = (*(layer for layer in range(10) for _ in range(5)), 9, 9)

MODELS: dict[str, ModelPreset] = {
    preset.name: preset
    for preset in (
        ModelPreset("llama-3.1-8b", 32, 8, 128, Widths(4096, 32, 14336)),
        ModelPreset("llama-3.1-70b", 80, 8, 128, Widths(8192, 64, 28672)),
        ModelPreset("llama-3.1-405b", 126, 8, 128, Widths(16384, 128, 53248)),
        ModelPreset("llama-3.2-1b", 16, 8, 64, Widths(2048, 32, 8192)),
        ModelPreset("llama-3.2-3b", 28, 8, 128, Widths(3072, 24, 8192)),
        ModelPreset("mistral-7b", 32, 8, 128, Widths(4096, 32, 14336)),  # v0.2 and later; v0.1 had a sliding window
        ModelPreset("mixtral-8x7b", 32, 8, 128, Widths(4096, 32, 2 * 14336)),
        ModelPreset("mixtral-8x22b", 56, 8, 128, Widths(6144, 48, 2 * 16384)),
        ModelPreset("qwen2.5-7b", 28, 4, 128, Widths(3584, 28, 18944)),
        ModelPreset("qwen2.5-14b", 48, 8, 128, Widths(5120, 40, 13824)),
        ModelPreset("qwen2.5-32b", 64, 8, 128, Widths(5120, 40, 27648)),
        ModelPreset("qwen2.5-72b", 80, 8, 128, Widths(8192, 64, 29568)),
        ModelPreset("qwen3-8b", 36, 8, 128, Widths(4096, 32, 12288)),
        ModelPreset("qwen3-32b", 64, 8, 128, Widths(5120, 64, 25600)),
        ModelPreset("qwen3-30b-a3b", 48, 4, 128, Widths(2048, 32, 8 * 768)),
        ModelPreset("qwen3-235b-a22b", 94, 4, 128, Widths(4096, 64, 8 * 1536)),
        _latent("deepseek-v3", 61),
        _latent("deepseek-r1", 61),
        _latent("deepseek-v3.2", 61, (_INDEXER,)),
        # 36 layers, layer_types in turn: sliding_attention of 128 tokens, full_attention.
        ModelPreset(
            "gpt-oss-120b", 18, 8, 64, Widths(2880, 64, 4 * 2880), states=(_window(8, 64, 128, tuple(range(18))),)
        ),
        ModelPreset(
            "gemma-3-27b", 10, 16, 128, Widths(5376, 32, 21504), states=(_window(16, 128, 1024, _GEMMA_LAYERS),)
        ),  # 62 layers
        ModelPreset("qwen3-next-80b-a3b", 12, 2, 256, Widths(2048, 16, (10 + 1) * 512), states=_DELTA_NET),  # 48 layers
    )
}


def find_model(name: str) -> ModelPreset:
    """Returns the preset of a model; case and a leading "vendor/" are ignored.

    Raises:
        UnknownModel: no preset has this name; the message suggests the nearest names.
    """
    key = name.strip().lower().rpartition("/")[2]
    if key in MODELS:
        return MODELS[key]
    hint = near(key, MODELS) or f"; known models: {', '.join(MODELS)}."
    raise UnknownModel(
        f"unknown model {name!r:.80}{hint} For any other model give --layers, --kv-heads, --head-dim and --dtype."
    )
