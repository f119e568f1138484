"""The content pattern: what it must be, and that no wrong byte, row or place escapes it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.lab.ranks.pattern import POISON, PlaneId, Rows, Source, Writer, aux_row, constants, row_bases, trace
from kvctl_agent.layout.parallel import mix64

MASK = 2**64 - 1


def oracle(seed: int, room: int, sheet: PlaneId, at: int, head: int, row_bytes: int) -> bytes:
    """One row by plain integer loops, from the definition in the module's docstring."""
    start = mix64(mix64(seed) ^ mix64(room + 1))
    base = mix64((start + at * 0x9E3779B97F4A7C15 + head * 0xD1B54A32D192ED03) & MASK) | 1
    first = mix64(sheet.segment * 2**40 + sheet.layer * 2**8 + sheet.plane + 1)
    words = []
    for word in range(-(-row_bytes // 8)):
        constant = mix64((first + word * 0x9E3779B97F4A7C15) & MASK) | 1
        words.append((base * constant & MASK).to_bytes(8, "little"))
    return b"".join(words)[:row_bytes]


rows_strategy = st.builds(
    Rows,
    per_page=st.integers(1, 5),
    head_lo=st.integers(0, 9),
    heads=st.integers(1, 4),
    row_bytes=st.integers(1, 40),
    element_bytes=st.just(1),
)
sheets = st.builds(PlaneId, segment=st.integers(0, 17), layer=st.integers(0, 200), plane=st.integers(0, 3))


@given(rows=rows_strategy, count=st.integers(1, 6), seed=st.integers(0, MASK), data=st.data())
@settings(max_examples=60)
def test_fill_writes_what_the_definition_says(rows: Rows, count: int, seed: int, data: st.DataObject):
    room, sheet = data.draw(st.integers(0, 2**40)), data.draw(sheets)
    dense = np.full((count, rows.page_bytes), POISON, dtype=np.uint8)
    bases = row_bases(seed, room, count * rows.per_page, rows.head_lo, rows.heads)

    Writer(rows).fill(dense, bases, sheet)

    view = dense.reshape(count * rows.per_page, rows.heads, rows.row_bytes)
    for row, head in np.ndindex(view.shape[:2]):
        want = oracle(seed, room, sheet, row, rows.head_lo + head, rows.row_bytes)
        assert view[row, head].tobytes() == want
    assert Writer(rows).check(dense, bases, sheet) is None


@given(rows=rows_strategy, data=st.data())
@settings(max_examples=60)
def test_any_single_wrong_bit_is_found_where_it_is(rows: Rows, data: st.DataObject):
    bases = row_bases(1, 2, 5 * rows.per_page, rows.head_lo, rows.heads)
    dense = np.zeros((5, rows.page_bytes), dtype=np.uint8)
    writer = Writer(rows)
    writer.fill(dense, bases, PlaneId(0, 3, 1))
    at, slot = data.draw(st.integers(0, 4)), data.draw(st.integers(0, rows.per_page - 1))
    head, dim = data.draw(st.integers(0, rows.heads - 1)), data.draw(st.integers(0, rows.row_bytes - 1))
    view = dense.reshape(5, rows.per_page, rows.heads, rows.row_bytes)
    view[at, slot, head, dim] ^= 1 << data.draw(st.integers(0, 7))

    wrong = writer.check(dense, bases, PlaneId(0, 3, 1))

    assert wrong is not None
    assert (wrong.at, wrong.head, wrong.dim) == (at * rows.per_page + slot, rows.head_lo + head, dim)
    assert wrong.found == view[at, slot, head, dim].tobytes()
    assert wrong.expected != wrong.found


def test_dims_are_counted_in_elements():
    rows = Rows(per_page=2, head_lo=0, heads=1, row_bytes=16, element_bytes=2)
    bases = row_bases(0, 0, 2, 0, 1)
    dense = np.zeros((1, rows.page_bytes), dtype=np.uint8)
    writer = Writer(rows)
    writer.fill(dense, bases, PlaneId(0, 0, 0))
    dense[0, 16 + 7] ^= 0xFF  # token 1, element 3, its second byte
    wrong = writer.check(dense, bases, PlaneId(0, 0, 0))
    assert wrong is not None
    assert (wrong.at, wrong.dim, len(wrong.expected), len(wrong.found)) == (1, 3, 2, 2)


def test_a_tail_of_the_prompt_is_checked_at_its_place():
    rows = Rows(per_page=4, head_lo=2, heads=2, row_bytes=8, element_bytes=1)
    bases = row_bases(5, 6, 12, 2, 2)
    dense = np.zeros((3, rows.page_bytes), dtype=np.uint8)
    writer = Writer(rows)
    writer.fill(dense, bases, PlaneId(0, 0, 0))
    assert writer.check(dense[1:], bases, PlaneId(0, 0, 0), first_page=1) is None
    dense[2, 0] ^= 1
    wrong = writer.check(dense[1:], bases, PlaneId(0, 0, 0), first_page=1)
    assert wrong is not None
    assert (wrong.at, wrong.head, wrong.dim) == (8, 2, 0)


def test_a_misplaced_row_is_traced_to_where_it_belongs():
    every = [PlaneId(2, layer, plane) for layer in range(32) for plane in (0, 1)]
    row = oracle(7, 12, PlaneId(2, 5, 1), at=33, head=3, row_bytes=32)
    rooms = {11: 64, 12: 64}
    assert trace(row, 7, rooms, 8, every) == Source(room=12, plane=PlaneId(2, 5, 1), at=33, head=3)
    assert trace(bytes([POISON]) * 32, 7, rooms, 8, every) is None


def test_aux_rows_differ_by_room_and_seed():
    rows = {aux_row(seed, room, 20).tobytes() for seed in (0, 1) for room in range(10)}
    assert len(rows) == 20
    assert all(len(row) == 20 for row in rows)


def test_constants_cannot_be_changed_by_a_caller():
    with pytest.raises(ValueError, match="read-only"):
        constants(PlaneId(0, 0, 0), 4)[0] = 1
