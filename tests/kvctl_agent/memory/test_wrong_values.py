"""Pools and model shapes of arbitrary values: either valid integers, or an error that names the value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import KvctlError, LayoutError
from kvctl_agent.layout.shape import ModelShape, StateShape
from kvctl_agent.memory.pool import Buffer, DraftKV, KVPool, StateTensors

NUMBERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 20),
    st.sampled_from(
        [2**31, 2**64, np.int64(2), np.uint8(16), np.bool_(True), np.float64(2), np.array(4), 2.0, "2", b"2"]
    ),
    st.sampled_from([1j, {}, object(), iter([1]), range(2), np.array([1, 2]), [], (), "", "kv", "conv", "\ud800"]),
)
VALUES = NUMBERS | st.lists(NUMBERS, max_size=2) | st.tuples(NUMBERS, NUMBERS)
EXAMPLES = settings(max_examples=150, deadline=None)


def rows(layers: int = 2, dim: int = 8) -> list[np.ndarray]:
    return [np.zeros((32, 2, dim), np.float16) for _ in range(layers)]


POOL = ["k", "v", "page_size", "total_kv_heads", "aux", "k_scale", "draft", "state"]


@EXAMPLES
@given(st.sampled_from(POOL), VALUES)
@example("page_size", np.int64(16))
@example("total_kv_heads", np.uint8(2))
def test_any_value_for_any_argument_of_a_pool(name: str, value: Any) -> None:
    arguments = {"k": rows(), "v": rows(), "page_size": 16, "total_kv_heads": 2, name: value}
    try:
        pool = KVPool.from_tensors(**arguments)
    except KvctlError:
        return
    assert type(pool.page_size) is int
    shape = pool.shape()
    assert {type(number) for number in (shape.num_kv_heads, shape.num_layers, shape.k_dim, shape.dtype_bytes)} == {int}
    pool.close()


@EXAMPLES
@given(st.sampled_from(["name", "tensors", "layers", "heads", "axis"]), VALUES)
@example("axis", np.int64(1))
@example("heads", np.int64(1))
def test_any_value_for_any_field_of_state(name: str, value: Any) -> None:
    fields: dict[str, Any] = {"name": "conv", "tensors": [np.zeros((4, 2, 3), np.float16)], name: value}
    if name == "heads":
        fields["axis"] = 1
    if name == "axis":
        fields["heads"] = 2
    try:
        pool = KVPool.from_tensors(rows(), rows(), page_size=16, total_kv_heads=2, state=[StateTensors(**fields)])
        shape = pool.shape()
    except KvctlError:
        return
    for state in shape.states:
        assert {type(number) for number in (*state.layers, state.rows, state.heads, state.head_bytes)} == {int}
    pool.close()


@EXAMPLES
@given(st.sampled_from(["address", "nbytes", "item_bytes", "shape", "dtype_bytes", "strides", "offset", "gpu"]), VALUES)
@example("shape", (2, 3))
def test_any_value_for_any_field_of_a_buffer(name: str, value: Any) -> None:
    fields: dict[str, Any] = {"address": 4096, "nbytes": 24, "item_bytes": 6, "shape": (6,), name: value}
    state = StateTensors("conv", [Buffer(**fields)])
    try:
        shape = KVPool.from_tensors(rows(), rows(), page_size=16, total_kv_heads=2, state=[state]).shape()
    except KvctlError:
        return
    assert {type(number) for number in (shape.states[0].rows, shape.states[0].head_bytes)} == {int}


@EXAMPLES
@given(st.sampled_from(["k", "v", "total_kv_heads", "k_scale", "v_scale"]), VALUES)
def test_any_value_for_any_field_of_a_draft(name: str, value: Any) -> None:
    fields: dict[str, Any] = {"k": rows(1), "v": rows(1), "total_kv_heads": 2, name: value}
    try:
        KVPool.from_tensors(rows(), rows(), page_size=16, total_kv_heads=2, draft=DraftKV(**fields)).close()
    except KvctlError:
        return


@EXAMPLES
@given(
    st.sampled_from(["num_layers", "num_kv_heads", "k_dim", "v_dim", "kind", "k_scale_bytes", "draft", "states"]),
    VALUES,
)
@example("num_layers", np.int64(2))
def test_any_value_for_any_field_of_a_model(name: str, value: Any) -> None:
    fields: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "k_dim": 8, "v_dim": 8, "dtype_bytes": 2, name: value}
    try:
        shape = ModelShape(**fields)
    except LayoutError:
        return
    assert {type(number) for number in (shape.num_layers, shape.num_kv_heads, shape.k_scale_bytes)} == {int}


@EXAMPLES
@given(st.sampled_from(["name", "layers", "rows", "heads", "head_bytes"]), VALUES)
def test_any_value_for_any_field_of_a_states_shape(name: str, value: Any) -> None:
    fields: dict[str, Any] = {"name": "conv", "layers": (0, 1), "rows": 1, "heads": 1, "head_bytes": 8, name: value}
    try:
        shape = StateShape(**fields)
    except LayoutError:
        return
    assert {type(number) for number in (*shape.layers, shape.rows, shape.heads, shape.head_bytes)} == {int}


@pytest.mark.parametrize("page_size", [0, -16, 16.0, True, "16", None])
def test_a_page_size_is_named(page_size: Any) -> None:
    with pytest.raises(KvctlError, match=f"page_size is {page_size!r}: it must be a whole number from 1"):
        KVPool.from_tensors(rows(), rows(), page_size=page_size, total_kv_heads=2)
