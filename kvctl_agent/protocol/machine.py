"""Common frame of the prefill and the decode machine: events go in, actions come out.

A machine is composed of parts, each of which owns some state and handles some events and messages. Its tables say
which handler gets what. `handle` never raises for anything a peer sent; what it cannot use is counted and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.context import MachineContext
from kvctl_agent.protocol.local_info import Timing
from kvctl_agent.protocol.peer import Peer, PeerState
from kvctl_agent.protocol.sessions import PeerSessions


class Machine:
    """Dispatches events and messages to the parts; subclasses build the parts and fill the tables.

    Other threads may read the attributes and views below; mappings are copied in one step before they are walked.

    Attributes:
        local, telemetry: as given.
        peers: by name.
        rooms: by number, those that have not ended everywhere.
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
        """Rooms that are open between us and a peer, once for each peer on a prefill rank."""
        raise NotImplementedError

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
