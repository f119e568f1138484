"""The part of a machine that all others share: identity, time of the event, peers, actions, telemetry."""

from __future__ import annotations

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.values import encodable
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.local_info import LocalInfo, Timing
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.telemetry.flight_recorder import Severity
from kvctl_agent.telemetry.hub import Telemetry


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
