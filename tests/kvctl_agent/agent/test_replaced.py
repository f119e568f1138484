"""Processes that are frozen, replaced and go on, and processes that share a name.

The frozen one stands for a paused machine or a node behind a partition: nothing that the others can see proves that it
has ended. Its replacement has a socket directory of its own, as on another host.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.polling import until

ROOMS, WAITING, LATER = [*range(20)], [*range(20, 24)], [*range(100, 140)]

Rank = Any  # a rank_process.py
Launch = Callable[..., Rank]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Everything here is in processes of its own."""


def states(rank: Rank, rooms: list[int], timeout: float = 60.0) -> dict[int, Any]:
    answer = rank.ask("wait", rooms=rooms, timeout=timeout)
    return {int(room): row for room, row in answer["rooms"].items()}


@pytest.mark.parametrize(
    ("transport", "path"),
    [("loopback", "slice"), ("nixl", "staged"), ("mooncake", "staged")],
)
def test_a_frozen_writer_that_was_replaced_writes_into_no_room_that_came_after_it(
    launch: Launch, transport: str, path: str
) -> None:
    config = {"transport": transport, "path": path}
    other, frozen = (launch("prefill", number, **config) for number in (0, 1))
    decode = launch("decode", 0, **config)
    decode.ask("ready", timeout=60)
    decode.ask("receive", rooms=ROOMS + WAITING)
    for rank in (other, frozen):
        rank.ask("claim", rooms=ROOMS + WAITING)
        rank.ask("known", rooms=ROOMS + WAITING)
    frozen.tell("feed", rooms=ROOMS)  # and is frozen while it writes
    frozen.signal(signal.SIGSTOP)
    other.ask("feed", rooms=ROOMS + WAITING)

    replacement = launch("prefill", 1, **config)
    until(lambda: decode.ask("incarnation", peer="prefill-1") == replacement.ask("own_incarnation"), "the replacement")
    until(lambda: decode.ask("peers")["prefill-1"] == "ready", "the replacement's readiness")
    before = states(decode, ROOMS + WAITING, timeout=0.1)  # which waits for pages, too
    assert {before[room]["state"] for room in WAITING} == {"FAILED"}
    assert not any(before[room]["released"] for room in WAITING), "the frozen one may still write to their pages"
    assert decode.ask("quarantined") > 0

    decode.ask("receive", rooms=LATER)
    for rank in (other, replacement):
        rank.ask("claim", rooms=LATER)
        rank.ask("feed", rooms=LATER)
    frozen.signal(signal.SIGCONT)
    after = states(decode, LATER)
    assert {row["state"] for row in after.values()} == {"SUCCESS"}, after
    frozen.hear()
    until(
        lambda: all(row["released"] for row in states(decode, ROOMS + WAITING, 0.1).values()),
        "what the frozen one says",
    )
    assert decode.ask("quarantined") == 0
    succeeded = [room for room, row in states(decode, ROOMS).items() if row["state"] == "SUCCESS"]
    assert decode.ask("verify", rooms=LATER + succeeded) == []
    until(lambda: "was replaced by incarnation" in (frozen.ask("waiting") or ""), "what the registry says")
    assert replacement.ask("waiting") is None
    assert decode.ask("incarnation", peer="prefill-1") == replacement.ask("own_incarnation"), "it does not come back"


def test_ranks_that_were_stopped_together_for_longer_than_lost_s_lose_nobody(launch: Launch) -> None:
    """As on a machine that is suspended, or moved to another one while it runs."""
    writers = [launch("prefill", number, transport="nixl") for number in (0, 1)]
    decode = launch("decode", 0, transport="nixl")
    decode.ask("ready", timeout=60)
    decode.ask("receive", rooms=ROOMS)
    for rank in writers:
        rank.ask("claim", rooms=ROOMS)
        rank.ask("known", rooms=ROOMS)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in (*writers, decode):
            rank.signal(number)
        time.sleep(4.0 if number is signal.SIGSTOP else 0.0)  # lost_s is 3
    for rank in writers:
        rank.ask("feed", rooms=ROOMS)
    rooms = states(decode, ROOMS)
    assert {row["state"] for row in rooms.values()} == {"SUCCESS"}, rooms
    assert decode.ask("verify", rooms=ROOMS) == []


def test_a_second_decode_rank_of_a_name_is_refused_and_the_first_is_served(launch: Launch) -> None:
    writers = [launch("prefill", number, transport="loopback") for number in (0, 1)]
    first = launch("decode", 0, transport="loopback")
    first.ask("ready", timeout=60)
    twin = launch("decode", 0, transport="loopback")
    twin.ask("receive", rooms=[500])
    first.ask("receive", rooms=ROOMS)
    for rank in writers:
        rank.ask("claim", rooms=ROOMS)
        rank.ask("feed", rooms=ROOMS)
    assert {row["state"] for row in states(first, ROOMS).values()} == {"SUCCESS"}
    refused = states(twin, [500])[500]
    assert refused["error"]["code"] == "KV_COMPAT_MISMATCH"
    assert "the name decode-0 is in use at prefill-" in refused["error"]["text"]
    assert f"by process {first.process.pid} on" in refused["error"]["text"]
    assert "refuses this rank: the name decode-0 is in use" in twin.ask("waiting")
    assert any("name decode-0 is in use" in text for text in writers[0].ask("events"))

    first.kill()
    until(lambda: set(twin.ask("peers").values()) == {"ready"}, "that the name is free")
    twin.ask("receive", rooms=LATER)
    for rank in writers:
        rank.ask("claim", rooms=LATER)
        rank.ask("feed", rooms=LATER)
    assert {row["state"] for row in states(twin, LATER).values()} == {"SUCCESS"}
    assert twin.ask("verify", rooms=LATER) == []


@pytest.mark.parametrize("noticed", [False, True])
def test_a_prefill_instance_that_restarts_at_another_registry(make_cluster: Any, noticed: bool) -> None:
    """As with a registry on a random port: the engine learns the new endpoint and disconnects the former one."""
    cluster = make_cluster(prefill=2, decode=1).start()
    former, successor = cluster.bootstrap, f"{cluster.bootstrap}-2"
    decode = cluster.ranks["decode-0"]
    open_rooms, rooms = [1, 2, 3], [11, 12, 13]
    cluster.receive(open_rooms)
    cluster.all("claim", "prefill", rooms=open_rooms)
    cluster.all("known", "prefill", rooms=open_rooms)
    for rank in cluster.of("prefill"):
        rank.kill()
    if noticed:
        decode.ask("wait", rooms=open_rooms, timeout=60)
    cluster.bootstrap = successor
    for number in range(2):
        cluster.launch("prefill", number).ask("start")
    decode.ask("disconnect", prefill=former)
    decode.ask("receive", rooms=rooms, prefill=successor)
    cluster.all("claim", "prefill", rooms=rooms)
    cluster.all("feed", "prefill", rooms=rooms)
    answer = decode.ask("wait", rooms=rooms, timeout=60)
    assert {room["state"] for room in answer["rooms"].values()} == {"SUCCESS"}, answer
    assert decode.ask("verify", rooms=rooms) == []
    failed = decode.ask("wait", rooms=open_rooms, timeout=60)["rooms"].values()
    assert {room["error"]["code"] for room in failed} == {"KV_PEER_LOST"}
    assert (decode.ask("serving"), decode.ask("waiting")) == ([successor], None)
    assert decode.ask("peers") == {"prefill-0": "ready", "prefill-1": "ready"}
    until(
        lambda: all(room["released"] for room in decode.ask("wait", rooms=open_rooms, timeout=0)["rooms"].values()),
        "the processes have ended, so nothing of them is in flight",
    )
    assert decode.ask("quarantined") == 0
    Path(former.removeprefix("ipc://")).unlink()  # of the killed ranks
