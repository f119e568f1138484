"""Faults seeded into the shipped machines: the explorer must detect each of them.

Each is a mistake that was made once, or could be; its configuration is a small world that exhibits it and that is
walked without violation with the shipped machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import ring as gate_module
from kvctl_agent.protocol.decode.admission import Handshake
from kvctl_agent.protocol.decode.reclaim import Reclaim
from kvctl_agent.protocol.decode.rooms import RecvRoom, RecvRooms, WriterTransfer
from kvctl_agent.protocol.machine import PeerSessions, Tombstones
from kvctl_agent.protocol.peer import CancelToken, Lease, Peer
from kvctl_agent.protocol.prefill.dispatch import Dispatch
from kvctl_agent.protocol.prefill.rooms import SendRooms, StagingRequests
from kvctl_agent.protocol.prefill.send_room import Part, PartState, PeerTransfer, SendRoom
from kvctl_agent.protocol.ring import Allocation, GrantTable, Region, RegionState, Ring
from tests.explore.configurations import D1, P0, P1, Configuration, D, two_pairs
from tests.explore.explorer.flow import Budget
from tests.explore.explorer.scene import Scene
from tests.support.protocol.simulation import direct

STUCK = r"the rooms cannot end any more"
IN_FLIGHT = r"while .* is in flight|after the room was released"
OVERWRITTEN = r"two writes in flight to the same ring bytes|the ring holds .* where"

Patch = pytest.MonkeyPatch


class Mutation(NamedTuple):
    """A fault, the class that it changes, and the expected violation."""

    name: str
    scene: Scene
    budget: Budget
    complaint: str
    put_in: Callable[[Patch], None]

    @property
    def configuration(self) -> Configuration:
        return Configuration(self.name, self.scene, self.budget)


def _no_tombstones(patch: Patch) -> None:
    patch.setattr(Tombstones, "add", lambda tombstones, key, outcome, now_ns: None)


def _serials_again(patch: Patch) -> None:
    allocate = Ring.allocate

    def again(ring: Ring, nbytes: int) -> Region:
        ring._serial = max((*ring._live, *ring._excluded), default=0)
        return allocate(ring, nbytes)

    patch.setattr(Ring, "allocate", again)


def _finals_counted(patch: Patch) -> None:
    def land_final(room: RecvRoom, final: object) -> bool:
        return bool(room.finals) and room.finals.pop() is not None

    patch.setattr(RecvRoom, "land_final", land_final)


def _not_freed_on_abort(patch: Patch) -> None:
    def drained(reclaim: Any, room: RecvRoom, transfer: WriterTransfer) -> None:
        transfer.drained = True
        reclaim.rooms.forget_when_drained(room)

    patch.setattr(Reclaim, "drained", drained)


def _gate_of_an_earlier_life(patch: Patch) -> None:
    begin = Peer.begin_incarnation

    def keep(peer: Peer, *introduced: Any) -> None:
        gate = peer.gate
        begin(peer, *introduced)
        peer.gate = gate

    patch.setattr(Peer, "begin_incarnation", keep)


def _gate_holds_a_worker(patch: Patch) -> None:
    """A worker takes the next part even if it may not be written yet, and waits with it."""
    dispatch_, grants_ = Dispatch.dispatch, Dispatch.on_staging_grants

    def held(dispatch: Any, peer: str) -> list[Any]:
        queues: dict[str, list[Any]] = vars(dispatch.state).setdefault("held", {})
        return queues.setdefault(peer, [])

    def take(dispatch: Any, room: Any, transfer: PeerTransfer, part: Part) -> None:
        part.state = PartState.QUEUED
        held(dispatch, transfer.peer).append((transfer, part))
        go_on(dispatch, dispatch.context.peers[transfer.peer])

    def go_on(dispatch: Any, peer: Peer) -> None:
        queue, rooms = held(dispatch, peer.name), dispatch.state.rooms
        while queue and rooms.get(queue[0][0].room) is not None:
            transfer, part = queue[0]
            if part.grant is None or not peer.gate.open(part.grant.round, part.grant.end):
                return
            queue.pop(0)
            part.state = PartState.READY
            dispatch_(dispatch, rooms[transfer.room], transfer, part)

    def on_staging_grants(dispatch: Any, peer: Peer, message: Any) -> None:
        grants_(dispatch, peer, message)
        go_on(dispatch, peer)

    patch.setattr(Dispatch, "dispatch", take)
    patch.setattr(Dispatch, "retry_parked", go_on)
    patch.setattr(Dispatch, "on_staging_grants", on_staging_grants)


def _gate_open(patch: Patch) -> None:
    patch.setattr(gate_module, "may_write", lambda round_, end, watermark: True)


def _freed_under_a_scatter(patch: Patch) -> None:
    def drained(reclaim: Any, room: RecvRoom, transfer: WriterTransfer) -> None:
        transfer.drained = True
        reclaim.grants.free(reclaim.state.grant_table.of_room(room.key_of(transfer.peer)))
        if room.room in reclaim.state.rooms:
            reclaim.rooms.forget_when_drained(room)

    patch.setattr(Reclaim, "drained", drained)


def _released_before_drained(patch: Patch) -> None:
    init = WriterTransfer.__init__

    def drained(transfer: WriterTransfer, peer: str, incarnation: int, *, kept: bool) -> None:
        init(transfer, peer, incarnation, kept=kept)
        transfer.drained = True

    patch.setattr(WriterTransfer, "__init__", drained)


def _drained_said_too_early(patch: Patch) -> None:
    patch.setattr(PeerTransfer, "drained", property(lambda transfer: True))


def _revoked_serial_forgotten(patch: Patch) -> None:
    patch.setattr(Part, "revoked", property(lambda part: 0, lambda part, serial: None))


def _request_said_once(patch: Patch) -> None:
    resend = SendRooms.resend

    def without_requests(rooms: Any, room: Any, transfer: PeerTransfer) -> None:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(StagingRequests, "send", lambda staging, transfer, parts: None)
            resend(rooms, room, transfer)

    patch.setattr(SendRooms, "resend", without_requests)


def _lost_is_taken_for_dead(patch: Patch) -> None:
    on_peer_lost = Reclaim.on_peer_lost

    def dead(reclaim: Any, peer: Peer, text: str) -> None:
        proven, peer.proven_dead = peer.proven_dead, True
        on_peer_lost(reclaim, peer, text)
        peer.proven_dead = proven

    patch.setattr(Reclaim, "on_peer_lost", dead)


def _success_on_the_last_chunk(patch: Patch) -> None:
    cover = RecvRoom.cover

    def last(room: RecvRoom, key: Any) -> None:
        cover(room, key)
        if key.chunk == max(chunk for _, chunk in room.wanted):
            room.missing = 0

    patch.setattr(RecvRoom, "cover", last)


def _quarantine_for_ever(patch: Patch) -> None:
    free = GrantTable.free

    def kept(table: GrantTable, serial: int) -> bool:
        allocation: Allocation | None = table.find(serial)
        return allocation is not None and allocation.state is not RegionState.QUARANTINED and free(table, serial)

    patch.setattr(GrantTable, "free", kept)


def _replaced_is_taken_for_dead(patch: Patch) -> None:
    replace = PeerSessions.replace

    def dead(sessions: Any, peer: Peer, incarnation: int) -> None:
        if peer.incarnation not in (0, incarnation) and not peer.proven_dead:
            sessions.lose(peer, proven=True, text="it came back")
        replace(sessions, peer, incarnation)

    patch.setattr(PeerSessions, "replace", dead)


def _replacement_answers_for_the_replaced(patch: Patch) -> None:
    def answers(rooms: Any, transfer: WriterTransfer) -> bool:
        return bool(rooms.context.is_ready(transfer.peer))

    def find(rooms: Any, peer: Peer, number: int, nonce: int) -> Any:
        room = rooms.state.rooms.get(number)
        if room is None or room.nonce != nonce:
            return None
        transfer = room.transfers.get(peer.name)
        return None if transfer is None else (room, transfer)

    patch.setattr(RecvRooms, "answers", answers)
    patch.setattr(RecvRooms, "find", find)


def _goodbye_always_drained(patch: Patch) -> None:
    on_shutdown = PeerSessions.on_shutdown
    patch.setattr(PeerSessions, "on_shutdown", lambda sessions, event: on_shutdown(sessions, ev.Shutdown(True)))


def _not_asked_after_a_silence(patch: Patch) -> None:
    patch.setattr(Handshake, "_resynchronise", lambda handshake, peer: None)


def _forgotten_before_it_has_drained(patch: Patch) -> None:
    patch.setattr(RecvRooms, "unanswered", lambda rooms, room: [])


def _recall_drops_nothing(patch: Patch) -> None:
    patch.setattr(CancelToken, "dropped", property(lambda cancel: cancel.cancelled))


def _recall_ends_at_once(patch: Patch) -> None:
    end_recall = Dispatch.end_recall

    def at_once(dispatch: Any, room: SendRoom) -> None:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(SendRoom, "drained", property(lambda room: True))
            end_recall(dispatch, room)

    patch.setattr(Dispatch, "end_recall", at_once)


def _sent_before_the_recall_has_ended(patch: Patch) -> None:
    advance = Dispatch.advance

    def at_once(dispatch: Any, room: SendRoom, *computed: Any) -> None:
        recalling, room.recalling = room.recalling, 0
        advance(dispatch, room, *computed)
        room.recalling = recalling

    patch.setattr(Dispatch, "advance", at_once)


def _lease_never_expires(patch: Patch) -> None:
    patch.setattr(Lease, "valid", lambda lease, now_ns: True)


def _ordered_without_a_lease(patch: Patch) -> None:
    patch.setattr(Peer, "may_post", lambda peer, now_ns: peer.usable)


def _done_without_the_rank_that_recalled(patch: Patch) -> None:
    patch.setattr(SendRoom, "sent", property(lambda room: all(each.sent for each in room.transfers.values())))
    patch.setattr(SendRoom, "done", property(lambda room: all(each.done for each in room.transfers.values())))


def _waits_for_nobody(patch: Patch) -> None:
    patch.setattr(RecvRoom, "awaited", property(lambda room: set(), lambda room, ranks: None))


def _asks_nobody(patch: Patch) -> None:
    patch.setattr(RecvRooms, "_ask_awaited", lambda rooms, room: None)


def _failure_elsewhere_forgotten(patch: Patch) -> None:
    forget = RecvRooms.forget

    def forgetful(rooms: RecvRooms, room: RecvRoom) -> None:
        room.failed_elsewhere = None
        forget(rooms, room)

    patch.setattr(RecvRooms, "forget", forgetful)


MUTATIONS = (
    Mutation("a keeper waits for nobody", two_pairs(), Budget(), r"only .* has received it", _waits_for_nobody),
    Mutation("a keeper asks nobody", two_pairs(), Budget(deaf=((P1, D),)), STUCK, _asks_nobody),
    Mutation(
        "a keeper forgets that the room has failed elsewhere",
        two_pairs(),
        Budget(deaf=((D, P0),), aborts=((D1, 7),)),
        r"only .* has received it",
        _failure_elsewhere_forgotten,
    ),
    Mutation(
        "the tombstone is dropped",
        Scene(opened=False, asked=False),
        Budget(copies=1, overtakings=1, aborts=((D, 7),)),
        STUCK,
        _no_tombstones,
    ),
    Mutation(
        "a serial is used again",
        Scene(rooms=2, granted=True),
        Budget(early=1),
        r"grants serial 1 again",
        _serials_again,
    ),
    Mutation(
        "final parts are counted",
        Scene(aux=3, states=(1,)),
        Budget(copies=1),
        r"succeeds, but|stored twice",
        _finals_counted,
    ),
    Mutation("an abort frees nothing", Scene(granted=True), Budget(aborts=((D, 7),)), STUCK, _not_freed_on_abort),
    Mutation(
        "a watermark is believed without its incarnation",
        Scene(pages=2, granted=True, computed=((P0, 7),), revived=(D,)),
        Budget(kills=(D,), restarts=(D,)),
        f"{OVERWRITTEN}|{STUCK}",
        _gate_of_an_earlier_life,
    ),
    Mutation(
        "a gated part holds its worker",
        Scene(rooms=2, writers=2, ring=1, granted=True),
        Budget(),
        STUCK,
        _gate_holds_a_worker,
    ),
    Mutation("the gate is always open", Scene(rooms=2), Budget(), OVERWRITTEN, _gate_open),
    Mutation(
        "a region is freed under its scatter",
        Scene(rooms=2, granted=True),
        Budget(aborts=((D, 7),)),
        rf"{OVERWRITTEN}|is scattered after",
        _freed_under_a_scatter,
    ),
    Mutation(
        "pages are released before the writers have drained",
        Scene(paths=direct),
        Budget(aborts=((D, 7),)),
        IN_FLIGHT,
        _released_before_drained,
    ),
    Mutation(
        "drained is said with a write in flight",
        Scene(granted=True),
        Budget(aborts=((D, 7),)),
        IN_FLIGHT,
        _drained_said_too_early,
    ),
    Mutation(
        "a revoked serial is taken again",
        Scene(rooms=2),
        Budget(copies=1, overtakings=1, early=1),
        OVERWRITTEN,
        _revoked_serial_forgotten,
    ),
    Mutation("a staging request is said once", Scene(), Budget(losses=1), STUCK, _request_said_once),
    Mutation(
        "silence is taken for proof of death",
        Scene(granted=True),
        Budget(pauses=(P0,)),
        IN_FLIGHT,
        _lost_is_taken_for_dead,
    ),
    Mutation(
        "a new incarnation is taken for proof of death",
        Scene(granted=True),
        Budget(freezes=(P0,), restarts=(P0,)),
        IN_FLIGHT,
        _replaced_is_taken_for_dead,
    ),
    Mutation(
        "a new incarnation answers for the one before",
        Scene(pages=2, paths=direct),
        Budget(freezes=(P0,), restarts=(P0,)),
        IN_FLIGHT,
        _replacement_answers_for_the_replaced,
    ),
    Mutation(
        "every goodbye says that it has drained",
        Scene(pages=2, paths=direct),
        Budget(leaves=(P0,)),
        IN_FLIGHT,
        _goodbye_always_drained,
    ),
    Mutation(
        "parts that were queued before a recall are sent",
        Scene(paths=direct, recalled=((P0, 7),)),
        Budget(recalls=((P0, 7),)),
        r"that its engine has recalled",
        _recall_drops_nothing,
    ),
    Mutation(
        "a recall is reported with a write in flight",
        Scene(paths=direct, recalled=((P0, 7),)),
        Budget(recalls=((P0, 7),)),
        r"gives pages of room 7 back while",
        _recall_ends_at_once,
    ),
    Mutation(
        "parts are queued before the recall of the pages before them has ended",
        Scene(paths=direct, pages=2, recalled=((P0, 7),)),
        Budget(recalls=((P0, 7),)),
        r"waits for the end of its recall",
        _sent_before_the_recall_has_ended,
    ),
    Mutation(
        "a queued part begins without a lease",
        Scene(paths=direct, computed=((P0, 7),)),
        Budget(pauses=(P0,)),
        r"posts to decode-0, which it has not heard of lately",
        _lease_never_expires,
    ),
    Mutation(
        "a part is ordered without a lease",
        Scene(paths=direct),
        Budget(pauses=(P0,)),
        r"orders .*, which it has not heard of lately",
        _ordered_without_a_lease,
    ),
    Mutation(
        "a room is done without the decode rank that recalled it",
        Scene(paths=direct, recalled=((D, 7),)),
        Budget(recalls=((D, 7),)),
        r"only \[\] has received it",
        _done_without_the_rank_that_recalled,
    ),
    Mutation(
        "success on the last chunk",
        Scene(pages=2, paths=direct),
        Budget(),
        r"succeeds, but",
        _success_on_the_last_chunk,
    ),
    Mutation("a quarantine has no end", Scene(granted=True), Budget(pauses=(P0,)), STUCK, _quarantine_for_ever),
    Mutation(
        "nobody asks again after a silence",
        Scene(granted=True),
        Budget(deaf=((P0, D),)),
        STUCK,
        _not_asked_after_a_silence,
    ),
    Mutation(
        "a writer is forgotten before it has drained",
        Scene(granted=True),
        Budget(forgets=((D, P0),), freezes=(P0,)),
        STUCK,
        _forgotten_before_it_has_drained,
    ),
)
