"""Real processes that die, stop, come back, idle and exit: what the others notice of it, and what is left behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["nixl", "loopback"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def of(rooms: range, target: int) -> list[int]:
    """Rooms that go to one of two decode ranks."""
    return [room for room in rooms if room % 2 == target]


def finish(cluster: Any, rooms: list[int], **waiting: Any) -> None:
    """The rooms end well on every rank, and their bytes are right."""
    for name, answer in cluster.all("wait", "prefill", rooms=rooms, timeout=10).items():
        assert {room["state"] for room in answer["rooms"].values()} == {"SUCCESS"}, (name, answer)
    for name in {cluster.target(room) for room in rooms}:
        mine = [room for room in rooms if cluster.target(room) == name]
        answer = cluster.ranks[name].ask("wait", rooms=mine, timeout=10)
        assert {room["state"] for room in answer["rooms"].values()} == {"SUCCESS"}, (name, answer)
        assert cluster.ranks[name].ask("verify", rooms=mine) == []


def failures(answer: Any) -> list[Any]:
    return [room["error"] for room in answer["rooms"].values() if room["state"] == "FAILED"]


def test_a_killed_decode_rank_fails_its_rooms_and_no_others_and_serves_again(make_cluster: Any, transport: str) -> None:
    cluster = make_cluster(transport).start()
    rooms = range(60)
    waiting = [*range(60, 70)]  # never computed: in flight for certain when it dies
    everything = [*rooms, *waiting]
    cluster.receive(everything)
    cluster.all("claim", "prefill", rooms=everything)
    cluster.all("known", "prefill", rooms=waiting)
    cluster.all("feed", "prefill", rooms=[*rooms])
    dead = cluster.ranks["decode-1"]
    dead.kill()
    since = time.monotonic()
    for name, answer in cluster.all("wait", "prefill", rooms=of(range(70), 1), timeout=8).items():
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
    assert time.monotonic() - since < 3
    finish(cluster, of(rooms, 0))
    cluster.all("feed", "prefill", rooms=of(range(60, 70), 0))
    finish(cluster, of(range(60, 70), 0))

    cluster.launch("decode", 1)
    cluster.ranks["decode-1"].ask("start")
    cluster.ranks["decode-1"].ask("ready", timeout=10)
    again = range(100, 120)
    cluster.receive([*again])
    cluster.all("claim", "prefill", rooms=[*again])
    cluster.all("feed", "prefill", rooms=[*again])
    finish(cluster, [*again])


@pytest.mark.parametrize(("transport", "victim"), [("nixl", 1), ("loopback", 1), ("loopback", 0)])
def test_a_killed_prefill_rank_fails_rooms_everywhere_and_serves_again(
    make_cluster: Any, transport: str, victim: int
) -> None:
    """Rank 0 also hosts the registry."""
    cluster = make_cluster(transport).start()
    rooms, waiting = range(40), [*range(40, 50)]
    everything = [*rooms, *waiting]
    cluster.receive(everything)
    cluster.all("claim", "prefill", rooms=everything)
    cluster.all("known", "prefill", rooms=waiting)
    cluster.all("feed", "prefill", rooms=[*rooms])
    dead = cluster.ranks[f"prefill-{victim}"]
    dead.kill()
    since = time.monotonic()
    answers = [cluster.ranks[f"decode-{dp}"].ask("wait", rooms=of(range(50), dp), timeout=8) for dp in (0, 1)]
    answers.append(cluster.ranks[f"prefill-{1 - victim}"].ask("wait", rooms=waiting, timeout=8))
    assert time.monotonic() - since < 3
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
    again.ask("ready", timeout=10)
    cluster.all("ready", timeout=15)
    more = [*range(100, 120)]
    cluster.receive(more)
    cluster.all("claim", "prefill", rooms=more)
    cluster.all("feed", "prefill", rooms=more)
    finish(cluster, more)


def test_a_stopped_decode_rank_holds_up_nobody_and_goes_on_where_it_was(make_cluster: Any, transport: str) -> None:
    cluster = make_cluster(transport, suspect_s=0.4, lost_s=20.0, heartbeat_s=0.1).start()
    rooms = range(40)
    cluster.receive([*rooms])
    cluster.all("claim", "prefill", rooms=[*rooms])
    stopped = cluster.ranks["decode-1"]
    stopped.signal(signal.SIGSTOP)
    cluster.all("feed", "prefill", rooms=[*rooms])
    since = time.monotonic()
    finish(cluster, of(rooms, 0))
    assert time.monotonic() - since < 5
    deadline = time.monotonic() + 5
    while cluster.ranks["prefill-0"].ask("peers") != {"decode-0": "ready", "decode-1": "suspect"}:
        assert time.monotonic() < deadline
    stopped.signal(signal.SIGCONT)
    finish(cluster, of(rooms, 1))
    assert cluster.ranks["prefill-0"].ask("peers") == {"decode-0": "ready", "decode-1": "ready"}


def test_idle_agents_with_connected_peers_cost_next_to_nothing(make_cluster: Any) -> None:
    cluster = make_cluster("nixl", prefill=1, decode=1).start()
    cluster.receive([1])
    cluster.all("claim", "prefill", rooms=[1])
    cluster.all("feed", "prefill", rooms=[1])
    finish(cluster, [1])
    time.sleep(0.5)
    shares = cluster.all("cpu", seconds=2.0)
    assert all(share < 0.03 for share in shares.values()), shares


class TestExit:
    """Nobody calls close; the process must end at once, with the engine's own exit code and nothing left behind."""

    @pytest.mark.parametrize(
        ("transport", "life"),
        [("nixl", "in flight"), ("loopback", "in flight"), ("loopback", "started"), ("loopback", "made")],
    )
    def test_falling_off_the_end(self, make_cluster: Any, socket_dir: Path, transport: str, life: str) -> None:
        cluster = make_cluster(transport, prefill=1, decode=1)
        ranks = [cluster.launch("prefill", 0), cluster.launch("decode", 0)]
        if life == "made":
            for rank in ranks:
                rank.ask("events")
        else:
            cluster.all("start")
            cluster.all("ready", timeout=20)
        if life == "in flight":
            cluster.receive([1, 2, 3])
            cluster.all("claim", "prefill", rooms=[1, 2, 3, 4])
            cluster.all("feed", "prefill", rooms=[1])
        for rank in ranks:
            code, out, err = rank.end(8)
            assert (code, out, err) == (0, "", ""), rank.name
        cluster.ranks.clear()
        left = [path.name for path in socket_dir.rglob("*") if path.is_socket()]
        assert left == []

    @pytest.mark.parametrize(
        ("transport", "ask", "code"),
        [
            ("nixl", {"do": "exit", "code": 3}, 3),
            ("loopback", {"do": "exit", "code": 3}, 3),
            ("loopback", {"do": "raise"}, 1),
        ],
    )
    def test_its_own_exit_code_is_kept(self, make_cluster: Any, transport: str, ask: dict[str, Any], code: int) -> None:
        cluster = make_cluster(transport, prefill=1, decode=0)
        rank = cluster.launch("prefill", 0)
        rank.ask("start")
        rank.ask("ready", timeout=10)
        rank.ask("claim", rooms=[1])
        rank.tell(**ask)
        ended, out, err = rank.end(8)
        cluster.ranks.clear()
        assert (ended, out) == (code, "")
        assert ("the engine's own" in err) == (code == 1)
