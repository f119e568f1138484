"""Admission of rooms on a decode rank: registered by the engine, planned and opened at the whole prefill instance.

A room is opened at every rank of the prefill instance, once all of them are known and ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LayoutError, LocalProtocolError
from kvctl_agent.layout import plan_inputs
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.plan import TransferSlice, aux_writer, slices_to_reader, state_slices_to_reader, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode.rooms import DecodeState, Final, RecvRoom, RecvRooms
from kvctl_agent.protocol.machine import MachineContext, PeerSessions
from kvctl_agent.protocol.peer import Peer, PeerPlan, PeerState, plan_with_peer
from kvctl_agent.protocol.tag import PartKey, PartKind


@dataclass(eq=False)
class RecvAdmission:
    """Takes rooms from the engine and opens them."""

    context: MachineContext
    state: DecodeState
    rooms: RecvRooms

    def on_open_room(self, event: ev.OpenRoom) -> None:
        context = self.context
        ev.check_room(event.room)
        ev.check_room(event.nonce)
        if last := self.state.rooms.get(event.room):
            if last.state is not RoomState.SUCCESS:
                raise LocalProtocolError(f"room {event.room} is open already; a room number is used once at a time")
            self.rooms.forget(last)  # our engine is done with it; a rank that does not know yet asks, and is told
        record = context.telemetry.rooms.open(event.room, event.nonce)
        record.pages = event.total_pages - event.prefix_pages
        context.telemetry.metrics.add("kvctl_rooms_opened_total", 1)
        opening = msg.RoomOpen(
            event.room,
            event.nonce,
            event.pages.astype("<i4").tobytes(),
            event.prefix_pages,
            event.total_pages,
            {},
            event.aux_index,
            [items.astype("<i4").tobytes() for items in event.states],
            event.prefill_only,
        )
        room = RecvRoom(opening, event.instance, event.pages, record, context.now_ns)
        self.state.rooms[event.room] = room
        self.rooms.enter(room, RoomState.BOOTSTRAPPING)
        if clash := self.state.clashes.get(event.instance):
            self.rooms.fail(room, context.failure("KV_COMPAT_MISMATCH", clash))
            return
        if event.instance not in self.state.rosters:
            self.state.rosters[event.instance] = ()
            context.act(ev.FindInstance(event.instance))
        for name in self.state.rosters[event.instance]:
            peer = context.peers[name]
            if peer.state is PeerState.REFUSED:
                self.fail_waiting(event.instance, context.failure("KV_COMPAT_MISMATCH", peer.refusal))
                return
        self._open(room)

    def open_waiting(self) -> None:
        """Open the rooms whose instance is complete by now."""
        for room in list(self.state.rooms.values()):
            if room.failure is None:
                self._open(room)

    def fail_waiting(self, instance: str, failure: Failure) -> None:
        """Rooms that wait for an instance which does not fit us would wait for ever."""
        for room in list(self.state.rooms.values()):
            if not room.legs and room.instance == instance:
                self.rooms.fail(room, failure)

    def _open(self, room: RecvRoom) -> None:
        """Make the plan and open the room everywhere, once the whole instance is there."""
        context = self.context
        roster = self.state.rosters[room.instance]
        if room.legs or not roster or not all(map(context.is_ready, roster)):
            return
        first = context.peers[roster[0]]
        inputs = first.inputs
        assert inputs is not None
        try:
            self._plan(room, inputs, roster)
        except LayoutError as error:
            self.rooms.fail(room, context.failure("KV_PLAN_MISMATCH", f"room {room.room}: {error}"))
            return
        room.opening = msgspec.structs.replace(room.opening, inputs=first.wire)
        for leg in room.legs.values():
            self.rooms.remind(room, leg)
        room.record.peers = [room.writers[writer] for writer in room.shares]
        room.record.event("open", context.now_ns)
        room.resend_ns = context.now_ns + context.timing.resend_ns

    def _plan(self, room: RecvRoom, inputs: PlanInputs, roster: tuple[str, ...]) -> None:
        opening = room.opening
        total, prefix = opening.total_pages, opening.prefix_pages
        if len(room.pages) != total - prefix:
            raise LayoutError(f"{len(room.pages)} pages for {prefix}..{total}")
        wanted = [] if opening.prefill_only else slices_to_reader(inputs, room.room, self.context.rank)
        finals: dict[Final, tuple[TransferSlice | None, ev.Pages]] = {}
        if opening.aux_index >= 0:
            key = PartKey(aux_writer(inputs, room.room, self.context.rank), 0, 0, 0)
            finals[PartKind.AUX, key] = None, np.array([opening.aux_index], np.int32)
        if any(opening.states):
            components = [segment.index for segment in inputs.segments if segment.state]
            asked = [index for index, items in zip(components, opening.states, strict=False) if items]
            for share in state_slices_to_reader(inputs, room.room, self.context.rank):
                if share.segment in asked:
                    key = PartKey(share.writer, share.segment, share.layer_lo, share.layer_hi)
                    items = np.frombuffer(opening.states[components.index(share.segment)], "<i4")
                    finals[PartKind.STATE, key] = share, items
        cells: dict[int, Sequence[Chunk]] = {}  # by cp rank, which alone decides

        def cells_of(writer: int) -> Sequence[Chunk]:
            cp = inputs.prefill.coord(writer).cp
            if cp not in cells:
                cells[cp] = writer_cells(inputs, room.room, writer, total, prefix)
            return cells[cp]

        room.plan(wanted, cells_of, finals, {name: self.context.peers[name].incarnation for name in roster})


@dataclass(eq=False)
class Instances:
    """Owns the rosters, and meets every rank on them."""

    context: MachineContext
    state: DecodeState
    rooms: RecvRooms
    admission: RecvAdmission
    sessions: PeerSessions

    def on_roster_known(self, event: ev.RosterKnown) -> None:
        for name in event.names:
            other = self._instance_of(name)
            if other in ("", event.instance):
                continue
            if not self.context.is_ready(name):
                self.state.rosters[other] = ()  # it has moved here
            else:
                text = f"{name} of {event.instance} is in use by the instance at {other}: give every agent its own name"
                self.context.note("name-taken", text, "error", peer=name)
                self.state.clashes[event.instance] = text
                self.admission.fail_waiting(event.instance, self.context.failure("KV_COMPAT_MISMATCH", text))
                return
        self.state.clashes.pop(event.instance, None)
        self.state.absent_ranks.pop(event.instance, None)
        self.state.rosters[event.instance] = event.names
        for number, name in enumerate(event.names):
            peer = self.context.peers.setdefault(name, Peer(name, self.context.timing))
            peer.registered = event.incarnations[number] if event.incarnations else 0
        self.say_hello()
        self.admission.open_waiting()

    def on_roster_missing(self, event: ev.RosterMissing) -> None:
        self.state.absent_ranks[event.instance] = event.text

    def _instance_of(self, name: str) -> str:
        """Where the registry of this rank's instance is; "" for a rank of none."""
        return next((instance for instance, roster in self.state.rosters.items() if name in roster), "")

    def forget_departed(self) -> None:
        """Ranks that are on no roster any more, once no room waits for what they may still have in flight."""
        departed = self.context.peers.keys() - {name for roster in self.state.rosters.values() for name in roster}
        if not departed:
            return
        for name in sorted(departed.difference(*(room.legs for room in self.state.rooms.values()))):
            del self.context.peers[name]
            self.context.act(ev.ForgetPeer(name))

    def say_hello(self) -> None:
        """To every rank that is not known to be fine: a restarted one answers, and so is found out early."""
        context, timing = self.context, self.context.timing
        for name in [name for roster in self.state.rosters.values() for name in roster]:
            peer = context.peers[name]
            unanswered = peer.hello_due_ns > 0  # it may be heard again meanwhile, and have given rooms up
            replaced = peer.registered not in (0, peer.incarnation)
            if (peer.state is not PeerState.READY or unanswered or replaced) and context.now_ns >= peer.hello_due_ns:
                refused = peer.state is PeerState.REFUSED
                peer.hello_due_ns = context.now_ns + (timing.suspect_ns if refused else timing.resend_ns)
                context.send(name, msg.Hello(msg.PROTOCOL_VERSION, context.local.introduction()))

    def find_clashing(self) -> None:
        """A peer was lost: it may have been this one that kept a name in use."""
        for instance in self.state.clashes:
            self.context.act(ev.FindInstance(instance))

    def on_hello_ack(self, event: ev.Received, message: msg.HelloAck) -> None:
        context, timing = self.context, self.context.timing
        peer_name, incarnation = event.peer, event.incarnation
        peer = context.peers.get(peer_name)
        if peer is None or message.to != context.local.incarnation:
            context.drop("incarnation")
            return
        if self.sessions.late(peer, incarnation):
            return
        asked, peer.hello_due_ns = peer.hello_due_ns > 0, 0
        if peer.incarnation == incarnation and peer.usable:
            self.sessions.hear(peer)
            if asked:
                self._resynchronise(peer)
            return
        self.sessions.replace(peer, incarnation)
        if peer.incarnation != incarnation:
            peer.unlike_since_ns = 0
        inputs, differences = self._pair(message)
        # The process that has our name may be our own last life: its silence will show.
        waits = bool(message.taken) and self._unlike_for_less_than(peer, 2 * timing.suspect_ns)
        if inputs is not None:
            stale = self._off_roster(peer_name, message.who)
            differences = (stale,) if stale else self._unlike_others(peer_name, inputs)
            # Those that it differs from may be gone, since it started anew and nobody has had time to see.
            waits = bool(stale or (differences and self._unlike_for_less_than(peer, timing.suspect_ns)))
            inputs = None if differences else inputs
        known = peer.state is (PeerState.CONNECTING if waits else PeerState.REFUSED)
        known = known and peer.incarnation == incarnation and peer.differences == differences
        peer.meet(incarnation, message.who, inputs, differences, event.route)
        peer.heard_ns = context.now_ns
        if waits:
            # It, or we, started anew: rooms wait, and what stands in the way is about to be seen as gone.
            peer.state = PeerState.CONNECTING
            peer.hello_due_ns = context.now_ns + timing.resend_ns
            if not known:
                text = f"{peer_name} cannot be used yet: {'; '.join(differences)}"
                context.note("peer-waits", text, "warning", peer=peer_name)
            return
        if inputs is None:
            peer.hello_due_ns = context.now_ns + timing.suspect_ns
            if not known:
                context.note("peer-refused", peer.refusal, "error", peer=peer_name)
                failure = context.failure("KV_COMPAT_MISMATCH", peer.refusal)
                self.admission.fail_waiting(self._instance_of(peer.name), failure)
            return
        peer.state = PeerState.READY
        context.note("peer-ready", f"{peer_name} is ready (incarnation {incarnation:016x})", peer=peer_name)
        self._resynchronise(peer)
        self.admission.open_waiting()

    def _pair(self, message: msg.HelloAck) -> PeerPlan:
        """How a rank fits us."""
        if message.version != msg.PROTOCOL_VERSION:
            return PeerPlan(None, (f"protocol version {msg.PROTOCOL_VERSION} ≠ {message.version}",))
        if message.taken:
            return PeerPlan(None, (message.taken,))
        if message.differences:
            return PeerPlan(None, tuple(message.differences))
        return plan_with_peer(self.context.local, message.who)

    def _off_roster(self, name: str, who: msg.PeerInfo) -> str:
        """How what a rank says of its place differs from what its registry said; "" where it does not."""
        roster = self.state.rosters.get(self._instance_of(name), ())
        if prod(who.sizes) != len(roster):
            return f"{len(roster)} ranks on the roster ≠ {prod(who.sizes)} by its sizes"
        if name not in roster or roster.index(name) != who.unique_rank:
            return f"it says that it is rank {who.unique_rank}, the roster says otherwise"
        return ""

    def _unlike_others(self, name: str, inputs: PlanInputs) -> tuple[str, ...]:
        """The factors in which a rank differs from those of its instance that are there already."""
        for other in self.state.rosters.get(self._instance_of(name), ()):
            theirs = self.context.peers[other].inputs
            if other != name and self.context.is_ready(other) and theirs is not None and theirs != inputs:
                factors = plan_inputs.differences(theirs.to_wire(), inputs.to_wire())
                return tuple(f"{factor} on {name}" for factor in factors)
        return ()

    def _unlike_for_less_than(self, peer: Peer, patience_ns: int) -> bool:
        """Whether this incarnation of a peer has not fitted for a short time only, so that it may fit yet."""
        peer.unlike_since_ns = peer.unlike_since_ns or self.context.now_ns
        return self.context.now_ns - peer.unlike_since_ns < patience_ns

    def _resynchronise(self, peer: Peer) -> None:
        """After a silence: it may have given rooms up meanwhile without our hearing of it, so ask by opening again."""
        for room in list(self.state.rooms.values()):
            leg = room.legs.get(peer.name)
            if leg is None or leg.incarnation != peer.incarnation:
                continue
            if leg.accepted and not room.state.finished:
                leg.accepted = False  # so that it is asked until it answers
                room.unaccepted += 1
            if self.rooms.remind(room, leg):
                room.resend_ns = self.context.now_ns + self.context.timing.resend_ns
