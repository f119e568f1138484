"""Scaling of presets: the order of the sizes, the limits, and the note."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvctl.lab.bench.scale import Geometry, Limits, fit, published, scaling_note
from kvctl.lab.ranks.request import Load, Tokens

WHOLE = Geometry(32, 8, 128)
LEAST = {"layers": 4, "kv_heads": 2, "head_dim": 64, "tokens": 64}
MIB = 1 << 20


def loads(divisor: int) -> Sequence[Load]:
    return [Load(4, Tokens(values=(1024 // divisor,)), 8)]


def fitted(memory_bytes: int, moved_bytes: int, least: Any = LEAST, in_flight: int = 99) -> Geometry:
    return fit(WHOLE, least, loads, 2, "bf16", Limits(memory_bytes, moved_bytes, in_flight))


def test_what_fits_stays_as_it_was_published():
    assert fitted(1 << 40, 1 << 40) == WHOLE
    assert scaling_note("stress", WHOLE, WHOLE) == ""


def test_layers_go_first_then_heads_then_dims_then_tokens():
    # 128 KiB a token: 4 rooms of 1,024 on two sides are 1 GiB.
    assert fitted(800 * MIB, 1 << 40) == Geometry(16, 8, 128)
    assert fitted(100 * MIB, 1 << 40) == Geometry(4, 4, 128)
    assert fitted(30 * MIB, 1 << 40) == Geometry(4, 2, 64)
    assert fitted(15 * MIB, 1 << 40) == Geometry(4, 2, 64, tokens=2)


def test_bytes_to_be_moved_count_too():
    # 8 rooms, twice: 2 GiB.
    assert fitted(1 << 40, 600 * MIB) == Geometry(8, 8, 128)


def test_of_many_in_flight_only_some_must_fit():
    assert fitted(800 * MIB, 1 << 40, in_flight=2) == WHOLE


def test_there_is_an_end_to_it():
    assert fitted(0, 0) == Geometry(4, 2, 64, tokens=16)


def test_what_is_not_named_stays():
    assert fitted(0, 0, {"layers": 16}) == Geometry(16, 8, 128)


def test_people_are_told_what_was_scaled():
    assert scaling_note("stress", WHOLE, Geometry(4, 8, 64, 2)) == (
        "stress is scaled to this machine: 4 of 32 layers, 64 of 128 head dim, 1/2 of the prompt lengths; options on "
        "the command line replace the preset's"
    )


def test_the_published_geometry_is_the_models_with_what_was_given():
    assert published(None, {}) == WHOLE
    assert published("llama-3.1-70b", {"layers": 8}) == Geometry(8, 8, 128)
    assert published("nobody-knows", {}) is None
    assert published("deepseek-r1", {}) is None
