"""Faults that are put into the shipped machines on purpose: the explorer must find each of them.

Each is a mistake that somebody has made, or could; its configuration is a small one that shows it, and that is walked
without complaint when the machines are as they are shipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import ring_gate as gate_module
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.grant_table import GrantedRegion, GrantTable, RegionState
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.prefill_rooms import PrefillRooms
from kvctl_agent.protocol.recv_room import RecvRoom, WriterTransfer
from kvctl_agent.protocol.ring import Region, Ring
from kvctl_agent.protocol.send_room import Part, PartState, PeerTransfer
from kvctl_agent.protocol.tombstones import RoomKey, Tombstones
from tests.explore.configurations import P0, Configuration, D
from tests.explore.explorer.flow import Budget
from tests.explore.explorer.scene import Scene
from tests.support.protocol.simulation import direct

STUCK = r"the rooms cannot end any more"
IN_FLIGHT = r"while .* is in flight|after the room was released"
OVERWRITTEN = r"two writes in flight to the same ring bytes|the ring holds .* where"

Patch = pytest.MonkeyPatch


class Mutation(NamedTuple):
    """A fault, what it is put into, and what the explorer says then."""

    name: str
    scene: Scene
    budget: Budget
    complaint: str
    put_in: Callable[[Patch], None]

    @property
    def configuration(self) -> Configuration:
        return Configuration(self.name, self.scene, self.budget)


def _no_tombstones(patch: Patch) -> None:
    patch.setattr(Tombstones, "bury", lambda graves, key, epitaph, now_ns: None)


def _serials_again(patch: Patch) -> None:
    allocate = Ring.allocate

    def again(ring: Ring, nbytes: int) -> Region:
        ring._serial = max((*ring._live, *ring._avoided), default=0)
        return allocate(ring, nbytes)

    patch.setattr(Ring, "allocate", again)


def _parts_counted(patch: Patch) -> None:
    def settle(room: RecvRoom, key: object) -> None:
        room.missing -= 1

    patch.setattr(RecvRoom, "grantable", lambda room, key: True)
    patch.setattr(RecvRoom, "settle", settle)


def _finals_counted(patch: Patch) -> None:
    def land_final(room: RecvRoom, final: object) -> bool:
        return bool(room.finals) and room.finals.pop() is not None

    patch.setattr(RecvRoom, "land_final", land_final)


def _not_freed_on_abort(patch: Patch) -> None:
    def drained(machine: Any, room: RecvRoom, leg: WriterTransfer) -> None:
        leg.drained = True
        machine._settle(room)

    patch.setattr(DecodeMachine, "_drained", drained)


def _gate_of_an_earlier_life(patch: Patch) -> None:
    meet = Peer.meet

    def keep(peer: Peer, *introduced: Any) -> None:
        gate = peer.gate
        meet(peer, *introduced)
        peer.gate = gate

    patch.setattr(Peer, "meet", keep)


def _gate_holds_a_worker(patch: Patch) -> None:
    """A worker takes the next part whether it may be written or not, and waits with it."""
    try_, grants = PrefillRooms._try, PrefillMachine.on_staging_grants

    def held(machine: Any, peer: str) -> list[Any]:
        queues: dict[str, list[Any]] = vars(machine).setdefault("_held", {})
        return queues.setdefault(peer, [])

    def take(machine: Any, room: Any, leg: PeerTransfer, part: Part) -> None:
        part.state = PartState.QUEUED
        held(machine, leg.peer).append((leg, part))
        go_on(machine, machine.peers[leg.peer])

    def go_on(machine: Any, peer: Peer) -> None:
        queue = held(machine, peer.name)
        while queue and machine.rooms.get(queue[0][0].room) is not None:
            leg, part = queue[0]
            if part.grant is None or not peer.gate.open(part.grant.round, part.grant.end):
                return
            queue.pop(0)
            part.state = PartState.READY
            try_(machine, machine.rooms[leg.room], leg, part)

    def on_staging_grants(machine: Any, peer: Peer, message: Any) -> None:
        grants(machine, peer, message)
        go_on(machine, peer)

    patch.setattr(PrefillRooms, "_try", take)
    patch.setattr(PrefillRooms, "_retry_parked", go_on)
    patch.setattr(PrefillMachine, "on_staging_grants", on_staging_grants)


def _gate_open(patch: Patch) -> None:
    patch.setattr(gate_module, "may_write", lambda round_, end, watermark: True)


def _freed_under_a_scatter(patch: Patch) -> None:
    def drained(machine: Any, room: RecvRoom, leg: WriterTransfer) -> None:
        leg.drained = True
        machine._free(machine.book.of_room(RoomKey(leg.peer, room.room, room.nonce)))
        if room.room in machine.rooms:
            machine._settle(room)

    patch.setattr(DecodeMachine, "_drained", drained)


def _released_before_drained(patch: Patch) -> None:
    init = WriterTransfer.__init__

    def drained(leg: WriterTransfer, peer: str, incarnation: int) -> None:
        init(leg, peer, incarnation)
        leg.drained = True

    patch.setattr(WriterTransfer, "__init__", drained)


def _drained_said_too_early(patch: Patch) -> None:
    patch.setattr(PeerTransfer, "drained", property(lambda leg: True))


def _revoked_serial_forgotten(patch: Patch) -> None:
    patch.setattr(Part, "revoked", property(lambda part: 0, lambda part, serial: None))


def _request_said_once(patch: Patch) -> None:
    resend = PrefillRooms._resend

    def without_requests(machine: Any, room: Any, leg: PeerTransfer) -> None:
        vars(machine)["_send_request"] = lambda leg, parts: None
        resend(machine, room, leg)
        del vars(machine)["_send_request"]

    patch.setattr(PrefillRooms, "_resend", without_requests)


def _lost_is_taken_for_dead(patch: Patch) -> None:
    on_peer_lost = DecodeMachine.on_peer_lost

    def dead(machine: Any, peer: Peer, text: str) -> None:
        proven, peer.proven_dead = peer.proven_dead, True
        on_peer_lost(machine, peer, text)
        peer.proven_dead = proven

    patch.setattr(DecodeMachine, "on_peer_lost", dead)


def _success_on_the_last_chunk(patch: Patch) -> None:
    settle = RecvRoom.settle

    def last(room: RecvRoom, key: Any) -> None:
        settle(room, key)
        if key.chunk == max(chunk for _, chunk in room.wanted):
            room.missing = 0

    patch.setattr(RecvRoom, "settle", last)


def _quarantine_for_ever(patch: Patch) -> None:
    free = GrantTable.free

    def kept(book: GrantTable, serial: int) -> bool:
        holding: GrantedRegion | None = book.find(serial)
        return holding is not None and holding.state is not RegionState.QUARANTINED and free(book, serial)

    patch.setattr(GrantTable, "free", kept)


def _replaced_is_taken_for_dead(patch: Patch) -> None:
    replace = Machine._replace

    def dead(machine: Any, peer: Peer, incarnation: int) -> None:
        if peer.incarnation not in (0, incarnation) and not peer.proven_dead:
            machine._lose(peer, proven=True, text="it came back")
        replace(machine, peer, incarnation)

    patch.setattr(Machine, "_replace", dead)


def _replacement_answers_for_the_replaced(patch: Patch) -> None:
    def answers(machine: Any, leg: WriterTransfer) -> bool:
        return bool(machine.is_ready(leg.peer))

    def find(machine: Any, peer: Peer, number: int, nonce: int) -> Any:
        room = machine.rooms.get(number)
        if room is None or room.nonce != nonce:
            return None
        leg = room.legs.get(peer.name)
        return None if leg is None else (room, leg)

    patch.setattr(DecodeMachine, "answers", answers)
    patch.setattr(DecodeMachine, "_find", find)


def _goodbye_always_drained(patch: Patch) -> None:
    on_shutdown = Machine.on_shutdown
    patch.setattr(Machine, "on_shutdown", lambda machine, event: on_shutdown(machine, ev.Shutdown(True)))


def _not_asked_after_a_silence(patch: Patch) -> None:
    patch.setattr(DecodeMachine, "_resynchronise", lambda machine, peer: None)


MUTATIONS = (
    Mutation(
        "the tombstone is dropped",
        Scene(opened=False, asked=False),
        Budget(copies=1, overtakings=1, aborts=((D, 7),)),
        STUCK,
        _no_tombstones,
    ),
    Mutation("a serial is used again", Scene(rooms=2, granted=True), Budget(early=1), STUCK, _serials_again),
    Mutation(
        "arrivals are counted",
        Scene(pages=2, paths=direct),
        Budget(copies=1),
        r"succeeds with",
        _parts_counted,
    ),
    Mutation("final parts are counted", Scene(aux=3, states=(1,)), Budget(copies=1), r"succeeds with", _finals_counted),
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
        "a new incarnation is taken for proof of death, past the ring",
        Scene(pages=2, paths=direct),
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
        "success on the last chunk",
        Scene(pages=2, paths=direct),
        Budget(),
        r"succeeds with",
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
)
