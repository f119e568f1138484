"""Common base of the prefill and the decode machine: context, tombstones, peer liveness, dispatch of events.

A machine is composed of components, each of which owns some state and handles some events and messages. Tables map each
event and message to its handler. `handle` never raises for anything that a peer sent: unusable input is counted and
dropped.
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
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.records import Severity

RECALLED = "RECALLED"
"""Code of a room that has ended because a decode engine took its pages back."""

T = TypeVar("T")


class Tombstones(Generic[T]):
    """Outcomes of ended rooms, used to answer late messages.

    Args:
        lifetime_ns: time for which an outcome is kept.
        capacity: maximum number of outcomes; beyond it the oldest is removed.
    """

    __slots__ = ("_capacity", "_entries", "_lifetime_ns")

    def __init__(self, lifetime_ns: int, capacity: int = 1 << 18) -> None:
        self._lifetime_ns = lifetime_ns
        self._capacity = capacity
        # Plain tuples, which equal room keys: unlike those, they cost the engine's garbage collection nothing.
        self._entries: OrderedDict[tuple[str, int, int], tuple[int, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: RoomKey) -> bool:
        return key in self._entries

    def set_lifetime(self, lifetime_ns: int) -> None:
        self._lifetime_ns = lifetime_ns

    def add(self, key: RoomKey, outcome: T, now_ns: int) -> None:
        self._entries[key.peer, key.room, key.nonce] = (now_ns, outcome)
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def find(self, key: RoomKey) -> T | None:
        entry = self._entries.get(key)
        return entry[1] if entry else None

    def expire(self, now_ns: int) -> None:
        while self._entries:
            key, (added_ns, _) = next(iter(self._entries.items()))
            if now_ns - added_ns < self._lifetime_ns:
                return
            del self._entries[key]


class MachineContext:
    """State and helper methods shared by all components of a machine.

    Attributes:
        now_ns: monotonic time of the event being handled.
        actions: actions that the event has caused so far.
        peers: peers by name; owned by `PeerSessions` and the component that does the handshake.
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

    def send(self, peer: str, message: msg.Message, route: bytes = b"") -> None:
        self.actions.append(ev.Send(peer, message, route))

    def answer(
        self, ticket: int, result: str, text: str, freed: tuple[int, ...] = (), drained: tuple[str, ...] = ()
    ) -> None:
        """Answers an operator's request; does nothing if `ticket` is 0, as in requests of the engine.

        Args:
            freed: serials of the ring regions that were freed.
            drained: names of writers that are treated as drained because the operator used force.
        """
        if ticket:
            self.actions.append(ev.Answered(ticket, result, text, freed, drained))

    def note(
        self, kind: str, text: str, severity: Severity = "info", *, room: int | None = None, peer: str | None = None
    ) -> None:
        """Adds an entry to the flight recorder."""
        self.telemetry.recorder.record(kind, text, severity, room, peer)

    def drop(self, reason: str) -> None:
        """Counts a control message as dropped for this reason."""
        self.telemetry.metrics.add("kvctl_control_dropped_total", 1, reason)

    def failure(self, code: str, text: str) -> Failure:
        """Returns a failure found on this rank at the present time, in the form in which it is sent to peers."""
        return {
            "rank": self.local.name,
            "code": code,
            "at_ns": self.telemetry.clock.wall_ns(self.now_ns),
            "text": encodable(text)[: msg.MAX_TEXT],
        }

    def is_ready(self, name: str) -> bool:
        """Returns whether messages about rooms may be sent to this peer. Safe to call from any thread."""
        peer = self.peers.get(name)
        return peer is not None and peer.usable


def failure_of(message: msg.RoomFailure) -> Failure:
    """Returns the first cause (rank, code, time, text) that a failure message carries."""
    return {"rank": message.rank, "code": message.code, "at_ns": message.at_ns, "text": message.text}


class PeerSessions:
    """Liveness of the peers: marks them ready, suspect or lost, forgets them, and sends heartbeats.

    Args:
        on_lost: called with a lost peer and the cause; fails the peer's rooms.
        on_former_ended: called when an earlier incarnation of a peer is proven to have ended.
        watermark: returns the watermark to put into heartbeats; empty on a rank without a ring.
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
        peer.closed = True
        self.lose(peer, proven=message.drained, text="it was closed")

    def on_former_bye(self, peer: Peer, event: ev.Received, message: msg.Bye) -> None:
        if message.drained:
            self.on_peer_dead(ev.PeerDead(peer.name, event.incarnation, "it was closed"))
        else:
            self._context.drop("incarnation")

    def check(self, stalled_ns: int = 0) -> None:
        """Marks silent peers as suspect or lost, and sends the heartbeats that are due.

        Args:
            stalled_ns: time before now in which this rank could not hear its peers.
        """
        context = self._context
        for peer in list(context.peers.values()):
            peer.discount(stalled_ns, context.now_ns)
            changed = peer.check(context.now_ns)
            silent = (context.now_ns - peer.heard_ns) / 1e9
            if changed is PeerState.SUSPECT:
                text = f"{peer.name} has been silent for {silent:.1f} s"
                context.note("peer-suspect", text, "warning", peer=peer.name)
            elif changed is PeerState.LOST:
                self.lose(peer, proven=False, text=f"silent for {silent:.1f} s")
            heartbeat = peer.due_heartbeat(context.now_ns, self._watermark())
            if heartbeat is not None:
                context.send(peer.name, heartbeat)

    def ready(self, peer: Peer) -> None:
        """Marks a peer as ready, and as the successor of a lost peer whose place it takes."""
        peer.state = PeerState.READY
        peer.since_ns = self._context.now_ns
        text = f"{peer.name} is ready (incarnation {peer.incarnation:016x})"
        self._context.note("peer-ready", text, peer=peer.name)
        lost = (other for other in self._context.peers.values() if peer.takes_place_of(other))
        if (former := min(lost, key=lambda other: other.lost_ns, default=None)) is not None:
            self._replaced(former, peer)

    def hear(self, peer: Peer) -> bool:
        """Records that a usable peer has sent a message; returns whether the peer's lease had expired."""
        lapsed, was_suspect = peer.hear(self._context.now_ns)
        if was_suspect:
            self._context.note("peer-back", f"{peer.name} is heard again", peer=peer.name)
        return lapsed

    def lose(self, peer: Peer, *, proven: bool, text: str) -> None:
        """Marks a peer as lost, and fails its rooms.

        Args:
            proven: none of this incarnation's writes is in flight or will be.
            text: cause of the loss.
        """
        context = self._context
        lost = f"peer {peer.name} (incarnation {peer.incarnation:016x}) lost: {text}"
        if proven:
            peer.end(peer.incarnation)
        peer.state = PeerState.LOST
        peer.lost_ns = context.now_ns
        peer.fail(lost)
        context.telemetry.metrics.add("kvctl_peer_lost_total", 1)
        context.note("peer-lost", lost, "error", peer=peer.name)
        self._on_lost(peer, lost)
        context.actions.append(ev.DropPeer(peer.name))
        successor = next((other for other in context.peers.values() if other.takes_place_of(peer)), None)
        if successor is not None:
            self._replaced(peer, successor)

    def _replaced(self, peer: Peer, successor: Peer) -> None:
        peer.replaced_by, successor.replaces = successor.name, peer.name
        text = f"{successor.name} on the same host has taken the place of {peer.name}"
        self._context.note("peer-replaced", text, peer=peer.name)

    def over(self, peer: Peer, keep_ns: int) -> str:
        """Returns why a peer need not be known any longer unless a room depends on it; "" if it must be known.

        Args:
            keep_ns: time for which a silent peer is kept that has neither closed nor was replaced.
        """
        if peer.usable or peer.state is PeerState.CONNECTING:
            return ""
        if peer.departed:
            return "it was closed" if peer.closed else f"{peer.replaced_by} has taken its place"
        silent_ns = self._context.now_ns - max(peer.lost_ns, peer.heard_ns)
        return f"it has been gone for {silent_ns / 1e9:.1f} s" if silent_ns >= keep_ns else ""

    def forget(self, peer: Peer, why: str) -> None:
        """Removes a peer, on which no room depends; a usable one is told, so that it does not miss this rank."""
        context = self._context
        if peer.usable:
            context.send(peer.name, msg.Bye(drained=False), peer.route)
        del context.peers[peer.name]
        context.actions.append(ev.ForgetPeer(peer.name))
        context.telemetry.metrics.add("kvctl_peers_forgotten_total", 1)
        context.note("peer-forgotten", f"{peer.name} is forgotten: {why}", peer=peer.name)

    def gone(self, event: ev.Forget) -> Peer | None:
        """Returns the peer that an operator wants to be forgotten; answers and returns None unless it is gone."""
        peer = self._context.peers.get(event.peer)
        if peer is None:
            self._context.answer(event.ticket, "unchanged", f"{self._context.local.name} knows no peer {event.peer}")
        elif peer.usable:
            heard_s = (self._context.now_ns - peer.heard_ns) / 1e9
            text = f"{peer.name} is {peer.state.value}, heard {heard_s:.1f} s ago: only a lost peer can be forgotten"
            self._context.answer(event.ticket, "refused", text)
            return None
        return peer

    def is_stale(self, peer: Peer, incarnation: int, info: msg.PeerInfo) -> bool:
        """Returns whether to ignore a Hello or HelloAck because of its sender's incarnation; counts it as dropped then.

        An incarnation is one process for its whole life: one that comes from another process, as after a fork or from a
        copy of the machine, is ignored. Otherwise the end of that process would count as the end of the first.

        An incarnation that has ended, or 0, is ignored. A usable peer is replaced only by the incarnation that the
        registry names; if the registry names none, by a higher incarnation, since incarnations grow with time. Once the
        peer is lost, any incarnation that has not ended is accepted, because the next process may run on a host whose
        clock is behind.
        """
        stale = incarnation == 0 or incarnation in peer.ended_incarnations
        if peer.usable and incarnation != peer.incarnation:
            stale = stale or (incarnation != peer.registered if peer.registered else incarnation < peer.incarnation)
        known = peer.info_of(incarnation)
        other = known is not None and (known.host, known.pid) != (info.host, info.pid)
        if stale or other:
            self._context.drop("incarnation" if stale else "stranger")
        return stale or other

    def replace(self, peer: Peer, incarnation: int) -> None:
        """Marks a usable peer as lost because another incarnation took its name; the old process may still run."""
        if peer.incarnation not in (0, incarnation) and peer.usable:
            self.lose(peer, proven=False, text=f"incarnation {incarnation:016x} took its name")


class Machine:
    """Dispatches events and messages to the components; subclasses build the components and fill the tables.

    Other threads may read the attributes and the views: these copy a mapping in one step before they iterate over it.

    Attributes:
        local, telemetry: those of the context.
        peers: peers by name.
        rooms: rooms by number, without those that have ended on all ranks.
        open: rooms that are open with a peer; on a prefill rank one item for each peer of a room.
        state: all state kept between two events.

    Args:
        find: returns the room that a message is about, and its transfer with a peer.
        fail: fails a room for a cause.
        on_lease_renewed: called when a message arrives from a peer whose lease had expired.
    """

    _events: dict[type[ev.Event], Callable[[Any], None]]
    _handshake: dict[type[msg.Message], Callable[[ev.Received, Any], None]]  # from any sender
    _messages: dict[type[msg.Message], Callable[[Peer, Any], None]]  # from the present incarnation of a peer
    _former_messages: dict[type[msg.Message], Callable[[Peer, ev.Received, Any], None]]  # from an earlier incarnation
    _lost_messages: dict[type[msg.Message], Callable[[Peer, Any], None]]  # from a lost peer
    _unknown_messages: dict[type[msg.Message], Callable[[ev.Received, Any], None]]  # from a lost or forgotten peer

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
        """Handles one event; returns the actions to execute, in order.

        Raises:
            LocalProtocolError: the local engine made calls in a wrong order; the state has not changed.
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
        """Number of open rooms; on a prefill rank a room counts once for each decode rank that has opened it."""
        return len(self.open)

    @property
    def refuses_rooms(self) -> bool:
        """Whether it refuses the rooms that peers open; only prefill ranks accept any."""
        return True

    def unanswered(self) -> list[int]:
        """Returns the ended rooms whose outcome a peer that is not silent has not acknowledged. Any thread may ask."""
        heard = {name for name, peer in self.peers.copy().items() if peer.state is PeerState.READY}
        ended = [room for room in list(self.rooms.values()) if room.state.finished]
        return [
            room.room
            for room in ended
            if any(name in heard and not transfer.acked for name, transfer in room.transfers.copy().items())
        ]

    def knows(self, room: int) -> bool:
        """Returns whether the local engine or a peer has opened this room here. Safe to call from any thread."""
        return room in self.rooms

    def sends(self, room: int) -> bool:
        """Returns whether the engine has called send() for an open room. Safe to call from any thread."""
        return False

    def opened_prefix(self, room: int) -> int | None:
        """Returns the prefix, in tokens, of a room that could begin before the engine called send().

        Safe to call from any thread. None if there is no such room, and on a decode rank.
        """
        return None

    @property
    def instances(self) -> tuple[str, ...]:
        """Registry addresses of the prefill instances that this rank knows; none on a prefill rank."""
        return ()

    def roster(self, instance: str) -> tuple[str, ...]:
        """Returns the names of the ranks of a prefill instance; empty until it is complete, and on a prefill rank."""
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
            if peer is None and kind in self._unknown_messages:
                self._unknown_messages[kind](event, message)
        elif peer.route != event.route:
            self._context.drop("stranger")
        elif peer.usable:
            lapsed = self._sessions.hear(peer)
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
            if peer.state is PeerState.LOST and kind in self._unknown_messages:
                self._unknown_messages[kind](event, message)

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
        """Fails the room of a message that can never be sent, since resending it until the deadline would not help."""
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
        self.state.tombstones.set_lifetime(event.bootstrap_ns)
