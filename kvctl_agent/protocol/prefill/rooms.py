"""Rooms of a prefill rank: which one a message is about, their states, and what is said again until it is answered.

The first cause of a failure goes to every decode rank of the room; queued parts are dropped behind the cancel;
"drained" is said only when nothing is in flight, nor ever will be.
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
from kvctl_agent.protocol.machine import MachineContext, Tombstones, failure_of
from kvctl_agent.protocol.peer import LocalInfo, Peer, Timing
from kvctl_agent.protocol.prefill.send_room import (
    ComputedPages,
    Final,
    Part,
    PartState,
    PeerTransfer,
    SendRoom,
    StagingCredits,
    Wait,
)
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey, Tag

# Which path a part takes: (peer's introduction, share, layers, the reader's pages) → path. The second one is asked
# for parts that can never have a ring region.
Choose = Callable[[msg.PeerInfo, TransferSlice, int, ev.Pages], str]


@dataclass(eq=False)
class StagingRequests:
    """Chooses paths, and asks for the regions that they need.

    Attributes:
        fallback: chooses a path that needs no ring.
        allowances: by peer.
    """

    context: MachineContext
    rooms: dict[int, SendRoom]
    allowances: dict[str, StagingCredits]
    choose: Choose
    fallback: Choose

    def request(self, room: SendRoom, leg: PeerTransfer) -> None:
        """Choose paths, and ask for staging for all staged parts of the leg that have not been asked for."""
        if room.prefetched:
            leg.cut_all(self.context.rank, room.groups)
        who = self.context.introduction(leg.peer)
        wanted: list[Part] = []
        for part in leg.parts.values():
            if not part.path:
                part.path = self.choose(who, part.share, part.layers, leg.pages_at(part.chunk))
            if part.path == STAGED and not part.requested and part.grant is None:
                wanted.append(part)
        if not wanted or not self.allowances[leg.peer].take(leg, wanted, computed=room.ledger.complete):
            return
        for part in wanted:
            part.requested = True
        leg.resend_ns = self.context.now_ns + self.context.timing.resend_ns
        room.record.event("request", self.context.now_ns, peer=leg.peer)
        self.send(leg, wanted)

    def request_all(self, room: SendRoom) -> None:
        for leg in room.legs.values():
            self.request(room, leg)

    def request_next(self, peer: str) -> None:
        """Something that was asked for is sent, or has come to nothing: others may ask."""
        allowance = self.allowances[peer]
        while (leg := allowance.next()) is not None:
            self.request(self.rooms[leg.room], leg)

    def send(self, leg: PeerTransfer, parts: list[Part]) -> None:
        for part in parts:
            part.asks += 1
            part.asked_ns = part.asked_ns or self.context.now_ns
        specs = [msg.PartSpec(part.key.chunk, part.key.lo, part.key.hi, part.nbytes) for part in parts]
        self.context.send(leg.peer, msg.StagingRequest(leg.room, leg.nonce, specs))


# What one peer, broken or hostile, can make us remember.
MAX_LEGS = 1 << 17
_DEADLINES_EVERY_NS = 1_000_000_000

Parked = dict[tuple[int, int, PartKey], tuple[PeerTransfer, Part]]


class Ended(NamedTuple):
    """A room that ended before our engine, or some decode rank, had come; those who come late are told how."""

    at_ns: int
    state: RoomState
    failure: Failure | None
    claimed: bool  # our engine had come
    openers: frozenset[str]  # decode ranks that had come


class PrefillState:
    """Everything that a prefill machine remembers between two events.

    Attributes:
        peers: by name; see `readers`.
        holds_back: this pipeline stage sends nothing before `finish`; fixed.
        draining: told to take no new rooms; see `machine`.
        rooms, legs: by number, and by peer, number and nonce; `forwards` and `admission` add, `SendRooms` removes.
        parked: by peer, parts that are ready and may not go yet; see `dispatch`.
        allowances: by peer, how much staging may be asked for; see `staging`.
        tombstones: legs that have ended, and how the room failed, if it did.
        aborted: rooms aborted before they were opened: when to believe it, and why; in the order of their coming.
        ended: rooms that ended before all who take part had come, oldest first.
        deadlines_due_ns: when to look for rooms that have waited for too long; see `SendRooms`.

    Args:
        early_send: a pipeline stage before the last one sends as soon as its own forward is done.
    """

    def __init__(self, local: LocalInfo, timing: Timing, *, early_send: bool = True) -> None:
        self.holds_back = not early_send and local.coord.pp < local.side.pp - 1
        self.peers: dict[str, Peer] = {}
        self.draining = False
        self.rooms: dict[int, SendRoom] = {}
        self.legs: dict[RoomKey, PeerTransfer] = {}
        self.parked: dict[str, Parked] = {}
        self.allowances: dict[str, StagingCredits] = {}
        self.tombstones: Tombstones[Failure | None] = Tombstones(timing.bootstrap_ns)
        self.aborted: dict[int, tuple[int, Failure]] = {}
        self.ended: dict[int, Ended] = {}
        self.deadlines_due_ns = 0


class SendRooms:
    """Moves rooms from state to state, and tells the decode ranks until each has answered.

    Attributes:
        layers: KV and draft layers of this rank.
        components: its state components, the last segments of its pool.
    """

    def __init__(self, context: MachineContext, state: PrefillState, staging: StagingRequests) -> None:
        self.context = context
        self.state = state
        self.staging = staging
        self.layers = context.local.layers
        self.components: list[Segment] = [held.segment for held in context.local.held if held.segment.state]

    def begin(self, number: int) -> SendRoom:
        """A new room, be it the engine's or a peer's."""
        self.state.ended.pop(number, None)
        record = self.context.telemetry.rooms.open(number, 0)
        ledger = ComputedPages(self.layers, self.context.local.chunk_pages)
        room = self.state.rooms[number] = SendRoom(number, record, ledger, self.context.now_ns)
        return room

    def find(self, peer: Peer, number: int, nonce: int) -> tuple[SendRoom, PeerTransfer] | None:
        """The room and leg that a message is about; where there is none, that is counted."""
        leg = self.state.legs.get(RoomKey(peer.name, number, nonce))
        if leg is None:
            self.context.drop("tombstone")
            return None
        return self.state.rooms[number], leg

    def forget(self, room: SendRoom) -> None:
        """Leave tombstones in the place of a room."""
        if self.state.rooms.pop(room.room, None) is None:
            return
        now_ns = self.context.now_ns
        for leg in room.legs.values():
            self.state.legs.pop(leg.room_key, None)
            self.state.tombstones.bury(leg.room_key, room.failure, now_ns)
        if not room.claimed or (room.failure is not None and not room.opened):
            openers = frozenset(room.legs)
            self.state.ended[room.room] = Ended(now_ns, room.state, room.failure, room.claimed, openers)
        self.context.telemetry.finish(room.record, now_ns)

    def expire(self) -> None:
        """Forget what late messages cannot be about any more."""
        now_ns = self.context.now_ns
        self.state.tombstones.expire(now_ns)
        while self.state.ended:
            number, ended = next(iter(self.state.ended.items()))
            if now_ns - ended.at_ns < self.context.timing.bootstrap_ns and len(self.state.ended) < MAX_LEGS:
                break
            del self.state.ended[number]

    def never_opened(self, number: int, failure: Failure) -> None:
        """Its opening was lost or refused: our engine, which waits for it or is yet to come, must not wait for ever.

        Not at once, though: the number may be that of another dp group's room, whose opening is on its way.
        """
        if number not in self.state.ended and len(self.state.aborted) < MAX_LEGS:
            due_ns = self.context.now_ns + self.context.timing.resend_ns
            self.state.aborted.setdefault(number, (due_ns, failure))

    def park(self, room: SendRoom, leg: PeerTransfer, part: Part) -> None:
        parked = self.state.parked[leg.peer]
        key = (leg.room, leg.nonce, part.key)
        if key not in parked:
            parked[key] = (leg, part)
            room.record.parked += 1

    def unpark(self, room: SendRoom, leg: PeerTransfer, part: Part) -> None:
        parked = self.state.parked.get(leg.peer)
        if parked and parked.pop((leg.room, leg.nonce, part.key), None):
            room.record.parked -= 1

    def tag(self, leg: PeerTransfer, part: Part | Final) -> bytes:
        """What the write of a part carries."""
        incarnation = self.context.peers[leg.peer].incarnation
        return Tag(part.kind, incarnation, leg.room, leg.nonce, part.serial, part.key, part.checksum).pack()

    def component(self, final: Final) -> Segment:
        """The state component that a final part is of; the components are the last segments."""
        return self.components[final.key.chunk - self.components[0].index]

    # ---- messages ---------------------------------------------------------------------------------------------

    def on_part_ack(self, peer: Peer, message: msg.PartAck) -> None:
        found = self.find(peer, message.room, message.nonce)
        if found is None:
            return
        _, leg = found
        for data in message.tags:
            try:
                tag = Tag.unpack(data)
            except RemoteProtocolError:
                self.context.drop("bad-tag")
                continue
            part = leg.parts.get(tag.key) if tag.kind is PartKind.KV else None
            if part is not None and part.state is PartState.SENT:
                part.confirmed = True

    def on_room_done(self, peer: Peer, message: msg.RoomDone) -> None:
        self.context.send(peer.name, msg.Ack(message.room, message.nonce, "room-done"))
        found = self.find(peer, message.room, message.nonce)
        if found is None or found[1].done:
            return
        room, leg = found
        leg.done = True
        room.record.event("done", self.context.now_ns, peer=peer.name)
        self.progress(room)

    def on_room_failed(self, peer: Peer, message: msg.RoomFailed) -> None:
        self.context.send(peer.name, msg.Ack(message.room, message.nonce, "room-failed"))
        if found := self.find(peer, message.room, message.nonce):
            room, leg = found
            leg.failed_acked = True  # it is he who says so
            self.fail(room, failure_of(message))
            self.progress(room)

    def on_room_abort(self, peer: Peer, message: msg.RoomAbort) -> None:
        """Also from a peer that is lost: it has replaced us, say, and asks whether anything of ours is in flight."""
        found = self.find(peer, message.room, message.nonce)
        if found is None:
            # Unknown or gone: nothing of it is in flight, and the grave keeps a late RoomOpen from raising it.
            key = RoomKey(peer.name, message.room, message.nonce)
            if not self.state.tombstones.holds(key):
                self.state.tombstones.bury(key, failure_of(message), self.context.now_ns)
                self.never_opened(message.room, failure_of(message))
            self.context.send(peer.name, msg.RoomDrained(message.room, message.nonce))
            return
        room, leg = found
        leg.abort_asked = leg.failed_acked = True
        leg.drained_said = False  # it asks again, so our answer was lost
        self.fail(room, failure_of(message))
        self.progress(room)

    def on_ack(self, peer: Peer, message: msg.Ack) -> None:
        found = self.find(peer, message.room, message.nonce)
        if found is not None and message.of == "room-failed":
            found[1].failed_acked = True
            self.progress(found[0])

    def on_peer_lost(self, peer: Peer, text: str) -> None:
        """Fail its rooms."""
        for room in list(self.state.rooms.values()):
            leg = room.legs.get(peer.name)
            if leg is None:
                continue
            leg.failed_acked = True
            self.fail(room, self.context.failure("KV_PEER_LOST", text))
            self.progress(room)

    # ---- states -----------------------------------------------------------------------------------------------

    def enter(self, room: SendRoom, state: RoomState) -> None:
        room.state = state
        room.since_ns = self.context.now_ns
        room.record.state(state, self.context.now_ns)
        if room.claimed:
            self.context.act(ev.StateChanged(room.room, state, room.failure))

    def progress(self, room: SendRoom) -> None:
        """See whether the room has come to an end of some kind."""
        if room.failure is not None:
            self._settle(room)
            return
        if room.sent and not room.released:
            self._release(room)
            for leg in room.legs.values():  # ask then how the room has ended
                leg.resend_ns = self.context.now_ns + 2 * self.context.timing.resend_ns
        if room.done and (room.released or not room.claimed):
            self.enter(room, RoomState.SUCCESS)
            self.forget(room)

    def _release(self, room: SendRoom) -> None:
        """Nothing of it will be read again."""
        room.released = True
        room.record.event("sent", self.context.now_ns)
        self._tell_overlap(room)
        if room.claimed:
            self.context.act(ev.Released(room.room))

    def _tell_overlap(self, room: SendRoom) -> None:
        begun, done = room.forward_begun_ns, room.computed_ns
        if not room.spans or begun is None or done is None:
            return
        hidden, exposed = room.spans.split(done)
        forwards = max(1, room.ledger.forwards)
        self.context.act(
            ev.Overlapped(
                pages=room.ledger.given // forwards,
                groups=len(room.groups),
                compute_ns=(done - begun) // forwards,
                transfer_ns=(hidden + exposed) // forwards,
                exposed_ns=exposed,
            )
        )

    def fail(self, room: SendRoom, failure: Failure) -> None:
        """End a room for this cause, unless it has ended."""
        if room.failure is not None or room.state is RoomState.SUCCESS:
            return
        context = self.context
        room.failure = failure
        room.record.fail(failure, context.now_ns)
        context.telemetry.metrics.add("kvctl_room_failures_total", 1, failure["code"])
        context.note("room-failed", f"{failure['rank']}: {failure['text']}", "error", room=room.room)
        for leg in room.legs.values():
            leg.cancel.cancelled = True
            leg.resend_ns = context.now_ns + context.timing.resend_ns
            for part in leg.parts.values():
                self.unpark(room, leg, part)
            self.staging.allowances[leg.peer].forget(leg)
            if not leg.failed_acked:
                self.say_failed(leg, failure)
        self.enter(room, RoomState.FAILED)
        self._settle(room)
        for leg in room.legs.values():
            self.staging.request_next(leg.peer)

    def say_failed(self, leg: PeerTransfer, failure: Failure) -> None:
        self.context.send(leg.peer, msg.RoomFailed(leg.room, leg.nonce, **failure))

    def _settle(self, room: SendRoom) -> None:
        """A failed room: say drained to those who ask, release and forget it when nothing is in flight."""
        for leg in room.legs.values():
            if leg.abort_asked and leg.drained and not leg.drained_said:
                leg.drained_said = True
                self.context.send(leg.peer, msg.RoomDrained(leg.room, leg.nonce))
        if not room.drained:
            return
        if not room.released:
            room.released = True
            if room.claimed:
                self.context.act(ev.Released(room.room))
        if all(leg.failed_acked for leg in room.legs.values()):
            self.forget(room)

    # ---- time -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Aborts that are to be believed, resends and deadlines."""
        now_ns, timing = self.context.now_ns, self.context.timing
        self._end_aborted()
        for leg in list(self.state.legs.values()):
            if now_ns >= leg.resend_ns > 0 and (room := self.state.rooms.get(leg.room)) is not None:
                self.resend(room, leg)
        if now_ns >= self.state.deadlines_due_ns:
            # Engines may announce thousands of rooms long before they are opened: look at those seldom.
            shortest = min(timing.bootstrap_ns, timing.waiting_ns)
            self.state.deadlines_due_ns = now_ns + min(_DEADLINES_EVERY_NS, shortest // 4)
            for room in list(self.state.rooms.values()):
                if room.failure is None:
                    self._check_deadline(room)
                elif not room.drained:
                    self._check_drained(room)

    def _end_aborted(self) -> None:
        for number, (due_ns, failure) in list(self.state.aborted.items()):
            if self.context.now_ns < due_ns:
                return  # in the order of their coming
            del self.state.aborted[number]
            room = self.state.rooms.get(number)
            if room is None and number not in self.state.ended:
                room = self.begin(number)
            if room is not None and not room.opened:
                self.fail(room, failure)

    def _check_deadline(self, room: SendRoom) -> None:
        waited = self.context.now_ns - room.since_ns
        stuck = f"room {room.room} was stuck in {room.state.label} for {waited / 1e9:.1f} s"
        if room.state is RoomState.BOOTSTRAPPING and waited > self.context.timing.bootstrap_ns:
            opened = f"{len(room.legs)} of {room.expected or '?'} decode ranks opened it"
            self.fail(room, self.context.failure("KV_ROOM_STUCK_BOOTSTRAP", f"{stuck}: {opened}"))
        elif room.state is not RoomState.BOOTSTRAPPING and waited > self.context.timing.waiting_ns:
            if room.done and room.drained:
                # The decode ranks have all that they wanted: failing now would end the room in two ways.
                text = f"room {room.room} is received by every decode rank, but for {waited / 1e9:.1f} s"
                self.context.note("room-unfinished", f"{text} {self._missing(room)}", "warning", room=room.room)
                self._release(room)
                self.progress(room)
                return
            self.fail(room, self.context.failure("KV_ROOM_STUCK_TRANSFER", f"{stuck}: {self._missing(room)}"))

    def _check_drained(self, room: SendRoom) -> None:
        """A write that the engine never ends keeps the room's pages: said once."""
        waited = self.context.now_ns - room.since_ns
        if room.overdue or waited <= self.context.timing.waiting_ns:
            return
        room.overdue = True
        parts = ", ".join(f"{leg.in_flight} to {leg.peer}" for leg in room.legs.values() if leg.in_flight)
        text = (
            f"room {room.room} failed {waited / 1e9:.1f} s ago and its pages are still held: writes in flight: {parts}"
        )
        self.context.note("room-undrained", text, "warning", room=room.room)

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
                    reasons = {
                        Wait.WRITE: "its write to end",
                        Wait.PAGES: "its pages to be computed",
                        Wait.GRANT: "a grant" if part.requested else "its turn to ask for staging",
                        Wait.WATERMARK: "the watermark",
                        Wait.LEASE: "a sign of life from it",
                    }
                    return f"{part.key} to {leg.peer} waits for {reasons[self.waits_for(leg, part)]}"
        if not room.finished:
            return "finish() was not called"
        for leg in room.legs.values():
            for final in leg.finals.values():
                if final.state is not PartState.SENT:
                    what = "the aux row" if final.kind is PartKind.AUX else f"state {self.component(final).name}"
                    waits = "its write to end" if final.state is PartState.QUEUED else "a sign of life from it"
                    return f"{what} to {leg.peer} waits for {waits}"
        return f"no RoomDone from {', '.join(leg.peer for leg in room.legs.values() if not leg.done)}"

    def waits_for(self, leg: PeerTransfer, part: Part) -> Wait:
        """What a part that is not sent waits for. Safe to ask from any thread."""
        grant = part.grant
        if part.state is PartState.QUEUED:
            return Wait.WRITE
        if part.state is PartState.PLANNED:
            return Wait.PAGES
        if part.path == STAGED and grant is None:
            return Wait.GRANT
        if grant is not None and not self.context.peers[leg.peer].gate.open(grant.round, grant.end):
            return Wait.WATERMARK
        return Wait.LEASE

    def resend(self, room: SendRoom, leg: PeerTransfer) -> None:
        """Say again what was not answered: requests without grants, tags without RoomDone, failures without Ack."""
        leg.resend_ns = self.context.now_ns + self.context.timing.resend_ns
        if not self.context.peers[leg.peer].usable:
            return
        if room.failure is not None:
            if not leg.failed_acked:
                self.say_failed(leg, room.failure)
            return
        if leg.done:
            return
        # A part whose tag was lost keeps its ring region, and so may keep others waiting: told before all are sent.
        sent: list[Part | Final] = [
            part for part in leg.parts.values() if part.state is PartState.SENT and not part.confirmed
        ]
        sent += [final for final in leg.finals.values() if final.state is PartState.SENT]
        tags = [self.tag(leg, part) for part in sent]
        if tags or leg.sent:
            self.context.telemetry.metrics.add("kvctl_control_resends_total", 1, "part-ready")
            self.context.send(leg.peer, msg.PartReady(leg.room, leg.nonce, tags))
        unanswered = [
            part for part in leg.parts.values() if part.path == STAGED and part.requested and part.grant is None
        ]
        if unanswered:
            self.context.telemetry.metrics.add("kvctl_control_resends_total", 1, "staging-request")
            self.staging.send(leg, unanswered)
