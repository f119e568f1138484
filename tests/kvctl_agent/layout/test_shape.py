from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.shape import MAX_STATES, KVGroup, ModelShape, Plane, StateShape, segments, whole_model

MLA = ModelShape(num_layers=4, num_kv_heads=1, k_dim=576, v_dim=0, dtype_bytes=2, kind="mla")
CONV = StateShape("conv", layers=(0, 2), rows=3, heads=1, head_bytes=10)


def test_bytes_of_a_token_follow_from_dims_that_may_differ() -> None:
    assert ModelShape(num_layers=3, num_kv_heads=5, k_dim=192, v_dim=128, dtype_bytes=2).token_bytes == 3 * 5 * 640
    assert ModelShape(32, 8, 128, 128, 2).token_bytes * 1024 == 128 * 2**20
    assert MLA.token_bytes == 4 * 1152


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "k_dim", "v_dim", "dtype_bytes"])
@pytest.mark.parametrize("value", [0, -2, 1.5, "8", False])
def test_a_bad_size_is_refused_by_name(field: str, value: object) -> None:
    sizes: dict[str, object] = {"num_layers": 1, "num_kv_heads": 1, "k_dim": 1, "v_dim": 1, "dtype_bytes": 2}
    with pytest.raises(LayoutError, match=f"^{field} is "):
        ModelShape(**(sizes | {field: value}))  # type: ignore[arg-type]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(LayoutError, match="kind 'ring' is unknown"):
        ModelShape(1, 1, 1, 1, 2, kind="ring")


# --- What a layer consists of. ---


def test_a_layer_of_heads_has_k_and_v_of_their_own_dims_and_a_scale_row_for_each_page() -> None:
    plain = ModelShape(num_layers=1, num_kv_heads=2, k_dim=192, v_dim=128, dtype_bytes=2)
    assert plain.planes(16) == (Plane("k", 16, 384), Plane("v", 16, 256))
    fp8 = ModelShape(1, 2, 192, 128, 1, k_scale_bytes=4, v_scale_bytes=2)
    assert fp8.planes(16) == (Plane("k", 16, 192), Plane("v", 16, 128), Plane("k_scale", 1, 4), Plane("v_scale", 1, 2))
    k_only = ModelShape(1, 2, 192, 128, 1, k_scale_bytes=4)
    assert [plane.name for plane in k_only.planes(16)] == ["k", "v", "k_scale"]


def test_a_layer_of_latents_has_one_row_a_token() -> None:
    assert MLA.planes(64) == (Plane("latent", 64, 1152),)
    scaled = ModelShape(4, 1, 576, 0, 1, kind="mla", k_scale_bytes=16)
    assert scaled.planes(64) == (Plane("latent", 64, 576), Plane("scale", 1, 16))


# --- Segments. ---


def test_draft_layers_are_numbered_after_the_targets_and_each_state_has_numbers_of_its_own() -> None:
    draft = ModelShape(2, 3, 8, 8, 1, k_scale_bytes=4)
    ssm = StateShape("ssm", layers=(1, 2, 3), rows=2, heads=6, head_bytes=7)
    shape = ModelShape(4, 5, 8, 4, 2, draft=draft, states=(CONV, ssm))
    found = segments(shape, page_size=16)
    assert [(s.index, s.name, s.layer_lo, s.layer_hi, s.heads, s.state) for s in found] == [
        (0, "kv", 0, 4, 5, False),
        (1, "draft", 4, 6, 3, False),
        (2, "conv", 0, 2, 1, True),
        (3, "ssm", 0, 3, 6, True),
    ]
    assert found[1].page_head_bytes == 16 * 16 + 4
    assert found[2].kv_layers == (0, 2)
    assert found[3].page_head_bytes * found[3].heads == 2 * 6 * 7


@pytest.mark.parametrize("page_size", [0, -1, 1.0])
def test_pages_have_a_size(page_size: object) -> None:
    with pytest.raises(LayoutError, match=r"^page_size is "):
        segments(MLA, page_size)  # type: ignore[arg-type]


# --- Refusals. ---


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"num_kv_heads": 8}, "8, 0 and 0"),
        ({"v_dim": 64}, "1, 64 and 0"),
        ({"v_scale_bytes": 4}, "1, 0 and 4"),
    ],
)
def test_a_latent_has_neither_heads_nor_v(change: dict[str, int], numbers: str) -> None:
    text = f"one latent row per token: num_kv_heads must be 1, v_dim and v_scale_bytes 0, not {numbers}$"
    with pytest.raises(LayoutError, match=text):
        replace(MLA, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["k_scale_bytes", "v_scale_bytes"])
@pytest.mark.parametrize("value", [-1, 0.5, None])
def test_scales_have_a_size_or_are_absent(field: str, value: object) -> None:
    with pytest.raises(LayoutError, match=f"^{field} is .* from 0 "):
        ModelShape(1, 1, 1, 1, 1, **{field: value})  # type: ignore[arg-type]


def test_a_draft_of_a_draft_and_a_draft_with_state_are_refused() -> None:
    for draft in (replace(MLA, draft=MLA), replace(MLA, states=(CONV,))):
        with pytest.raises(
            LayoutError, match="the draft model must not have a draft model, state components or groups"
        ):
            replace(MLA, draft=draft)


@pytest.mark.parametrize("name", ["", "kv", "draft", "two words", "a-b", "3d", "x" * 65])
def test_a_states_name_is_a_word_that_names_no_other_segment(name: str) -> None:
    with pytest.raises(LayoutError, match="the name must be an identifier of at most 64 characters"):
        replace(CONV, name=name)


@pytest.mark.parametrize("field", ["rows", "heads", "head_bytes"])
def test_a_states_sizes_are_refused_by_name(field: str) -> None:
    with pytest.raises(LayoutError, match=f"^state conv {field} is 0: it must be a whole number from 1"):
        replace(CONV, **{field: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [(), (2, 1), (0, 2, 1)])
def test_a_states_layers_ascend(layers: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"^state conv: layers \(.*\) are not ascending layer numbers"):
        replace(CONV, layers=layers)


@pytest.mark.parametrize("layer", [-1, 1.5, "1", True])
def test_a_states_layers_are_numbers(layer: object) -> None:
    with pytest.raises(LayoutError, match=r"^state conv layer is .* from 0 "):
        replace(CONV, layers=(layer, 2))  # type: ignore[arg-type]


def test_a_state_lies_beside_layers_that_the_model_has() -> None:
    with pytest.raises(LayoutError, match=r"^conv: layer 4 is beyond the 4 layers"):
        replace(MLA, states=(replace(CONV, layers=(0, 4)),))


def test_states_have_names_of_their_own_and_a_limit() -> None:
    with pytest.raises(LayoutError, match=r"\['conv', 'conv'\]: names must be unique"):
        replace(MLA, states=(CONV, CONV))
    many = tuple(replace(CONV, name=f"s{i}") for i in range(MAX_STATES + 1))
    assert len(segments(replace(MLA, states=many[:-1]), 1)) == 1 + MAX_STATES
    with pytest.raises(LayoutError, match=f"and {MAX_STATES} components are allowed"):
        replace(MLA, states=many)


class TestGroups:
    KV = ModelShape(2, 2, 8, 4, 2)
    GROUP = KVGroup("swa", KV, (1, 3), 8)

    def test_each_group_is_a_segment_between_the_draft_and_the_states_with_a_table_of_its_own(self) -> None:
        other = KVGroup("index", ModelShape(1, 1, 16, 0, 1, kind="mla"), (0,), 4)
        shape = ModelShape(4, 5, 8, 4, 2, draft=ModelShape(1, 5, 8, 4, 2), states=(CONV,), groups=(self.GROUP, other))
        found = segments(shape, 16)
        assert [(s.name, s.layer_lo, s.layer_hi, s.heads, s.table) for s in found] == [
            ("kv", 0, 4, 5, 0),
            ("draft", 4, 5, 5, 0),
            ("swa", 5, 7, 2, 1),
            ("index", 7, 8, 1, 2),
            ("conv", 0, len(CONV.layers), CONV.heads, None),
        ]
        assert [plane.rows for plane in found[2].planes] == [8, 8]
        assert found[2].beside(0, 2) == (5, 6)
        assert found[2].beside(2, 3) == (6, 6)

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"name": "kv"}, "group 'kv': the name must be an identifier"),
            ({"layers": (3, 1)}, r"group swa: layers \(3, 1\) are not ascending"),
            ({"layers": (1,)}, "group swa: 2 layers, but 1 KV layers"),
            ({"page_size": 0}, "page_size is 0"),
            ({"kv": replace(KV, draft=KV)}, "group swa: kv must be a ModelShape without draft"),
        ],
    )
    def test_what_a_group_cannot_be_is_refused_by_name(self, changes: dict[str, Any], text: str) -> None:
        with pytest.raises(LayoutError, match=text):
            replace(self.GROUP, **changes)

    def test_a_group_lies_beside_layers_that_the_model_has_and_has_a_name_of_its_own(self) -> None:
        with pytest.raises(LayoutError, match="swa: layer 3 is beyond the 2 layers"):
            ModelShape(2, 1, 1, 1, 1, groups=(self.GROUP,))
        with pytest.raises(LayoutError, match="names must be unique"):
            ModelShape(4, 1, 1, 1, 1, groups=(self.GROUP, self.GROUP))
        with pytest.raises(LayoutError, match="it must be a list of KVGroup"):
            ModelShape(4, 1, 1, 1, 1, groups=(1,))  # type: ignore[arg-type]


# ---- pipeline stages ---------------------------------------------------------------------------------------------


def _group(name: str, *layers: int) -> KVGroup:
    return KVGroup(name, ModelShape(len(layers), 2, 8, 8, 2), layers, 16)


def test_the_layers_of_pipeline_stages_are_numbered_one_after_the_other() -> None:
    state = StateShape("mamba", (0,), 1, 2, 64)
    first = ModelShape(3, 2, 8, 8, 2, states=(state,), groups=(_group("window", 0, 0, 2),))
    second = ModelShape(
        2, 2, 8, 8, 2, states=(replace(state, layers=(1,)),), groups=(_group("window", 1), _group("b", 0))
    )
    last = ModelShape(1, 2, 8, 8, 2, states=(state,), draft=ModelShape(1, 2, 8, 8, 2))
    model = whole_model([first, second, last])
    assert model.num_layers == 6
    assert [(group.name, group.layers, group.kv.num_layers) for group in model.groups] == [
        ("window", (0, 0, 2, 4), 4),
        ("b", (3,), 1),
    ]
    assert [each.layers for each in model.states] == [(0, 4, 5)]
    assert model.draft == last.draft


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ([{"draft": ModelShape(1, 2, 8, 8, 2)}, {}], "draft model must be on the last"),
        ([{"states": (StateShape("mamba", (0,), 1, 2, 64),)}, {}], "must have all state components"),
        ([{"groups": (_group("b", 0), _group("a", 0))}, {"groups": (_group("a", 0), _group("b", 0))}], "orders"),
    ],
)
def test_stages_that_make_no_model_are_refused(stages: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        whole_model([ModelShape(2, 2, 8, 8, 2, **each) for each in stages])
