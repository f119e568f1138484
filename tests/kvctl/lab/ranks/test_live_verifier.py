"""Pages change owners, and every write to a page without permission is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvctl.lab.ranks.content import Content, allocate_pool
from kvctl.lab.ranks.messages import Mismatch, Room
from kvctl.lab.ranks.verify import LiveVerifier
from kvctl_agent.memory.pool import KVPool
from tests.support.synthetic_rank import SHAPE, start_command

PAGES = 24


START = start_command({**SHAPE, "layers": 2}, page_size=16, pool_pages=PAGES + 1, aux_slots=4)


@pytest.fixture
def pool() -> Iterator[KVPool]:
    memory = allocate_pool(START)
    yield memory
    memory.close()


class Rooms:
    """Rooms of a live rank without an agent."""

    def __init__(self, pool: KVPool, enabled: bool = True) -> None:
        self.content = Content(pool, START)
        self.content.poison()
        self.verifier = LiveVerifier(self.content, enabled)

    def open(self, number: int, index: int, tokens: int, prefix_tokens: int = 0) -> list[int]:
        """Returns the room's pages."""
        self.content.add(Room(index, number, tokens, prefix_tokens))
        self.verifier.opened(number)
        return self.content.pages(number).tolist()

    def fill(self, number: int) -> None:
        self.content.fill_rooms([self.content.rooms[number]])

    def verify(self, number: int) -> tuple[int, Mismatch | None]:
        return self.verifier.verify(number)


@pytest.fixture
def rooms(pool: KVPool) -> Rooms:
    return Rooms(pool)


def page_of(pool: KVPool, page: int, layer: int = 1, plane: int = 0) -> Any:
    block = pool.segments[0].block(layer, plane)
    return block.reshape(PAGES + 1, -1)[page]


def test_what_was_filled_verifies_and_what_was_not_does_not(rooms: Rooms, pool: KVPool):
    pages = rooms.open(1, 77, 64)
    _, wrong = rooms.verify(1)
    assert wrong is not None
    assert (wrong["room"], wrong["hint"]) == (1, "never written")
    rooms.fill(1)
    nbytes, wrong = rooms.verify(1)
    assert wrong is None
    assert nbytes == 64 * 2 * 2 * 2 * 8 * 2  # tokens, layers, K and V, heads, dim, bytes of an element
    page_of(pool, pages[2])[5] ^= 1
    _, wrong = rooms.verify(1)
    assert wrong is not None
    assert wrong["where"].startswith("layer 1 k token 32")


def test_a_cached_prefix_must_stay_as_it_was(rooms: Rooms, pool: KVPool):
    rooms.open(1, 77, 64, 32)
    rooms.fill(1)  # as if the writer had sent the cached prefix as well
    _, wrong = rooms.verify(1)
    assert wrong is not None
    assert wrong["hint"] == "no room owned it"
    assert rooms.verify(1)[1] is None  # reported once


def test_a_write_after_the_release_is_found_by_a_sweep(rooms: Rooms, pool: KVPool):
    page = rooms.open(1, 77, 64)[0]
    rooms.fill(1)
    rooms.content.remove(1)
    assert rooms.verifier.sweep() == []
    page_of(pool, page)[3] = 0x11
    (stray,) = rooms.verifier.sweep()
    assert stray["where"] == f"layer 1 k page {page} byte 3"
    assert stray["found"] == "11"
    assert rooms.verifier.sweep() == []  # reported once


def test_it_is_found_by_the_next_owner_too(rooms: Rooms, pool: KVPool):
    page_of(pool, 7)[0] = 0x22
    pool.aux[0][2] = 0
    for number in range(4):
        rooms.open(number, number, 96)
    assert {stray["where"].split(" page")[0] for stray in rooms.verifier.sweep()} == {"layer 1 k", "aux row 2 byte 0"}


def test_a_fleet_that_does_not_verify_looks_at_nothing(pool: KVPool):
    rooms = Rooms(pool, enabled=False)
    page_of(pool, 7)[0] = 0x22
    rooms.open(1, 1, 16 * PAGES)
    assert rooms.verify(1) == (0, None)
    assert rooms.verifier.sweep() == []
