"""Rooms of a prefill rank: staging requests, room states, and messages resent until they are answered.

The first cause of a failure is sent to every decode rank of the room, and the room's queued parts are dropped.
RoomDrained is sent only when nothing of the room is in flight, nor ever will be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvctl_agent.contract.choices import STAGED
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import Segment
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.machine import RECALLED, MachineContext, Tombstones, failure_of
from kvctl_agent.protocol.peer import LocalInfo, Peer, Timing
from kvctl_agent.protocol.prefill.send_room import (
    ComputedTables,
    Final,
    Part,
    PartState,
    PeerTransfer,
    SendRoom,
    Wait,
)
from kvctl_agent.protocol.prefill.staging_credits import StagingCredits
from kvctl_agent.protocol.tag import MAX_ROW_BYTES, PartKey, PartKind, RoomKey, Tag

# Bound on the memory that one peer, broken or hostile, can make this rank allocate.
MAX_TRANSFERS = 1 << 17
DECLINED = "DECLINED"
_DEADLINES_EVERY_NS = 1_000_000_000
_DEADLINES = ("KV_ROOM_STUCK_WAITING", "KV_ROOM_STUCK_TRANSFER")
"""Codes of rooms whose parts do not arrive at a decode rank in time."""

# (peer's info, share, layers, destination pages) → path
ChoosePath = Callable[[msg.PeerInfo, TransferSlice, int, ev.Pages], str]
Parked = dict[tuple[int, int, PartKey], tuple[PeerTransfer, Part]]


class EndedRoom(NamedTuple):
    """Outcome of a room that the engine or a decode rank had not opened, or not opened again, when it ended."""

    at_ns: int
    state: RoomState
    failure: Failure | None
    claimed: bool  # the local engine had called send()
    openers: frozenset[str]  # decode ranks that had opened the room, without those that may open it again
    prefix_tokens: int | None  # as in StateChanged


class PrefillState:
    """All state that a prefill machine keeps between two events.

    Attributes:
        peers: decode ranks by name.
        sends_at_finish: this pipeline stage sends nothing before `finish`; fixed.
        rows_in_tags: an aux row goes in the tag of the last KV part; fixed.
        draining: whether new rooms are refused.
        rooms: rooms by number.
        transfers: transfers by peer, room number and nonce.
        parked: by peer, the gated parts: they are ready and may not be sent yet.
        credits: by peer, the limit on requested staging.
        tombstones: transfers that have ended, with the failure of their room.
        pending_aborts: rooms aborted before they were opened, by number: when the abort takes effect, and its cause.
            Oldest first.
        ended: rooms that ended before all participants had opened them, oldest first.
        deadlines_due_ns: monotonic time of the next check for rooms past their deadline.

    Args:
        early_send: pipeline stages before the last one send as soon as their own forward is done.
        checksums: tags carry checksums, and so no rows.
    """

    def __init__(self, local: LocalInfo, timing: Timing, *, early_send: bool = True, checksums: bool = False) -> None:
        self.rows_in_tags = not checksums and sum(local.aux_row_bytes) <= MAX_ROW_BYTES
        self.sends_at_finish = not early_send and local.coord.pp < local.side.pp - 1
        self.peers: dict[str, Peer] = {}
        self.draining = False
        self.rooms: dict[int, SendRoom] = {}
        self.transfers: dict[RoomKey, PeerTransfer] = {}
        self.parked: dict[str, Parked] = {}
        self.credits: dict[str, StagingCredits] = {}
        self.tombstones: Tombstones[Failure | None] = Tombstones(timing.bootstrap_ns)
        self.pending_aborts: dict[int, tuple[int, Failure]] = {}
        self.ended: dict[int, EndedRoom] = {}
        self.deadlines_due_ns = 0


@dataclass(eq=False)
class StagingRequests:
    """Chooses the paths of parts, and requests ring regions for staged parts within the credits of each peer.

    Attributes:
        choose: chooses the path of a part.
        fallback: chooses a path that needs no ring, for a part that can never have a region.
    """

    context: MachineContext
    state: PrefillState
    choose: ChoosePath
    fallback: ChoosePath

    def request(self, room: SendRoom, transfer: PeerTransfer) -> None:
        """Chooses missing paths, and requests regions for all staged parts in one message if the credits allow it."""
        if room.recalled or transfer.recalled is not None:
            return
        if room.prefetched:
            transfer.plan_parts(room.groups)
        info = self.context.peers[transfer.peer].info
        assert info is not None
        wanted: list[Part] = []
        for part in transfer.parts.values():
            if not part.path:
                part.path = self.choose(info, part.share, part.layers, transfer.pages_at(part))
            if part.path == STAGED and not part.requested and part.grant is None:
                wanted.append(part)
        if not wanted or not self.state.credits[transfer.peer].charge(
            transfer, wanted, computed=room.computed.complete
        ):
            return
        for part in wanted:
            part.requested = True
        transfer.resend_ns = self.context.now_ns + self.context.timing.resend_ns
        room.record.event("request", self.context.now_ns, peer=transfer.peer)
        self.send(transfer, wanted)

    def request_all(self, room: SendRoom) -> None:
        for transfer in room.transfers.values():
            self.request(room, transfer)

    def request_next(self, peer: str) -> None:
        """Lets waiting transfers request staging, after credits for this peer were refunded."""
        credits = self.state.credits[peer]
        while (transfer := credits.next_waiting()) is not None:
            self.request(self.state.rooms[transfer.room], transfer)

    def refund(self, peer: str, part: Part) -> None:
        """Refunds the credits of a part, and lets waiting transfers request staging."""
        self.state.credits[peer].refund(part)
        self.request_next(peer)

    def give_back(self, transfer: PeerTransfer, part: Part) -> None:
        """Gives back the grant and the credits of a part whose pages the engine has recalled.

        The room may wait for its pages for long, and possibly for rooms that need this ring and these credits.
        """
        self.state.credits[transfer.peer].refund(part)
        part.requested = False
        part.asks = part.asked_ns = 0
        if part.grant is not None:
            self.return_grant(transfer, part, part.grant.serial)
            part.grant = None

    def return_grant(self, transfer: PeerTransfer, part: Part, serial: int) -> None:
        """Returns a grant that will never be written; a lost message is repeated when the grant is received again."""
        part.revoked = max(part.revoked, serial)
        self.context.send(transfer.peer, msg.StagingRevoked(transfer.room, transfer.nonce, serial))

    def send(self, transfer: PeerTransfer, parts: list[Part]) -> None:
        for part in parts:
            part.asks += 1
            part.asked_ns = part.asked_ns or self.context.now_ns
        specs = [msg.PartSpec(part.key.chunk, part.key.lo, part.key.hi, part.nbytes) for part in parts]
        self.context.send(transfer.peer, msg.StagingRequest(transfer.room, transfer.nonce, specs))


class SendRooms:
    """Changes the states of rooms, and resends messages until the decode ranks have answered.

    Attributes:
        layers: KV and draft layers of this rank.
        components: state components of this rank; they are the last segments of its pool.
    """

    def __init__(self, context: MachineContext, state: PrefillState, staging: StagingRequests) -> None:
        self.context = context
        self.state = state
        self.staging = staging
        self.layers = context.local.layers
        self.components: list[Segment] = [shard.segment for shard in context.local.shards if shard.segment.state]
        local = context.local
        shards = [shard for shard in local.shards if shard.segment.table]
        pages = [local.chunk_tokens // group.page_size for group in local.shape.groups]
        self._groups = list(zip(shards, pages, strict=True))  # shard and pages per cell of each KV group

    def begin(self, number: int) -> SendRoom:
        """Creates a room when the local engine or a decode rank opens it, whichever comes first."""
        self.state.ended.pop(number, None)
        record = self.context.telemetry.open(number, 0)
        room = self.state.rooms[number] = SendRoom(number, record, self.nothing_computed(), self.context.now_ns)
        return room

    def nothing_computed(self) -> ComputedTables:
        return ComputedTables(self.layers, self.context.local.chunk_pages, self._groups)

    def find(self, peer: Peer, number: int, nonce: int) -> tuple[SendRoom, PeerTransfer] | None:
        """Returns the room and transfer that a message is about.

        Returns None, and counts the message as dropped, if there is no such transfer.
        """
        transfer = self.state.transfers.get(RoomKey(peer.name, number, nonce))
        if transfer is None:
            self.context.drop("tombstone")
            return None
        return self.state.rooms[number], transfer

    def forget(self, room: SendRoom) -> None:
        """Removes a room, and keeps its outcome as tombstones for late messages."""
        if self.state.rooms.pop(room.room, None) is None:
            return
        now_ns = self.context.now_ns
        for transfer in room.transfers.values():
            self.state.transfers.pop(transfer.key, None)
            self.state.tombstones.add(transfer.key, room.failure, now_ns)
        openers = frozenset(name for name, transfer in room.transfers.items() if transfer.recalled is None)
        everyone = room.opened_by_all and len(openers) == len(room.transfers)
        # The engine will not call send() for a room that was declined at another rank, either.
        claimed = room.claimed or (room.failure is not None and room.failure["code"] == DECLINED)
        if not room.claimed or (room.failure is not None and not everyone):
            ended = EndedRoom(now_ns, room.state, room.failure, claimed, openers, room.prefix_tokens)
            self.state.ended[room.room] = ended
        self.context.telemetry.finish(room.record, now_ns)

    def expire(self) -> None:
        """Removes tombstones and ended rooms that are too old to be needed for late messages."""
        now_ns = self.context.now_ns
        self.state.tombstones.expire(now_ns)
        while self.state.ended:
            number, ended = next(iter(self.state.ended.items()))
            if now_ns - ended.at_ns < self.context.timing.bootstrap_ns and len(self.state.ended) < MAX_TRANSFERS:
                break
            del self.state.ended[number]

    def abort_unopened(self, number: int, failure: Failure) -> None:
        """Schedules the failure of a room whose opening was aborted or refused, for which the engine may be waiting.

        The failure is delayed because another dp group may be about to open a room with the same number.
        """
        if number not in self.state.ended and len(self.state.pending_aborts) < MAX_TRANSFERS:
            due_ns = self.context.now_ns + self.context.timing.resend_ns
            self.state.pending_aborts.setdefault(number, (due_ns, failure))

    def park(self, room: SendRoom, transfer: PeerTransfer, part: Part) -> None:
        parked = self.state.parked[transfer.peer]
        key = (transfer.room, transfer.nonce, part.key)
        if key not in parked:
            parked[key] = (transfer, part)
            room.record.parked += 1

    def unpark(self, room: SendRoom, transfer: PeerTransfer, part: Part) -> None:
        parked = self.state.parked.get(transfer.peer)
        if parked and parked.pop((transfer.room, transfer.nonce, part.key), None):
            room.record.parked -= 1

    def component(self, final: Final) -> Segment:
        """Returns the state component that a final part belongs to."""
        return self.components[final.key.chunk - self.components[0].index]

    def on_decline_room(self, event: ev.DeclineRoom) -> None:
        """Fails a room that decode ranks wait for here, or will open here, and that the engine has not begun."""
        failure = self.context.failure(DECLINED, event.reason)
        room = self.state.rooms.get(event.room)
        if room is None:
            declined = EndedRoom(self.context.now_ns, RoomState.FAILED, failure, True, frozenset(), None)
            # What decode ranks have ended before is over for the engine, too: a later call of send() is another room.
            self.state.ended[event.room] = self.state.ended.get(event.room, declined)._replace(claimed=True)
        elif not room.claimed:
            room.claimed = True  # a later call of send() begins another room of this number
            self.fail(room, failure)
            self.progress(room)

    # ---- messages ---------------------------------------------------------------------------------------------

    def on_part_ack(self, peer: Peer, message: msg.PartAck) -> None:
        found = self.find(peer, message.room, message.nonce)
        if found is None:
            return
        _, transfer = found
        for data in message.tags:
            try:
                tag = Tag.unpack(data)
            except RemoteProtocolError:
                self.context.drop("bad-tag")
                continue
            part = transfer.parts.get(tag.key) if tag.kind is PartKind.KV else None
            if part is not None and part.state is PartState.SENT:
                part.confirmed = True

    def on_room_done(self, peer: Peer, message: msg.RoomDone) -> None:
        self.context.send(peer.name, msg.Ack(message.room, message.nonce, "room-done"))
        found = self.find(peer, message.room, message.nonce)
        if found is None or found[1].done:
            return
        room, transfer = found
        transfer.done_ns = max(1, self.context.now_ns - message.age_ns)
        room.record.event("done", self.context.now_ns, peer=peer.name)
        self.context.telemetry.transfers.arrived(room.room, peer.name, transfer.done_ns, peer.rtt_ns)
        if not transfer.keeper:
            self.tell_keeper(room)
        self.progress(room)

    def tell_keeper(self, room: SendRoom) -> None:
        """Tells the keeper of a room once all other decode ranks have it; `resend` repeats it."""
        keeper, done_ns = room.keeper, room.readers_done_ns
        if keeper is None or keeper.done or room.failure is not None or not done_ns:
            return
        keeper.resend_ns = keeper.resend_ns or self.context.now_ns + self.context.timing.resend_ns
        age_ns = self.context.now_ns - done_ns
        self.context.send(keeper.peer, msg.ReadersDone(keeper.room, keeper.nonce, age_ns))

    def on_room_failed(self, peer: Peer, message: msg.RoomFailed) -> None:
        self.context.send(peer.name, msg.Ack(message.room, message.nonce, "room-failed"))
        if found := self.find(peer, message.room, message.nonce):
            room, transfer = found
            transfer.acked = True  # the peer knows, since the failure came from it
            self._fail_by_peer(room, failure_of(message))
            self.progress(room)

    def on_room_abort(self, peer: Peer, message: msg.RoomAbort) -> None:
        """Fails the room, and answers RoomDrained once none of its writes is in flight.

        The message is also accepted from a peer that is lost here.
        """
        found = self.find(peer, message.room, message.nonce)
        if found is None:
            # Nothing of an unknown or ended room is in flight; with the tombstone a late RoomOpen is refused.
            key = RoomKey(peer.name, message.room, message.nonce)
            failure = self.state.tombstones.find(key)
            if key not in self.state.tombstones:
                self.state.tombstones.add(key, failure_of(message), self.context.now_ns)
                if not message.recall:
                    self.abort_unopened(message.room, failure_of(message))
            elif message.recall and failure is not None and failure["code"] != RECALLED:
                self.state.tombstones.add(key, failure_of(message), self.context.now_ns)  # so that this is done once
                self._refuse_again(peer, message.room, failure)
            self.context.send(peer.name, msg.RoomDrained(message.room, message.nonce))
            return
        room, transfer = found
        transfer.abort_received = transfer.acked = True
        transfer.drained_sent = False  # the abort was resent, so the answer was lost
        if message.recall:
            self._recall_transfer(room, transfer, failure_of(message))
        else:
            self._fail_by_peer(room, failure_of(message))
        self.progress(room)

    def _fail_by_peer(self, room: SendRoom, failure: Failure) -> None:
        """Fails a room as a decode rank did; the text also says what the engine here has not passed."""
        if failure["code"] in _DEADLINES and not room.finished:
            text = f"{failure['text']}; at {self.context.local.name} {self._describe_wait(room)}"
            failure = {**failure, "text": text}
        self.fail(room, failure)

    def _refuse_again(self, peer: Peer, number: int, failure: Failure) -> None:
        """Keeps an ended room's failure, to refuse a decode rank that had recalled the room and opens it again."""
        if number not in self.state.rooms:
            everyone = frozenset(self.context.peers)
            ended = EndedRoom(self.context.now_ns, RoomState.FAILED, failure, True, everyone, None)
            ended = self.state.ended.get(number, ended)
            self.state.ended[number] = ended._replace(openers=ended.openers - {peer.name})

    def _recall_transfer(self, room: SendRoom, transfer: PeerTransfer, cause: Failure) -> None:
        """Stops a transfer whose decode rank has recalled its pages; `progress` ends it once nothing is in flight."""
        if transfer.recalled is not None:
            return
        transfer.recalled = cause
        if room.failure is not None:
            return  # nothing of it is sent any more; the decode rank learns why when it opens the room again
        transfer.stop()
        for part in transfer.parts.values():
            self.unpark(room, transfer, part)
        self.state.credits[transfer.peer].forget(transfer)
        self.context.note("room-recalled", cause["text"], room=room.room, peer=transfer.peer)
        self.staging.request_next(transfer.peer)

    def _end_recalled(self, room: SendRoom, transfer: PeerTransfer) -> None:
        """Ends a recalled transfer of which nothing is in flight; the room waits until it is opened again.

        A room that the local engine has not claimed is not known to anybody any more, and is forgotten.
        """
        now_ns, cause, record = self.context.now_ns, transfer.recalled, room.record
        self.context.send(transfer.peer, msg.RoomDrained(transfer.room, transfer.nonce))
        room.opened_by.discard(transfer.reader_rank)
        del room.transfers[transfer.peer], self.state.transfers[transfer.key]
        self.state.tombstones.add(transfer.key, cause, now_ns)
        record.planned -= transfer.planned
        record.sent = (record.sent or 0) - sum(
            part.layers for part in transfer.parts.values() if part.state is PartState.SENT
        )
        record.leave(transfer.peer, transfer.nonce)
        room.since_ns = now_ns
        if not room.claimed and not room.transfers:
            assert cause is not None
            record.fail(cause, now_ns)
            del self.state.rooms[room.room]
            self.context.telemetry.finish(record, now_ns)

    def recalled_late(self, room: SendRoom, transfer: PeerTransfer) -> Failure | None:
        """Returns the failure of a room that can no longer be sent as a decode rank that recalled it asks; else None.

        The engine need not have passed pages of the prefix that it was told of, so no later prefix may be shorter.
        """
        if room.released and not transfer.sent:
            why = f"after {self.context.local.name} had released its pages"
        elif (
            transfer.reader_rank in room.readers
            and room.told_prefix_tokens is not None
            and transfer.prefix_tokens < room.told_prefix_tokens
        ):
            why = f"and has {transfer.prefix_tokens} tokens cached now, {room.told_prefix_tokens} before"
        else:
            return None
        text = f"room {room.room}: {transfer.peer} recalled it {why}: its prompt must be computed again"
        return self.context.failure("RECALL_LATE", text)

    def unlike_prompt(self, room: SendRoom, transfer: PeerTransfer) -> Failure | None:
        """Returns the failure of a room whose decode rank expects another prompt than the engine computes; else None.

        What one of the two does not know is not compared.
        """
        if room.tokens and transfer.tokens and room.tokens != transfer.tokens:
            text = f"this side computes a prompt of {room.tokens} tokens, {transfer.peer} expects {transfer.tokens}"
        elif room.digest and transfer.digest and room.digest != transfer.digest:
            text = f"this side computes another prompt than {transfer.peer} expects: "
            text += f"digest {room.digest:016x} ≠ {transfer.digest:016x}"
        else:
            return None
        return self.context.failure("KV_PLAN_MISMATCH", f"room {room.room}: {text}")

    def on_room_renew(self, peer: Peer, message: msg.RoomRenew) -> None:
        """Restarts the deadline of rooms that wait to be opened."""
        for number in message.rooms:
            room = self.state.rooms.get(number)
            if room is not None and room.claimed and room.failure is None and not room.opened:
                room.since_ns = self.context.now_ns

    def on_ack(self, peer: Peer, message: msg.Ack) -> None:
        found = self.find(peer, message.room, message.nonce)
        if found is not None and message.of == "room-failed":
            found[1].acked = True
            self.progress(found[0])

    def on_peer_lost(self, peer: Peer, text: str) -> None:
        """Fails the rooms of a lost peer, except those that it has received: their other transfers continue."""
        for room in list(self.state.rooms.values()):
            transfer = room.transfers.get(peer.name)
            if transfer is None:
                continue
            transfer.acked = True
            if not transfer.done:
                self.fail(room, self.context.failure("KV_PEER_LOST", text))
            self.progress(room)

    # ---- states -----------------------------------------------------------------------------------------------

    def begin_transfer(self, room: SendRoom, at_ns: int) -> None:
        """Notes the begin of a room's transfer if its prompt is finished and all decode ranks have opened it.

        Args:
            at_ns: monotonic time of the later of the two.
        """
        if not room.finished or not room.opened or room.failure is not None:
            return
        transfer = next(each for each in room.transfers.values() if each.tables)  # all have the same prompt
        inputs = self.context.peers[transfer.peer].inputs
        if inputs is not None and not transfer.prefill_only:
            table = transfer.tables[0]
            tokens = (table.total_pages - table.prefix_pages) * inputs.page_size
            self.context.telemetry.transfers.begin(room.room, tokens, at_ns)

    def enter(self, room: SendRoom, state: RoomState) -> None:
        room.state = state
        room.since_ns = self.context.now_ns
        room.record.state(state, self.context.now_ns)
        if room.claimed:
            self.report(room)

    def report(self, room: SendRoom) -> None:
        """Tells the engine the state of a room, and the prefix if it is known."""
        if room.told_prefix_tokens is None:
            room.told_prefix_tokens = room.prefix_tokens
        self.context.actions.append(ev.StateChanged(room.room, room.state, room.failure, room.told_prefix_tokens))

    def progress(self, room: SendRoom) -> None:
        """Releases a room's pages once all parts are sent, and ends the room once every decode rank has confirmed it.

        A failed room is released and ended once nothing of it is in flight.
        """
        if room.failure is not None:
            self._forget_when_drained(room)
            return
        for transfer in [each for each in room.transfers.values() if each.recalled is not None and each.drained]:
            self._end_recalled(room, transfer)
        if not room.released and room.sent:
            self._release(room)
            for transfer in room.transfers.values():  # time to ask how the room ended, in case RoomDone is lost
                transfer.resend_ns = self.context.now_ns + 2 * self.context.timing.resend_ns
        if (room.released or not room.claimed) and room.done:
            self.enter(room, RoomState.SUCCESS)
            self.forget(room)

    def _release(self, room: SendRoom) -> None:
        """Marks the room's pages as reusable, since they will not be read again."""
        room.released = True
        room.record.event("sent", self.context.now_ns)
        self._report_overlap(room)
        if room.claimed:
            self.context.actions.append(ev.Released(room.room))

    def _report_overlap(self, room: SendRoom) -> None:
        begun, done = room.forward_begun_ns, room.computed_ns
        if not room.groups or not room.spans or begun is None or done is None:
            return
        hidden, exposed = room.spans.split(done)
        forwards = max(1, room.computed.forwards)
        self.context.actions.append(
            ev.Overlapped(
                tokens=room.grouped_tokens,
                pages=room.computed.given // forwards,
                groups=len(room.groups),
                compute_ns=(done - begun) // forwards,
                transfer_ns=(hidden + exposed) // forwards,
                exposed_ns=exposed,
            )
        )

    def fail(self, room: SendRoom, failure: Failure) -> None:
        """Fails a room with this first cause, unless the room has ended."""
        if room.failure is not None or room.state is RoomState.SUCCESS:
            return
        context = self.context
        room.failure = failure
        room.record.fail(failure, context.now_ns)
        context.telemetry.metrics.add("kvctl_room_failures_total", 1, failure["code"])
        context.note("room-failed", f"{failure['rank']}: {failure['text']}", "error", room=room.room)
        for transfer in room.transfers.values():
            transfer.stop()
            transfer.resend_ns = context.now_ns + context.timing.resend_ns
            for part in transfer.parts.values():
                self.unpark(room, transfer, part)
            self.state.credits[transfer.peer].forget(transfer)
            if not transfer.acked:
                self.send_failed(transfer, failure)
        self.enter(room, RoomState.FAILED)
        self._forget_when_drained(room)
        for transfer in room.transfers.values():
            self.staging.request_next(transfer.peer)

    def send_failed(self, transfer: PeerTransfer, failure: Failure) -> None:
        self.context.send(transfer.peer, msg.RoomFailed(transfer.room, transfer.nonce, **failure))

    def _forget_when_drained(self, room: SendRoom) -> None:
        """Finishes a failed room: answers RoomAbort, then releases and forgets the room once nothing is in flight."""
        for transfer in room.transfers.values():
            if transfer.abort_received and transfer.drained and not transfer.drained_sent:
                transfer.drained_sent = True
                self.context.send(transfer.peer, msg.RoomDrained(transfer.room, transfer.nonce))
        if not room.drained:
            return
        if not room.released:
            room.released = True
            if room.claimed:
                self.context.actions.append(ev.Released(room.room))
        if all(transfer.acked for transfer in room.transfers.values()):
            self.forget(room)

    # ---- time -------------------------------------------------------------------------------------------------

    def check(self, stalled_ns: int = 0) -> None:
        """Fails rooms that are past their deadline or have a due abort, and resends the messages that are due.

        Args:
            stalled_ns: time before now in which this rank could not run, which counts for no deadline.
        """
        now_ns, timing = self.context.now_ns, self.context.timing
        if stalled_ns:
            for each in self.state.rooms.values():
                each.since_ns = min(each.since_ns + stalled_ns, now_ns)
        self._apply_aborts()
        for transfer in list(self.state.transfers.values()):
            if now_ns >= transfer.resend_ns > 0 and (room := self.state.rooms.get(transfer.room)) is not None:
                self.resend(room, transfer)
        if now_ns >= self.state.deadlines_due_ns:
            # Engines may announce thousands of rooms long before they are opened: check deadlines seldom.
            shortest = min(
                timing.bootstrap_ns, timing.waiting_ns, timing.unclaimed_ns, timing.hold_ns or timing.bootstrap_ns
            )
            self.state.deadlines_due_ns = now_ns + min(_DEADLINES_EVERY_NS, shortest // 4)
            for room in list(self.state.rooms.values()):
                if room.failure is None:
                    self._check_deadline(room)
                elif not room.drained:
                    self._check_drained(room)

    def _apply_aborts(self) -> None:
        for number, (due_ns, failure) in list(self.state.pending_aborts.items()):
            if self.context.now_ns < due_ns:
                return  # the others are due later
            del self.state.pending_aborts[number]
            room = self.state.rooms.get(number)
            if room is None and number not in self.state.ended:
                room = self.begin(number)
            if room is not None and not room.opened_by_all:
                self.fail(room, failure)

    def _check_deadline(self, room: SendRoom) -> None:
        waited = self.context.now_ns - room.since_ns
        stuck = f"room {room.room} was stuck in {room.state.label} for {waited / 1e9:.1f} s"
        timing = self.context.timing
        if not room.claimed and waited > timing.unclaimed_ns:
            text = f"{', '.join(room.transfers)} opened room {room.room} {waited / 1e9:.1f} s ago"
            text += f", and the engine of {self.context.local.name} has not called send() for it"
            self.fail(room, self.context.failure("KV_ROOM_UNCLAIMED", text))
        elif timing.hold_ns and room.computed.complete and not room.transfers:
            if waited > timing.hold_ns:
                text = f"room {room.room} was computed at {self.context.local.name}, and in {waited / 1e9:.1f} s "
                text += "no decode rank has opened or renewed it"
                self.fail(room, self.context.failure("KV_HOLD_EXPIRED", text))
        elif not room.opened:
            if waited > timing.bootstrap_ns:
                opened = f"{len(room.transfers)} of {len(room.openers) or '?'} decode ranks opened it here"
                self.fail(room, self.context.failure("KV_ROOM_STUCK_BOOTSTRAP", f"{stuck}: {opened}"))
        elif waited > timing.waiting_ns:
            if room.done and room.drained:
                # The decode ranks have all that they wanted: a failure here would give the room two different ends.
                text = f"room {room.room} is received by every decode rank, but for {waited / 1e9:.1f} s"
                self.context.note("room-unfinished", f"{text} {self._describe_wait(room)}", "warning", room=room.room)
                self._release(room)
                self.progress(room)
                return
            self.fail(room, self.context.failure("KV_ROOM_STUCK_TRANSFER", f"{stuck}: {self._describe_wait(room)}"))

    def _check_drained(self, room: SendRoom) -> None:
        """Records once that a failed room's pages are still held because a write to a decode rank has not ended."""
        waited = self.context.now_ns - room.since_ns
        if room.overdue or waited <= self.context.timing.waiting_ns:
            return
        room.overdue = True
        parts = ", ".join(
            f"{transfer.in_flight} to {transfer.peer}" for transfer in room.transfers.values() if transfer.in_flight
        )
        text = (
            f"room {room.room} failed {waited / 1e9:.1f} s ago and its pages are still held: writes in flight: {parts}"
        )
        self.context.note("room-undrained", text, "warning", room=room.room)

    def _describe_wait(self, room: SendRoom) -> str:
        """Describes what the room waits for, for the text of a missed deadline."""
        if room.launched:
            return "the event of its forward is not done"
        if room.deferred:
            return "finish() was not called, and until then this stage keeps its pages back (pp_early_send is off)"
        if room.recalled:
            return "the engine recalled its pages, and has not passed them again"
        if not room.computed.complete:
            return f"the engine gave no last pages: {room.computed.describe_missing()}"
        for transfer in room.transfers.values():
            for part in transfer.parts.values():
                if part.state is not PartState.SENT:
                    reasons = {
                        Wait.WRITE: "its write to end",
                        Wait.PAGES: "its pages to be computed",
                        Wait.GRANT: "a grant" if part.requested else "its turn to ask for staging",
                        Wait.WATERMARK: "the watermark",
                        Wait.LEASE: "a sign of life from it",
                    }
                    return f"{part.key} to {transfer.peer} waits for {reasons[self.waits_for(transfer, part)]}"
        if not room.finished:
            return "finish() was not called"
        for transfer in room.transfers.values():
            for final in transfer.finals.values():
                if final.state is not PartState.SENT:
                    what = "the aux row" if final.kind is PartKind.AUX else f"state {self.component(final).name}"
                    waits = "its write to end" if final.state is PartState.QUEUED else "a sign of life from it"
                    return f"{what} to {transfer.peer} waits for {waits}"
        if not room.opened_by_all:
            return "the decode rank that keeps it has not opened it here"
        silent = [transfer for transfer in room.transfers.values() if not transfer.done]
        waits = ", which waits for the other decode ranks" if room.readers_done_ns and silent[0].keeper else ""
        return f"no RoomDone from {', '.join(transfer.peer for transfer in silent)}{waits}"

    def waits_for(self, transfer: PeerTransfer, part: Part) -> Wait:
        """Returns the reason why a part is not sent yet. Safe to call from any thread."""
        grant = part.grant
        if part.state is PartState.QUEUED:
            return Wait.WRITE
        if part.state is PartState.PLANNED:
            return Wait.PAGES
        if part.path == STAGED and grant is None:
            return Wait.GRANT
        if grant is not None and not self.context.peers[transfer.peer].gate.open(grant.round, grant.end):
            return Wait.WATERMARK
        return Wait.LEASE

    def resend(self, room: SendRoom, transfer: PeerTransfer) -> None:
        """Resends unanswered messages: requests without grants, tags without RoomDone, failures without Ack."""
        transfer.resend_ns = self.context.now_ns + self.context.timing.resend_ns
        peer = self.context.peers[transfer.peer]
        if not peer.usable:
            return
        if room.failure is not None:
            if not transfer.acked:
                self.send_failed(transfer, room.failure)
            return
        if transfer.done or transfer.recalled is not None:
            return
        if transfer.keeper:
            self.tell_keeper(room)
        # A part whose tag was lost keeps its ring region, and others may wait for that: do not wait until all are sent.
        sent: list[Part | Final] = [
            part for part in transfer.parts.values() if part.state is PartState.SENT and not part.confirmed
        ]
        sent += [final for final in transfer.finals.values() if final.state is PartState.SENT]
        tags = [transfer.tag(part, peer.incarnation) for part in sent]
        if tags or transfer.sent:
            self.context.telemetry.metrics.add("kvctl_control_resends_total", 1, "part-ready")
            self.context.send(transfer.peer, msg.PartReady(transfer.room, transfer.nonce, tags))
        unanswered = [
            part for part in transfer.parts.values() if part.path == STAGED and part.requested and part.grant is None
        ]
        if unanswered:
            self.context.telemetry.metrics.add("kvctl_control_resends_total", 1, "staging-request")
            self.staging.send(transfer, unanswered)
