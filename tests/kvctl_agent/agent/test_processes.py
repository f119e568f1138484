"""Real processes that die, stop, come back and idle: what the others notice of it."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Ranks come and go here while the cluster stays; it checks at its end that each one ended cleanly."""


def of(rooms: range, target: int) -> list[int]:
    """Rooms that go to one of two decode ranks."""
    return [room for room in rooms if room % 2 == target]


def finish(cluster: Any, rooms: list[int]) -> None:
    """The rooms end well on every rank, and their bytes are right."""
    for name, answer in cluster.all("wait", "prefill", rooms=rooms, timeout=60).items():
        assert {room["state"] for room in answer["rooms"].values()} == {"SUCCESS"}, (name, answer)
    for name in {cluster.target(room) for room in rooms}:
        mine = [room for room in rooms if cluster.target(room) == name]
        answer = cluster.ranks[name].ask("wait", rooms=mine, timeout=60)
        assert {room["state"] for room in answer["rooms"].values()} == {"SUCCESS"}, (name, answer)
        assert cluster.ranks[name].ask("verify", rooms=mine) == []


def peers(cluster: Any, wanted: dict[str, str]) -> None:
    """Waits until the first prefill rank sees its peers so."""
    deadline = time.monotonic() + 60
    while (seen := cluster.ranks["prefill-0"].ask("peers")) != wanted:
        assert time.monotonic() < deadline, seen
        time.sleep(0.02)


def failures(answer: Any) -> list[Any]:
    return [room["error"] for room in answer["rooms"].values() if room["state"] == "FAILED"]


def test_a_killed_decode_rank_fails_its_rooms_and_no_others_and_serves_again(cluster: Any) -> None:
    rooms = range(60)
    waiting = [*range(60, 70)]  # never computed: in flight for certain when it dies
    everything = [*rooms, *waiting]
    cluster.receive(everything)
    cluster.all("claim", "prefill", rooms=everything)
    cluster.all("known", "prefill", rooms=waiting)
    cluster.all("feed", "prefill", rooms=[*rooms])
    dead = cluster.ranks["decode-1"]
    dead.kill()
    for name, answer in cluster.all("wait", "prefill", rooms=of(range(70), 1), timeout=60).items():
        failed = failures(answer)
        assert len(failed) >= 5, (name, answer)
        for error in failed:
            assert "decode-1" in error["text"]
        for room in of(range(60, 70), 1):  # the others may have met the death on their way
            error = answer["rooms"][str(room)]["error"]
            assert error["code"] == "KV_PEER_LOST"
            assert "peer decode-1 (incarnation" in error["text"]
            assert f"lost: process {dead.process.pid} has ended" in error["text"]
        assert all(room["released"] for room in answer["rooms"].values()), "its process is gone, nothing is in flight"
    finish(cluster, of(rooms, 0))
    cluster.all("feed", "prefill", rooms=of(range(60, 70), 0))
    finish(cluster, of(range(60, 70), 0))

    cluster.launch("decode", 1)
    cluster.ranks["decode-1"].ask("start")
    cluster.ranks["decode-1"].ask("ready", timeout=60)
    again = range(100, 120)
    cluster.receive([*again])
    cluster.all("claim", "prefill", rooms=[*again])
    cluster.all("feed", "prefill", rooms=[*again])
    finish(cluster, [*again])


@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_prefill_rank_fails_rooms_everywhere_and_serves_again(cluster: Any, victim: int) -> None:
    """Rank 0 also hosts the registry."""
    rooms, waiting = range(200, 240), [*range(240, 250)]
    everything = [*rooms, *waiting]
    cluster.receive(everything)
    cluster.all("claim", "prefill", rooms=everything)
    cluster.all("known", "prefill", rooms=waiting)
    cluster.all("feed", "prefill", rooms=[*rooms])
    dead = cluster.ranks[f"prefill-{victim}"]
    dead.kill()
    answers = [cluster.ranks[f"decode-{dp}"].ask("wait", rooms=of(range(200, 250), dp), timeout=60) for dp in (0, 1)]
    answers.append(cluster.ranks[f"prefill-{1 - victim}"].ask("wait", rooms=waiting, timeout=60))
    for answer in answers:
        failed = failures(answer)
        assert len(failed) >= 5
        for error in failed:
            assert f"peer prefill-{victim} (incarnation" in error["text"]
            assert f"process {dead.process.pid} has ended" in error["text"]
        assert all(room["released"] for room in answer["rooms"].values())

    cluster.launch("prefill", victim)
    again = cluster.ranks[f"prefill-{victim}"]
    again.ask("start")
    again.ask("ready", timeout=60)
    cluster.all("ready", timeout=60)
    more = [*range(300, 320)]
    cluster.receive(more)
    cluster.all("claim", "prefill", rooms=more)
    cluster.all("feed", "prefill", rooms=more)
    finish(cluster, more)


def test_a_stopped_decode_rank_holds_up_nobody_and_goes_on_where_it_was(cluster: Any) -> None:
    rooms = range(400, 440)
    cluster.receive([*rooms])
    cluster.all("claim", "prefill", rooms=[*rooms])
    stopped = cluster.ranks["decode-1"]
    stopped.signal(signal.SIGSTOP)
    cluster.all("feed", "prefill", rooms=[*rooms])
    finish(cluster, of(rooms, 0))  # or it would not end before the stopped one goes on
    peers(cluster, {"decode-0": "ready", "decode-1": "suspect"})
    stopped.signal(signal.SIGCONT)
    finish(cluster, of(rooms, 1))
    peers(cluster, {"decode-0": "ready", "decode-1": "ready"})


def test_idle_agents_with_connected_peers_cost_next_to_nothing(cluster: Any, at_best: Any) -> None:
    for rank in cluster.ranks.values():
        at_best(lambda rank=rank: rank.ask("cpu", seconds=0.5), 0.03)
