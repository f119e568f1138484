"""Conversion of integers of any type, and formatting of values, text and layer ranges."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.contract.values import encodable, integer, layer_range, shown


class Slot(IntEnum):
    THREE = 3


class Broken:
    """An object without a working repr."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __index__(self) -> int:
        raise RuntimeError("no")


class OnGpu:
    __cuda_array_interface__: ClassVar[dict[str, Any]] = {}

    def __index__(self) -> int:
        raise AssertionError("reading it would wait for the device")


@pytest.mark.parametrize("three", [3, Slot.THREE, np.int8(3), np.uint64(3), np.array(3)])
def test_integers_of_any_type_become_an_int(three: object) -> None:
    assert integer(three) == 3
    assert type(integer(three)) is int


def test_tensors_of_one_integer_become_an_int() -> None:
    torch = pytest.importorskip("torch")
    assert integer(torch.tensor(3)) == 3
    assert integer(torch.tensor(True)) is None
    assert integer(torch.tensor(3.0)) is None
    assert integer(torch.tensor([3, 4])) is None


@pytest.mark.parametrize(
    "other",
    [
        True,
        np.bool_(True),
        np.array(True),
        3.0,
        np.float32(3),
        "3",
        b"3",
        None,
        [3],
        np.array([3, 4]),
        3j,
        Broken(),
        OnGpu(),
    ],
    ids=lambda other: type(other).__name__,
)
def test_everything_else_is_no_integer(other: object) -> None:
    assert integer(other) is None


@pytest.mark.parametrize(
    "value",
    [10**5000, Broken(), "x" * 1000, list(range(1000)), "a\nb", "\ud800", np.zeros((5, 5))],
    ids=["digits", "broken", "long", "list", "lines", "surrogate", "array"],
)
def test_a_value_is_shown_on_one_short_line(value: object) -> None:
    text = shown(value)
    assert len(text) <= 63
    assert text.isprintable()


@given(st.text(st.characters()))
def test_text_is_the_same_unless_it_cannot_be_encoded(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        assert encodable(text).encode()
    else:
        assert encodable(text) == text


def test_lone_surrogates_are_escaped() -> None:
    assert encodable("client said \ud800, é") == "client said \\ud800, é"


def test_layer_ranges_include_both_ends() -> None:
    assert [layer_range(0, 4), layer_range(3, 4), layer_range(5, 5)] == ["0-3", "3", "[5, 5)"]
