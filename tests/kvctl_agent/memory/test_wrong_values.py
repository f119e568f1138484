"""Pools and model shapes of arbitrary values: either valid integers, or an error that names the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import KvctlError
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


def rows(layers: int = 2, dim: int = 8) -> list[np.ndarray]:
    return [np.zeros((32, 2, dim), np.float16) for _ in range(layers)]


def pool_of(**fields: Any) -> KVPool:
    return KVPool.from_tensors(**{"k": rows(), "v": rows(), "page_size": 16, "total_kv_heads": 2, **fields})


def state_of(**fields: Any) -> KVPool:
    return pool_of(state=[StateTensors(**fields)])


MODEL = {"num_layers": 2, "num_kv_heads": 2, "k_dim": 8, "v_dim": 8, "dtype_bytes": 2, "kind": "mha"}
STATE = {"name": "conv", "layers": (0, 1), "rows": 1, "heads": 1, "head_bytes": 8}
TENSORS = {"name": "conv", "tensors": [np.zeros((4, 2, 3), np.float16)], "layers": None}
BUFFER = {"address": 4096, "nbytes": 24, "item_bytes": 6, "shape": (6,), "dtype_bytes": 1}
# What is made of fields, their right values, and other fields that may be wrong, too.
MADE: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "pool": (pool_of, {"k": None, "page_size": 16, "total_kv_heads": 2}, ["v", "aux", "k_scale", "draft", "state"]),
    "heads of state": (state_of, {**TENSORS, "heads": 2, "axis": 1}, []),
    "state": (state_of, TENSORS, []),
    "buffer": (
        lambda **fields: state_of(name="conv", tensors=[Buffer(**fields)]), BUFFER, ["strides", "offset", "gpu"]
    ),
    "draft": (
        lambda **fields: pool_of(draft=DraftKV(**{"k": rows(1), "v": rows(1), **fields})),
        {"total_kv_heads": 2}, ["k", "v", "k_scale", "v_scale"],
    ),
    "model": (ModelShape, MODEL, ["k_scale_bytes", "draft", "states"]),
    "shape of state": (StateShape, STATE, []),
}  # fmt: skip


def numbers_of(shape: Any) -> list[Any]:
    """Returns the numbers of a model, with those of its states, or of one state."""
    if isinstance(shape, StateShape):
        return [*shape.layers, shape.rows, shape.heads, shape.head_bytes]
    own = [shape.num_kv_heads, shape.num_layers, shape.k_dim, shape.v_dim, shape.dtype_bytes, shape.k_scale_bytes]
    return own + [number for state in shape.states for number in numbers_of(state)]


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.parametrize("what", MADE)
def test_any_value_for_any_field(what: str, data: st.DataObject) -> None:
    make, fields, more = MADE[what]
    fields = {name: value for name, value in fields.items() if value is not None}
    fields[data.draw(st.sampled_from([*MADE[what][1], *more]))] = data.draw(VALUES)
    try:
        made = make(**fields)
        shape = made.shape() if isinstance(made, KVPool) else made
    except KvctlError:
        return
    assert {type(number) for number in numbers_of(shape)} == {int}
    if isinstance(made, KVPool):
        assert type(made.page_size) is int
        made.close()


@pytest.mark.parametrize("heads", [0, np.array([1, 2])])
def test_kv_heads_are_a_positive_number(heads: Any) -> None:
    with pytest.raises(KvctlError, match="total_kv_heads is "):
        pool_of(total_kv_heads=heads)


@pytest.mark.parametrize("page_size", [0, -16, 16.0, True, "16", None])
def test_a_page_size_is_named(page_size: Any) -> None:
    with pytest.raises(KvctlError, match=f"page_size is {page_size!r}: it must be a whole number from 1"):
        KVPool.from_tensors(rows(), rows(), page_size=page_size, total_kv_heads=2)
