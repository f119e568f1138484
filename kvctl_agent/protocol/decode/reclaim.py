"""When memory that a writer may still write to is free: it has drained, its end is proven, or an operator says so.

A one-sided write that was posted cannot be recalled, and a process that was replaced may be frozen and go on. So what
it was given stays its own until its process is known to have ended, or says itself that nothing is in flight.

An operator takes ring regions back, and what a failed room holds for a lost writer. A region whose writer answers is
asked back from it; one that is not given back is set aside: others go past it, and its bytes stay its writer's. Bytes
that a write may still land in, and nobody can prove that it will not, are freed only by force: the operator says then
that the writer is gone. A region that is being scattered is never taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode.landing import Grants
from kvctl_agent.protocol.decode.rooms import DecodeState, RecvRoom, RecvRooms, WriterTransfer
from kvctl_agent.protocol.machine import MachineContext, failure_of
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.protocol.ring import GrantedRegion, RegionState


@dataclass(eq=False)
class Reclaim:
    """Proof that writers have ended, and answers to the operator's `release`."""

    context: MachineContext
    state: DecodeState
    rooms: RecvRooms
    grants: Grants

    def on_room_refused(self, peer: Peer, message: msg.RoomRefused) -> None:
        if found := self.rooms.find(peer, message.room, message.nonce):
            room, leg = found
            leg.acked = leg.drained = True  # it has nothing of the room, nor will have
            self.rooms.fail(room, failure_of(message))
            self.drained(room, leg)

    def on_room_drained(self, peer: Peer, message: msg.RoomDrained) -> None:
        found = self.rooms.find(peer, message.room, message.nonce)
        if found is None:
            return
        room, leg = found
        if room.failure is None:
            self.context.drop("unexpected")
            return
        leg.acked = True
        self.drained(room, leg)

    def on_former_drained(self, peer: Peer, event: ev.Received, message: msg.RoomDrained) -> None:
        """A process that was replaced goes on after having been frozen, say, and answers what it was asked."""
        room = self.state.rooms.get(message.room)
        if room is not None and room.nonce == message.nonce and room.failure is not None:
            self._drained_by(room, peer, event.incarnation)

    def on_former_ended(self, peer: Peer, incarnation: int) -> None:
        for room in list(self.state.rooms.values()):
            self._drained_by(room, peer, incarnation)

    def on_peer_lost(self, peer: Peer, text: str) -> None:
        """Fail its rooms; what it may still write is quarantined, unless its end is proven."""
        for room in list(self.state.rooms.values()):
            leg = room.legs.get(peer.name)
            if leg is None or leg.incarnation != peer.incarnation:
                continue
            leg.acked = True
            self.rooms.fail(room, self.context.failure("KV_PEER_LOST", text))
            if peer.proven_dead:  # nothing of a dead process is in flight
                self.drained(room, leg)
                continue
            self.state.book.quarantine_room(room.key_of(peer.name))
            if room.room in self.state.rooms:
                self.rooms.settle(room)

    def forget_former(self) -> None:
        """Earlier incarnations that no failed room waits for: what they may write nobody uses."""
        for peer in self.context.peers.values():
            if peer.former:
                legs = [room.legs.get(peer.name) for room in self.state.rooms.values()]
                held = {leg.incarnation for leg in legs if leg is not None and not leg.drained}
                for incarnation in peer.former.keys() - held:
                    del peer.former[incarnation]

    def drained(self, room: RecvRoom, leg: WriterTransfer) -> None:
        """Nothing of this writer is in flight: what it holds of the ring is free, unless a scatter reads it."""
        leg.drained = True
        self.grants.free(self.state.book.unread(room.key_of(leg.peer)))
        if room.room in self.state.rooms:
            self.rooms.settle(room)

    def _drained_by(self, room: RecvRoom, peer: Peer, incarnation: int) -> None:
        leg = room.legs.get(peer.name)
        if leg is not None and leg.incarnation == incarnation:
            self.drained(room, leg)

    @property
    def quarantined_bytes(self) -> int:
        """Ring and page bytes of failed rooms that a lost rank, not proven dead, may still write, or one that has not
        drained for long. Safe to read from another thread."""
        total = self.state.book.quarantined_bytes
        for room in list(self.state.rooms.values()):
            if room.failure is None:
                continue
            for name, leg in room.legs.items():
                if not leg.drained and (room.overdue or not self.rooms.answers(leg)):
                    total += room.owed_bytes(name)
        return total

    # ---- the operator -----------------------------------------------------------------------------------------

    def on_release_held(self, event: ev.ReleaseHeld) -> None:
        if event.room is None:
            self._release_region(event)
        else:
            self._release_room(event, event.room)

    def _release_region(self, event: ev.ReleaseHeld) -> None:
        serial, ticket = event.serial, event.ticket
        holding = self.state.book.find(serial)
        if holding is None:
            if 0 < serial <= self.state.book.ring.last_serial:
                self.context.answer(ticket, "unchanged", f"allocation {serial} is free already")
            else:
                self.context.answer(
                    ticket, "refused", f"no allocation {serial} was ever given: kvctl staging map lists them"
                )
            return
        what = f"allocation {serial} of room {holding.room.room}"
        if holding.state is RegionState.LANDED:
            text = f"{what} has landed and is being scattered: it is free when that is done"
            self.context.answer(ticket, "refused", text)
        elif holding.state is not RegionState.QUARANTINED and (
            not event.force or self.grants.is_fresh(holding.room.peer)
        ):
            self._move_away(holding, what, ticket, force=event.force)
        elif not event.force:
            self.context.answer(ticket, "refused", f"{what}: {self._doubt([self._leg_of(holding)])}")
        else:
            room = self.state.rooms.get(holding.room.room)
            mine = room is not None and room.nonce == holding.room.nonce
            if room is not None and mine:
                # Its writer may come back and take these bytes for its own: nothing of the room is believed any more.
                self.rooms.fail(room, self.context.failure("ABORTED", f"an operator freed {what} by force"))
            if self.state.book.find(serial) is holding:
                self.grants.free([holding])
            self.grants.unpin()
            held = ""
            if room is not None and mine and room.room in self.state.rooms:
                held = f"; its room still holds its pages: kvctl staging release --room {room.room}"
            self.context.answer(ticket, "released", f"{what} is freed by force{held}", freed=(serial,))

    def _move_away(self, holding: GrantedRegion, what: str, ticket: int, *, force: bool) -> None:
        """Ask a writer for an unwritten region; where it cannot be asked, or did not answer, let others go past it."""
        writer = holding.room.peer
        if holding.yields:
            text = f"{what}: others go past it already; its bytes are {writer}'s until it gives them back"
            if force:
                text += ", and force is for writers that are suspect or lost"
            self.context.answer(ticket, "unchanged", text)
        elif holding.state is RegionState.GRANTED and not holding.posted and self.grants.is_fresh(writer):
            self.grants.revoke(holding, 0)
            room = self.state.rooms.get(holding.room.room)
            again = "" if room is None or room.failure is not None else ", and asks for another place when it does"
            self.context.answer(ticket, "revoking", f"{what}: {writer} was asked to give it back{again}")
        else:
            holding.yields = True
            why = "is writing it" if holding.posted else "has not given it back"
            self.grants.unpin()
            text = f"{what}: {writer} {why}, so others go past it; its bytes are {writer}'s until then"
            self.context.answer(ticket, "aside", text)

    def _release_room(self, event: ev.ReleaseHeld, number: int) -> None:
        ticket = event.ticket
        room = self.state.rooms.get(number)
        if room is None:
            self.context.answer(ticket, "unknown", "")
            return
        if room.failure is None:
            text = f"room {number} is {room.state.label}, and what it holds is in use: kvctl rooms abort {number} first"
            self.context.answer(ticket, "refused", text)
            return
        undrained = [leg for leg in room.legs.values() if not leg.drained]
        stuck = [leg for leg in undrained if room.overdue or not self.rooms.answers(leg)]
        if not stuck:
            who = ", ".join(leg.peer for leg in undrained)
            waits = f"{who} was asked to drain" if who else "a part of it is being scattered"
            waited_s = (self.context.now_ns - room.since_ns) / 1e9
            self.context.answer(
                ticket, "refused", f"room {number} failed {waited_s:.1f} s ago, and {waits}: wait for that"
            )
            return
        if not event.force:
            self.context.answer(ticket, "refused", f"room {number}: {self._doubt(stuck)}")
            return
        freed = self._give_up(room, stuck)
        self.grants.unpin()
        self.rooms.settle(room)
        left = "its pages are the engine's again" if room.released else "its pages are still held"
        rest = [leg.peer for leg in room.legs.values() if not leg.drained]
        if rest:
            left += f" for {', '.join(rest)}"
        regions = f"{len(freed)} allocation{'s' * (len(freed) != 1)}"
        text = f"room {number}: {regions} freed by force, and {left}"
        self.context.answer(ticket, "released", text, freed=freed, drained=tuple(leg.peer for leg in stuck))

    def _give_up(self, room: RecvRoom, legs: list[WriterTransfer]) -> tuple[int, ...]:
        """Nothing of these writers is in flight, the operator says; the serials that this frees."""
        held: list[GrantedRegion] = []
        for leg in legs:
            leg.acked = leg.drained = True
            held += self.state.book.unread(room.key_of(leg.peer))
        self.grants.free(held)
        return tuple(sorted(holding.region.serial for holding in held))

    def _leg_of(self, holding: GrantedRegion) -> WriterTransfer:
        return self.state.rooms[holding.room.room].legs[holding.room.peer]  # a room outlives the regions it holds

    def _doubt(self, legs: list[WriterTransfer]) -> str:
        """Why what these hold is not freed, and what would make it safe."""
        writers: list[str] = []
        for leg in legs:
            peer = self.context.peers.get(leg.peer)
            who = peer.introduced(leg.incarnation) if peer is not None else None
            writers.append(f"{leg.peer} ({who.process})" if who is not None else leg.peer)
        return (
            f"{', '.join(writers)} may still write to it, and nothing proves that it will not: "
            "end that process, or make sure that it is gone, then release it with force"
        )
