"""A worker that never calls close: it ends at once, with its own exit status, leaves nothing behind, and its peers hear
of it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

EXIT_S = 60.0
AT_ONCE_S = 12.0  # a Bye, or the look for dead processes; silence would take 15 s


class Way(NamedTuple):
    """How a process ends: what is done to it, its exit status, what it then says on stderr, and whether it could clean
    up behind itself."""

    do: Callable[[Any], Any]
    status: int
    says: str = ""
    cleans: bool = True


def fork(rank: Any) -> None:
    """A forked child ends as processes do, and its parent goes on."""
    assert rank.ask("fork", code=5) == 5


WAYS = {
    "the end of main": Way(lambda rank: None, 0),
    "sys.exit": Way(lambda rank: rank.tell("exit", code=3), 3),
    "an exception": Way(lambda rank: rank.tell("raise"), 1, "RuntimeError: the engine's own"),
    "sys.exit in a thread": Way(lambda rank: rank.ask("exit_thread", code=4), 0),
    "SIGINT": Way(lambda rank: rank.signal(signal.SIGINT), -signal.SIGINT, "KeyboardInterrupt"),
    "SIGTERM": Way(lambda rank: rank.signal(signal.SIGTERM), -signal.SIGTERM, cleans=False),
    "after a fork": Way(fork, 0),
}
FEW = ("the end of main", "SIGINT", "after a fork")
CASES = [
    *(("nixl", "prefill", way) for way in WAYS),
    *(("nixl", "decode", way) for way in FEW),
    ("mooncake", "decode", "SIGINT"),
]
OTHER = {"prefill": "decode", "decode": "prefill"}


@pytest.fixture(scope="module")
def survivors(make_pair: Any) -> Iterator[Callable[[str, str], Any]]:
    """By transport and role that ends: a cluster in which the other role outlives one victim after the other."""
    clusters: dict[tuple[str, str], Any] = {}

    def get(transport: str, role: str) -> Any:
        if (transport, role) not in clusters:
            clusters[transport, role] = make_pair(transport)
            clusters[transport, role].launch(OTHER[role], 0).ask("start")
        return clusters[transport, role]

    yield get
    for cluster in clusters.values():
        cluster.close()
        left = [path.name for path in cluster.directory.rglob("*") if path.is_socket()]
        assert left == []


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """The survivors outlive each test."""


@pytest.mark.parametrize(("transport", "role", "way"), CASES)
def test_with_rooms_in_flight(survivors: Any, transport: str, role: str, way: str) -> None:
    cluster, how = survivors(transport, role), WAYS[way]
    victim, survivor = cluster.launch(role, 0), cluster.of(OTHER[role])[0]
    victim.ask("start")
    cluster.all("ready", timeout=60)
    first = 100 * (1 + CASES.index((transport, role, way)))
    rooms = [first, first + 1, first + 2]
    cluster.receive(rooms)
    cluster.all("claim", "prefill", rooms=rooms)
    cluster.all("known", "prefill", rooms=rooms)
    cluster.all("feed", "prefill", rooms=rooms[:1])
    files = {path.name for path in cluster.directory.iterdir()}
    how.do(victim)
    if way == "after a fork":
        assert {path.name for path in cluster.directory.iterdir()} == files, "the child removed its parent's files"
        cluster.all("feed", "prefill", rooms=rooms[1:2])
        for rank in (victim, survivor):
            ended = rank.ask("wait", rooms=rooms[:2], timeout=EXIT_S)["rooms"]
            assert {room["state"] for room in ended.values()} == {"SUCCESS"}, (rank.name, ended)
        assert cluster.ranks["decode-0"].ask("verify", rooms=rooms[:2]) == []
    status, out, err = cluster.ranks.pop(victim.name).end(EXIT_S)
    answer = survivor.ask("wait", rooms=rooms[2:], timeout=EXIT_S)
    # An engine may complain that the other one is gone.
    ours = [line for line in err.splitlines() if "UCX" not in line]
    assert (status, out) == (how.status, ""), err
    assert how.says in err
    assert bool(ours) == bool(how.says), err
    for room in answer["rooms"].values():
        assert room["state"] == "FAILED"
        assert room["released"]
        assert victim.name in room["error"]["text"] or victim.name == room["error"]["rank"]
    assert answer["seconds"] < AT_ONCE_S
    if how.cleans:
        left = [path.name for path in cluster.directory.iterdir() if path.name.startswith(victim.name)]
        assert left == []


@pytest.mark.parametrize("life", ["made", "started"])
def test_without_a_room(make_cluster: Any, socket_dir: Path, life: str) -> None:
    cluster = make_cluster("loopback", prefill=1, decode=1)
    ranks = [cluster.launch("prefill", 0), cluster.launch("decode", 0)]
    if life == "started":
        cluster.all("start")
        cluster.all("ready", timeout=60)
    else:
        cluster.all("events")
    for rank in ranks:
        assert rank.end(EXIT_S) == (0, "", ""), rank.name
    cluster.ranks.clear()
    left = [path.name for path in socket_dir.rglob("*") if path.is_socket()]
    assert left == []
