"""Memory of a decode rank: one room at a time may be written to each page, aux row and item."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.protocol.events import Pages
from kvctl_agent.runtime.page_owners import PageOwners

KINDS = [("page", 12), ("aux row", 4), ("item of state conv", 3)]


def numbers(*values: int) -> Pages:
    return np.array(values, np.int32)


@pytest.fixture
def memory() -> PageOwners:
    return PageOwners(KINDS)


def test_a_number_that_is_given_twice_is_refused_and_takes_nothing(memory: PageOwners) -> None:
    with pytest.raises(LocalProtocolError, match="room 7: page 3 is given twice"):
        memory.claim(7, (numbers(1, 3, 5, 3), numbers(0)))
    memory.claim(8, (numbers(1, 3, 5), numbers(0)))


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.lists(st.integers(0, 11), max_size=5), st.integers(0, 4)),
        max_size=30,
    )
)
def test_it_does_as_a_dictionary_would(steps: list[tuple[int, bool, list[int], int]]) -> None:
    memory = PageOwners(KINDS)
    owners: dict[tuple[int, int], int] = {}
    for room, takes, pages, row in steps:
        rows = [row] if row < 4 else []
        mine = {key for key, owner in owners.items() if owner == room}
        if mine or not takes:
            memory.release(room)
            for key in mine:
                del owners[key]
            continue
        wanted = [(0, page) for page in pages] + [(1, each) for each in rows]
        if len(set(wanted)) < len(wanted) or owners.keys() & set(wanted):
            with pytest.raises(LocalProtocolError):
                memory.claim(room, (numbers(*pages), numbers(*rows)))
        else:
            memory.claim(room, (numbers(*pages), numbers(*rows)))
            owners.update(dict.fromkeys(wanted, room))


@pytest.mark.parametrize(("count", "below"), [(64, 0.05), (4096, 0.3)])
def test_it_costs_little_of_a_look_at_the_whole_pool(
    at_best: Callable[[Callable[[], float], float], None], count: int, below: float
) -> None:
    """Compared with such a look in the same process: 4,096 random pages take 30 to 240 us, depending on the machine."""
    memory, pool = PageOwners([("page", 1 << 22)]), np.zeros(1 << 22, np.int32)
    pool.fill(0)  # pages that were never written share one page of memory
    pages = np.random.default_rng(1).permutation(1 << 22)[:count].astype(np.int32)

    def once() -> float:
        began = time.process_time()
        for _ in range(100):
            memory.claim(7, (pages,))
            memory.release(7)
        claimed = time.process_time()
        for _ in range(20):
            pool.any()
        return (claimed - began) / 100 / ((time.process_time() - claimed) / 20)

    at_best(once, below)
