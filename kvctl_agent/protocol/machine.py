"""What both machines share: one entry for events, peers, and the small words for acting and noting.

`handle` never raises for anything a peer sent; what it cannot use is counted and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.values import encodable
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.local_info import LocalInfo, Timing
from kvctl_agent.protocol.peer import Peer, PeerState
from kvctl_agent.telemetry.flight_recorder import Severity
from kvctl_agent.telemetry.hub import Telemetry


class Machine:
    """Base of the prefill and the decode machine; `on_<event>` and `on_<message>` methods are the table."""

    def __init__(self, local: LocalInfo, timing: Timing, telemetry: Telemetry) -> None:
        self.local = local
        self.rank = local.unique_rank
        self.timing = timing
        self.telemetry = telemetry
        self.peers: dict[str, Peer] = {}
        self.now_ns = 0
        self.draining = False  # told to take no new rooms
        self._actions: list[ev.Action] = []
        self._events: dict[type, Callable[[Any], None]] = {
            event: getattr(self, f"on_{_snake(event.__name__)}")
            for event in ev.Event.__subclasses__()
            if hasattr(self, f"on_{_snake(event.__name__)}")
        }
        self._messages: dict[type, Callable[[Peer, Any], None]] = {
            message: getattr(self, f"on_{_snake(message.__name__)}")
            for message in msg.Message.__subclasses__()
            if hasattr(self, f"on_{_snake(message.__name__)}")
        }

    def handle(self, event: ev.Event, now_ns: int) -> list[ev.Action]:
        """Take one event at one moment; returns what is to be done, in order.

        Raises:
            LocalProtocolError: our own engine broke the order of calls; nothing has changed.
        """
        self.now_ns = now_ns
        self._actions = []
        self._events[type(event)](event)
        return self._actions

    @property
    def open_rooms(self) -> int:
        """Rooms that are open between us and a peer, once for each peer on a prefill rank."""
        raise NotImplementedError

    def knows(self, room: int) -> bool:
        """Whether it is open here, be it by a peer alone. Safe to ask from any thread."""
        raise NotImplementedError

    def roster(self, instance: str) -> tuple[str, ...]:
        """Names of the ranks of a prefill instance; empty until it is complete, and on a prefill rank."""
        return ()

    # ---- what subclasses may override -------------------------------------------------------------------------

    def on_hello(self, event: ev.Received, message: msg.Hello) -> None:
        self.drop("unexpected")

    def on_hello_ack(self, event: ev.Received, message: msg.HelloAck) -> None:
        self.drop("unexpected")

    def on_peer_lost(self, peer: Peer, text: str) -> None:
        """Its rooms fail."""

    def on_former_ended(self, peer: Peer, incarnation: int) -> None:
        """Nothing of this earlier incarnation is in flight, nor will be."""

    def on_former_said(self, peer: Peer, event: ev.Received) -> None:
        """An earlier incarnation, which was replaced, has something to say."""
        self.drop("incarnation")

    def on_unusable_said(self, peer: Peer, message: msg.Message) -> None:
        """A peer that is not met, or lost, has something to say."""
        self.drop("peer-not-ready")

    def on_lease_renewed(self, peer: Peer) -> None:
        """This peer was heard after a silence that had ended its lease: posts to it may go on."""

    def on_time(self) -> None:
        """Deadlines and resends."""

    def watermark(self) -> list[int]:
        """The watermark to put into heartbeats; empty on a rank that has no ring."""
        return []

    # ---- events every machine knows ---------------------------------------------------------------------------

    def on_received(self, event: ev.Received) -> None:
        message = event.message
        if isinstance(message, msg.Hello):
            self.on_hello(event, message)
            return
        if isinstance(message, msg.HelloAck):
            self.on_hello_ack(event, message)
            return
        peer = self.peers.get(event.peer)
        if peer is not None and event.incarnation in peer.former:
            self.on_former_said(peer, event)
            return
        if peer is None or peer.incarnation != event.incarnation:
            self.drop("incarnation")
            return
        if peer.route != event.route:
            self.drop("stranger")
            return
        if not peer.usable:
            self.on_unusable_said(peer, message)
            return
        lapsed = not peer.may_post(self.now_ns)
        self._hear(peer)
        handler = self._messages.get(type(message))
        if handler is None:
            self.drop("unexpected")
        else:
            handler(peer, message)
        if lapsed:
            self.on_lease_renewed(peer)

    def _hear(self, peer: Peer) -> None:
        if peer.heard(self.now_ns):
            self.note("peer-back", f"{peer.name} is heard again", peer=peer.name)

    def on_peer_dead(self, event: ev.PeerDead) -> None:
        peer = self.peers.get(event.peer)
        if peer is None:
            return
        if peer.incarnation == event.incarnation and not peer.proven_dead:
            self._lose(peer, proven=True, text=event.text)
        elif event.incarnation in peer.former:
            peer.end(event.incarnation)
            self.note("peer-ended", f"{peer.name} (incarnation {event.incarnation:016x}): {event.text}", peer=peer.name)
            self.on_former_ended(peer, event.incarnation)

    def on_shutdown(self, event: ev.Shutdown) -> None:
        for peer in self.peers.values():
            if peer.usable or peer.state is PeerState.LOST:
                self.act(ev.Send(peer.name, msg.Bye(event.drained)))

    def on_bye(self, peer: Peer, message: msg.Bye) -> None:
        self._lose(peer, proven=message.drained, text="it was closed")

    def on_tick(self, event: ev.Tick) -> None:
        for peer in list(self.peers.values()):
            changed = peer.check(self.now_ns)
            silent = (self.now_ns - peer.heard_ns) / 1e9
            if changed is PeerState.SUSPECT:
                self.note("peer-suspect", f"{peer.name} has been silent for {silent:.1f} s", "warning", peer=peer.name)
            elif changed is PeerState.LOST:
                self._lose(peer, proven=False, text=f"silent for {silent:.1f} s")
            heartbeat = peer.due_heartbeat(self.now_ns, self.watermark())
            if heartbeat is not None:
                self.act(ev.Send(peer.name, heartbeat))
        self.on_time()

    def on_drain(self, event: ev.Drain) -> None:
        self.draining = event.on

    def on_set_timeouts(self, event: ev.SetTimeouts) -> None:
        self.timing = msgspec.structs.replace(self.timing, bootstrap_ns=event.bootstrap_ns, waiting_ns=event.waiting_ns)
        for peer in self.peers.values():
            peer.timing = self.timing

    def _lose(self, peer: Peer, *, proven: bool, text: str) -> None:
        lost = f"peer {peer.name} (incarnation {peer.incarnation:016x}) lost: {text}"
        if proven:
            peer.end(peer.incarnation)
        peer.state = PeerState.LOST
        peer.fail(lost)
        self.telemetry.metrics.add("kvctl_peer_lost_total", 1)
        self.note("peer-lost", lost, "error", peer=peer.name)
        self.on_peer_lost(peer, lost)
        self.act(ev.DropPeer(peer.name))

    def _late(self, peer: Peer, incarnation: int) -> bool:
        """Whether a Hello or its answer comes from an incarnation that is over, or from none; counted then.

        A peer that is not lost is replaced by the incarnation that the registry names; where there is none, by a higher
        one, since incarnations grow with time. The next process may run on a host whose clock is behind: once the peer
        is lost, any incarnation that is not over is believed.
        """
        late = incarnation == 0 or incarnation in peer.past
        if peer.usable and incarnation != peer.incarnation:
            late = late or (incarnation != peer.registered if peer.registered else incarnation < peer.incarnation)
        if late:
            self.drop("incarnation")
        return late

    def _replace(self, peer: Peer, incarnation: int) -> None:
        """A new incarnation takes the peer's name, which proves nothing about the one before."""
        if peer.incarnation not in (0, incarnation) and peer.usable:
            self._lose(peer, proven=False, text=f"incarnation {incarnation:016x} took its name")

    # ---- small words ------------------------------------------------------------------------------------------

    def act(self, action: ev.Action) -> None:
        self._actions.append(action)

    def answer(
        self, ticket: int, result: str, text: str, freed: tuple[int, ...] = (), drained: tuple[str, ...] = ()
    ) -> None:
        """What came of an operator's request; an engine's has no ticket, and gets no answer."""
        if ticket:
            self.act(ev.Answered(ticket, result, text, freed, drained))

    def note(
        self, kind: str, text: str, severity: Severity = "info", *, room: int | None = None, peer: str | None = None
    ) -> None:
        """An entry in the flight recorder."""
        self.telemetry.recorder.record(kind, text, severity, room, peer)

    def drop(self, reason: str) -> None:
        """A message changed nothing but this counter."""
        self.telemetry.metrics.add("kvctl_control_dropped_total", 1, reason)

    def failure(self, code: str, text: str) -> Failure:
        """A first cause that was found here."""
        return {
            "rank": self.local.name,
            "code": code,
            "at_ns": self.telemetry.clock.wall_ns(self.now_ns),
            "text": encodable(text)[: msg.MAX_TEXT],
        }


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
