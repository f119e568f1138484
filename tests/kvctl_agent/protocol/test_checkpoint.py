"""Checkpoints: a round trip preserves a machine's state; a checkpoint of another build is refused."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from kvctl_agent.errors import RecordingError, RecordingVersionError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.checkpoint import TooSlow, _Encoder, _registry, build, pack, take, unpack
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
        data = pack(take(machine, AGES))
        local, _, state = build(unpack(data))
        again: Machine = found._build(local, state)
        assert pack(take(again, AGES)) == data
        assert type(again) is type(machine)
        later = found.now_ns + found.timing.resend_ns
        mine, theirs = again.handle(ev.Tick(), later), machine.handle(ev.Tick(), later)
        assert [type(action) for action in mine] == [type(action) for action in theirs], name


def test_equal_sets_have_equal_encodings() -> None:
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert one == other
    assert [*one] != [*other]
    assert _Encoder().encode(one) == _Encoder().encode(other)


def test_no_two_immutable_classes_have_one_name() -> None:
    names = Counter(kind.__name__ for kind in _registry().by_reference)
    assert [name for name, count in names.items() if count > 1] == []


def test_a_fresh_checkpoint_is_a_new_machine_with_the_same_flags() -> None:
    found = busy(0)
    for name, machine in found.machines.items():
        checkpoint = take(machine, AGES).fresh()
        local, timing, state = build(unpack(pack(checkpoint)))
        again: Machine = found._build(local, state)
        assert (local.name, again.open_rooms, timing) == (name, 0, machine.timing)


def test_it_gives_up_when_it_takes_too_long() -> None:
    found = World(ring=8)
    found.connect()
    for room in range(200):
        found.receive(room, 3)
    with pytest.raises(TooSlow):
        take(found.d(), 0)


def test_an_idle_machine_is_copied_well_within_what_the_control_loop_allows() -> None:
    found = World(ring=8)
    found.connect()
    for room in range(300):
        found.receive(room, 1)
        found.send(room, 1)
    found.settle()
    assert len(found.d().state.tombstones) == 300
    take(found.d(), 20_000_000)  # ten times the log's budget: this machine may be busy


def test_the_oldest_tombstones_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl_agent.protocol.checkpoint.TOMBSTONES_KEPT", 3)
    found = World()
    found.connect()
    for room in range(5):
        found.receive(room, 1)
        found.send(room, 1)
    found.settle()
    checkpoint = take(found.d(), AGES)
    assert checkpoint.left_out == 2
    _, _, state = build(checkpoint)
    assert [room for _, room, _ in state.tombstones._entries] == [2, 3, 4]


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x95", msgspec.msgpack.encode([2, {}, 1, 2, ["dict"], ["list"], 0])])
def test_garbage_is_no_checkpoint(data: bytes) -> None:
    with pytest.raises(RecordingError, match="not a checkpoint"):
        unpack(data)


def test_a_checkpoint_of_an_earlier_encoding_is_of_another_build() -> None:
    with pytest.raises(RecordingVersionError, match="its checkpoint has another version"):
        unpack(msgspec.msgpack.encode([[["c", "LocalInfo", []], ["c", "Timing", []]], {}, [], 0, {}]))


def test_only_known_classes_are_made() -> None:
    encoded = msgspec.msgpack.decode(pack(take(World().d(), AGES)))
    encoded[4] += ["evil", ["Popen", ["list", "true"]]]
    with pytest.raises(RecordingVersionError, match="Popen"):
        unpack(msgspec.msgpack.encode(encoded))


def test_a_checkpoint_of_other_fields_is_of_another_build() -> None:
    found = World()
    encoded = msgspec.msgpack.decode(pack(take(found.d(), AGES)))
    encoded[1]["LocalInfo"][0] = "title"
    with pytest.raises(RecordingVersionError, match="its LocalInfo differs in name, title"):
        unpack(msgspec.msgpack.encode(encoded))
    less = take(found.d(), AGES)
    del less.state["rooms"]
    with pytest.raises(RecordingVersionError, match="differs in rooms"):
        build(less)
