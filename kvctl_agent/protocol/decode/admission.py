"""Admission on a decode rank: registers the engine's rooms, and opens them at their prefill instances.

A room is opened at the ranks that may write to this one, once all ranks of the dp group that computes it are ready. The
room's keeper, one of its decode ranks, makes itself known to all others of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import msgspec

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LayoutError, LocalProtocolError
from kvctl_agent.layout import plan_inputs
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.page_indices import packed, single, unpacked
from kvctl_agent.layout.plan import (
    TransferSlice,
    aux_writer,
    keeper,
    opened_at,
    prefill_ranks,
    readers_of,
    slices_to_reader,
    state_slices_to_reader,
    stripe_of,
    writer_cells,
)
from kvctl_agent.layout.plan_inputs import PlanInputs, Wire
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode.prefill_instances import PrefillInstances
from kvctl_agent.protocol.decode.rooms import DecodeState, FinalKey, RecvRoom, RecvRooms, TablePages, opening_at
from kvctl_agent.protocol.machine import MachineContext, PeerSessions
from kvctl_agent.protocol.peer import Peer, PeerPlan, PeerState, plan_with_peer
from kvctl_agent.protocol.tag import PartKey, PartKind, aux_key


@dataclass(eq=False)
class RecvAdmission:
    """Registers the rooms that the engine receives, plans them and opens them at the prefill ranks."""

    context: MachineContext
    state: DecodeState
    rooms: RecvRooms
    instances: PrefillInstances

    def on_open_room(self, event: ev.OpenRoom) -> None:
        context = self.context
        ev.check_room(event.room)
        ev.check_room(event.nonce)
        if (last := self.state.rooms.get(event.room)) and not last.unopened:
            if last.state is not RoomState.SUCCESS:
                raise LocalProtocolError(f"room {event.room} is open already; a room number is used once at a time")
            if late := [each.peer for each in last.transfers.values() if not (each.accepted or each.acked)]:
                # They would take the keeper of the new room for that of the last one.
                names = ", ".join(late)
                raise LocalProtocolError(f"room {event.room} has not ended yet: its keeper is unknown to {names}")
        if last:
            self.rooms.forget(last)  # its pages were released; a rank that has missed its end will ask for the outcome
        if (former := self.state.unopened.get(event.room)) and former.instance == event.instance:
            del self.state.unopened[event.room]  # the prefill ranks would take its end for that of the new room
        record = context.telemetry.open(event.room, event.nonce)
        record.pages = event.total_pages - event.prefix_pages
        record.request_id, record.traceparent = event.request_id, event.traceparent
        opening = msg.RoomOpen(
            event.room,
            event.nonce,
            b"",  # set once the instance is ready
            event.prefix_pages,
            event.total_pages,
            {},
            event.aux_index,
            [packed(items) for items in event.states],
            event.prefill_only,
            tokens=event.tokens,
            digest=event.digest,
        )
        given = event.pages, event.groups, event.tokens
        room = RecvRoom(opening, event.instance, *given, record, context.now_ns)
        self.state.rooms[event.room] = room
        self.rooms.enter(room, RoomState.BOOTSTRAPPING)
        instance = self.instances.find(event.instance)
        if event.refusal:
            self.rooms.fail(room, context.failure("ABORTED", event.refusal))
            self._open(room)
            return
        if instance.clash:
            self.rooms.fail(room, context.failure("KV_COMPAT_MISMATCH", instance.clash))
            return
        for name in self.rooms.ranks_of(room):
            peer = context.peers[name]
            if peer.state is PeerState.REFUSED:
                self.rooms.fail(room, context.failure("KV_COMPAT_MISMATCH", peer.refusal))
                return
        self._open(room)

    def open_waiting(self) -> None:
        """Opens the waiting rooms whose prefill instance is ready now."""
        for room in list(self.state.rooms.values()):
            if room.failure is None:
                self._open(room)
        self.open_failed(any)

    def open_failed(self, ready: Callable[[Iterable[bool]], bool] = all) -> None:
        """Opens rooms that failed before they could be opened, so that the prefill ranks learn of it.

        Args:
            ready: how many ranks of a room's instance must be ready for an attempt: with `all` there are none in vain,
                of which thousands would hold up the control loop; with `any` the ranks of one dp group suffice.
        """
        unopened, instances, is_ready = self.state.unopened, self.state.instances, self.context.is_ready
        while unopened and self.context.now_ns - (oldest := next(iter(unopened.values()))).since_ns > (
            self.context.timing.bootstrap_ns
        ):
            del unopened[oldest.room]
        if unopened:
            tried = {name for name, each in instances.items() if each.roster and ready(map(is_ready, each.roster))}
            for room in [each for each in unopened.values() if each.instance in tried]:
                if room.room not in self.state.rooms:  # otherwise the number is in use at another instance
                    self._open(room)

    def fail_waiting(self, instance: str, failure: Failure, rank: str = "") -> None:
        """Fails the unopened rooms of a prefill instance, or of one of its ranks, that this rank cannot use.

        Args:
            rank: name of the rank, which rooms of other dp groups do not need; "": the whole instance. While no rank of
                the instance is ready, its dp groups are unknown, and every room may need the rank.
        """
        for room in list(self.state.rooms.values()):
            if room.transfers or room.instance != instance:
                continue
            if not rank or rank in self.rooms.ranks_of(room):
                self.rooms.fail(room, failure)

    def _open(self, room: RecvRoom) -> None:
        """Plans a room and opens it; does nothing unless all ranks that compute it are ready."""
        context = self.context
        # A room whose instance is disconnected has ended, or was opened before.
        ranks = self.rooms.ranks_of(room)
        if room.transfers or not ranks or not all(map(context.is_ready, ranks)):
            return
        first = context.peers[ranks[0]]
        inputs = first.inputs
        assert inputs is not None
        try:
            self._to_transfer_pages(room, inputs, first.wire)
            self._plan(room, inputs)
        except LayoutError as error:
            self.state.unopened.pop(room.room, None)
            self.rooms.fail(room, context.failure("KV_PLAN_MISMATCH", f"room {room.room}: {error}"))
            return
        for transfer in room.transfers.values():
            context.send(transfer.peer, opening_at(room, transfer))
        room.resend_ns = context.now_ns + context.timing.resend_ns
        if not room.unopened:
            room.record.expect([room.writers[writer] for writer in room.shares])
            room.record.event("open", context.now_ns)
            return
        self.state.rooms[room.room] = self.state.unopened.pop(room.room)
        for transfer in room.transfers.values():
            self.rooms.send_unanswered(room, transfer)

    def _to_transfer_pages(self, room: RecvRoom, inputs: PlanInputs, wire: Wire) -> None:
        """Converts the pages of a room, which the engine has passed, to transfer pages.

        Raises:
            LayoutError: there are not as many pages as the prompt needs.
        """
        opening, split = room.opening, inputs.decode_split
        given = opening.total_pages - opening.prefix_pages
        prefix, total = inputs.span(opening.prefix_pages, opening.total_pages, room.tokens)
        stripe = stripe_of(inputs, self.context.rank)
        own = stripe.before(total) - stripe.before(prefix)
        needed = -(-own // split)  # on a cp rank without tokens of the last page, one less than given
        if not needed <= len(room.pages) <= given:
            raise LayoutError(f"{len(room.pages)} pages after a prefix of {opening.prefix_pages}, not {needed}")
        engine_pages = room.pages[:needed]
        tables = [TablePages(engine_pages, split, prefix, total)]
        for group, pages in zip(inputs.shape.groups, room.groups, strict=True):
            group_total = -(-room.tokens // group.page_size)
            tables.append(TablePages(pages, 1, group_total - len(pages), group_total))
        room.tables = tables
        room.opening = msgspec.structs.replace(
            opening,
            pages=packed(engine_pages),
            prefix_pages=prefix,
            total_pages=total,
            inputs=wire,
            groups=[packed(pages) for pages in room.groups],
        )
        room.record.tokens = room.opening.tokens_to_send(inputs.page_size)

    def _plan(self, room: RecvRoom, inputs: PlanInputs) -> None:
        opening, reader = room.opening, self.context.rank
        wanted = [] if opening.prefill_only else slices_to_reader(inputs, room.room, reader)
        finals: dict[FinalKey, tuple[TransferSlice | None, ev.Pages]] = {}
        if opening.aux_index >= 0:
            writer = aux_writer(inputs, room.room, reader)
            finals[PartKind.AUX, aux_key(writer)] = None, single(opening.aux_index)
        if any(opening.states):
            components = [segment.index for segment in inputs.segments if segment.state]
            asked = [index for index, items in zip(components, opening.states, strict=False) if items]
            for share in state_slices_to_reader(inputs, room.room, reader):
                if share.segment in asked:
                    key = PartKey(share.writer, share.segment, share.layer_lo, share.layer_hi)
                    items = unpacked(opening.states[components.index(share.segment)])
                    finals[PartKind.STATE, key] = share, items
        chunks: dict[tuple[int, int], Sequence[Chunk]] = {}  # writers of one cp rank send the same chunks

        def chunks_of(writer: int, table: int) -> Sequence[Chunk]:
            key = inputs.prefill.coord(writer).cp, table
            if key not in chunks:
                _, _, prefix, total = room.tables[table]
                chunks[key] = writer_cells(inputs, room.room, writer, reader, total, prefix, table)
            return chunks[key]

        names = self.state.roster(room.instance)
        if len(names) != inputs.prefill.size:
            raise LayoutError(f"the registry names {len(names)} of the instance's {inputs.prefill.size} ranks")
        incarnations, awaited, kept = {}, [], []
        dp = self.context.local.coord.dp
        keeps = keeper(inputs, room.room, dp) == reader
        # The keeper may never open a room that has failed here.
        ranks = prefill_ranks(inputs, room.room) if room.unopened else opened_at(inputs, room.room, reader)
        for rank in ranks:
            incarnations[names[rank]] = self.context.peers[names[rank]].incarnation
            readers = readers_of(inputs, room.room, dp, rank)
            if keeps and readers != {reader}:
                awaited.append(names[rank])
                if reader not in readers:
                    kept.append(names[rank])
        room.plan(wanted, chunks_of, finals, names, incarnations, awaited, kept)


@dataclass(eq=False)
class Handshake:
    """Performs the handshake with the ranks of the prefill instances."""

    context: MachineContext
    state: DecodeState
    rooms: RecvRooms
    instances: PrefillInstances
    admission: RecvAdmission
    sessions: PeerSessions

    def on_roster_known(self, event: ev.RosterKnown) -> None:
        instance = self.instances.answered(event.instance)
        for name in event.names:
            other = self.instances.of_rank(name)
            if other in ("", event.instance):
                continue
            if not self.context.is_ready(name):
                self.state.instances[other].roster = ()  # the rank has moved to this instance
            else:
                text = (
                    f"{name} of {event.instance} is in use by the instance at {other}: give every agent its own name, "
                    "or set name_suffix"
                )
                self.context.note("name-taken", text, "error", peer=name)
                instance.clash = text
                self.admission.fail_waiting(event.instance, self.context.failure("KV_COMPAT_MISMATCH", text))
                return
        instance.roster, instance.absent, instance.clash = event.names, "", ""
        for number, name in enumerate(event.names):
            peer = self.context.peers.setdefault(name, Peer(name, self.context.timing))
            peer.registered = event.incarnations[number] if event.incarnations else 0
        self.send_hello()
        self.admission.open_waiting()

    def on_renew_rooms(self, event: ev.RenewRooms) -> None:
        """Sends RoomRenew to the ready ranks of an instance; looks the instance up if it is not known yet."""
        for name in self.instances.find(event.instance).roster:
            if self.context.is_ready(name):
                self.context.send(name, msg.RoomRenew(list(event.rooms)))

    def send_hello(self) -> None:
        """Sends Hello, when due, to ranks that are not ready, have not answered or have registered a new incarnation.

        Hello is due again after `resend_ns`, or `suspect_ns` for a refused rank, so that a restarted rank is noticed
        early. A lost rank that is on no roster any more gets it while a room waits for its writes: if it still runs, it
        is then asked to drain.
        """
        context, timing = self.context, self.context.timing
        for name, peer in context.peers.items():
            unanswered = peer.hello_due_ns > 0  # also when the peer is heard again: it may have failed rooms
            replaced = peer.registered not in (0, peer.incarnation)
            if (peer.state is not PeerState.READY or unanswered or replaced) and context.now_ns >= peer.hello_due_ns:
                refused = peer.state is PeerState.REFUSED
                peer.greeted_ns = peer.greeted_ns or context.now_ns
                peer.hello_due_ns = context.now_ns + (timing.suspect_ns if refused else timing.resend_ns)
                context.send(name, msg.Hello(msg.PROTOCOL_VERSION, context.local.peer_info()))

    def on_hello_wanted(self, peer: Peer, message: msg.HelloWanted) -> None:
        if not peer.hello_due_ns:
            peer.hello_due_ns = self.context.now_ns
            self.send_hello()

    def on_hello_ack(self, event: ev.Received, message: msg.HelloAck) -> None:
        context, timing = self.context, self.context.timing
        peer_name, incarnation = event.peer, event.incarnation
        peer = context.peers.get(peer_name)
        if peer is None or message.to != context.local.incarnation:
            context.drop("incarnation")
            return
        if self.sessions.is_stale(peer, incarnation, message.who):
            return
        asked, peer.hello_due_ns = peer.hello_due_ns > 0, 0
        if peer.incarnation == incarnation and peer.usable:
            self.sessions.hear(peer)
            if asked:
                self._resynchronise(peer)
            return
        self.sessions.replace(peer, incarnation)
        if peer.incarnation != incarnation:
            peer.mismatch_since_ns = 0
        inputs, differences = self._pair(message)
        # The process with the name of this rank may be this rank's predecessor: then it will become silent.
        waits = bool(message.taken) and self._mismatched_for_less_than(peer, 2 * timing.suspect_ns)
        if inputs is not None:
            stale = self._mismatch_with_roster(peer_name, message.who)
            differences = (stale,) if stale else self._mismatches_with_others(peer_name, inputs)
            # The ranks with which the peer differs may have ended without notice, since this one has just started.
            waits = bool(stale or (differences and self._mismatched_for_less_than(peer, timing.suspect_ns)))
            inputs = None if differences else inputs
        known = peer.state is (PeerState.CONNECTING if waits else PeerState.REFUSED)
        known = known and peer.incarnation == incarnation and peer.differences == differences
        peer.begin_incarnation(incarnation, message.who, inputs, differences, event.route)
        peer.heard_ns = context.now_ns
        if waits:
            # The peer or this rank has just started: rooms wait until the conflicting process is noticed to be gone.
            peer.state = PeerState.CONNECTING
            peer.hello_due_ns = context.now_ns + timing.resend_ns
            if not known:
                text = f"{peer_name} cannot be used yet: {'; '.join(differences)}"
                context.note("peer-waits", text, "warning", peer=peer_name)
            return
        if inputs is None:
            peer.hello_due_ns = context.now_ns + timing.suspect_ns
            if not known:
                self._refuse(peer)
            return
        self.sessions.ready(peer)
        self._resynchronise(peer)
        self.admission.open_waiting()

    def on_peer_unusable(self, event: ev.PeerUnusable) -> None:
        """Refuses a rank to whose control socket this rank will not connect; a lost rank only gets the error."""
        peer = self.context.peers.get(event.peer)
        if peer is None or peer.usable or peer.last_error == event.text:
            return
        peer.fail(event.text)
        if peer.state is PeerState.LOST:  # it may still write: its end must be proven
            self.context.note("peer-refused", f"{peer.name} refused: {event.text}", "error", peer=peer.name)
            return
        peer.state, peer.differences = PeerState.REFUSED, (event.text,)
        self._refuse(peer)

    def _refuse(self, peer: Peer) -> None:
        context = self.context
        context.note("peer-refused", peer.refusal, "error", peer=peer.name)
        failure = context.failure("KV_COMPAT_MISMATCH", peer.refusal)
        self.admission.fail_waiting(self.instances.of_rank(peer.name), failure, peer.name)

    def _pair(self, message: msg.HelloAck) -> PeerPlan:
        """Returns the plan inputs of this rank and the sender of a HelloAck, or the factors in which they differ."""
        if message.version != msg.PROTOCOL_VERSION:
            return PeerPlan(None, (f"protocol version {msg.PROTOCOL_VERSION} ≠ {message.version}",))
        if message.taken:
            return PeerPlan(None, (message.taken,))
        if message.differences:
            return PeerPlan(None, tuple(message.differences))
        return plan_with_peer(self.context.local, message.who)

    def _mismatch_with_roster(self, name: str, info: msg.PeerInfo) -> str:
        """Returns how the sizes and unique rank in a peer's info differ from the roster, as text; "" if they agree."""
        if not (roster := self.state.roster(self.instances.of_rank(name))):
            return ""  # the rank has left its instance, and only has to drain
        if prod(info.sizes) != len(roster):
            return f"{len(roster)} ranks on the roster ≠ {prod(info.sizes)} by its sizes"
        if name not in roster or roster.index(name) != info.unique_rank:
            return f"it says that it is rank {info.unique_rank}, the roster says otherwise"
        return ""

    def _mismatches_with_others(self, name: str, inputs: PlanInputs) -> tuple[str, ...]:
        """Returns the plan factors in which a rank differs from a ready rank of its instance; empty if none differ."""
        for other in self.state.roster(self.instances.of_rank(name)):
            known = self.context.peers[other].inputs
            if other != name and self.context.is_ready(other) and known is not None and known != inputs:
                factors = plan_inputs.differences(known.to_wire(), inputs.to_wire())
                return tuple(f"{factor} on {name}" for factor in factors)
        return ()

    def _mismatched_for_less_than(self, peer: Peer, patience_ns: int) -> bool:
        """Returns whether this incarnation of a peer has mismatched for less than `patience_ns` since the first call.

        Within that time the mismatch may end, for example because a process that conflicts with the peer is found to be
        gone.
        """
        peer.mismatch_since_ns = peer.mismatch_since_ns or self.context.now_ns
        return self.context.now_ns - peer.mismatch_since_ns < patience_ns

    def _resynchronise(self, peer: Peer) -> None:
        """Reopens unfinished rooms at a peer that is reachable again, and resends it the outcome of finished ones.

        While the peer was silent it may have failed the rooms, and its message about that may have been lost.
        """
        for room in list(self.state.rooms.values()):
            transfer = room.transfers.get(peer.name)
            if transfer is None or transfer.incarnation != peer.incarnation:
                continue
            if transfer.accepted and not room.state.finished:
                transfer.accepted = False  # so that RoomOpen is resent until the peer answers
                room.unaccepted += not transfer.kept
            if self.rooms.send_unanswered(room, transfer):
                room.resend_ns = self.context.now_ns + self.context.timing.resend_ns
