"""Frees memory of failed rooms on a decode rank once no writer can write to it any more.

A one-sided write that was posted cannot be recalled, and a process that was replaced may be frozen and continue later.
So the memory that it may write is kept until the process has reported that nothing is in flight (RoomDrained, Bye), is
proven to have ended, or is declared gone by an operator.

An operator can release a ring region, or all memory of a failed room that lost writers may still write. A live writer
is asked to give a region back; if it does not, the region is retired: the watermark passes it, but its bytes stay
allocated. Bytes that a write may still reach are freed only by force, by which the operator states that the writer is
gone. A region that is being scattered is never released.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvctl_agent.contract.states import RoomState
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode.landing import Grants
from kvctl_agent.protocol.decode.rooms import DecodeState, RecvRoom, RecvRooms, WriterTransfer
from kvctl_agent.protocol.machine import MachineContext, failure_of
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.protocol.ring import Allocation, RegionState

_SHOWN = 5  # rooms that an answer names


@dataclass(eq=False)
class Reclaim:
    """Handles messages and events that prove that a writer has drained or ended, and operators' `release` requests."""

    context: MachineContext
    state: DecodeState
    rooms: RecvRooms
    grants: Grants

    def on_room_refused(self, peer: Peer, message: msg.RoomRefused) -> None:
        if found := self.rooms.find(peer, message.room, message.nonce):
            room, transfer = found
            transfer.acked = transfer.drained = True  # the rank has not opened the room, and will not
            self.rooms.fail(room, failure_of(message))
            self.drained(room, transfer)

    def on_room_drained(self, peer: Peer, message: msg.RoomDrained) -> None:
        found = self.rooms.find(peer, message.room, message.nonce)
        if found is None:
            return
        room, transfer = found
        if room.failure is None:
            self.context.drop("unexpected")
            return
        transfer.acked = True
        self.drained(room, transfer)

    def on_former_drained(self, peer: Peer, event: ev.Received, message: msg.RoomDrained) -> None:
        """Handles RoomDrained from an earlier incarnation of a peer, whose process may have been frozen for a while."""
        room = self.state.rooms.get(message.room)
        if room is not None and room.nonce == message.nonce and room.failure is not None:
            self._drained_by(room, peer, event.incarnation)

    def on_former_ended(self, peer: Peer, incarnation: int) -> None:
        for room in list(self.state.rooms.values()):
            self._drained_by(room, peer, incarnation)

    def on_peer_lost(self, peer: Peer, text: str) -> None:
        """Fails the rooms of a lost peer; quarantines regions that it may still write, unless it is proven dead."""
        for room in list(self.state.rooms.values()):
            transfer = room.transfers.get(peer.name)
            if transfer is None or transfer.incarnation != peer.incarnation:
                continue
            transfer.acked = True
            if room.state is not RoomState.SUCCESS or peer.name in room.awaited:
                self.rooms.fail(room, self.context.failure("KV_PEER_LOST", text))
            if peer.proven_dead:  # nothing of a dead process is in flight
                self.drained(room, transfer)
                continue
            self.state.grant_table.quarantine_room(room.key_of(peer.name))
            if room.room in self.state.rooms:
                self.rooms.forget_when_drained(room)

    def forget_former(self) -> None:
        """Removes the earlier incarnations of peers that no room waits for any more."""
        for peer in self.context.peers.values():
            if peer.former:
                transfers = [room.transfers.get(peer.name) for room in self.state.rooms.values()]
                waiting = {each.incarnation for each in transfers if each is not None and not each.drained}
                for incarnation in peer.former.keys() - waiting:
                    del peer.former[incarnation]

    def drained(self, room: RecvRoom, transfer: WriterTransfer) -> None:
        """Marks a writer as drained, and frees its regions except those that a scatter reads."""
        transfer.drained = True
        self.grants.free(self.state.grant_table.unlanded(room.key_of(transfer.peer)))
        if room.room in self.state.rooms:
            self.rooms.forget_when_drained(room)

    def _drained_by(self, room: RecvRoom, peer: Peer, incarnation: int) -> None:
        transfer = room.transfers.get(peer.name)
        if transfer is not None and transfer.incarnation == incarnation:
            self.drained(room, transfer)

    @property
    def quarantined_bytes(self) -> int:
        """Ring and page bytes of failed rooms that a lost or silent writer may still write. Any thread may read it.

        These writers are lost and not proven to be dead, or have not drained within the waiting deadline.
        """
        total = self.state.grant_table.quarantined_bytes
        for room in list(self.state.rooms.values()):
            if room.failure is None:
                continue
            for name, transfer in room.transfers.items():
                if not transfer.drained and (room.overdue or not self.rooms.answers(transfer)):
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
        allocation = self.state.grant_table.find(serial)
        if allocation is None:
            if 0 < serial <= self.state.grant_table.ring.last_serial:
                self.context.answer(ticket, "unchanged", f"allocation {serial} is free already")
            else:
                self.context.answer(
                    ticket, "refused", f"no allocation {serial} was ever given: kvctl staging map lists them"
                )
            return
        what = f"allocation {serial} of room {allocation.room.room}"
        if allocation.state is RegionState.LANDED:
            text = f"{what} has landed and is being scattered: it is free when that is done"
            self.context.answer(ticket, "refused", text)
        elif allocation.state is not RegionState.QUARANTINED and (
            not event.force or self.grants.is_heard(allocation.room.peer)
        ):
            self._revoke_or_retire(allocation, what, ticket, force=event.force)
        elif not event.force:
            self.context.answer(ticket, "refused", f"{what}: {self._writers_of([self._transfer_of(allocation)])}")
        else:
            room = self.state.rooms.get(allocation.room.room)
            if room is not None and room.nonce != allocation.room.nonce:
                room = None
            if room is not None:
                # Its writer may come back and write these bytes: nothing of the room is trusted any more.
                self.rooms.fail(room, self.context.failure("ABORTED", f"an operator freed {what} by force"))
            if self.state.grant_table.find(serial) is allocation:
                self.grants.free([allocation])
            self.grants.unblock()
            rest = ""
            if room is not None and room.room in self.state.rooms:
                rest = f"; its room still holds its pages: kvctl staging release --room {room.room}"
            self.context.answer(ticket, "released", f"{what} is freed by force{rest}", freed=(serial,))

    def _revoke_or_retire(self, allocation: Allocation, what: str, ticket: int, *, force: bool) -> None:
        """Revokes an unwritten region; retires it if its writer cannot be asked, is writing it or has not answered."""
        writer = allocation.room.peer
        if allocation.retire_requested:
            text = f"{what}: others go past it already; its bytes are {writer}'s until it gives them back"
            if force:
                text += ", and force is for writers that are suspect or lost"
            self.context.answer(ticket, "unchanged", text)
        elif allocation.state is RegionState.GRANTED and not allocation.posted and self.grants.is_heard(writer):
            self.grants.revoke(allocation, 0)
            room = self.state.rooms.get(allocation.room.room)
            again = "" if room is None or room.failure is not None else ", and asks for another place when it does"
            self.context.answer(ticket, "revoking", f"{what}: {writer} was asked to give it back{again}")
        else:
            allocation.retire_requested = True
            why = "is writing it" if allocation.posted else "has not given it back"
            self.grants.unblock()
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
        undrained = [transfer for transfer in room.transfers.values() if not transfer.drained]
        stuck = [transfer for transfer in undrained if room.overdue or not self.rooms.answers(transfer)]
        if not stuck:
            names = ", ".join(transfer.peer for transfer in undrained)
            waits = f"{names} was asked to drain" if names else "a part of it is being scattered"
            waited_s = (self.context.now_ns - room.since_ns) / 1e9
            self.context.answer(
                ticket, "refused", f"room {number} failed {waited_s:.1f} s ago, and {waits}: wait for that"
            )
            return
        if not event.force:
            self.context.answer(ticket, "refused", self.unproven([(room, transfer) for transfer in stuck]))
            return
        freed = self.free_by_force(room, stuck)
        left = "its pages are the engine's again" if room.released else "its pages are still held"
        rest = [transfer.peer for transfer in room.transfers.values() if not transfer.drained]
        if rest:
            left += f" for {', '.join(rest)}"
        regions = f"{len(freed)} allocation{'s' * (len(freed) != 1)}"
        text = f"room {number}: {regions} freed by force, and {left}"
        self.context.answer(ticket, "released", text, freed=freed, drained=tuple(transfer.peer for transfer in stuck))

    def held_for(self, writer: str) -> list[tuple[RecvRoom, WriterTransfer]]:
        """Returns the failed rooms whose memory is kept because a rank, in any incarnation, may still write it."""
        found = [(room, room.transfers.get(writer)) for room in self.state.rooms.values() if room.failure is not None]
        return [(room, transfer) for room, transfer in found if transfer is not None and not transfer.drained]

    def free_by_force(self, room: RecvRoom, transfers: list[WriterTransfer]) -> tuple[int, ...]:
        """Frees what a failed room holds for writers that an operator has declared gone.

        Returns:
            the serials of the ring regions that were freed.
        """
        allocations: list[Allocation] = []
        for transfer in transfers:
            transfer.acked = transfer.drained = True
            allocations += self.state.grant_table.unlanded(room.key_of(transfer.peer))
        self.grants.free(allocations)
        self.grants.unblock()
        self.rooms.forget_when_drained(room)
        return tuple(sorted(allocation.region.serial for allocation in allocations))

    def _transfer_of(self, allocation: Allocation) -> WriterTransfer:
        return self.state.rooms[allocation.room.room].transfers[allocation.room.peer]  # a room outlives its regions

    def unproven(self, held: list[tuple[RecvRoom, WriterTransfer]]) -> str:
        """Returns the answer to an operator about failed rooms: which writers may still write their memory."""
        numbers = list(dict.fromkeys(str(room.room) for room, _ in held))
        more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
        rooms = f"room{'s' * (len(numbers) != 1)} {', '.join(numbers[:_SHOWN])}{more}"
        return f"{rooms}: {self._writers_of([transfer for _, transfer in held])}"

    def _writers_of(self, transfers: list[WriterTransfer]) -> str:
        """Returns the answer to an operator: which writers may still write the memory, and how to release it safely."""
        writers: dict[str, None] = {}
        for transfer in transfers:
            peer = self.context.peers.get(transfer.peer)
            info = peer.info_of(transfer.incarnation) if peer is not None else None
            writers[f"{transfer.peer} ({info.process})" if info is not None else transfer.peer] = None
        return (
            f"{', '.join(writers)} may still write to it, and nothing proves that it will not: "
            "end that process, or make sure that it is gone, then release it with force"
        )
