"""Models of a bench of SGLang servers: a folder, a name that SGLang resolves, or one with random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvctl.lab.models import find_model
from kvctl.lab.ranks.request import Sizes
from kvctl_agent.errors import UnknownModel

MODEL_SIZES = ("layers", "kv_heads", "head_dim")
"""Options that change the shape of a model with random weights."""

_DEFAULT = "llama-3.1-8b"
_TINY = {"layers": 8, "hidden": 128, "heads": 8, "kv_heads": 4, "head_dim": 16, "intermediate": 256, "vocabulary": 512}
_VOCABULARY = 32000
_COMMON_VOCABULARY = 1000  # which models have whose vocabulary is not known
_LEAST_POSITIONS = 4096
_CONFIGS = ("config.json", "params.json")  # the latter in Mistral's own format
_VENDOR_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Model(NamedTuple):
    """A model of servers.

    Attributes:
        path: folder, or name that SGLang resolves; "": a model with random weights, to be written.
        shape: what a result says of the model, as `kvctl bench` does.
        vocabulary: tokens of prompts are below this.
        llama: fields of that `Llama`; None: the model exists.
    """

    path: str
    shape: Mapping[str, Any]
    vocabulary: int
    llama: Mapping[str, Any] | None = None


def model_of(name: str | None, sizes: Mapping[str, int], cuda: bool, longest: int, dp_attention: bool = False) -> Model:
    """Returns the model that the options name.

    Args:
        name: folder or VENDOR/NAME of a model, or a known model, whose shape gets random weights; None: the default,
            without a GPU a tiny one.
        sizes: `MODEL_SIZES` that replace those of the shape.
        dp_attention: random weights are those of a Qwen3: SGLang's Llama has no DP attention.

    Raises:
        ValueError: the model is unknown, or cannot have these sizes or random weights.
    """
    folder = Path(name or "")
    if name and (folder.is_dir() or "/" in name):
        if sizes:
            raise ValueError(f"--model {name} has its own shape, which {', '.join(sizes)} cannot change")
        return Model(str(folder.resolve()) if folder.is_dir() else name, {"model": name}, _vocabulary(folder))
    family = "Qwen3" if dp_attention else "Llama"
    label, shape = (f"tiny {family}", _TINY) if name is None and not cuda else _known(name or _DEFAULT, family)
    llama: dict[str, Any] = {**shape, **sizes, "positions": max(_LEAST_POSITIONS, longest), "qwen3": dp_attention}
    llama["dtype"] = "bfloat16" if cuda else "float32"
    if llama["heads"] % llama["kv_heads"]:
        raise ValueError(f"{llama['heads']} query heads cannot share {llama['kv_heads']} KV heads: change --kv-heads")
    shown = {"model": f"random {label}", "kind": "mha", "dtype": llama["dtype"]}
    return Model("", {**shown, **{each: llama[each] for each in MODEL_SIZES}}, llama["vocabulary"], llama)


def missing(model: Model) -> str:
    """Returns why the folder that was named as the model has no checkpoint; "" if it has one, or SGLang decides."""
    folder = Path(model.path)
    if model.llama is not None or folder.is_file():
        return ""
    if not folder.is_dir():
        return "" if _VENDOR_NAME.fullmatch(model.path) else f"--model {model.path} is neither a folder nor VENDOR/NAME"
    if any((folder / config).is_file() for config in _CONFIGS):
        return ""
    return f"--model {model.path} has no {_CONFIGS[0]}: name the folder of a checkpoint"


def unfit(model: Model, role: str, sizes: Sizes) -> str:
    """Returns why a model with random weights cannot be split over so many ranks; "" if it can or is not known.

    Args:
        role: prefill or decode, for the names of the options to change.
    """
    llama = model.llama
    if llama is None:
        return ""
    heads, kv_heads, layers, width = (llama[each] for each in ("heads", "kv_heads", "layers", "intermediate"))
    if heads % sizes.tp or max(kv_heads, sizes.tp) % min(kv_heads, sizes.tp):
        return f"{heads} query heads and {kv_heads} KV heads cannot be split over {sizes.tp} ranks: change --{role}-tp"
    # DP attention divides requests; the MLP is split over all ranks of a stage.
    if width % (ranks := sizes.tp * sizes.dp):
        options = [f"--{role}-{axis}" for axis, number in (("tp", sizes.tp), ("dp", sizes.dp)) if number > 1]
        return f"MLPs of width {width} cannot be split over {ranks} ranks: change {' or '.join(options)}"
    if layers < sizes.pp:
        return f"{layers} layers cannot be split over {sizes.pp} stages: change --{role}-pp"
    return ""


def _known(name: str, family: str) -> tuple[str, Mapping[str, int]]:
    try:
        preset = find_model(name)
    except UnknownModel as error:
        raise ValueError(f"{error} A model of your own: --model FOLDER") from error
    if preset.kind != "mha" or preset.states:
        raise ValueError(
            f"{preset.name} cannot have random weights, which are those of a {family}: give --model its folder"
        )
    return f"{family} of the shape of {preset.name}", {
        "layers": preset.num_layers,
        "hidden": preset.widths.hidden,
        "heads": preset.widths.q_heads,
        "kv_heads": preset.num_kv_heads,
        "head_dim": preset.head_dim,
        "intermediate": preset.widths.intermediate,
        "vocabulary": _VOCABULARY,
    }


def _vocabulary(folder: Path) -> int:
    """Returns the size of a model's vocabulary; a size that every model has if the folder does not say."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _COMMON_VOCABULARY
