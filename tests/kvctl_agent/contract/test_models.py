from __future__ import annotations

import pytest

from kvctl.lab.models import MODELS, find_model
from kvctl_agent.errors import ConfigError, UnknownModel


def test_a_preset_is_found_by_name() -> None:
    llama = find_model("llama-3.1-70b")
    assert (llama.num_layers, llama.num_kv_heads, llama.head_dim, llama.dtype) == (80, 8, 128, "bf16")


@pytest.mark.parametrize("name", ["Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B", " qwen3-235b-a22b "])
def test_case_vendor_and_blanks_do_not_matter(name: str) -> None:
    assert find_model(name).num_layers == 94


def test_every_preset_is_filed_under_its_own_name_in_the_form_that_look_up_uses() -> None:
    for name, preset in MODELS.items():
        assert preset.name == name
        assert find_model(name.upper()) is preset


def test_published_sizes_of_the_cache_per_token() -> None:
    # Layers * KV heads * head_dim * (K and V) * 2 bytes.
    per_token = {m.name: m.num_layers * m.num_kv_heads * m.head_dim * 4 for m in MODELS.values() if m.kind == "mha"}
    assert per_token["llama-3.1-8b"] == 128 * 1024
    assert per_token["llama-3.1-70b"] == 320 * 1024
    assert per_token["llama-3.1-405b"] == 504 * 1024
    assert per_token["qwen2.5-7b"] == 56 * 1024
    assert per_token["qwen3-235b-a22b"] == 188 * 1024


def test_a_latent_model_keeps_one_row_of_its_compressed_kv_and_rotary_key() -> None:
    for name in ("deepseek-v3", "deepseek-r1", "deepseek-v3.2"):
        model = find_model(name)
        assert (model.kind, model.num_layers, model.num_kv_heads, model.head_dim) == ("mla", 61, 1, 512 + 64)


def test_layers_that_are_not_full_attention_are_state_beside_those_that_are() -> None:
    layers = {name: len(model.states[0].layers) + model.num_layers for name, model in MODELS.items() if model.states}
    assert layers["gpt-oss-120b"] == 36
    assert layers["gemma-3-27b"] == 62
    assert layers["qwen3-next-80b-a3b"] == 48
    for model in MODELS.values():
        for state in model.states:
            assert list(state.layers) == sorted(state.layers)
            assert all(layer < model.num_layers for layer in state.layers)


def test_state_of_one_request_of_a_gated_delta_net() -> None:
    conv, ssm = find_model("qwen3-next-80b-a3b").states
    # 8192 channels, 3 steps of the convolution, bf16; 32 heads of 128 x 128 float32.
    assert conv.rows * conv.heads * conv.head_bytes == 8192 * 3 * 2
    assert ssm.rows * ssm.heads * ssm.head_bytes == 32 * 128 * 128 * 4


def test_a_near_miss_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(UnknownModel, match=r"unknown model 'llama-3\.1-70', did you mean llama-3\.1-70b"):
        find_model("llama-3.1-70")
    with pytest.raises(UnknownModel, match="qwen3-32b"):
        find_model("qwen-3-32b")


def test_a_name_like_no_other_is_answered_with_all_names_and_the_way_round() -> None:
    with pytest.raises(UnknownModel) as unknown:
        find_model("zzz")
    assert all(name in str(unknown.value) for name in MODELS)
    assert "--layers, --kv-heads, --head-dim" in str(unknown.value)
    assert isinstance(unknown.value, ConfigError)
    assert isinstance(unknown.value, ValueError)
