"""Validation of plan inputs, and the comparison of two sides' inputs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.plan_inputs import MAX_SPLIT, PLAN_VERSION, Factor, PlanInputs, differences
from kvctl_agent.layout.shape import ModelShape, StateShape

SHAPE = ModelShape(num_layers=32, num_kv_heads=8, k_dim=128, v_dim=128, dtype_bytes=2)
MLA = ModelShape(num_layers=32, num_kv_heads=1, k_dim=576, v_dim=0, dtype_bytes=2, kind="mla")
CONV = StateShape("conv", layers=(0, 2), rows=3, heads=6, head_bytes=10)
DRAFT = ModelShape(num_layers=1, num_kv_heads=6, k_dim=64, v_dim=64, dtype_bytes=2)
PLAIN = PlanInputs(shape=SHAPE, page_size=16, chunk_pages=8, prefill=ParallelConfig(), decode=ParallelConfig())
BASE = replace(PLAIN, page_size=64, prefill=ParallelConfig(dp=2, tp=4), decode=ParallelConfig(dp=4))


# --- Refusals. ---


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"prefill": ParallelConfig(tp=3)},
            "prefill tp=3: 8 KV heads cannot be laid out over tp 3: 8 % 3 = 2 and 3 % 8 = 3",
        ),
        (
            {"decode": ParallelConfig(tp=12)},
            "decode tp=12: 8 KV heads cannot be laid out over tp 12: 8 % 12 = 8 and 12 % 8 = 4",
        ),
        (
            {"prefill_split": MAX_SPLIT + 1},
            f"prefill page_size {16 * (MAX_SPLIT + 1)}: it may be at most {MAX_SPLIT} times 16, the tokens of a",
        ),
        (
            {"shape": replace(SHAPE, k_scale_bytes=4), "decode_split": 4},
            "kv has scales for each page (k_scale), so a decode page of 64 tokens cannot be divided: use pages",
        ),
        (
            {"prefill": ParallelConfig(pp=33)},
            "prefill pp=33: 32 layers cannot be divided into pp=33 stages: one would be empty",
        ),
        (
            {"decode": ParallelConfig(pp=40)},
            "decode pp=40: 32 layers cannot be divided into pp=40 stages: one would be empty",
        ),
        (
            {"prefill": ParallelConfig(pp=2, stages=(20, 13))},
            "prefill pp=2: pipeline stages have 20+13 = 33 layers, but the model has 32",
        ),
        (
            {"decode": ParallelConfig(pp=2, stages=(1, 30))},
            "decode pp=2: pipeline stages have 1+30 = 31 layers, but the model has 32",
        ),
        (
            {"prefill": ParallelConfig(tp=4), "shape": replace(SHAPE, draft=DRAFT)},
            "prefill tp=4 (draft): 6 KV heads cannot be laid out over tp 4: 6 % 4 = 2 and 4 % 6 = 4",
        ),
        (
            {"decode": ParallelConfig(tp=4), "shape": replace(SHAPE, states=(CONV,))},
            "decode tp=4 (conv): 6 KV heads cannot",
        ),
        (
            {"cp_mode": "ring"},
            "cp_mode 'ring' is unknown: it must be one of rank0, all, all-chunk, room-hash",
        ),
        ({"page_size": 0}, "page_size is 0: it must be a whole number from 1"),
        ({"chunk_pages": -1}, "chunk_pages is -1: it must be a whole number from 1"),
        ({"plan_version": 0}, "plan_version is 0: it must be a whole number from 1"),
    ],
)
def test_layouts_that_cannot_exchange_kv_are_refused_with_the_arithmetic(change: dict[str, object], text: str) -> None:
    with pytest.raises(LayoutError) as refused:
        replace(PLAIN, **change)  # type: ignore[arg-type]
    assert text in str(refused.value)


def test_a_latent_and_a_replicated_state_go_with_any_tp() -> None:
    everywhere = replace(MLA, states=(replace(CONV, heads=1),))
    for tp in range(1, 20):
        assert replace(
            PLAIN, shape=everywhere, prefill=ParallelConfig(tp=tp), decode=ParallelConfig(tp=20 - tp)
        ).segments


# --- Comparison. ---

CHANGES: dict[str, PlanInputs] = {
    "plan_version": replace(BASE, plan_version=PLAN_VERSION + 1),
    "shape.num_layers": replace(BASE, shape=replace(SHAPE, num_layers=16)),
    "shape.num_kv_heads": replace(BASE, shape=replace(SHAPE, num_kv_heads=4)),
    "shape.k_dim": replace(BASE, shape=replace(SHAPE, k_dim=64)),
    "shape.v_dim": replace(BASE, shape=replace(SHAPE, v_dim=64)),
    "shape.dtype_bytes": replace(BASE, shape=replace(SHAPE, dtype_bytes=1)),
    "shape.k_scale_bytes": replace(BASE, shape=replace(SHAPE, k_scale_bytes=4)),
    "shape.v_scale_bytes": replace(BASE, shape=replace(SHAPE, v_scale_bytes=4)),
    "page_size": replace(BASE, page_size=32),
    "chunk_pages": replace(BASE, chunk_pages=16),
    "prefill.dp": replace(BASE, prefill=ParallelConfig(tp=4)),
    "prefill.cp": replace(BASE, prefill=ParallelConfig(dp=2, cp=2, tp=4)),
    "prefill.pp": replace(BASE, prefill=ParallelConfig(dp=2, pp=2, tp=4)),
    "prefill.tp": replace(BASE, prefill=ParallelConfig(dp=2, tp=8)),
    "decode.dp": replace(BASE, decode=ParallelConfig(dp=2)),
    "decode.pp": replace(BASE, decode=ParallelConfig(dp=4, pp=2)),
    "decode.tp": replace(BASE, decode=ParallelConfig(dp=4, tp=2)),
    "decode.cp": replace(BASE, decode=ParallelConfig(dp=4, cp=2)),
    "prefill.split": replace(BASE, prefill_split=4),
    "decode.split": replace(BASE, decode_split=4),
    "decode.stripe": replace(BASE, stripe_pages=4),
    "cp_mode": replace(BASE, cp_mode="all"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_names_its_factor_and_nothing_else(name: str) -> None:
    mine, theirs = BASE.to_wire(), CHANGES[name].to_wire()
    assert differences(mine, theirs) == (Factor(name, mine[name], str(theirs[name])),)


def test_every_plan_input_is_compared() -> None:
    compared = set(BASE.to_wire())
    assert compared - set(CHANGES) == {"shape.kind", "prefill.stages", "decode.stages"}
    assert str(differences(replace(BASE, shape=MLA).to_wire(), BASE.to_wire())[3]) == "shape.kind mla ≠ mha"
    cut = replace(BASE, decode=ParallelConfig(dp=4, pp=2, stages=(12, 20)))
    even = replace(BASE, decode=ParallelConfig(dp=4, pp=2))
    assert list(map(str, differences(cut.to_wire(), even.to_wire()))) == ["decode.stages 12,20 ≠ even"]


def test_a_draft_and_a_state_that_only_one_side_has_are_named() -> None:
    full = replace(BASE, shape=replace(SHAPE, draft=replace(DRAFT, num_kv_heads=8), states=(replace(CONV, heads=8),)))
    found = differences(BASE.to_wire(), full.to_wire())
    assert {factor.name.split(".")[0] for factor in found} == {"draft", "state"}
    assert {factor.local for factor in found} == {"absent"}
    other = replace(full.shape, states=(replace(CONV, heads=8, layers=(0, 3)),))
    (factor,) = differences(full.to_wire(), replace(full, shape=other).to_wire())
    assert str(factor) == "state.conv 3x8x10 bytes beside layers 0,2 ≠ 3x8x10 bytes beside layers 0,3"


def test_the_order_of_state_components_is_compared() -> None:
    """Otherwise components of equal geometry would be written to each other's memory."""
    conv = replace(CONV, heads=8)
    ssm = replace(conv, name="ssm")
    mine, theirs = (replace(BASE, shape=replace(SHAPE, states=states)) for states in ((conv, ssm), (ssm, conv)))
    assert list(map(str, differences(mine.to_wire(), theirs.to_wire()))) == ["states conv,ssm ≠ ssm,conv"]


def test_equal_inputs_do_not_differ_and_several_differences_are_all_named() -> None:
    assert differences(BASE.to_wire(), replace(BASE).to_wire()) == ()
    other = replace(BASE, page_size=32, decode=ParallelConfig(dp=8))
    assert [str(factor) for factor in differences(BASE.to_wire(), other.to_wire())] == [
        "page_size 64 ≠ 32",
        "decode.dp 4 ≠ 8",
    ]


def test_the_wire_is_flat_and_survives_json() -> None:
    wire = BASE.to_wire()
    assert all(isinstance(value, int | str) for value in wire.values())
    assert (wire["prefill.tp"], wire["decode.dp"], wire["page_size"], wire["prefill.stages"]) == (4, 4, 64, "even")
    assert differences(wire, json.loads(json.dumps(wire))) == ()


@pytest.mark.parametrize("value", [None, 1.5, "64", [64], -1])
def test_a_malformed_field_of_a_peer_is_a_difference_like_any_other(value: object) -> None:
    assert differences(BASE.to_wire(), BASE.to_wire() | {"page_size": value}) == (Factor("page_size", 64, str(value)),)


def test_oversized_fields_of_a_peer_are_truncated_in_texts() -> None:
    flood = BASE.to_wire() | {"cp_mode": "x" * 10_000, "y" * 10_000: 1}
    assert all(len(str(factor)) < 200 for factor in differences(BASE.to_wire(), flood))
