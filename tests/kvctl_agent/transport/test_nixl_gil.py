"""Calls of NIXL's native code that the control loop makes for every room keep the GIL; those that connect do not."""

from __future__ import annotations

from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvctl_agent.native.nixl_requests import WriteRequests
from kvctl_agent.transport.nixl.native_requests import UNLIMITED_NS, NativeWrite
from tests.kvctl_agent.transport.conftest import Pair, sizes
from tests.support.gil import releases_the_gil

pytestmark = pytest.mark.parametrize("engine", ["nixl"], indirect=True, scope="module")
_CALLS = 1000


def tags(prefix: str) -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(_CALLS)]


def test_tags_are_sent_with_the_gil_but_the_first_to_a_peer_which_connects_ucx(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, peer = pair.agent.transport, pair.peer
    known, native = transport._peer("peer"), transport._native
    called: list[str] = []
    spy = {name: lambda *args, name=name: called.append(name) or 0 for name in ("tell", "reach")}
    with monkeypatch.context() as patch:
        patch.setattr(transport, "_native", SimpleNamespace(**spy))
        known.told = False
        transport.tell("peer", b"one")
        transport.tell("peer", b"two")
    assert called == ["reach", "tell"]
    sent = {name: [transport._slices.whole(tag) for tag in tags(name)] for name in called}
    assert releases_the_gil(map(native.reach, repeat(known.engine_name), sent["reach"]))
    assert not releases_the_gil(map(native.tell, repeat(known.engine_name), sent["tell"]))
    arrived = [bytes.fromhex(arrival["tag"]) for arrival in peer.collect(_CALLS + 1)]
    assert arrived[-_CALLS:] == tags("tell")
    assert arrived[:-_CALLS] == tags("reach")[: len(arrived) - _CALLS]


def test_small_writes_are_posted_and_polled_with_the_gil_but_the_first_to_a_peer(pair: Pair) -> None:
    transport, nbytes = pair.agent.transport, sizes(512, 2)
    known = transport._peer("peer")
    described = transport._described(known, pair.agent.at(0, 4096), pair.peer.at(0, 4096), nbytes)
    whole = [slice(0, None)], [transport._slices.whole(b"small")]

    def made() -> list[NativeWrite]:
        return [transport._native_write(known, described, 1024, *whole, UNLIMITED_NS) for _ in range(_CALLS)]

    first, others = made(), made()
    posted: list[bool] = []
    given, first[0]._requests = first[0]._requests, cast(Any, SimpleNamespace(post=posted.append, error=0))
    known.reached = False
    first[0].post()
    known.reached = True
    first[0].post()
    assert posted == [False, True]
    first[0]._requests = given
    known.reached = False
    assert releases_the_gil(map(WriteRequests.post, requests(first), repeat(False)))
    assert not releases_the_gil(map(WriteRequests.post, requests(others), repeat(True)))
    assert not releases_the_gil(map(WriteRequests.poll, requests(others)))
    for each in first:
        each.stop()  # those after the one that has released the GIL are not posted
    writes = [each for each in first if each.post_ns] + others
    for each in writes:
        pair.agent.finish(each)
    assert all(each.release() for each in first)
    assert known.reached
    assert [arrival["tag"] for arrival in pair.peer.collect(len(writes))] == [b"small".hex()] * len(writes)


def requests(writes: list[NativeWrite]) -> list[Any]:
    return [each._requests for each in writes if each._requests is not None]
