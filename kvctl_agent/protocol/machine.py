"""Common frame of the prefill and the decode machine: events go in, actions come out.

A machine is composed of parts, each of which owns some state and handles some events and messages. Its tables say
which handler gets what. `handle` never raises for anything a peer sent; what it cannot use is counted and dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sized
from typing import Any, Generic, TypeVar

import msgspec

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.values import encodable
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.peer import LocalInfo, Peer, PeerState, Timing
from kvctl_agent.protocol.tag import RoomKey
from kvctl_agent.telemetry.flight_recorder import Severity
from kvctl_agent.telemetry.hub import Telemetry

T = TypeVar("T")


class Tombstones(Generic[T]):
    """Bounded, expiring memory of ended rooms: each lives at least `lifetime_ns`, unless `capacity` is exceeded."""

    def __init__(self, lifetime_ns: int, capacity: int = 1 << 18) -> None:
        self._lifetime_ns = lifetime_ns
        self._capacity = capacity
        self._graves: OrderedDict[RoomKey, tuple[int, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graves)

    def keep_for(self, lifetime_ns: int) -> None:
        """How long each lives from now on."""
        self._lifetime_ns = lifetime_ns

    def bury(self, key: RoomKey, epitaph: T, now_ns: int) -> None:
        self._graves[key] = (now_ns, epitaph)
        self._graves.move_to_end(key)
        if len(self._graves) > self._capacity:
            self._graves.popitem(last=False)

    def holds(self, key: RoomKey) -> bool:
        return key in self._graves

    def find(self, key: RoomKey) -> T | None:
        grave = self._graves.get(key)
        return grave[1] if grave else None

    def expire(self, now_ns: int) -> None:
        while self._graves:
            key, (at, _) = next(iter(self._graves.items()))
            if now_ns - at < self._lifetime_ns:
                return
            del self._graves[key]


class MachineContext:
    """Handed to every part of one machine by its constructor.

    Attributes:
        now_ns: monotonic time of the event that is being handled.
        actions: what the event has led to so far.
        peers: by name; owned by `PeerSessions` and the part that does the handshake.
        telemetry: written to, never read.
    """

    def __init__(self, local: LocalInfo, timing: Timing, telemetry: Telemetry, peers: dict[str, Peer]) -> None:
        self.local = local
        self.rank = local.unique_rank
        self.timing = timing
        self.telemetry = telemetry
        self.peers = peers
        self.now_ns = 0
        self.actions: list[ev.Action] = []

    def act(self, action: ev.Action) -> None:
        self.actions.append(action)

    def send(self, peer: str, message: msg.Message, route: bytes = b"") -> None:
        self.actions.append(ev.Send(peer, message, route))

    def answer(
        self, ticket: int, result: str, text: str, freed: tuple[int, ...] = (), drained: tuple[str, ...] = ()
    ) -> None:
        """Result of an operator's request; an engine's request has no ticket, and gets no answer."""
        if ticket:
            self.act(ev.Answered(ticket, result, text, freed, drained))

    def note(
        self, kind: str, text: str, severity: Severity = "info", *, room: int | None = None, peer: str | None = None
    ) -> None:
        """Add an entry to the flight recorder."""
        self.telemetry.recorder.record(kind, text, severity, room, peer)

    def drop(self, reason: str) -> None:
        """Count a message that changed nothing."""
        self.telemetry.metrics.add("kvctl_control_dropped_total", 1, reason)

    def failure(self, code: str, text: str) -> Failure:
        """A first cause that was found on this rank."""
        return {
            "rank": self.local.name,
            "code": code,
            "at_ns": self.telemetry.clock.wall_ns(self.now_ns),
            "text": encodable(text)[: msg.MAX_TEXT],
        }

    def is_ready(self, name: str) -> bool:
        """Whether the peer of this name may be spoken to. Safe to ask from any thread."""
        peer = self.peers.get(name)
        return peer is not None and peer.usable

    def introduction(self, peer: str) -> msg.PeerInfo:
        """What a peer that was met said of itself."""
        who = self.peers[peer].who
        assert who is not None
        return who


def failure_of(message: msg.RoomFailure) -> Failure:
    """The first cause that a message carries."""
    return {"rank": message.rank, "code": message.code, "at_ns": message.at_ns, "text": message.text}


class PeerSessions:
    """Follows what is heard of each peer.

    Args:
        on_lost: fails the rooms of a peer that was lost; gets the peer and the cause in words.
        on_former_ended: called when an earlier incarnation of a peer is proven to have ended.
        watermark: the watermark to put into heartbeats; empty on a rank that has no ring.
    """

    def __init__(
        self,
        context: MachineContext,
        on_lost: Callable[[Peer, str], None],
        on_former_ended: Callable[[Peer, int], None] = lambda peer, incarnation: None,
        watermark: Callable[[], list[int]] = list,
    ) -> None:
        self._context = context
        self._on_lost = on_lost
        self._on_former_ended = on_former_ended
        self._watermark = watermark

    def on_peer_dead(self, event: ev.PeerDead) -> None:
        peer = self._context.peers.get(event.peer)
        if peer is None:
            return
        if peer.incarnation == event.incarnation and not peer.proven_dead:
            self.lose(peer, proven=True, text=event.text)
        elif event.incarnation in peer.former:
            peer.end(event.incarnation)
            text = f"{peer.name} (incarnation {event.incarnation:016x}): {event.text}"
            self._context.note("peer-ended", text, peer=peer.name)
            self._on_former_ended(peer, event.incarnation)

    def on_shutdown(self, event: ev.Shutdown) -> None:
        for peer in self._context.peers.values():
            if peer.usable or peer.state is PeerState.LOST:
                self._context.send(peer.name, msg.Bye(event.drained))

    def on_bye(self, peer: Peer, message: msg.Bye) -> None:
        self.lose(peer, proven=message.drained, text="it was closed")

    def on_former_bye(self, peer: Peer, event: ev.Received, message: msg.Bye) -> None:
        if message.drained:
            self.on_peer_dead(ev.PeerDead(peer.name, event.incarnation, "it was closed"))
        else:
            self._context.drop("incarnation")

    def check(self) -> None:
        """Let time pass: suspect and lose silent peers, send the heartbeats that are due."""
        context = self._context
        for peer in list(context.peers.values()):
            changed = peer.check(context.now_ns)
            silent = (context.now_ns - peer.heard_ns) / 1e9
            if changed is PeerState.SUSPECT:
                context.note(
                    "peer-suspect", f"{peer.name} has been silent for {silent:.1f} s", "warning", peer=peer.name
                )
            elif changed is PeerState.LOST:
                self.lose(peer, proven=False, text=f"silent for {silent:.1f} s")
            heartbeat = peer.due_heartbeat(context.now_ns, self._watermark())
            if heartbeat is not None:
                context.send(peer.name, heartbeat)

    def hear(self, peer: Peer) -> None:
        if peer.heard(self._context.now_ns):
            self._context.note("peer-back", f"{peer.name} is heard again", peer=peer.name)

    def lose(self, peer: Peer, *, proven: bool, text: str) -> None:
        """Take a peer for lost; `proven`: nothing of its incarnation is in flight, nor will be."""
        context = self._context
        lost = f"peer {peer.name} (incarnation {peer.incarnation:016x}) lost: {text}"
        if proven:
            peer.end(peer.incarnation)
        peer.state = PeerState.LOST
        peer.fail(lost)
        context.telemetry.metrics.add("kvctl_peer_lost_total", 1)
        context.note("peer-lost", lost, "error", peer=peer.name)
        self._on_lost(peer, lost)
        context.act(ev.DropPeer(peer.name))

    def late(self, peer: Peer, incarnation: int) -> bool:
        """Whether a Hello or its answer comes from an incarnation that is over, or from none; counted then.

        A peer that is not lost is replaced by the incarnation that the registry names; where there is none, by a higher
        one, since incarnations grow with time. The next process may run on a host whose clock is behind: once the peer
        is lost, any incarnation that is not over is believed.
        """
        late = incarnation == 0 or incarnation in peer.past
        if peer.usable and incarnation != peer.incarnation:
            late = late or (incarnation != peer.registered if peer.registered else incarnation < peer.incarnation)
        if late:
            self._context.drop("incarnation")
        return late

    def replace(self, peer: Peer, incarnation: int) -> None:
        """A new incarnation takes the peer's name, which proves nothing about the one before."""
        if peer.incarnation not in (0, incarnation) and peer.usable:
            self.lose(peer, proven=False, text=f"incarnation {incarnation:016x} took its name")


class Machine:
    """Dispatches events and messages to the parts; subclasses build the parts and fill the tables.

    Other threads may read the attributes and views below; mappings are copied in one step before they are walked.

    Attributes:
        local, telemetry: as given.
        peers: by name.
        rooms: by number, those that have not ended everywhere.
        open: rooms that are open with a peer; on a prefill rank one item for each peer of a room.
        state: everything that is remembered between two events; a checkpoint is a copy of it.

    Args:
        find: the room and its side towards a peer that a message is about.
        fail: fails a room for a cause.
        on_lease_renewed: called when a peer is heard again whose lease had run out.
    """

    _events: dict[type[ev.Event], Callable[[Any], None]]
    _handshake: dict[type[msg.Message], Callable[[ev.Received, Any], None]]  # from anybody
    _messages: dict[type[msg.Message], Callable[[Peer, Any], None]]  # from the present incarnation of a peer
    _former_messages: dict[type[msg.Message], Callable[[Peer, ev.Received, Any], None]]  # from an earlier one
    _lost_messages: dict[type[msg.Message], Callable[[Peer, Any], None]]  # from a peer that was taken for lost

    def __init__(
        self,
        context: MachineContext,
        state: Any,
        sessions: PeerSessions,
        find: Callable[[Peer, int, int], tuple[Any, Any] | None],
        fail: Callable[[Any, Failure], None],
        on_lease_renewed: Callable[[Peer], None] = lambda peer: None,
    ) -> None:
        self.local = context.local
        self.telemetry = context.telemetry
        self.peers = context.peers
        self.rooms: dict[int, Any] = state.rooms
        self.open: Sized = state.rooms
        self.state = state
        self._context = context
        self._sessions = sessions
        self._find = find
        self._fail = fail
        self._on_lease_renewed = on_lease_renewed

    def handle(self, event: ev.Event, now_ns: int) -> list[ev.Action]:
        """Take one event at one moment; returns what is to be done, in order.

        Raises:
            LocalProtocolError: our own engine broke the order of calls; nothing has changed.
        """
        context = self._context
        context.now_ns = now_ns
        context.actions = []
        self._events[type(event)](event)
        return context.actions

    @property
    def timing(self) -> Timing:
        return self._context.timing

    @property
    def open_rooms(self) -> int:
        """Number of rooms that are open with a peer; a prefill rank counts each peer of a room."""
        return len(self.open)

    def knows(self, room: int) -> bool:
        """Whether a room is open here, be it by a peer alone. Safe to ask from any thread."""
        return room in self.rooms

    def roster(self, instance: str) -> tuple[str, ...]:
        """Names of the ranks of a prefill instance; empty until it is complete, and on a prefill rank."""
        return ()

    # ---- handlers that both machines have ---------------------------------------------------------------------

    def on_received(self, event: ev.Received) -> None:
        message = event.message
        kind = type(message)
        handshake = self._handshake.get(kind)
        if handshake is not None:
            handshake(event, message)
            return
        if kind is msg.Hello or kind is msg.HelloAck:
            self._context.drop("unexpected")  # for the other role
            return
        peer = self.peers.get(event.peer)
        if peer is not None and event.incarnation in peer.former:
            former = self._former_messages.get(kind)
            if event.route != peer.former[event.incarnation].route:
                self._context.drop("stranger")
            elif former is None:
                self._context.drop("incarnation")
            else:
                former(peer, event, message)
        elif peer is None or peer.incarnation != event.incarnation:
            self._context.drop("incarnation")
        elif peer.route != event.route:
            self._context.drop("stranger")
        elif peer.usable:
            lapsed = not peer.may_post(self._context.now_ns)
            self._sessions.hear(peer)
            if (handler := self._messages.get(kind)) is not None:
                handler(peer, message)
            else:
                self._context.drop("unexpected")
            if lapsed:
                self._on_lease_renewed(peer)
        elif peer.state is PeerState.LOST and kind in self._lost_messages:
            self._lost_messages[kind](peer, message)
        else:
            self._context.drop("peer-not-ready")

    def on_abort_room(self, event: ev.AbortRoom) -> None:
        room = self.rooms.get(event.room)
        if room is None:
            self._context.answer(event.ticket, "unknown", "")
        elif room.state.finished:
            self._context.answer(event.ticket, "unchanged", f"room {event.room} is {room.state.label} already")
        else:
            self._fail(room, self._context.failure("ABORTED", event.text))
            text = f"room {event.room} has failed here, and its other ranks are told"
            self._context.answer(event.ticket, "aborted", text)

    def on_unsendable(self, event: ev.Unsendable) -> None:
        """Resending would not help, so the room fails instead of waiting for its deadline."""
        peer = self.peers.get(event.peer)
        found = self._find(peer, event.room, event.nonce) if peer is not None else None
        if found is not None:
            self._fail(found[0], self._context.failure("MESSAGE_UNSENDABLE", event.text))

    def on_heartbeat(self, peer: Peer, message: msg.Heartbeat) -> None:
        peer.heartbeat(message, self._context.now_ns)

    def on_set_timeouts(self, event: ev.SetTimeouts) -> None:
        timing = msgspec.structs.replace(self.timing, bootstrap_ns=event.bootstrap_ns, waiting_ns=event.waiting_ns)
        self._context.timing = timing
        for peer in self.peers.values():
            peer.timing = timing
        self.state.tombstones.keep_for(event.bootstrap_ns)
