"""Digests between living agents: each path's parts are compared, and one that differs fails its room by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.memory.digest import part_digest

PATIENCE_S = 60  # for what takes milliseconds on a quiet machine


@pytest.fixture(params=["slice", "staged"])
def fleet(make_fleet: Any, request: pytest.FixtureRequest) -> Any:
    """Two writers of half the heads each, one reader."""
    return make_fleet("loopback", path=request.param, digest=True).start()


@pytest.mark.parametrize("differs", [False, True])
def test_what_is_in_the_pages_is_compared_with_what_was_sent(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, differs: bool
) -> None:
    taken: list[int] = []

    def digest(*of: Any) -> int:
        taken.append(part_digest(*of) ^ differs)
        return taken[-1]

    monkeypatch.setattr("kvctl_agent.runtime.arrivals.part_digest", digest)
    room = fleet.claim(fleet.receive(fleet.room(7, 8)))
    fleet.feed(room)
    assert room.wait(PATIENCE_S) == {RoomState.FAILED if differs else RoomState.SUCCESS}, room.errors()
    fleet.settle()
    if differs:
        assert {handle.error["code"] for handle in room.handles} == {"KV_DIGEST_MISMATCH"}
    else:
        assert len(taken) >= 2  # one of each writer
        fleet.expect(room)
        fleet.check()
