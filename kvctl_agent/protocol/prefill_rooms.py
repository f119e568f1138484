"""What may happen to a room on a prefill rank: asked for, parked, queued, sent, failed, buried.

Rules it keeps (design: one room, end to end):

- A ready part goes to a worker when its path needs no ring, or when it has a grant, the watermark has passed it and
  the peer was heard from lately. Otherwise it is parked and holds nothing.
- The final parts, aux row and state, are queued only after all KV parts of their leg.
- The first cause of a failure goes to every decode rank of the room; queued parts are dropped behind the cancel;
  "drained" is said only when nothing is in flight, nor ever will be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.computed_pages import ComputedPages, SendableChunk
from kvctl_agent.protocol.local_info import LocalInfo, Timing
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.protocol.send_room import Final, Part, PartState, PeerTransfer, SendRoom
from kvctl_agent.protocol.staging_credits import StagingCredits
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag
from kvctl_agent.protocol.tombstones import RoomKey, Tombstones
from kvctl_agent.telemetry.hub import Telemetry

STAGED = "staged"

# Which path a part takes: (peer's introduction, share, layers, the reader's pages) → path. The second one is asked
# for parts that can never have a ring region.
Choose = Callable[[msg.PeerInfo, TransferSlice, int, ev.Pages], str]


class Ended(NamedTuple):
    """A room that ended before our engine, or some decode rank, had come; those who come late are told how."""

    at_ns: int
    state: RoomState
    failure: Failure | None
    claimed: bool  # our engine had come
    openers: frozenset[str]  # decode ranks that had come


class PrefillRooms(Machine):
    """Rooms, legs and parts of one prefill rank; `PrefillMachine` adds who says what."""

    def __init__(
        self,
        local: LocalInfo,
        timing: Timing,
        telemetry: Telemetry,
        choose: Choose,
        fallback: Choose,
        early_send: bool = True,
    ) -> None:
        """`early_send`: a pipeline stage before the last one sends as soon as its own forward is done."""
        super().__init__(local, timing, telemetry)
        self._holds_back = not early_send and local.coord.pp < local.side.pp - 1
        self._layers = local.layers
        self._components = [held.segment for held in local.held if held.segment.state]
        self._choose = choose
        self._fallback = fallback
        self.rooms: dict[int, SendRoom] = {}
        self._legs: dict[RoomKey, PeerTransfer] = {}
        self._parked: dict[str, dict[tuple[int, int, PartKey], tuple[PeerTransfer, Part]]] = {}
        self._allowances: dict[str, StagingCredits] = {}  # by peer
        self._graves: Tombstones[Failure | None] = Tombstones(timing.bootstrap_ns)  # how the room failed, if it did
        self._deadlines_due_ns = 0
        self._aborted: dict[int, tuple[int, Failure]] = {}  # rooms aborted before they were opened: when to believe it
        self._ended: dict[int, Ended] = {}  # rooms that ended before all who take part had come, oldest first

    @property
    def open_rooms(self) -> int:
        return len(self._legs)

    def parked(self) -> list[tuple[PeerTransfer, Part]]:
        """Parts that are ready and may not go yet. Safe to read from another thread."""
        return [entry for parked in list(self._parked.values()) for entry in list(parked.values())]

    def knows(self, room: int) -> bool:
        return room in self.rooms

    def on_set_timeouts(self, event: ev.SetTimeouts) -> None:
        super().on_set_timeouts(event)
        self._graves.keep_for(event.bootstrap_ns)
        self._deadlines_due_ns = 0

    def on_unsendable(self, event: ev.Unsendable) -> None:
        """Resending would not help, so the room fails instead of waiting for its deadline."""
        peer = self.peers.get(event.peer)
        found = self._find(peer, event.room, event.nonce) if peer is not None else None
        if found is not None:
            self._fail(found[0], self.failure("MESSAGE_UNSENDABLE", event.text))

    def _new_room(self, number: int) -> SendRoom:
        self._ended.pop(number, None)
        record = self.telemetry.rooms.open(number, 0)
        ledger = ComputedPages(self._layers, self.local.chunk_pages)
        room = self.rooms[number] = SendRoom(number, record, ledger, self.now_ns)
        return room

    def _find(self, peer: Peer, number: int, nonce: int) -> tuple[SendRoom, PeerTransfer] | None:
        """The room and leg that a message is about; where there is none, that is counted."""
        leg = self._legs.get(RoomKey(peer.name, number, nonce))
        if leg is None:
            self.drop("tombstone")
            return None
        return self.rooms[number], leg

    def _state(self, room: SendRoom, state: RoomState) -> None:
        room.state = state
        room.since_ns = self.now_ns
        room.record.state(state, self.now_ns)
        if room.claimed:
            self.act(ev.StateChanged(room.room, state, room.failure))

    def _request_all(self, room: SendRoom) -> None:
        for leg in room.legs.values():
            self._request(room, leg)

    def _request(self, room: SendRoom, leg: PeerTransfer) -> None:
        """Choose paths, and ask for staging for all staged parts of the leg that have not been asked for."""
        if room.prefetched:
            leg.cut_all(self.rank, room.groups)
        who = self.peers[leg.peer].who
        assert who is not None
        wanted: list[Part] = []
        for part in leg.parts.values():
            if not part.path:
                part.path = self._choose(who, part.share, part.layers, leg.pages_at(part.chunk))
            if part.path == STAGED and not part.requested and part.grant is None:
                wanted.append(part)
        if not wanted or not self._allowances[leg.peer].take(leg, wanted, computed=room.ledger.complete):
            return
        for part in wanted:
            part.requested = True
        leg.resend_ns = self.now_ns + self.timing.resend_ns
        room.record.event("request", self.now_ns, peer=leg.peer)
        self._send_request(leg, wanted)

    def _request_next(self, peer: str) -> None:
        """Something that was asked for is sent, or has come to nothing: others may ask."""
        allowance = self._allowances[peer]
        while (leg := allowance.next()) is not None:
            self._request(self.rooms[leg.room], leg)

    def _send_request(self, leg: PeerTransfer, parts: list[Part]) -> None:
        for part in parts:
            part.asks += 1
            part.asked_ns = part.asked_ns or self.now_ns
        specs = [msg.PartSpec(part.key.chunk, part.key.lo, part.key.hi, part.nbytes) for part in parts]
        self.act(ev.Send(leg.peer, msg.StagingRequest(leg.room, leg.nonce, specs)))

    def _fall_back(self, room: SendRoom, leg: PeerTransfer, part: Part, reason: str, text: str) -> None:
        who = self.peers[leg.peer].who
        assert who is not None
        self._unpark(room, leg, part)
        self._allowances[leg.peer].end(part)
        part.path = self._fallback(who, part.share, part.layers, leg.pages_at(part.chunk))
        self.telemetry.metrics.add("kvctl_fallbacks_total", 1, reason)
        self.note("fallback", f"{text}: sent by {part.path}", "warning", room=room.room, peer=leg.peer)
        if part.state is PartState.READY:
            self._try(room, leg, part)
        self._request_next(leg.peer)

    def _advance(self, room: SendRoom, leg: PeerTransfer, steps: Sequence[SendableChunk], at_ns: int) -> None:
        """Some layers of some pages are computed: hand over the parts that this makes ready."""
        given, total = room.ledger.given, room.ledger.total
        if not leg.prefill_only and (given > leg.total_pages or total not in (None, leg.total_pages)):
            text = f"room {room.room}: this side computed {given} pages, {leg.peer} expects {leg.total_pages}"
            self._fail(room, self.failure("KV_PLAN_MISMATCH", text))
            return
        room.since_ns = self.now_ns
        if room.state is RoomState.WAITING_FOR_INPUT:
            self._state(room, RoomState.TRANSFERRING)
        ready: list[Part] = []
        for lo, hi, old, new in steps:
            for part in leg.between(self.rank, lo, hi, old, new):
                cell = part.chunk
                if part.state is PartState.PLANNED and room.ledger.ready(
                    part.key.lo, part.key.hi, cell.first + cell.count
                ):
                    part.src_pages = room.ledger.source(cell)
                    part.ready_ns = at_ns
                    part.state = PartState.READY
                    ready.append(part)
        if room.ledger.complete or any(not part.path for part in ready):  # they were cut just now
            self._request(room, leg)
        for part in ready:
            self._try(room, leg, part)

    def _try(self, room: SendRoom, leg: PeerTransfer, part: Part) -> None:
        """Hand a ready part to a worker, or park it."""
        if room.failure is not None:
            return
        peer = self.peers[leg.peer]
        grant = part.grant
        if part.path == STAGED and (grant is None or not peer.gate.open(grant.round, grant.end)):
            self._park(room, leg, part)
            return
        if not peer.may_post(self.now_ns):
            self._park(room, leg, part)
            return
        self._unpark(room, leg, part)
        part.state = PartState.QUEUED
        leg.in_flight += 1
        leg.to_queue -= part.layers
        assert part.src_pages is not None
        self.act(
            ev.Transfer(
                peer=leg.peer,
                room=leg.room,
                nonce=leg.nonce,
                kind=PartKind.KV,
                key=part.key,
                path=part.path,
                share=part.share,
                src_pages=part.src_pages,
                dst_pages=leg.pages_at(part.chunk),
                grant=grant if part.path == STAGED else None,
                tag=self._tag(leg, part),
                cancel=leg.cancel,
                ready_ns=part.ready_ns,
                opened_ns=self.now_ns,
            )
        )
        self._queue_finals(room, leg)

    def _queue_finals(self, room: SendRoom, leg: PeerTransfer) -> None:
        """Once all KV parts of the leg are with a worker: the aux row and the state, if the lease allows it."""
        if room.failure is not None or not room.finished or leg.to_queue:
            return
        if not self.peers[leg.peer].may_post(self.now_ns):
            return  # called again when it is renewed
        for final in leg.finals.values():
            if final.state is PartState.PLANNED and room.failure is None:  # one of them may fail it
                self._queue_final(room, leg, final)

    def _queue_final(self, room: SendRoom, leg: PeerTransfer, final: Final) -> None:
        aux = final.kind is PartKind.AUX
        source = np.array([room.aux_src], np.int32) if aux else self._items(room, final)
        if len(source) != len(final.dst) or (aux and room.aux_src < 0):
            what = "an aux row" if aux else f"{len(final.dst)} items of state {self._component(final)}"
            given = "none" if aux else str(len(source))
            text = f"room {room.room}: {leg.peer} expects {what}, finish() gave {given}"
            self._fail(room, self.failure("KV_PLAN_MISMATCH", text))
            return
        final.state = PartState.QUEUED
        leg.in_flight += 1
        path = "bulk"
        if final.share is not None:
            who = self.peers[leg.peer].who
            assert who is not None
            path = self._fallback(who, final.share, final.share.num_layers, final.dst)
        self.act(
            ev.Transfer(
                peer=leg.peer,
                room=leg.room,
                nonce=leg.nonce,
                kind=final.kind,
                key=final.key,
                path=path,
                share=final.share,
                src_pages=source,
                dst_pages=final.dst,
                grant=None,
                tag=self._final_tag(leg, final),
                cancel=leg.cancel,
                ready_ns=room.forward_done_ns,
                opened_ns=self.now_ns,
            )
        )

    def _items(self, room: SendRoom, final: Final) -> ev.Pages:
        """Our items of a state component; the components are the last segments."""
        place = final.key.chunk - self._components[0].index
        return room.state_src[place] if place < len(room.state_src) else np.empty(0, np.int32)

    def _component(self, final: Final) -> str:
        return self._components[final.key.chunk - self._components[0].index].name

    def _tag(self, leg: PeerTransfer, part: Part) -> bytes:
        serial = part.grant.serial if part.grant and part.path == STAGED else 0
        incarnation = self.peers[leg.peer].incarnation
        return Tag(PartKind.KV, incarnation, leg.room, leg.nonce, serial, part.key, part.checksum).pack()

    def _final_tag(self, leg: PeerTransfer, final: Final) -> bytes:
        incarnation = self.peers[leg.peer].incarnation
        return Tag(final.kind, incarnation, leg.room, leg.nonce, 0, final.key, final.checksum).pack()

    def _park(self, room: SendRoom, leg: PeerTransfer, part: Part) -> None:
        parked = self._parked[leg.peer]
        key = (leg.room, leg.nonce, part.key)
        if key not in parked:
            parked[key] = (leg, part)
            room.record.parked += 1

    def _unpark(self, room: SendRoom, leg: PeerTransfer, part: Part) -> None:
        parked = self._parked.get(leg.peer)
        if parked and parked.pop((leg.room, leg.nonce, part.key), None):
            room.record.parked -= 1

    def _retry_parked(self, peer: Peer) -> None:
        """See which of the parked parts may go now: called when the watermark moved or the lease was renewed."""
        gate = peer.gate
        for leg, part in list(self._parked[peer.name].values()):
            grant = part.grant
            if part.path != STAGED or (grant is not None and gate.open(grant.round, grant.end)):
                room = self.rooms.get(leg.room)
                if room is not None:  # else one of those before it has ended this room
                    self._try(room, leg, part)

    def _progress(self, room: SendRoom) -> None:
        """See whether the room has come to an end of some kind."""
        if room.failure is not None:
            self._settle(room)
            return
        if room.sent and not room.released:
            self._release(room)
            for leg in room.legs.values():
                leg.resend_ns = self.now_ns + 2 * self.timing.resend_ns  # ask then how the room has ended
        if room.done and (room.released or not room.claimed):
            self._state(room, RoomState.SUCCESS)
            self._bury(room)

    def _release(self, room: SendRoom) -> None:
        """Nothing of it will be read again."""
        room.released = True
        room.record.event("sent", self.now_ns)
        self._tell_overlap(room)
        if room.claimed:
            self.act(ev.Released(room.room))

    def _tell_overlap(self, room: SendRoom) -> None:
        begun, done = room.record.forward_begun_at, room.record.forward_done_at
        if not room.spans or begun is None or done is None:
            return
        hidden, exposed = room.spans.split(done)
        forwards = max(1, room.ledger.forwards)
        self.act(
            ev.Overlapped(
                pages=room.ledger.given // forwards,
                groups=len(room.groups),
                compute_ns=(done - begun) // forwards,
                transfer_ns=(hidden + exposed) // forwards,
                exposed_ns=exposed,
            )
        )

    def _fail(self, room: SendRoom, failure: Failure) -> None:
        if room.failure is not None or room.state is RoomState.SUCCESS:
            return
        room.failure = failure
        room.record.fail(failure, self.now_ns)
        self.telemetry.metrics.add("kvctl_room_failures_total", 1, failure["code"])
        self.note("room-failed", f"{failure['rank']}: {failure['text']}", "error", room=room.room)
        for leg in room.legs.values():
            leg.cancel.cancelled = True
            leg.resend_ns = self.now_ns + self.timing.resend_ns
            for part in leg.parts.values():
                self._unpark(room, leg, part)
            self._allowances[leg.peer].forget(leg)
            if not leg.failed_acked:
                self._say_failed(room, leg)
        self._state(room, RoomState.FAILED)
        self._settle(room)
        for leg in room.legs.values():
            self._request_next(leg.peer)

    def _say_failed(self, room: SendRoom, leg: PeerTransfer) -> None:
        failure = room.failure
        assert failure is not None
        text = msg.RoomFailed(leg.room, leg.nonce, failure["rank"], failure["code"], failure["at_ns"], failure["text"])
        self.act(ev.Send(leg.peer, text))

    def _settle(self, room: SendRoom) -> None:
        """A failed room: say drained to those who ask, release and forget it when nothing is in flight."""
        for leg in room.legs.values():
            if leg.abort_asked and leg.drained and not leg.drained_said:
                leg.drained_said = True
                self.act(ev.Send(leg.peer, msg.RoomDrained(leg.room, leg.nonce)))
        if not room.drained:
            return
        if not room.released:
            room.released = True
            if room.claimed:
                self.act(ev.Released(room.room))
        if all(leg.failed_acked for leg in room.legs.values()):
            self._bury(room)

    def _bury(self, room: SendRoom) -> None:
        if self.rooms.pop(room.room, None) is None:
            return
        for leg in room.legs.values():
            key = RoomKey(leg.peer, leg.room, leg.nonce)
            self._legs.pop(key, None)
            self._graves.bury(key, room.failure, self.now_ns)
        if not room.claimed or (room.failure is not None and not room.opened):
            openers = frozenset(room.legs)
            self._ended[room.room] = Ended(self.now_ns, room.state, room.failure, room.claimed, openers)
        self.telemetry.finish(room.record, self.now_ns)

    # ---- time -------------------------------------------------------------------------------------------------

    def _check_deadline(self, room: SendRoom) -> None:
        waited = self.now_ns - room.since_ns
        stuck = f"room {room.room} was stuck in {room.state.label} for {waited / 1e9:.1f} s"
        if room.state is RoomState.BOOTSTRAPPING and waited > self.timing.bootstrap_ns:
            opened = f"{len(room.legs)} of {room.expected or '?'} decode ranks opened it"
            self._fail(room, self.failure("KV_ROOM_STUCK_BOOTSTRAP", f"{stuck}: {opened}"))
        elif room.state is not RoomState.BOOTSTRAPPING and waited > self.timing.waiting_ns:
            if room.done and room.drained:
                # The decode ranks have all that they wanted: failing now would end the room in two ways.
                text = f"room {room.room} is received by every decode rank, but for {waited / 1e9:.1f} s"
                self.note("room-unfinished", f"{text} {self._missing(room)}", "warning", room=room.room)
                self._release(room)
                self._progress(room)
                return
            self._fail(room, self.failure("KV_ROOM_STUCK_TRANSFER", f"{stuck}: {self._missing(room)}"))

    def _check_drained(self, room: SendRoom) -> None:
        """A write that the engine never ends keeps the room's pages: said once."""
        waited = self.now_ns - room.since_ns
        if room.overdue or waited <= self.timing.waiting_ns:
            return
        room.overdue = True
        parts = ", ".join(f"{leg.in_flight} to {leg.peer}" for leg in room.legs.values() if leg.in_flight)
        text = (
            f"room {room.room} failed {waited / 1e9:.1f} s ago and its pages are still held: writes in flight: {parts}"
        )
        self.note("room-undrained", text, "warning", room=room.room)

    def _missing(self, room: SendRoom) -> str:
        if room.launched:
            return "the event of its forward is not done"
        if room.held:
            return "finish() was not called, and until then this stage keeps its pages back (pp_early_send is off)"
        if not room.ledger.complete:
            return f"the engine gave no last pages: {room.ledger.behind()}"
        for leg in room.legs.values():
            for part in leg.parts.values():
                if part.state is not PartState.SENT:
                    return f"{part.key} to {leg.peer} waits for {self._waits_for(leg, part)}"
        if not room.finished:
            return "finish() was not called"
        for leg in room.legs.values():
            for final in leg.finals.values():
                if final.state is not PartState.SENT:
                    what = "the aux row" if final.kind is PartKind.AUX else f"state {self._component(final)}"
                    waits = "its write to end" if final.state is PartState.QUEUED else "a sign of life from it"
                    return f"{what} to {leg.peer} waits for {waits}"
        return f"no RoomDone from {', '.join(leg.peer for leg in room.legs.values() if not leg.done)}"

    def _waits_for(self, leg: PeerTransfer, part: Part) -> str:
        """What a part that is not sent waits for."""
        if part.state is PartState.QUEUED:
            return "its write to end"
        if part.state is PartState.PLANNED:
            return "its pages to be computed"
        if part.path == STAGED and part.grant is None:
            return "a grant" if part.requested else "its turn to ask for staging"
        if part.grant is not None and not self.peers[leg.peer].gate.open(part.grant.round, part.grant.end):
            return "the watermark"
        return "a sign of life from it"

    def _resend(self, room: SendRoom, leg: PeerTransfer) -> None:
        """Say again what was not answered: requests without grants, tags without RoomDone, failures without Ack."""
        leg.resend_ns = self.now_ns + self.timing.resend_ns
        if not self.peers[leg.peer].usable:
            return
        if room.failure is not None:
            if not leg.failed_acked:
                self._say_failed(room, leg)
            return
        if leg.done:
            return
        # A part whose tag was lost keeps its ring region, and so may keep others waiting: told before all are sent.
        tags = [
            self._tag(leg, part) for part in leg.parts.values() if part.state is PartState.SENT and not part.confirmed
        ]
        finals = [final for final in leg.finals.values() if final.state is PartState.SENT]
        tags += [self._final_tag(leg, final) for final in finals]
        if tags or leg.sent:
            self.telemetry.metrics.add("kvctl_control_resends_total", 1, "part-ready")
            self.act(ev.Send(leg.peer, msg.PartReady(leg.room, leg.nonce, tags)))
        unanswered = [
            part for part in leg.parts.values() if part.path == STAGED and part.requested and part.grant is None
        ]
        if unanswered:
            self.telemetry.metrics.add("kvctl_control_resends_total", 1, "staging-request")
            self._send_request(leg, unanswered)


def place(key: PartKey) -> tuple[int, int, tuple[int, int]]:
    return key.writer, key.chunk, (key.lo, key.hi)
