"""A peer that is killed with a room in flight and comes back: whoever stays holds what it held after the first time."""

from __future__ import annotations

import time

import pytest

from benchmarks.leaks.census import Sizes, grown
from benchmarks.leaks.endings import WAIT_S, Sides, finish, success
from benchmarks.leaks.process import SideProcess
from benchmarks.nothing_left import START_S, launch, workplace

TOMBSTONES_S = 3.0  # also the time that a room has to be opened in
KILLS = 2


def settled(side: SideProcess, before: Sizes) -> list[str]:
    """What the side holds beyond `before`, when tombstones are over."""
    deadline = time.monotonic() + WAIT_S
    while lines := grown(before, side.ask("census")):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return lines


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nothing_is_left_of_a_killed_peer(role: str) -> None:
    before: Sizes = {}
    with workplace() as directory:
        sides = {
            each: launch(each, "nixl", directory, bootstrap_timeout_s=TOMBSTONES_S) for each in ("prefill", "decode")
        }
        try:
            stays = sides["decode" if role == "prefill" else "prefill"]
            for kill in range(KILLS):
                for side in sides.values():
                    side.ask("ready", timeout=START_S)
                pair: Sides = (sides["prefill"], sides["decode"])
                success(*pair, 10 * kill)
                finish(pair, success, 10 * kill)
                in_flight = 10 * kill + 1
                pair[1].ask("receive", room=in_flight)
                pair[0].ask("claim", room=in_flight)
                stays.ask("known", room=in_flight, timeout=WAIT_S)
                sides[role].kill()
                for end in stays.ask("wait", room=in_flight, timeout=WAIT_S):
                    assert end["released"]
                    assert end["error"]["code"] == "KV_PEER_LOST", end
                if not kill:
                    time.sleep(TOMBSTONES_S + 1)
                    before = stays.ask("census")
                assert settled(stays, before) == []
                if kill < KILLS - 1:
                    sides[role] = launch(role, "nixl", directory, bootstrap_timeout_s=TOMBSTONES_S)
            assert stays.ask("errors") == []
        finally:
            for side in sides.values():
                side.kill()
