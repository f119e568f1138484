"""Calls of NIXL's native code that the control loop makes for every room keep the GIL; those that connect do not."""

from __future__ import annotations

import pytest

from kvctl_agent.transport.base import Write
from kvctl_agent.transport.nixl.native_requests import BUILT
from tests.kvctl_agent.transport.conftest import Pair, sizes
from tests.support.gil import gave_up_the_gil

pytestmark = [
    pytest.mark.skipif(not BUILT, reason="kvctl was built without a C++ compiler"),
    pytest.mark.parametrize("engine", ["nixl"], indirect=True, scope="module"),
]
_TAGS, _WRITES = 3000, 100  # so many that a release of the GIL is seen
_ATTEMPTS = 20  # where other processes have the cores, no thread may wake up in time for any of them


def test_tags_are_sent_with_the_gil(pair: Pair) -> None:
    agent, peer = pair
    agent.transport.tell("peer", b"first")
    peer.collect(1)

    def tell() -> None:
        for number in range(_TAGS):
            agent.transport.tell("peer", b"%d" % number)

    assert not gave_up_the_gil(tell)
    assert [arrival["tag"] for arrival in peer.collect(_TAGS)] == [(b"%d" % number).hex() for number in range(_TAGS)]


def test_small_writes_are_posted_and_polled_with_the_gil(pair: Pair) -> None:
    transport, here, there = pair.agent.transport, pair.agent.at(0, 4096), pair.peer.at(0, 4096)
    writes: list[Write] = []

    def write() -> None:
        for _ in range(_WRITES):
            writes.append(transport.write("peer", here, there, sizes(512, 2), b"small"))
            writes[-1].poll()

    assert not gave_up_the_gil(write)
    for each in writes:
        pair.agent.finish(each)
    assert [arrival["tag"] for arrival in pair.peer.collect(_WRITES)] == [b"small".hex()] * _WRITES


def test_the_first_tag_to_a_peer_which_connects_ucx_is_sent_without_the_gil(pair: Pair) -> None:
    agent, peer = pair
    known = agent.transport._peer("peer")

    def tell() -> None:
        for number in range(_TAGS):
            known.told = False  # every tag is sent as the first one
            agent.transport.tell("peer", b"%d" % number)

    for _ in range(_ATTEMPTS):
        released = gave_up_the_gil(tell)
        assert known.told
        tags = [arrival["tag"] for arrival in peer.collect(_TAGS)]
        assert tags == [(b"%d" % number).hex() for number in range(_TAGS)]
        if released:
            break
    assert released


def test_the_first_write_to_a_peer_is_posted_without_the_gil(pair: Pair) -> None:
    transport, here, there = pair.agent.transport, pair.agent.at(0), pair.peer.at(0)
    known = transport._peer("peer")
    writes: list[Write] = []

    def write() -> None:
        for _ in range(_TAGS):
            known.reached = False  # every write is posted as the first one
            writes.append(transport.write("peer", here, there, sizes(512), b"small"))

    for _ in range(_ATTEMPTS):
        released = gave_up_the_gil(write)
        for each in writes:
            pair.agent.finish(each)
        writes.clear()
        assert known.reached
        assert [arrival["tag"] for arrival in pair.peer.collect(_TAGS)] == [b"small".hex()] * _TAGS
        if released:
            break
    assert released
