"""Machines with seeded bugs: a replay names the violated invariant, and shortens the inputs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvctl.lab.replay.decode_invariants import DecodeInvariants
from kvctl.lab.replay.player import play
from kvctl.lab.replay.prefill_invariants import PrefillInvariants
from kvctl.lab.replay.recordings import Input, Start
from kvctl.lab.replay.verdicts import AgentVerdict, judge
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode.rooms import RecvRoom
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.protocol.prefill.send_room import PeerTransfer
from kvctl_agent.protocol.recording import InputLog
from kvctl_agent.protocol.ring import Position, Region, Ring, RingGate
from tests.kvctl.lab.replay import recorded
from tests.support.protocol.simulation import SECOND, Broken, World, mixed

ROOMS = 6
MOST = 20  # inputs that are enough for any of these


def history(seed: int) -> list[InputLog]:
    """Runs rooms through rings of two parts, with loss, duplicates, aborts and a pause, up to the first violation."""
    dice = random.Random(seed)
    decode = ParallelConfig(tp=1 + seed % 2)
    found = recorded.RecordedWorld(ParallelConfig(tp=2), decode, ring=2, chunk_pages=1, choose=mixed)
    try:
        found.connect()
        for room in range(ROOMS):
            for reader in range(decode.tp):
                found.receive(room, 1 + room % 2, reader=reader)
        found.connect()
        for room in range(ROOMS - 2):
            found.send(room, 1 + room % 2)
        for _ in range(4):
            found.stir(dice, 40, loss=0.05, copies=0.05)
            found.feed(dice.choice(list(found.machines)), ev.AbortRoom(dice.randrange(ROOMS), "enough"))
        found.paused.add("decode-0")
        for _ in range(2):
            found.tick(SECOND)
        for room in range(ROOMS - 2, ROOMS):
            found.send(room, 1 + room % 2)
        found.stir(dice, 40)
        found.paused.clear()
        found.settle(ticks=60)
    except (Broken, AssertionError, KeyError):
        pass  # the oracle has seen it, too
    return [log for lives in found.logs.values() for log in lives]


def _unfree(ring: Ring, serial: int) -> bool:
    """Also frees the next oldest region, which may be in use."""
    moved = _free(ring, serial)
    if len(ring._live) > 1:
        ring._live.pop(next(iter(ring._live)))
        ring.sequence += 1
    return moved


_free = Ring.free


def _reusing(ring: Ring, nbytes: int) -> Region:
    region = _allocate(ring, nbytes)
    ring._serial -= region.serial % 3 == 0
    return region


_allocate = Ring.allocate

MUTANTS: dict[str, tuple[type, str, Any, set[str]]] = {
    "final parts do not count": (
        RecvRoom,
        "complete",
        property(lambda room: room.missing == 0),
        {"success-with-a-gap"},
    ),
    "a keeper that waits for nobody": (
        RecvRoom,
        "awaited",
        property(lambda room: set(), lambda room, ranks: None),
        {"success-with-a-gap"},
    ),
    "drained without waiting": (
        PeerTransfer,
        "drained",
        property(lambda transfer: True),
        {"drained-in-flight", "released-early"},
    ),
    "gates stand open": (RingGate, "open", lambda gate, round_, end: True, {"transfer-gated"}),
    "no lease": (Peer, "may_post", lambda peer, now_ns: peer.usable, {"transfer-without-lease"}),
    "serials come again": (Ring, "allocate", _reusing, {"serial-reused", "two-owners"}),
    "the watermark passes what is held": (Ring, "free", _unfree, {"two-owners", "scatter", "watermark-back"}),
    "the watermark goes back": (
        Ring,
        "watermark",
        property(lambda ring: Position(0, 0) if ring.sequence % 4 == 3 else _watermark.fget(ring)),
        {"watermark-back"},
    ),
    "a machine that raises": (
        PeerTransfer,
        "pages_at",
        lambda transfer, part: transfer.tables[0].dst_pages[part.chunk.first - transfer.tables[0].prefix_pages :][
            : {0: 1}[part.chunk.index]
        ],
        {"exception"},
    ),
}
_watermark: Any = vars(Ring)["watermark"]


def judged(log: InputLog, shrink_s: float = 30.0) -> AgentVerdict:
    agent = recorded.recording_of(log)
    (verdict,) = judge([agent], shrink_s, lambda text: None)
    return verdict


def broken(seeds: range) -> InputLog | None:
    """Returns the first log in which a replay finds a violation."""
    for seed in seeds:
        for log in history(seed):
            segment = recorded.recording_of(log).segments()[0]
            if play(segment.start, segment.inputs()).breach is not None:
                return log
    return None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_replay_names_the_rule_and_few_inputs_that_break_it(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, instead, invariants = MUTANTS[mutant]
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, instead)
        log = broken(range(12))
        assert log is not None, "no history breaks it"
        verdict = judged(log)
    breach, shrunk = verdict["breach"], verdict["shrunk"]
    assert breach is not None
    assert shrunk is not None
    assert breach["invariant"] in invariants, breach
    assert not verdict["notes"]
    assert shrunk["fresh"]
    assert shrunk["inputs"] <= MOST, shrunk
    assert shrunk["inputs"] < breach["number"]
    assert any(line.startswith("#") for line in breach["story"])
    segment = recorded.recording_of(log).segments()[0]
    assert play(segment.start, segment.inputs(), feasible=True).breach is None  # without the bug


def test_without_a_bug_all_of_it_is_clean() -> None:
    assert broken(range(6)) is None


def prefill_inputs(role: str = "prefill") -> tuple[Start, list[Input]]:
    logs = [log for log in history(0) if recorded.recording_of(log).segments()[0].start.checkpoint.local.role == role]
    segment = recorded.recording_of(logs[0]).segments()[0]
    return segment.start, list(segment.inputs())


def test_an_error_of_the_checks_is_not_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    start, inputs = prefill_inputs()

    def fail(*_: Any) -> None:
        raise KeyError("decode-0")

    monkeypatch.setattr(PrefillInvariants, "check", fail)
    with pytest.raises(KeyError, match="decode-0"):
        play(start, inputs)


def test_a_room_of_a_rank_of_unknown_layout_has_no_plan() -> None:
    _, inputs = prefill_inputs()
    opening, now_ns = next(
        (item.event, item.now_ns)
        for item in inputs
        if isinstance(item.event, ev.Received) and isinstance(item.event.message, msg.RoomOpen)
    )
    accepted = msg.RoomAccepted(opening.message.room, opening.message.nonce)
    checker = PrefillInvariants(World().p())
    checker.check(opening, now_ns, [ev.Send(opening.peer, accepted)])
    assert checker.rooms_checked == 1


def test_a_room_that_is_opened_at_an_unknown_peer_is_not_checked() -> None:
    _, inputs = prefill_inputs()
    message = next(
        item.event.message
        for item in inputs
        if isinstance(item.event, ev.Received) and isinstance(item.event.message, msg.RoomOpen)
    )
    _, calls = prefill_inputs("decode")
    call = next(item for item in calls if isinstance(item.event, ev.OpenRoom) and item.event.room == message.room)
    checker = DecodeInvariants(World().d())
    opened = [ev.StateChanged(message.room, RoomState.BOOTSTRAPPING), ev.Send("prefill-9", message)]
    checker.check(call.event, call.now_ns, opened)
    checker.check(ev.Tick(), call.now_ns, [ev.StateChanged(message.room, RoomState.SUCCESS)])
