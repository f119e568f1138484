"""Control messages that are lost, doubled and late: every room still completes, and every byte is right."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.protocol.events import Received
from kvctl_agent.runtime.control_channel import ControlChannel


class BadLine:
    """Stands between an agent's links and its loop; `hurt` of the messages are lost, doubled or held back."""

    def __init__(self, links: ControlChannel, seed: int, hurt: float) -> None:
        self._real = links.receive
        self._random = random.Random(seed)
        self._hurt = hurt
        self._held: list[Received] = []
        self.lost = self.doubled = self.late = 0

    def receive(self, ready: Container[object]) -> Iterator[Received]:
        held, self._held = self._held, []
        for received in self._real(ready):
            if self._random.random() >= self._hurt:
                yield received
                continue
            match self._random.randrange(3):
                case 0:
                    self.lost += 1
                case 1:
                    self.doubled += 1
                    yield received
                    yield received
                case _:
                    self.late += 1
                    self._held.append(received)
        # What was held back comes after what came later.
        for late in held:
            if self._random.random() < 0.5:
                yield late
            else:
                self._held.append(late)


def spoil(fleet: Any, seed: int, hurt: float) -> list[BadLine]:
    lines = []
    for number, agent in enumerate(fleet.prefill + fleet.decode):
        line = BadLine(agent.links, seed * 100 + number, hurt)
        agent.links.receive = line.receive
        lines.append(line)
    return lines


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
    ).start()
    lines = spoil(fleet, seed, 0.3)
    rooms = [fleet.feed(fleet.claim(fleet.receive(fleet.room(number, 8, aux=number))), (3,)) for number in range(40)]
    for room in rooms:
        assert room.wait(60) == {RoomState.SUCCESS}, (room.number, room.errors(), fleet.events("room-failed"))
        fleet.expect(room)
    for rank in fleet.aux_image:
        fleet.aux_image[rank][:] = next(agent for agent in fleet.decode if agent.name == rank).pool.aux
    fleet.check()
    fleet.settle()
    assert fleet.errors() == []
    assert sum(line.lost for line in lines) > 20
    assert sum(line.doubled for line in lines) > 20
    assert sum(line.late for line in lines) > 20
    assert fleet.total(fleet.prefill + fleet.decode, "kvctl_control_resends_total") > 0
    assert fleet.total(fleet.prefill + fleet.decode, "kvctl_peer_lost_total") == 0


def test_a_greeting_is_repeated_until_it_is_answered(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 2), resend_s=0.05)
    for number in range(2):
        fleet.prefill.append(fleet.prefill_agent(number).start())
        spoil(fleet, 7, 0.6)
    agent = fleet.decode_agent(0)
    fleet.decode.append(agent.start())
    agent.links.receive = BadLine(agent.links, 8, 0.6).receive
    agent.wait_ready(60)
    fleet.run(1, 4)
    fleet.check()


@pytest.mark.parametrize("seed", range(3))
def test_aborts_under_loss_end_everywhere_and_release_everything(make_fleet: Any, model: Any, seed: int) -> None:
    wide = model(heads=4, k_dim=128, v_dim=128, page_size=8, pages=400, layers=2)
    fleet = make_fleet(model=wide, path="staged", chunk_tokens=32, resend_s=0.05, heartbeat_s=0.05).start()
    spoil(fleet, 50 + seed, 0.3)
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
