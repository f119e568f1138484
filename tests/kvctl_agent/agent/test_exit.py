"""A worker that never calls close: it ends at once, with its own exit code, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("transport", "life"),
    [("nixl", "in flight"), ("loopback", "in flight"), ("loopback", "started"), ("loopback", "made")],
)
def test_falling_off_the_end(make_cluster: Any, socket_dir: Path, transport: str, life: str) -> None:
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
        # An engine may complain that the other one is gone.
        ours = [line for line in err.splitlines() if "UCX" not in line]
        assert (code, out, ours) == (0, "", []), rank.name
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
def test_its_own_exit_code_is_kept(make_cluster: Any, transport: str, ask: dict[str, Any], code: int) -> None:
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
