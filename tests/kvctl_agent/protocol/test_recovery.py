"""Recovery of peers: effects of the silence, end and return of a rank."""

from __future__ import annotations

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.peer import PeerState
from tests.support.folded import folded
from tests.support.protocol.moments import connected, in_flight, run_until, said, silence, under_way
from tests.support.protocol.simulation import SECOND, TIMING, World, direct, registry


def events_of(world: World, name: str, kind: str) -> list[str]:
    rows = folded(world.machines[name].telemetry).recorder.since(None, 256)["events"]
    return [row["text"] for row in rows if row["kind"] == kind]


def pass_time(world: World, ns: int, step_ns: int = SECOND // 2) -> None:
    for _ in range(ns // step_ns):
        world.tick(step_ns)
        world.flush()


# ---- suspect -------------------------------------------------------------------------------------------------------


def test_a_suspect_is_shown_and_is_given_nothing_that_would_let_it_write() -> None:
    """Its room is granted, gated and waiting; the ring drains meanwhile, and still it gets no more than heartbeats."""
    world = under_way(34)
    world.paused.add("prefill-0")
    pass_time(world, TIMING.suspect_ns)
    assert world.d().peers["prefill-0"].state is PeerState.SUSPECT
    assert any(
        text.startswith("prefill-0 has been silent for 3.") for text in events_of(world, "decode-0", "peer-suspect")
    )
    said(world, "prefill-0")
    grants = world.d().telemetry.metrics.total("kvctl_ring_grants_total")
    pass_time(world, TIMING.suspect_ns)
    given = said(world, "prefill-0")
    assert not [message for message in given if isinstance(message, msg.StagingGrants)]
    assert [message for message in given if isinstance(message, msg.Heartbeat)], "it is not given up"
    assert world.d().telemetry.metrics.total("kvctl_ring_grants_total") == grants
    world.paused.clear()
    world.settle()
    assert {room.state for room in world.rooms.values()} == {RoomState.SUCCESS}


# ---- lost ----------------------------------------------------------------------------------------------------------


def room_of_four() -> World:
    """Room 7 passes between two prefill and two decode ranks, and has not been computed."""
    world = connected(ParallelConfig(tp=2), ParallelConfig(tp=2))
    for reader in (0, 1):
        world.receive(7, 3, reader=reader, nonce=1000 + reader)
    world.flush()
    for rank in (0, 1):
        world.feed(f"prefill-{rank}", ev.SendRoom(7))
        world.sent[f"prefill-{rank}", 7] = RoomState.WAITING_FOR_INPUT
    return world


@pytest.mark.parametrize("victim", ["prefill-0", "prefill-1", "decode-0", "decode-1"])
@pytest.mark.parametrize("proven", [True, False])
def test_the_loss_of_any_rank_fails_its_room_on_all_others_with_its_name_and_life(victim: str, proven: bool) -> None:
    world = room_of_four()
    life = world.machines[victim].local.incarnation
    before = world.now_ns
    if proven:
        world.kill(victim)
        world.flush()
        assert world.now_ns == before, "nobody waits for silence to grow"
    else:
        world.paused.add(victim)
        pass_time(world, TIMING.lost_ns + SECOND)
    causes = {room.reader: room.failure for room in world.rooms.values()}
    causes |= {name: world.sent_failures.get((name, 7)) for name in world.prefill_names}
    causes.pop(victim, None)
    assert len(causes) == 3
    for name, cause in causes.items():
        assert cause is not None, f"{name} was not told"
        assert cause["code"] == "KV_PEER_LOST"
        why = "process has ended" if proven else "silent for 15."
        assert cause["text"].startswith(f"peer {victim} (incarnation {life:016x}) lost: {why}"), (name, cause)
    world.paused.clear()
    world.settle()
    world.check_empty()


# ---- quarantine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["drained", "dead", "replaced and dead"])
@pytest.mark.parametrize("choose", [None, direct])
def test_pages_with_a_lost_writer_come_back_when_that_is_safe_and_not_before(end: str, choose: object) -> None:
    world = in_flight(choose=choose)
    room = world.rooms["decode-0", 7, 1000]
    world.paused.add("prefill-0")
    pass_time(world, 60 * SECOND)
    assert room.failure["code"] == "KV_PEER_LOST"
    assert not room.released, "a minute of silence proves nothing"
    assert world.d().quarantined_bytes > 0
    world.paused.clear()
    if end == "drained":
        world.settle(ticks=10)
    elif end == "dead":
        world.kill("prefill-0")
    else:
        world.restart("prefill-0", proven=False)
        pass_time(world, TIMING.suspect_ns)
        assert not room.released, "a new process proves nothing about the old one"
        world.prove()
    assert room.released
    assert world.d().quarantined_bytes == 0
    assert len(world.d().state.grant_table) == 0


# ---- tombstones ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", ["success", "failed"])
def test_a_late_opening_meets_a_tombstone_for_as_long_as_an_opening_may_take(ended: str) -> None:
    world = connected()
    world.receive(7, 2)
    opening = next(item for item in world.pool if item.kind == "message" and item.to == "prefill-0")
    world.send(7, 2)
    if ended == "failed":
        world.feed("prefill-0", ev.AbortRoom(7, "enough"))
    world.settle()
    pass_time(world, TIMING.bootstrap_ns - 2 * SECOND, SECOND)
    world.happen(opening)
    assert not world.p().rooms, "no zombie"
    answers = [message for message in said(world, "decode-0") if isinstance(message, msg.RoomRefused)]
    assert len(answers) == 1
    pass_time(world, TIMING.bootstrap_ns + 2 * SECOND, SECOND)
    assert len(world.p().state.tombstones) == 0, "it asked again, and was remembered for as long again"


# ---- return --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [1, 5, 12])
@pytest.mark.parametrize("steps", [0, 8, 16, 24, 32, 40, 50, 60])
def test_a_line_that_is_cut_for_less_than_a_loss_costs_no_room(steps: int, seconds: int) -> None:
    """Everything said meanwhile is lost, both ways; what is in flight by then lands or has to be told again."""
    world = under_way(steps)
    for _ in range(2 * seconds):
        world.pool = [item for item in world.pool if item.kind != "message"]
        run_until(world, "message")
        world.tick(SECOND // 2)
    world.pool = [item for item in world.pool if item.kind != "message"]
    world.settle(ticks=20)
    assert {room.state for room in world.rooms.values()} == {RoomState.SUCCESS}
    assert set(world.sent.values()) == {RoomState.SUCCESS}
    world.check_empty()


@pytest.mark.parametrize("steps", [0, 16, 32, 48, 60])
@pytest.mark.parametrize("stopped", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("seconds", [5, 30])
def test_a_rank_that_was_stopped_serves_again_without_a_restart(stopped: str, seconds: int, steps: int) -> None:
    world = under_way(steps)
    silence(world, stopped, seconds)
    world.settle(ticks=30)
    states = {room.state for room in world.rooms.values()}
    assert states == {RoomState.SUCCESS} or seconds > TIMING.lost_ns // SECOND
    room = world.receive(9, 4)
    world.send(9, 4)
    world.settle(ticks=2)
    assert room.state is RoomState.SUCCESS
    world.check_empty()


def test_what_the_transport_knew_of_the_old_life_goes_before_the_new_one_is_connected() -> None:
    """`remove_remote_agent` first: an engine that knows both would write into the dead one's memory."""
    world = connected()
    world.kill("decode-0", proven=False)
    pass_time(world, TIMING.suspect_ns)
    world._start("decode-0")
    hello = next(item for item in world.pool if item.kind == "message" and item.to == "prefill-0")
    incarnation, (message,), _ = codec.decode(hello.what)
    actions = world.p().handle(ev.Received("decode-0", incarnation, message), world.now_ns)
    order = [type(action) for action in actions if isinstance(action, ev.DropPeer | ev.ConnectPeer)]
    assert order == [ev.DropPeer, ev.ConnectPeer]


# ---- a room that comes too late ------------------------------------------------------------------------------------


def test_a_room_for_an_instance_of_which_a_rank_is_lost_fails_soon_and_says_who() -> None:
    """The rank's next life will not have heard of the room from its engine: nobody may wait for that."""
    world = connected(ParallelConfig(tp=2))
    world.kill("prefill-1")
    late = world.receive(7, 2)
    pass_time(world, TIMING.suspect_ns // 2)
    assert late.state is RoomState.BOOTSTRAPPING, "it may be back at once"
    pass_time(world, TIMING.suspect_ns)
    assert late.state is RoomState.FAILED
    assert late.failure["code"] == "KV_PEER_LOST"
    assert "peer prefill-1 (incarnation" in late.failure["text"]
    assert late.released


@pytest.mark.parametrize("progress", ["answers", "registers", "missing"])
def test_a_room_waits_while_the_registry_of_its_instance_is_filled_anew(progress: str) -> None:
    """It was opened for the endpoint of an instance that has ended and starts again, one rank after the other."""
    world = connected(ParallelConfig(tp=2))
    for name in world.prefill_names:
        world.kill(name)
    room = world.receive(7, 2)
    world._start("prefill-0")
    missing = "1 of 2 prefill ranks registered, missing tp=1"
    world.feed("decode-0", ev.RosterMissing(registry(0), missing))
    pass_time(world, 3 * TIMING.suspect_ns)
    assert room.state is RoomState.BOOTSTRAPPING
    if progress == "missing":
        pass_time(world, TIMING.lost_ns)
        assert room.failure["code"] == "KV_PEER_LOST"
        assert room.failure["text"].endswith(missing)
        return
    world._start("prefill-1")
    lives = tuple(world.life(name) for name in world.prefill_names)
    world.feed("decode-0", ev.RosterKnown(registry(0), tuple(world.prefill_names), lives))
    if progress == "registers":
        world.paused.add("prefill-1")
        pass_time(world, TIMING.lost_ns)
        assert room.failure["code"] == "KV_PEER_LOST"
        return
    world.tick(SECOND // 2)
    assert room.state is RoomState.BOOTSTRAPPING, "the second rank has not answered yet"
    world.flush()
    world.send(7, 2)
    world.settle()
    assert room.state is RoomState.SUCCESS
