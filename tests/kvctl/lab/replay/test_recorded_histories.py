"""Replays of random histories are clean and repeat the recorded outcomes, from any checkpoint."""

from __future__ import annotations

import random
import zlib
from typing import Any

import msgspec
import pytest

from kvctl.lab.replay.player import play
from kvctl.lab.replay.recordings import AgentRecording, Piece
from kvctl.lab.replay.verdicts import judge
from kvctl_agent.errors import RecordingError, RecordingVersionError
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.recording import InputLog, encode
from tests.kvctl.lab.replay.recorded import RecordedWorld, header, recording_of
from tests.support.protocol.scenarios import SHAPES, open_and_compute, preempt, reopen
from tests.support.protocol.simulation import SECOND, mixed


def harm(found: RecordedWorld, dice: random.Random, rooms: list[int]) -> None:
    """Injects one failure."""
    name = dice.choice(list(found.machines))
    match dice.choice(["abort", "restart", "lost", "stopped", "operator", "preempt"]):
        case "abort":
            found.feed(name, ev.AbortRoom(dice.choice(rooms), "enough"))
        case "restart":
            found.restart(name, proven=dice.random() < 0.5)
        case "lost":
            found.stir(dice, 100, loss=0.9, delay=0.3)
        case "operator":
            operate(found, dice, rooms)
        case "preempt":
            for serial in (1, 2):
                preempt(found, dice, serial)
                found.stir(dice, 50)
                reopen(found)
        case "stopped":
            found.paused.add(name)
            for _ in range(dice.choice([2, 20])):
                found.stir(dice, 10)
                found.tick(SECOND)
            found.paused.clear()


def operate(found: RecordedWorld, dice: random.Random, rooms: list[int]) -> None:
    """Drains, resumes, changes timeouts, and releases regions as an operator may without proof."""
    for name in found.machines:
        found.feed(name, ev.Drain(dice.random() < 0.5))
        found.feed(name, ev.SetTimeouts(100 * SECOND, 110 * SECOND))
        found.stir(dice, 10)
        if name.startswith("decode"):
            serials = [
                allocation.region.serial for allocation in found.machines[name].state.grant_table.allocations()
            ] or [1]
            for ticket in (1, 2):
                found.feed(name, ev.ReleaseHeld(ticket, dice.choice(serials)))
            found.feed(name, ev.ReleaseHeld(3, room=dice.choice(rooms)))
        found.feed(name, ev.AbortRoom(dice.choice(rooms), "enough", 4))
    for name in found.machines:
        found.feed(name, ev.Drain(False))


def history(seed: int, **more: Any) -> list[InputLog]:
    """Runs rooms of all kinds with loss, duplicates, aborts, restarts and pauses."""
    dice = random.Random(seed)
    prefill, decode = dice.choice(
        [
            (ParallelConfig(tp=2), ParallelConfig()),
            (ParallelConfig(pp=2), ParallelConfig(dp=2)),
            (ParallelConfig(tp=2), ParallelConfig(tp=2)),
        ]
    )
    shape = SHAPES[dice.choice(["plain", "hybrid"])]
    found = RecordedWorld(prefill, decode, ring=dice.choice([3, 8]), shape=shape, choose=mixed, **more)
    rooms = list(range(10, 14))
    for room in rooms:
        open_and_compute(found, dice, room, late=0.3)
    for _ in range(2):
        found.stir(dice, 60, loss=0.1, copies=0.1)
        harm(found, dice, rooms)
    found.flush()
    found.prove()
    found.settle(ticks=300)
    for room in range(20, 23):
        open_and_compute(found, dice, room)
        found.stir(dice, 40, loss=0.05)
    found.settle(ticks=300)
    return [log for lives in found.logs.values() for log in lives]


@pytest.mark.parametrize("seed", range(6))
def test_a_whole_recording_is_clean_and_does_what_was_done(seed: int) -> None:
    rooms = 0
    for log in history(seed):
        agent = recording_of(log, page_bytes=500)
        (segment,) = agent.segments()
        played = play(segment.start, segment.inputs())
        assert played.breach is None, played.breach
        assert played.diverged is None
        assert played.inputs == segment.count == log.taken
        assert (log.missed, log.fault, agent.dropped) == (0, "", 0)
        rooms += played.rooms
    assert rooms >= 7


@pytest.mark.parametrize("seed", range(4))
def test_so_is_what_is_left_of_a_long_one(seed: int) -> None:
    """The oldest inputs were dropped, so the recording begins at a later checkpoint."""
    late = 0
    for log in history(seed, capacity=64):
        agent = recording_of(log)
        for segment in agent.segments():
            played = play(segment.start, segment.inputs())
            assert played.breach is None, played.breach
            assert played.diverged is None
            late += segment.first > 0
        assert log.fault == ""
    assert late > 0


def test_time_alone_is_recorded_too() -> None:
    found = RecordedWorld()
    for _ in range(5):
        found.tick(SECOND)
    (log,) = found.logs["decode-0"]
    (segment,) = recording_of(log).segments()
    assert [type(item.event).__name__ for item in segment.inputs()][-5:] == ["Tick"] * 5


@pytest.mark.parametrize("place", ["grant_table", "peers", "rooms"])
def test_a_checkpoint_that_is_of_no_machine_is_refused_in_words(place: str) -> None:
    found = RecordedWorld()
    found.tick(SECOND)
    (segment,) = recording_of(found.logs["decode-0"][0]).segments()
    start = segment.start
    nodes = start.checkpoint.nodes
    _, (keys,), *_ = nodes[0]
    nodes[0][1 + nodes[keys].index(place)] = 7
    with pytest.raises(RecordingError, match="its checkpoint is of no machine"):
        play(start, segment.inputs())


def test_inputs_of_another_build_are_refused_with_its_version() -> None:
    agent = recording_of(RecordedWorld().logs["decode-0"][0], "decode-0")
    agent.header["version"] = "0.0.9"
    agent.pieces[0] = agent.pieces[0]._replace(body=zlib.compress(msgspec.msgpack.encode([3, {}])))
    agent.pieces.append(Piece(1, "inputs", 0, 1, zlib.compress(encode(([], [(1, "Tick", ev.Tick(), "")])))))
    with pytest.raises(RecordingVersionError) as caught:
        judge([agent], None, lambda _: None)
    assert str(caught.value) == (
        "decode-0 was recorded by another build, kvctl 0.0.9: its checkpoints have version 3, not 4: "
        "replay it with the build that recorded it"
    )
    agent.header["plan_version"] += 1
    with pytest.raises(RecordingVersionError, match=r"kvctl 0\.0\.9: its plan has version"):
        judge([agent], None, lambda _: None)


def test_what_is_missing_is_told_with_its_own_reason() -> None:
    for fault, told in (("TypeError: no such class", "with a fault, 5 inputs"), ("", "5 inputs were missed: too many")):
        agent = AgentRecording(header("decode-0", missed=5, fault=fault), 0)
        (verdict,) = judge([agent], None, lambda _: None)
        assert [note for note in verdict["notes"] if told in note]
        assert len(verdict["notes"]) == 2, "the other one: nothing was recorded"
