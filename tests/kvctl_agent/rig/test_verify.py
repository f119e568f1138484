"""Verification of a decode rank's pool: right content passes; lost, misplaced, damaged and stray bytes do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvctl_agent.contract.rig import Room, Sizes, Start
from kvctl_agent.rig.content import Content, allocate_pool
from kvctl_agent.rig.pattern import POISON
from kvctl_agent.rig.verify import verify

PAGE = 4


def start(**changes: Any) -> Start:
    wanted: dict[str, Any] = {
        "name": "decode-0",
        "fleet_dir": "",
        "bootstrap": "",
        "role": "decode",
        "unique": 0,
        "prefill": Sizes(tp=2),
        "decode": Sizes(),
        "layers": (0, 3),
        "heads": (0, 2),
        "total_kv_heads": 2,
        "head_dim": 8,
        "dtype_bytes": 2,
        "page_size": PAGE,
        "page_order": "random",
        "pool_pages": 12,
        "aux_slots": 3,
        "seed": 5,
        **changes,
    }
    return Start(**wanted)


def rooms(prefix_tokens: int = 0) -> list[Room]:
    return [
        Room(index=index, number=1000 + index, tokens=tokens, prefix_tokens=prefix_tokens, decode_dp=0, slot=index)
        for index, tokens in enumerate((13, 8))
    ]


@pytest.fixture
def content() -> Iterator[Content]:
    yield from make()


def make(lot: list[Room] | None = None, **changes: Any) -> Iterator[Content]:
    pool = allocate_pool(start(**changes))
    content = Content(pool, start(**changes))
    content.take(lot or rooms())
    content.poison()
    yield content
    pool.close()


def receive(content: Content, skip: int = 0) -> None:
    """What a correct transfer leaves: everything, or all but the first `skip` pages of each room."""
    whole = dict(content.pages)
    content.fill(0)
    for pages in whole.values():
        for layer in range(3):
            for kv in (0, 1):
                content.block(layer, kv).reshape(-1, content.rows.page_bytes)[pages[:skip]] = POISON


@pytest.mark.parametrize("mode", ["full", "sample"])
def test_what_was_sent_in_full_verifies(content: Content, mode: str):
    receive(content)
    report = verify(content, mode)
    assert report["mismatches"] == []
    assert report["rooms"] == 2
    assert (report["bytes"] == 6 * PAGE * 2 * 16 * 6) == (mode == "full")
    assert report["bytes"] > 0


def test_the_pages_of_a_rank_do_not_depend_on_the_run(content: Content):
    before = {number: pages.tolist() for number, pages in content.pages.items()}
    content.take([Room(**{**as_dict(room), "number": room.number + 500}) for room in rooms()])
    assert [pages.tolist() for pages in content.pages.values()] == list(before.values())


def test_what_never_came_is_called_so(content: Content):
    (first, second) = (report for report in verify(content, "full")["mismatches"][:2])
    assert (first["room"], first["layer"], first["kv"], first["token"], first["head"]) == (1000, 0, "K", 0, 0)
    assert first["hint"] == second["hint"] == "never written"


def test_a_swapped_page_is_traced_to_where_it_belongs(content: Content):
    receive(content)
    block = content.block(2, 1).reshape(-1, content.rows.page_bytes)
    here, there = content.pages[1000][1], content.pages[1001][0]
    block[[here, there]] = block[[there, here]]
    report = verify(content, "full")
    assert report["bad_rooms"] == [0, 1]
    assert report["mismatches"][0] == {
        "room": 1000,
        "layer": 2,
        "kv": "V",
        "token": PAGE,
        "head": 0,
        "dim": 0,
        "expected": report["mismatches"][0]["expected"],
        "found": report["mismatches"][0]["found"],
        "hint": "the row of room 1001 layer 2 V token 0 head 0",
    }


def test_swapped_heads_are_found(content: Content):
    receive(content)
    row = content.block(0, 0).reshape(-1, 2, 16)[content.pages[1001][0] * PAGE]
    row[[0, 1]] = row[[1, 0]]
    (wrong,) = verify(content, "full")["mismatches"]
    assert (wrong["room"], wrong["token"], wrong["head"]) == (1001, 0, 0)
    assert wrong["hint"] == "the row of room 1001 layer 0 K token 0 head 1"


def test_a_damaged_byte_is_no_ones_row(content: Content):
    receive(content)
    content.block(1, 0).reshape(-1, 16)[(content.pages[1000][3] * PAGE + 2) * 2 + 1, 5] ^= 1
    (wrong,) = verify(content, "full")["mismatches"]
    assert (wrong["layer"], wrong["token"], wrong["head"], wrong["dim"]) == (1, 14, 1, 2)
    assert len(bytes.fromhex(wrong["found"])) == 2


def test_a_byte_in_a_page_of_nobody_is_a_stray(content: Content):
    receive(content)
    content.block(1, 1)[7] = 0  # page 0
    (wrong,) = verify(content, "full")["mismatches"]
    assert (wrong["kv"], wrong["layer"]) == ("stray", 1)
    assert "V page 0 was owed nothing but was written to" in wrong["hint"]


def test_the_cached_prefix_must_not_be_written():
    for content in make(rooms(prefix_tokens=PAGE)):
        receive(content, skip=1)
        assert verify(content, "full")["mismatches"] == []
        content.block(0, 0).reshape(-1, content.rows.page_bytes)[content.pages[1001][0], 3] = 1
        (wrong,) = verify(content, "full")["mismatches"]
        assert wrong["kv"] == "stray"


def test_aux_rows_are_checked_and_so_are_the_unused_ones(content: Content):
    receive(content)
    content.aux()[1, 9] ^= 255
    content.aux()[2, 4] = 0
    aux, stray = verify(content, "full")["mismatches"]
    assert (aux["room"], aux["kv"], aux["dim"]) == (1001, "aux", 9)
    assert stray["hint"] == "aux row 2 was owed nothing but was written to"


def test_pages_of_a_failed_room_may_hold_anything(content: Content):
    receive(content)
    content.block(0, 0).reshape(-1, content.rows.page_bytes)[content.pages[1000][0]] = 1
    assert verify(content, "full", failed={1000}) == {**verify(content, "full", {1000}), "rooms": 1, "mismatches": []}


def test_a_rank_of_later_layers_and_heads_checks_those():
    for content in make(layers=(3, 6), heads=(1, 2)):
        content.fill(0)
        assert verify(content, "full")["mismatches"] == []
    for content in make(layers=(3, 6), heads=(1, 2)):
        other = Content(content._pool, start(layers=(0, 3), heads=(1, 2)))
        other.take(rooms())
        other.fill(0)
        assert verify(content, "full")["bad_rooms"] == [0, 1]


def test_a_lot_is_filled_once(content: Content):
    content.fill(7)
    content.block(0, 0)[:] = 0
    content.fill(7)
    assert not content.block(0, 0).any()
    content.fill(8)
    assert content.block(0, 0).any()


def as_dict(room: Room) -> dict[str, Any]:
    return {name: getattr(room, name) for name in Room.__slots__}
