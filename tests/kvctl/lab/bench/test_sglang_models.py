"""Models of a bench of servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kvctl.lab.bench.sglang_checkpoint import Llama, write_checkpoint
from kvctl.lab.bench.sglang_models import missing, model_of


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 777}))
    model = model_of(str(tmp_path), {}, cuda=True, longest=100)
    assert (model.path, model.llama, model.vocabulary) == (str(tmp_path), None, 777)


@pytest.mark.parametrize("config", [{"text_config": {"vocab_size": 777}}, {}, []])
def test_a_vocabulary_that_the_folder_does_not_say_is_small(tmp_path: Path, config: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_of(str(tmp_path), {}, cuda=True, longest=100).vocabulary == (777 if config else 1000)


def test_a_name_with_a_vendor_is_left_to_sglang() -> None:
    model = model_of("meta-llama/Llama-3.1-8B", {}, cuda=True, longest=100)
    assert (model.path, model.shape, model.vocabulary) == (
        "meta-llama/Llama-3.1-8B",
        {"model": "meta-llama/Llama-3.1-8B"},
        1000,
    )


def test_a_known_shape_gets_random_weights() -> None:
    model = model_of("llama-3.2-1b", {"layers": 4}, cuda=True, longest=9000)
    assert model.llama is not None
    llama = Llama(**model.llama)
    assert (llama.layers, llama.hidden, llama.head_dim, llama.dtype) == (4, 2048, 64, "bfloat16")
    assert (llama.positions, model.path, model.shape["layers"]) == (9000, "", 4)


def test_the_default_is_tiny_without_a_gpu() -> None:
    tiny, large = (model_of(None, {}, cuda, longest=100) for cuda in (False, True))
    assert tiny.llama is not None
    assert large.llama is not None
    assert tiny.llama["hidden"] < large.llama["hidden"] == 4096
    assert tiny.llama["dtype"] == "float32"


@pytest.mark.parametrize(
    ("name", "sizes", "problem"),
    [
        ("lama-3.1-8b", {}, "unknown model.*--model FOLDER"),
        ("deepseek-v3", {}, "cannot have random weights"),
        ("llama-3.1-8b", {"kv_heads": 3}, "cannot share 3 KV heads"),
        ("vendor/name", {"layers": 3}, "its own shape, which layers cannot change"),
    ],
)
def test_what_cannot_be_is_refused(name: str, sizes: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        model_of(name, sizes, cuda=True, longest=100)


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "with" / "config.json").write_text("{}")

    def missing_of(name: str | None) -> str:
        return missing(model_of(name, {}, cuda=True, longest=100))

    assert missing_of(str(tmp_path)) == f"--model {tmp_path} has no config.json: name the folder of a checkpoint"
    for name in (f"{tmp_path}/none", "./none", "s3://bucket/model", "vendor/name:revision"):
        assert missing_of(name) == f"--model {name} is neither a folder nor VENDOR/NAME"
    assert [missing_of(name) for name in (f"{tmp_path}/with", "vendor/name", "llama-3.2-1b", None)] == [""] * 4


def test_a_shape_is_written_a_file_a_layer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", shape=Llama(layers=3, vocabulary=32, dtype="bfloat16"))
    assert len([*(tmp_path / "m").glob("*.safetensors")]) == 3
    assert json.loads((tmp_path / "m" / "config.json").read_text())["num_hidden_layers"] == 3


def test_a_qwen3_has_norms_of_q_and_k(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", shape=Llama(layers=1, vocabulary=32, qwen3=True))
    assert json.loads((tmp_path / "m" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    norms = [name for name in load_file(tmp_path / "m" / "layer0.safetensors") if "_norm" in name]
    assert norms == ["model.layers.0.self_attn.k_norm.weight", "model.layers.0.self_attn.q_norm.weight"], norms
