"""Checkpoints: a round trip preserves a machine's state; a checkpoint of another build is refused."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvctl_agent.errors import RecordingError, RecordingVersionError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.checkpoint import VERSION, Copy, TooSlow, build, unpack
from kvctl_agent.protocol.machine import Machine
from tests.support.protocol.scenarios import open_and_compute, world
from tests.support.protocol.simulation import World

AGES = 1 << 62


def busy(seed: int) -> World:
    """A world in the midst of things."""
    dice = random.Random(seed)
    found = world(dice)
    for room in range(3):
        open_and_compute(found, dice, room, late=0.5)
    found.stir(dice, dice.choice([20, 80, 160]), loss=0.1)
    found.feed(dice.choice(list(found.machines)), ev.AbortRoom(1, "enough"))
    found.kill(dice.choice(list(found.machines)), proven=dice.random() < 0.5)
    found.stir(dice, 60, loss=0.2, delay=0.2)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_machine_made_from_a_checkpoint_is_in_the_same_state_and_does_the_same(seed: int) -> None:
    found = busy(seed)
    for name, machine in list(found.machines.items()):
        data = Copy(machine, AGES).pack()
        local, _, state = build(unpack(data))
        again: Machine = found._build(local, state)
        assert Copy(again, AGES).pack() == data
        assert type(again) is type(machine)
        later = found.now_ns + found.timing.resend_ns
        mine, theirs = again.handle(ev.Tick(), later), machine.handle(ev.Tick(), later)
        assert [type(action) for action in mine] == [type(action) for action in theirs], name


def test_a_fresh_checkpoint_is_a_new_machine_with_the_same_flags() -> None:
    found = busy(0)
    for name, machine in found.machines.items():
        checkpoint = unpack(Copy(machine, AGES).pack()).fresh()
        local, timing, state = build(unpack(checkpoint.pack()))
        again: Machine = found._build(local, state)
        assert (local.name, again.open_rooms, timing) == (name, 0, machine.timing)


def test_it_gives_up_when_it_takes_too_long() -> None:
    found = World(ring=8)
    found.connect()
    for room in range(200):
        found.receive(room, 3)
    with pytest.raises(TooSlow):
        Copy(found.d(), 0)


def test_an_idle_machine_is_copied_well_within_what_the_control_loop_allows() -> None:
    found = World(ring=8)
    found.connect()
    for room in range(300):
        found.receive(room, 1)
        found.send(room, 1)
    found.settle()
    assert len(found.d().state.tombstones) == 300
    Copy(found.d(), 20_000_000)  # ten times the log's budget: this machine may be busy


def test_the_oldest_tombstones_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl_agent.protocol.checkpoint.TOMBSTONES_KEPT", 3)
    found = World()
    found.connect()
    for room in range(5):
        found.receive(room, 1)
        found.send(room, 1)
    found.settle()
    checkpoint = unpack(Copy(found.d(), AGES).pack())
    assert checkpoint.left_out == 2
    _, _, state = build(checkpoint)
    assert [room for _, room, _ in state.tombstones._entries] == [2, 3, 4]


def encoded(**changes: Any) -> bytes:
    """A checkpoint with other fields."""
    return msgspec.structs.replace(unpack(Copy(World().d(), AGES).pack()), **changes).pack()


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x95", msgspec.msgpack.encode([VERSION, {}, 1, 2, {}, {}, []])])
def test_garbage_is_no_checkpoint(data: bytes) -> None:
    with pytest.raises(RecordingError, match="not a checkpoint"):
        unpack(data)


def test_a_checkpoint_of_an_earlier_encoding_is_of_another_build() -> None:
    with pytest.raises(RecordingVersionError, match="its checkpoints have version 3, not 4"):
        unpack(msgspec.msgpack.encode([3, {}, [], [], {}, [], 0]))


@pytest.mark.parametrize("name", ["Popen", "subprocess.Popen", "protocol.peer.partial", "protocol.codec.encode"])
def test_only_known_classes_are_made(name: str) -> None:
    with pytest.raises(RecordingVersionError, match=name):
        build(unpack(encoded(fields={name: []}, nodes=[[name]])))


@pytest.mark.parametrize(
    "nodes",
    [
        [["dict", [7]]],
        [["dict"]],
        [[]],
        [["dict", [1], 1, 2], ["tuple", "rooms"]],
        [["dict", [1], 1], ["tuple", [2]], ["list"]],
        [["tuple", [0]]],
        [["list"]],
        [["int", "seven"]],
        [["protocol.ring.Ring", 1]],
    ],
)
def test_damaged_nodes_are_no_checkpoint(nodes: list[list[Any]]) -> None:
    with pytest.raises(RecordingError, match="its checkpoint is damaged: "):
        build(unpack(encoded(nodes=nodes)))


def test_a_checkpoint_of_other_fields_is_of_another_build() -> None:
    fields = unpack(encoded()).fields
    fields["protocol.ring.Ring"][0] = "title"
    with pytest.raises(RecordingVersionError, match=r"its protocol\.ring\.Ring differs in .*, title"):
        build(unpack(encoded(fields=fields)))
    with pytest.raises(RecordingVersionError, match=r"the state of its machine differs in .*rooms"):
        build(unpack(encoded(nodes=[["dict", [1]], ["tuple"]])))
