"""Random histories of the composed machines, with faults of network and processes, checked by the oracle.

A history is determined by its seed. The rings are tiny, so that gating, wrapping and revoking happen in most of them;
`scenarios` has the other events of a history.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvctl_agent.contract.choices import BULK, STAGED
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.decode.landing import Grants
from kvctl_agent.protocol.decode.rooms import RecvRoom
from kvctl_agent.protocol.peer import CancelToken, Peer, Timing
from kvctl_agent.protocol.prefill.dispatch import Dispatch
from kvctl_agent.protocol.prefill.send_room import ComputedPages, PeerTransfer, SendRoom
from kvctl_agent.protocol.ring import Position, Region, Ring, RingGate
from tests.support.protocol.invariants import Broken
from tests.support.protocol.moments import asked, compute, give, granted
from tests.support.protocol.scenarios import open_and_compute, preempt, reopen, world
from tests.support.protocol.simulation import SECOND, TIMING, World, registry


def history(dice: random.Random, *, answers: float = 1.0, timing: Timing = TIMING) -> tuple[World, list[int]]:
    """Two or three instances and one to three rooms, all at random."""
    found = world(dice, answers=answers, timing=timing)
    rooms = [10 + number for number in range(dice.choice([1, 2, 3]))]
    for room in rooms:
        open_and_compute(found, dice, room, late=0.3)
    return found, rooms


def unhindered(seed: int) -> World:
    """A history in which nothing fails but the network, up to its end."""
    dice = random.Random(seed)
    found, _ = history(dice)
    loss, copies = dice.choice([0, 0.05, 0.2]), dice.choice([0, 0.05, 0.2])
    found.stir(dice, dice.choice([50, 200, 600]), loss=loss, copies=copies)
    found.settle(ticks=60)
    return found


@settings(max_examples=100)
@given(seed=st.integers(0, 1 << 32))
def test_loss_duplication_reordering_and_delay_harm_no_room(seed: int) -> None:
    found = unhindered(seed)
    assert {room.state for room in found.rooms.values()} == {RoomState.SUCCESS}
    assert set(found.sent.values()) == {RoomState.SUCCESS}
    found.check_empty()


def test_the_histories_cover_what_a_room_can_hold() -> None:
    """Else the oracle above would be content with nothing."""
    seen: Counter[str] = Counter()
    for seed in range(45):
        found = unhindered(seed)
        for room in found.rooms.values():
            names = {found.inputs.segments[segment].name for segment in room.segments}
            seen.update(names)
            seen["aux"] += room.aux_written
            seen["prefill only"] += room.opening.prefill_only
            seen["other instance"] += room.instance
            seen["prefix"] += room.opening.prefix_pages % found.chunk_pages > 0
            seen["no pages"] += not len(room.opening.pages)
            seen[found.instances[room.instance].cp_mode] += found.instances[room.instance].side.cp > 1
        seen.update(found.paths)
        for name in found.machines:
            seen["kept back"] += getattr(found.machines[name].state, "sends_at_finish", False)
        seen["uneven"] += bool(found.prefill.stages) + bool(found.decode.stages)
        seen["layer groups"] += found.cut[True]
    wanted = {"kv", "draft", "conv", "ssm", "index", "aux", "prefill only", "other instance", "prefix", "no pages"}
    wanted |= {"rank0", "all", "all-chunk", "room-hash", "kept back", "uneven", "layer groups", "staged", "slice"}
    assert {name: seen[name] for name in wanted if seen[name] < 3} == {}


def harm(world: World, dice: random.Random, rooms: list[int], loss: float, copies: float) -> None:
    """Something goes wrong."""
    name, room = dice.choice(list(world.machines)), dice.choice(rooms)
    what = dice.choice(
        [
            *("abort", "restart", "restart unproven", "dead for a while", "engine error", "deaf", "stopped", "preempt"),
            *("disconnect", "refuse"),
        ]
    )
    if what == "preempt":
        preempt(world, dice, 1)
        world.stir(dice, dice.choice([5, 50]), loss=loss, copies=copies)
        reopen(world)
    elif what == "abort":
        world.feed(name, ev.AbortRoom(room, "enough"))
    elif what == "restart":
        world.restart(name)
    elif what == "restart unproven":
        world.restart(name, proven=False)
    elif what == "dead for a while":
        world.kill(name, proven=dice.random() < 0.5)
        world.stir(dice, 30, loss=loss, copies=copies)
        world.restart(name)
    elif what == "engine error":
        if world.flying:
            write = dice.choice(world.flying)
            order, text = write.order, "the wire broke"
            failed = ev.PartFailed(order.peer, order.room, order.nonce, order.kind, order.key, "BROKEN", text, True)
            world.feed(write.writer, failed)
    elif what == "disconnect":
        instance = registry(dice.randrange(len(world.instances)))
        readers = [name for name, machine in world.machines.items() if isinstance(machine, DecodeMachine)]
        for reader in readers:
            world.feed(reader, ev.DisconnectInstance(instance))
            world.stir(dice, dice.choice([0, 5, 50]), loss=loss, copies=copies)
        for reader in readers if dice.random() < 0.5 else ():
            world.feed(reader, ev.ConnectInstance(instance))
    elif what == "refuse":
        place, number = dice.randrange(len(world.instances)), 1000 + dice.randrange(1 << 60)
        calls: list[Callable[[], object]] = [
            lambda: world.receive(number, 0, aux=-1, instance=place, refusal="no pages"),
            lambda: world.send(number, 3, instance=place, states=[0] * len(world.shape.states)),
        ]
        for call in dice.sample(calls, dice.choice([1, 2])):
            call()
            world.stir(dice, dice.choice([0, 20]), loss=loss, copies=copies)
    elif what == "deaf":
        world.stir(dice, 200, loss=0.9, delay=0.3)
    else:
        world.paused.add(name)
        for _ in range(dice.choice([2, 5, 20])):
            world.stir(dice, 20, loss=loss, copies=copies)
            world.tick(SECOND)
        world.paused.clear()


def harmed(seed: int) -> World:
    """A history in which something fails, up to its end."""
    dice = random.Random(seed)
    found, rooms = history(dice, answers=0.7)
    loss, copies = dice.choice([0, 0.05, 0.2]), dice.choice([0, 0.05, 0.2])
    for _ in range(dice.choice([1, 2, 3])):
        found.stir(dice, dice.choice([5, 20, 50, 100, 200]), loss=loss, copies=copies)
        harm(found, dice, rooms, loss, copies)
    found.stir(dice, 50, loss=loss, copies=copies)
    found.flush()  # late messages first, so that nobody who has ended is met once more
    found.prove()
    found.settle()
    return found


def preempted(seed: int) -> World:
    """A history in which engines take pages back and go on later, up to its end.

    A connection is a step like others: more time may pass before it than the `lost_ns` of other histories, after which
    rooms fail for a silent rank.
    """
    dice = random.Random(seed)
    found, _ = history(dice, timing=replace(TIMING, lost_ns=TIMING.bootstrap_ns))
    loss, copies = dice.choice([0, 0.05, 0.2]), dice.choice([0, 0.05, 0.2])
    for serial in range(1, dice.choice([2, 3, 5])):
        found.stir(dice, dice.choice([5, 20, 50, 100, 200]), loss=loss, copies=copies)
        preempt(found, dice, serial)
        reopen(found)
    for _ in range(40):
        found.stir(dice, 20, loss=loss, copies=copies)
        reopen(found)
        if found.over():
            break
    found.settle()
    return found


@settings(max_examples=100)
@given(seed=st.integers(0, 1 << 32))
@example(seed=1327)  # a connection after 17 s
@example(seed=2981)  # a room fails before a recall arrives, and is opened again
def test_preempted_rooms_succeed_or_fail_because_their_pages_were_released(seed: int) -> None:
    found = preempted(seed)
    for room in found.rooms.values():
        assert room.state is RoomState.SUCCESS or room.failure["code"] in ("RECALLED", "RECALL_LATE"), room.failure
    found.check_empty()


def test_preempted_histories_cover_both_sides_and_every_end() -> None:
    """Else the oracle above would be content with nothing."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        found = preempted(seed)
        seen["prefill"] += len(found.recalls)
        last = {(room.reader, room.room): room for room in found.rooms.values()}
        seen["decode"] += len(found.rooms) - len(last)
        seen["success after a recall by decode"] += sum(
            room.state is RoomState.SUCCESS and len([each for each in found.rooms if each[:2] == key]) > 1
            for key, room in last.items()
        )
        seen["too late"] += sum(room.state is RoomState.FAILED for room in last.values())
    assert min(seen.values()) > 3, seen


@settings(max_examples=100)
@given(seed=st.integers(0, 1 << 32))
def test_abort_restart_pause_and_engine_errors_end_every_room_and_leave_nothing(seed: int) -> None:
    harmed(seed).check_empty()


@pytest.mark.parametrize("seed", range(4))
def test_many_rooms_through_a_ring_that_holds_two_parts(seed: int) -> None:
    """No set of rooms can hold each other up for ever."""
    dice = random.Random(seed)
    found = World(ParallelConfig(tp=2), ParallelConfig(), ring=2, chunk_pages=1)
    found.connect()
    for room in range(12):
        found.receive(room, 3)
        found.send(room, 3)
    found.stir(dice, 500, loss=0.02)
    found.settle()
    assert {room.state for room in found.rooms.values()} == {RoomState.SUCCESS}
    assert found.d().state.grant_table.ring.round > 5
    found.check_empty()


allocate, free, watermark = Ring.allocate, Ring.free, vars(Ring)["watermark"]


def allocate_again(ring: Ring, nbytes: int) -> Region:
    region = allocate(ring, nbytes)
    ring._serial -= region.serial % 3 == 0
    return region


def free_next(ring: Ring, serial: int) -> bool:
    """Also frees the oldest region, which may be in use."""
    moved = free(ring, serial)
    if len(ring._live) > 1:
        ring._live.pop(next(iter(ring._live)))
        ring.sequence += 1
    return moved


queue, on_staging_request = Dispatch._queue, Grants.on_staging_request


def queue_without_a_grant(dispatch: Any, transfer: Any, part: Any, path: str, *rest: Any) -> None:
    if path == STAGED:
        part.grant, rest = None, (*rest[:3], None, *rest[4:])
    queue(dispatch, transfer, part, path, *rest)


def queue_on_another_path(dispatch: Any, transfer: Any, part: Any, path: str, *rest: Any) -> None:
    queue(dispatch, transfer, part, BULK, *rest)


def grant_to_a_failed_room(grants: Any, peer: Peer, message: msg.StagingRequest) -> None:
    room = grants.state.rooms.get(message.room)
    if room is None or room.failure is None:
        on_staging_request(grants, peer, message)
        return
    failure, room.failure = room.failure, None
    on_staging_request(grants, peer, message)
    room.failure = failure


@pytest.mark.parametrize(
    ("of", "name", "instead", "complaint"),
    [
        (Dispatch, "_queue", queue_without_a_grant, "on path staged without a grant"),
        (Dispatch, "_queue", queue_on_another_path, "on path bulk with a grant"),
        (SendRoom, "released", property(lambda room: False, lambda room, released: None), "releases room .* twice"),
        (Grants, "on_staging_request", grant_to_a_failed_room, "grants regions to .*, which is not open"),
        (RecvRoom, "complete", property(lambda room: room.missing == 0), "succeeds, but (the aux row|state)"),
        (RingGate, "open", lambda gate, round_, end: True, "which the watermark .* has not passed"),
        (Peer, "may_post", lambda peer, now_ns: peer.usable, "which it has not heard of lately"),
        (Ring, "allocate", allocate_again, "grants serial .* again|grants serial .* after serial"),
        (Ring, "free", free_next, "moves its watermark back|the ring holds|two writes in flight|KeyError"),
        (
            Ring,
            "watermark",
            property(lambda ring: Position(0, 0) if ring.sequence % 4 == 3 else watermark.fget(ring)),
            "moves its watermark back",
        ),
        (
            PeerTransfer,
            "drained",
            property(lambda transfer: True),
            "after the room was released|after it was released|while writer",
        ),
        (CancelToken, "cancelled", property(lambda cancel: False, lambda cancel, raised: None), "to be dropped"),
        (RecvRoom, "awaited", property(lambda room: set(), lambda room, ranks: None), "and only .* has received it"),
        (ComputedPages, "ready", lambda computed, lo, hi, page: True, "before page .* is computed there"),
    ],
)
def test_the_oracle_sees_a_machine_that_forgets_a_rule(
    monkeypatch: pytest.MonkeyPatch, of: type, name: str, instead: object, complaint: str
) -> None:
    """No final parts in the completion; gates, leases, serials, watermarks that do not hold; drains not waited for."""
    monkeypatch.setattr(of, name, instead)
    with pytest.raises(AssertionError, match=complaint):
        list(map(harmed, range(200)))


@pytest.mark.parametrize("message", [msg.RoomDrained(7, 1000), msg.StagingRevoked(7, 1000, 1)])
def test_the_oracle_sees_a_report_of_no_writes_while_one_is_queued(message: msg.Message) -> None:
    world = asked(1)
    give(world, granted(world))
    compute(world, 1)
    (write,) = world.queued()
    assert world.flying == []
    with pytest.raises(Broken, match=r"while writer 0 chunk 0 .* is queued"):
        world.messages.sent(world.p(), ev.Send("decode-0", message), world)
    write.order.cancel.cancelled = True
    world.messages.sent(world.p(), ev.Send("decode-0", message), world)
