"""The decode rank's machine: what its engine, peers, arrivals and the clock say. Events in, actions out, no I/O.

A room is opened at every rank of the prefill instance, once all of them are known and ready. A staging request is
answered at once, for as long as the part could ever fit; the same request gets the same grant; a part whose revoke is
open gets none. What then may happen to a room is in `decode_rooms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec
import numpy as np

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LayoutError, LocalProtocolError, RemoteProtocolError
from kvctl_agent.layout import plan_inputs
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.plan import aux_writer, slices_to_reader, state_slices_to_reader, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode_release import DecodeReleases
from kvctl_agent.protocol.grant_table import RegionState
from kvctl_agent.protocol.local_info import PeerPlan, plan_with_peer
from kvctl_agent.protocol.peer import Peer, PeerState
from kvctl_agent.protocol.recv_room import Final, RecvRoom
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag
from kvctl_agent.protocol.tombstones import RoomKey


class DecodeMachine(DecodeReleases):
    """All rooms of one decode rank."""

    # ---- the engine -------------------------------------------------------------------------------------------

    def on_open_room(self, event: ev.OpenRoom) -> None:
        ev.check_room(event.room)
        ev.check_room(event.nonce)
        if last := self.rooms.get(event.room):
            if last.state is not RoomState.SUCCESS:
                raise LocalProtocolError(f"room {event.room} is open already; a room number is used once at a time")
            self._bury(last)  # our engine is done with it; a rank that does not know yet will ask, and be told
        record = self.telemetry.rooms.open(event.room, event.nonce)
        record.pages = event.total_pages - event.prefix_pages
        self.telemetry.metrics.add("kvctl_rooms_opened_total", 1)
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
        room = self.rooms[event.room] = RecvRoom(opening, event.instance, event.pages, record, self.now_ns)
        self._state(room, RoomState.BOOTSTRAPPING)
        if clash := self._clashes.get(event.instance):
            self._fail(room, self.failure("KV_COMPAT_MISMATCH", clash))
            return
        if event.instance not in self.rosters:
            self.rosters[event.instance] = ()
            self.act(ev.FindInstance(event.instance))
        for name in self.rosters[event.instance]:
            if self.peers[name].state is PeerState.REFUSED:
                self._refuse_all(self.peers[name])
                return
        self._open(room)

    def on_abort_room(self, event: ev.AbortRoom) -> None:
        room = self.rooms.get(event.room)
        if room is not None and not room.state.finished:
            self._fail(room, self.failure("ABORTED", event.text))
            self.answer(event.ticket, "aborted", f"room {event.room} has failed here, and its other ranks are told")
        elif room is not None:
            self.answer(event.ticket, "unchanged", f"room {event.room} is {room.state.label} already")
        else:
            self.answer(event.ticket, "unknown", "")

    def _open(self, room: RecvRoom) -> None:
        """Make the plan and open the room everywhere, once the whole instance is there."""
        roster = self.rosters[room.instance]
        if room.legs or not roster or not all(map(self.is_ready, roster)):
            return
        first = self.peers[roster[0]]
        inputs = first.inputs
        assert inputs is not None
        opening = room.opening
        try:
            self._plan(room, inputs, roster)
        except LayoutError as error:
            self._fail(room, self.failure("KV_PLAN_MISMATCH", f"room {room.room}: {error}"))
            return
        room.opening = msgspec.structs.replace(opening, inputs=first.wire)
        for leg in room.legs.values():
            self._remind(room, leg)
        room.record.peers = [room.writers[writer] for writer in room.shares]
        room.record.event("open", self.now_ns)
        room.resend_ns = self.now_ns + self.timing.resend_ns

    def _plan(self, room: RecvRoom, inputs: PlanInputs, roster: tuple[str, ...]) -> None:
        opening = room.opening
        total, prefix = opening.total_pages, opening.prefix_pages
        if len(room.pages) != total - prefix:
            raise LayoutError(f"{len(room.pages)} pages for {prefix}..{total}")
        wanted = [] if opening.prefill_only else slices_to_reader(inputs, room.room, self.rank)
        finals: dict[Final, tuple[TransferSlice | None, ev.Pages]] = {}
        if opening.aux_index >= 0:
            key = PartKey(aux_writer(inputs, room.room, self.rank), 0, 0, 0)
            finals[PartKind.AUX, key] = None, np.array([opening.aux_index], np.int32)
        if any(opening.states):
            components = [segment.index for segment in inputs.segments if segment.state]
            asked = [index for index, items in zip(components, opening.states, strict=False) if items]
            for share in state_slices_to_reader(inputs, room.room, self.rank):
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

        room.plan(wanted, cells_of, finals, {name: self.peers[name].incarnation for name in roster})

    # ---- peers ------------------------------------------------------------------------------------------------

    def on_roster_known(self, event: ev.RosterKnown) -> None:
        for name in event.names:
            other = self._instance_of(name)
            if other in ("", event.instance):
                continue
            if not self.is_ready(name):
                self.rosters[other] = ()  # it has moved here
            else:
                text = f"{name} of {event.instance} is in use by the instance at {other}: give every agent its own name"
                self.note("name-taken", text, "error", peer=name)
                self._clashes[event.instance] = text
                self._fail_waiting(event.instance, self.failure("KV_COMPAT_MISMATCH", text))
                return
        self._clashes.pop(event.instance, None)
        self._absent_ranks.pop(event.instance, None)
        self.rosters[event.instance] = event.names
        for number, name in enumerate(event.names):
            peer = self.peers.setdefault(name, Peer(name, self.timing))
            peer.registered = event.incarnations[number] if event.incarnations else 0
        self._say_hello()
        for room in list(self.rooms.values()):
            self._open(room)

    def on_roster_missing(self, event: ev.RosterMissing) -> None:
        self._absent_ranks[event.instance] = event.text

    def _instance_of(self, name: str) -> str:
        """Where the registry of this rank's instance is; "" for a rank of none."""
        return next((instance for instance, roster in self.rosters.items() if name in roster), "")

    def _forget_departed(self) -> None:
        """Ranks that are on no roster any more, once no room waits for what they may still have in flight."""
        departed = self.peers.keys() - {name for roster in self.rosters.values() for name in roster}
        if not departed:
            return
        for name in sorted(departed.difference(*(room.legs for room in self.rooms.values()))):
            del self.peers[name]
            self.act(ev.ForgetPeer(name))

    def _say_hello(self) -> None:
        """To every rank that is not known to be fine: a restarted one answers, and so is found out early."""
        for name in [name for roster in self.rosters.values() for name in roster]:
            peer = self.peers[name]
            unanswered = peer.hello_due_ns > 0  # it may be heard again meanwhile, and have given rooms up
            replaced = peer.registered not in (0, peer.incarnation)
            if (peer.state is not PeerState.READY or unanswered or replaced) and self.now_ns >= peer.hello_due_ns:
                refused = peer.state is PeerState.REFUSED
                peer.hello_due_ns = self.now_ns + (self.timing.suspect_ns if refused else self.timing.resend_ns)
                self.act(ev.Send(name, msg.Hello(msg.PROTOCOL_VERSION, self.local.introduction())))

    def on_hello_ack(self, event: ev.Received, message: msg.HelloAck) -> None:
        peer_name, incarnation = event.peer, event.incarnation
        peer = self.peers.get(peer_name)
        if peer is None or message.to != self.local.incarnation:
            self.drop("incarnation")
            return
        if self._late(peer, incarnation):
            return
        asked, peer.hello_due_ns = peer.hello_due_ns > 0, 0
        if peer.incarnation == incarnation and peer.usable:
            self._hear(peer)
            if asked:
                self._resynchronise(peer)
            return
        self._replace(peer, incarnation)
        if peer.incarnation != incarnation:
            peer.unlike_since_ns = 0
        inputs, differences = self._pair(message)
        # The process that has our name may be our own last life: its silence will show.
        waits = bool(message.taken) and self._unlike_for_less_than(peer, 2 * self.timing.suspect_ns)
        if inputs is not None:
            stale = self._off_roster(peer_name, message.who)
            differences = (stale,) if stale else self._unlike_others(peer_name, inputs)
            # Those that it differs from may be gone, since it started anew and nobody has had time to see.
            waits = bool(stale or (differences and self._unlike_for_less_than(peer, self.timing.suspect_ns)))
            inputs = None if differences else inputs
        known = peer.state is (PeerState.CONNECTING if waits else PeerState.REFUSED)
        known = known and peer.incarnation == incarnation and peer.differences == differences
        peer.meet(incarnation, message.who, inputs, differences, event.route)
        peer.heard_ns = self.now_ns
        if waits:
            # It, or we, started anew: rooms wait, and what stands in the way is about to be seen as gone.
            peer.state = PeerState.CONNECTING
            peer.hello_due_ns = self.now_ns + self.timing.resend_ns
            if not known:
                text = f"{peer_name} cannot be used yet: {'; '.join(differences)}"
                self.note("peer-waits", text, "warning", peer=peer_name)
            return
        if inputs is None:
            peer.hello_due_ns = self.now_ns + self.timing.suspect_ns
            if not known:
                self.note("peer-refused", _refusal(peer), "error", peer=peer_name)
                self._refuse_all(peer)
            return
        peer.state = PeerState.READY
        self.note("peer-ready", f"{peer_name} is ready (incarnation {incarnation:016x})", peer=peer_name)
        self._resynchronise(peer)
        for room in list(self.rooms.values()):
            if room.failure is None:
                self._open(room)

    def _pair(self, message: msg.HelloAck) -> PeerPlan:
        """How a rank fits us."""
        if message.version != msg.PROTOCOL_VERSION:
            return PeerPlan(None, (f"protocol version {msg.PROTOCOL_VERSION} ≠ {message.version}",))
        if message.taken:
            return PeerPlan(None, (message.taken,))
        if message.differences:
            return PeerPlan(None, tuple(message.differences))
        return plan_with_peer(self.local, message.who)

    def _off_roster(self, name: str, who: msg.PeerInfo) -> str:
        """How what a rank says of its place differs from what its registry said; "" where it does not."""
        roster = self.roster(self._instance_of(name))
        if prod(who.sizes) != len(roster):
            return f"{len(roster)} ranks on the roster ≠ {prod(who.sizes)} by its sizes"
        if name not in roster or roster.index(name) != who.unique_rank:
            return f"it says that it is rank {who.unique_rank}, the roster says otherwise"
        return ""

    def _unlike_others(self, name: str, inputs: PlanInputs) -> tuple[str, ...]:
        """The factors in which a rank differs from those of its instance that are there already."""
        for other in self.roster(self._instance_of(name)):
            theirs = self.peers[other].inputs
            if other != name and self.is_ready(other) and theirs is not None and theirs != inputs:
                factors = plan_inputs.differences(theirs.to_wire(), inputs.to_wire())
                return tuple(f"{factor} on {name}" for factor in factors)
        return ()

    def _unlike_for_less_than(self, peer: Peer, patience_ns: int) -> bool:
        """Whether this incarnation of a peer has not fitted for a short time only, so that it may fit yet."""
        peer.unlike_since_ns = peer.unlike_since_ns or self.now_ns
        return self.now_ns - peer.unlike_since_ns < patience_ns

    def _refuse_all(self, peer: Peer) -> None:
        """Rooms that wait for an instance which does not fit us would wait for ever."""
        self._fail_waiting(self._instance_of(peer.name), self.failure("KV_COMPAT_MISMATCH", _refusal(peer)))

    def _fail_waiting(self, instance: str, failure: Failure) -> None:
        for room in list(self.rooms.values()):
            if not room.legs and room.instance == instance:
                self._fail(room, failure)

    def _resynchronise(self, peer: Peer) -> None:
        """After a silence: it may have given rooms up meanwhile without our hearing of it, so ask by opening again."""
        for room in list(self.rooms.values()):
            leg = room.legs.get(peer.name)
            if leg is None or leg.incarnation != peer.incarnation:
                continue
            if leg.accepted and not room.state.finished:
                leg.accepted = False  # so that it is asked until it answers
                room.unaccepted += 1
            if self._remind(room, leg):
                room.resend_ns = self.now_ns + self.timing.resend_ns

    def on_heartbeat(self, peer: Peer, message: msg.Heartbeat) -> None:
        peer.heartbeat(message, self.now_ns)

    def on_peer_lost(self, peer: Peer, text: str) -> None:
        for room in list(self.rooms.values()):
            leg = room.legs.get(peer.name)
            if leg is None or leg.incarnation != peer.incarnation:
                continue
            leg.acked = True
            self._fail(room, self.failure("KV_PEER_LOST", text))
            if peer.proven_dead:  # nothing of a dead process is in flight
                self._drained(room, leg)
                continue
            for holding in self.book.of_room(RoomKey(peer.name, room.room, room.nonce)):
                if holding.state is not RegionState.LANDED:
                    self.book.quarantine(holding)
            if room.room in self.rooms:
                self._settle(room)
        for instance in self._clashes:  # it may have been this one that kept a name in use
            self.act(ev.FindInstance(instance))

    # ---- messages ---------------------------------------------------------------------------------------------

    def on_room_accepted(self, peer: Peer, message: msg.RoomAccepted) -> None:
        if found := self._find(peer, message.room, message.nonce):
            self._accept(*found)

    def on_room_refused(self, peer: Peer, message: msg.RoomRefused) -> None:
        if found := self._find(peer, message.room, message.nonce):
            room, leg = found
            leg.acked = leg.drained = True  # it has nothing of the room, nor will have
            cause = message
            self._fail(room, {"rank": cause.rank, "code": cause.code, "at_ns": cause.at_ns, "text": cause.text})
            self._drained(room, leg)

    def on_staging_request(self, peer: Peer, message: msg.StagingRequest) -> None:
        found = self._find(peer, message.room, message.nonce)
        if found is None:
            self._answer_stranger(peer, message.room, message.nonce)
            return
        room, _ = found
        if room.failure is not None or peer.state is not PeerState.READY:
            return  # the abort is on its way
        assert peer.who is not None
        owner = RoomKey(peer.name, room.room, room.nonce)
        grants: list[msg.Grant] = []
        for spec in message.parts:
            key = PartKey(peer.who.unique_rank, spec.chunk, spec.lo, spec.hi)
            if spec.lo >= spec.hi or not room.owes(key) or not self._size_fits(room, key, spec.nbytes):
                self.drop("unknown-part")
                continue
            holding = self.book.of_part(owner, key)
            if holding is None:
                if not room.grantable(key):
                    self.drop("late")
                    continue
                if not self.book.ring.fits(spec.nbytes):
                    self._refuse_staging(peer, message, spec)
                    continue
                holding = self.book.grant(owner, key, spec.nbytes, self.now_ns)
                room.grant(key)
                self.telemetry.metrics.add("kvctl_ring_grants_total", 1)
            if holding.state is RegionState.GRANTED:
                grants.append(holding.grant())
            elif holding.state is RegionState.REVOKING:
                self._revoke(holding, 0)  # the answer was lost, and whoever waited behind it may wait no more
        if grants:
            mark = self.watermark()
            peer.watermark_sent = (mark[0], mark[1], mark[2])
            room.record.event("grant", self.now_ns, writer=peer.who.unique_rank, peer=peer.name)
            self.act(ev.Send(peer.name, msg.StagingGrants(room.room, room.nonce, grants, mark)))

    def _size_fits(self, room: RecvRoom, key: PartKey, nbytes: int) -> bool:
        """The plan, not the writer, says how large a part is."""
        return nbytes == room.share_of(key).part_bytes(len(room.pages_at(key)), key.hi - key.lo)

    def _refuse_staging(self, peer: Peer, message: msg.StagingRequest, spec: msg.PartSpec) -> None:
        self.telemetry.metrics.add("kvctl_ring_refusals_total", 1)
        self.book.refused_largest_bytes = max(self.book.refused_largest_bytes, spec.nbytes)
        ring, size = self.book.ring.largest_bytes, self.book.ring.size_bytes
        why = "can never fit" if ring == size else "fits between no two of the quarantined bytes of"
        self.note(
            "staging-refused",
            f"a part of {spec.nbytes} bytes {why} the ring of {size} bytes: raise staging_ring_mb",
            "warning",
            room=message.room,
            peer=peer.name,
        )
        refused = msg.StagingRefused(message.room, message.nonce, spec.chunk, spec.lo, spec.hi, spec.nbytes, ring)
        self.act(ev.Send(peer.name, refused))

    def _answer_stranger(self, peer: Peer, number: int, nonce: int) -> None:
        """A writer speaks of a room that is over or was never here: it must not wait for ever."""
        if self._graves.find(RoomKey("", number, nonce)):
            self.act(ev.Send(peer.name, msg.RoomDone(number, nonce)))
            return
        failure = self.failure("KV_ROOM_UNKNOWN", f"{self.local.name} has no room {number} with this nonce")
        answer = msg.RoomFailed(number, nonce, failure["rank"], failure["code"], failure["at_ns"], failure["text"])
        self.act(ev.Send(peer.name, answer))

    def on_staging_revoked(self, peer: Peer, message: msg.StagingRevoked) -> None:
        holding = self.book.find(message.serial)
        if holding is None or holding.state is not RegionState.REVOKING or holding.room.peer != peer.name:
            self.drop("late")
            return
        self.telemetry.metrics.add("kvctl_ring_revokes_total", 1)
        self._free([holding])
        self._unpin()  # it may have been the last heir of a region that is to be set aside

    def on_too_late(self, peer: Peer, message: msg.TooLate) -> None:
        holding = self.book.find(message.serial)
        if holding is None or holding.state is not RegionState.REVOKING or holding.room.peer != peer.name:
            self.drop("late")
            return
        holding.state = RegionState.GRANTED
        holding.at_ns = self.now_ns
        holding.posted = True

    def on_part_ready(self, peer: Peer, message: msg.PartReady) -> None:
        found = self._find(peer, message.room, message.nonce)
        if found is None:
            self._answer_stranger(peer, message.room, message.nonce)
            return
        room, _ = found
        known: list[bytes] = []
        for data in message.tags:
            try:
                tag = Tag.unpack(data)
            except RemoteProtocolError:
                self.drop("bad-tag")
                continue
            writer = room.writers[tag.key.writer] if tag.key.writer < len(room.writers) else ""
            if writer != peer.name or (tag.room, tag.nonce) != (room.room, room.nonce):
                self.drop("bad-tag")
                continue
            known.append(data)
            self._arrived(tag, self.now_ns)
        self.act(ev.Send(peer.name, msg.PartAck(message.room, message.nonce, known)))

    def on_room_failed(self, peer: Peer, message: msg.RoomFailed) -> None:
        self.act(ev.Send(peer.name, msg.Ack(message.room, message.nonce, "room-failed")))
        if found := self._find(peer, message.room, message.nonce):
            cause = message
            self._fail(found[0], {"rank": cause.rank, "code": cause.code, "at_ns": cause.at_ns, "text": cause.text})

    def on_room_drained(self, peer: Peer, message: msg.RoomDrained) -> None:
        found = self._find(peer, message.room, message.nonce)
        if found is None:
            return
        room, leg = found
        if room.failure is None:
            self.drop("unexpected")
            return
        leg.acked = True
        self._drained(room, leg)

    def on_ack(self, peer: Peer, message: msg.Ack) -> None:
        found = self._find(peer, message.room, message.nonce)
        if found is not None and found[0].state is RoomState.SUCCESS and message.of == "room-done":
            found[1].acked = True
            self._settle(found[0])

    # ---- bytes and time ---------------------------------------------------------------------------------------

    def on_arrived(self, event: ev.Arrived) -> None:
        self._arrived(event.tag, event.at_ns)

    def on_scattered(self, event: ev.Scattered) -> None:
        holding = self.book.find(event.serial)
        if holding is None or holding.state is not RegionState.LANDED:
            return
        self._free([holding])
        room = self.rooms[holding.room.room]  # a room outlives the regions it holds
        self._in_pages(room, holding.key, {"arrive": holding.at_ns, "scatter": event.at_ns}, "staged")
        if room.failure is not None:
            self._settle(room)

    def on_time(self) -> None:
        now = self.now_ns
        self._graves.expire(now)
        self._say_hello()
        self._forget_former()
        self._forget_departed()
        for room in list(self.rooms.values()):
            if not room.state.finished:
                self._check_deadline(room)
            elif room.failure is not None:
                self._check_drained(room)
            if now >= room.resend_ns > 0:
                self._resend(room)
        self._unpin()


def _refusal(peer: Peer) -> str:
    return f"{peer.name} refused: {'; '.join(peer.differences)}"
