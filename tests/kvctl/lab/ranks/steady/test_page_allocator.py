"""Pages change hands, and nothing that touches one out of turn goes unseen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvctl.lab.ranks.content import allocate_pool
from kvctl.lab.ranks.messages import Start
from kvctl.lab.ranks.pattern import POISON
from kvctl.lab.ranks.request import Load, PlanRequest, Sizes, Tokens
from kvctl.lab.ranks.resolve import make_plan
from kvctl.lab.ranks.steady.page_allocator import PageAllocator
from kvctl_agent.memory.pool import KVPool

PAGES = 24


def start(role: str = "decode", **changes: Any) -> Start:
    plan = make_plan(
        PlanRequest(
            prefill=(Sizes(),),
            decode=Sizes(),
            loads=(Load(1, Tokens(values=(64,))),),
            memory_bytes=1 << 30,
            seed=3,
            layers=2,
            kv_heads=2,
            head_dim=8,
            dtype="bf16",
            kind="mha",
            rooms=1,
            transport="loopback",
        )
    )
    options: dict[str, Any] = {
        "name": role,
        "fleet_dir": "",
        "role": role,
        "instance": 0 if role == "prefill" else -1,
        "unique": 0,
        "prefill": (Sizes(),),
        "bootstraps": ("ipc:///nowhere",),
        "decode": Sizes(),
        "shape": plan["shape"],
        "page_size": 16,
        "page_order": "random",
        "pool_pages": PAGES + 1,
        "state_slots": {},
        "aux_slots": 4,
        "seed": 3,
        **changes,
    }
    return Start(**options)


@pytest.fixture
def pool() -> Iterator[KVPool]:
    memory = allocate_pool(start())
    yield memory
    memory.close()


@pytest.fixture
def tenancy(pool: KVPool) -> PageAllocator:
    return PageAllocator(pool, start(), watch=True)


def page_of(pool: KVPool, page: int, layer: int = 1, plane: int = 0) -> Any:
    block = pool.segments[0].block(layer, plane)
    return block.reshape(PAGES + 1, -1)[page]


def test_rooms_get_pages_of_their_own_and_never_page_0(tenancy: PageAllocator):
    rooms = [tenancy.take(number, number, 70, 0) for number in range(4)]
    pages = [page for room in rooms for page in tenancy.pages(room.number).tolist()]
    assert len(pages) == len(set(pages)) == 4 * 5
    assert 0 not in pages
    assert len({room.slot for room in rooms}) == 4
    with pytest.raises(MemoryError, match="room 9 needs 7 pages, 4 are free"):
        tenancy.take(9, 9, 100, 0)
    for room in rooms:
        tenancy.give_back(room.number)
    tenancy.take(5, 5, 16 * PAGES, 0)  # all of them
    assert tenancy.sweep() == []


def test_what_was_filled_verifies_and_what_was_not_does_not(tenancy: PageAllocator, pool: KVPool):
    tenancy.take(1, 77, 64, 0)
    _, wrong = tenancy.verify(1)
    assert wrong is not None
    assert (wrong["room"], wrong["hint"]) == (1, "never written")
    tenancy.fill(1)
    nbytes, wrong = tenancy.verify(1)
    assert wrong is None
    assert nbytes == 64 * 2 * 2 * 2 * 8 * 2  # tokens, layers, K and V, heads, dim, bytes of an element
    page_of(pool, int(tenancy.pages(1)[2]))[5] ^= 1
    _, wrong = tenancy.verify(1)
    assert wrong is not None
    assert wrong["where"].startswith("layer 1 k token 32")


def test_a_cached_prefix_must_stay_as_it_was(tenancy: PageAllocator, pool: KVPool):
    tenancy.take(1, 77, 64, 32)
    tenancy.fill(1)  # as if the writer had sent what nobody asked for
    _, wrong = tenancy.verify(1)
    assert wrong is not None
    assert wrong["hint"] == "written although no room had it"
    for page in tenancy.pages(1)[:2]:
        for layer in range(2):
            for plane in range(2):
                page_of(pool, int(page), layer, plane)[:] = POISON
    assert tenancy.verify(1)[1] is None


def test_a_write_after_the_release_is_found_by_a_sweep(tenancy: PageAllocator, pool: KVPool):
    tenancy.take(1, 77, 64, 0)
    page = int(tenancy.pages(1)[0])
    tenancy.fill(1)
    tenancy.give_back(1)
    assert tenancy.sweep() == []
    page_of(pool, page)[3] = 0x11
    (stray,) = tenancy.sweep()
    assert stray["where"] == f"layer 1 k page {page} byte 3"
    assert stray["found"] == "11"
    assert tenancy.sweep() == []  # said once


def test_it_is_found_by_the_next_tenant_too(tenancy: PageAllocator, pool: KVPool):
    page_of(pool, 7)[0] = 0x22
    pool.aux[2] = 0  # type: ignore[index]
    for number in range(4):
        tenancy.take(number, number, 96, 0)
    assert {stray["where"].split(" page")[0] for stray in tenancy.sweep()} == {"layer 1 k", "aux row 2"}


def test_a_fleet_that_does_not_verify_looks_at_nothing(pool: KVPool):
    tenancy = PageAllocator(pool, start(), watch=False)
    page_of(pool, 7)[0] = 0x22
    tenancy.take(1, 1, 16 * PAGES, 0)
    assert tenancy.sweep() == []
