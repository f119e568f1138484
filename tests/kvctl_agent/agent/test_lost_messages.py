"""Control messages that are lost, doubled and late: every room still completes, and every byte is right."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator
from itertools import count
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.parts import PartFactories
from kvctl_agent.protocol.events import Received
from kvctl_agent.runtime.control_channel import ControlChannel


class BadLine(ControlChannel):
    """A control channel that loses, doubles or holds back `hurt` of the messages that come in."""

    def __init__(self, seed: int, hurt: float, *links: Any) -> None:
        super().__init__(*links)
        self._random = random.Random(seed)
        self._hurt = hurt
        self._held: list[Received] = []
        self.lost = self.doubled = self.late = 0

    def receive(self, ready: Container[object]) -> Iterator[Received]:
        passed: list[Received] = []
        held, self._held = self._held, []
        for received in super().receive(ready):
            if self._random.random() >= self._hurt:
                passed.append(received)
                continue
            match self._random.randrange(3):
                case 0:
                    self.lost += 1
                case 1:
                    self.doubled += 1
                    passed += [received, received]
                case _:
                    self.late += 1
                    self._held.append(received)
        # What was held back comes after what came later.
        for late in held:
            if self._random.random() < 0.5:
                passed.append(late)
            else:
                self._held.append(late)
        yield from passed


def bad_lines(seed: int, hurt: float) -> PartFactories:
    """For the agents of one fleet, each with dice of its own."""
    seeds = count(seed * 100)
    return PartFactories(control_channel=lambda *links: BadLine(next(seeds), hurt, *links))


@pytest.mark.parametrize("seed", range(6))
def test_all_rooms_complete(make_fleet: Any, model: Any, seed: int) -> None:
    wide = model(heads=4, k_dim=128, v_dim=128, page_size=8, pages=400, layers=2)
    fleet = make_fleet(
        ("loopback", "nixl")[seed % 2],
        prefill=(1, 2),
        decode=(2, 1),
        model=wide,
        path=("staged", "slice", "staged")[seed % 3],
        chunk_tokens=32,
        resend_s=0.05,
        heartbeat_s=0.05,
        factories=bad_lines(seed, 0.3),
    ).start()
    lines = [agent.parts.control_channel for agent in fleet.prefill + fleet.decode]
    rooms = [fleet.feed(fleet.claim(fleet.receive(fleet.room(number, 8, aux=number))), (3,)) for number in range(40)]
    for room in rooms:
        assert room.wait(60) == {RoomState.SUCCESS}, (room.number, room.errors(), fleet.events("room-failed"))
        fleet.expect(room)
    for rank in fleet.aux_image:
        fleet.aux_image[rank][:] = next(agent for agent in fleet.decode if agent.name == rank).pool.aux[0]
    fleet.check()
    fleet.settle()
    assert fleet.errors() == []
    assert sum(line.lost for line in lines) > 20
    assert sum(line.doubled for line in lines) > 20
    assert sum(line.late for line in lines) > 20
    assert fleet.total(fleet.prefill + fleet.decode, "kvctl_control_resends_total") > 0
    assert fleet.total(fleet.prefill + fleet.decode, "kvctl_peer_lost_total") == 0


@pytest.mark.parametrize("seed", range(2))
def test_aborts_under_loss_end_everywhere_and_release_everything(make_fleet: Any, model: Any, seed: int) -> None:
    wide = model(heads=4, k_dim=128, v_dim=128, page_size=8, pages=400, layers=2)
    quick = {"chunk_tokens": 32, "resend_s": 0.05, "heartbeat_s": 0.05}
    fleet = make_fleet(model=wide, path="staged", **quick, factories=bad_lines(50 + seed, 0.3)).start()
    dice = random.Random(seed)
    rooms = []
    for number in range(40):
        room = fleet.feed(fleet.claim(fleet.receive(fleet.room(number, 8))), (3,))
        rooms.append(room)
        if dice.random() < 0.5:
            dice.choice(room.handles).abort("enough")
    for room in rooms:
        assert len(room.wait(60)) == 1, room.number
        assert all(handle.released for handle in room.handles)
        if room.wait(0) == {RoomState.SUCCESS}:
            fleet.expect(room)
    fleet.settle()
    fleet.check(but=tuple(room for room in rooms if room.wait(0) == {RoomState.FAILED}))
    assert fleet.errors() == []
