"""Who is alive: one machine per peer, fed by what is heard and by the clock.

`connecting → ready ⇄ suspect → lost`, or `refused` when the layouts differ. Silence makes a peer suspect (no new
grants) and later lost (its rooms fail); proof of death or a new incarnation makes it lost at once. A lost peer that
says Hello again starts over.

A new incarnation proves nothing about the one before: that may be a frozen process, which goes on one day. Only the end
of its process, seen on this host, and its own word that it has drained are proof.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from kvctl_agent.layout.parallel import RankCoord
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.protocol.events import Lease
from kvctl_agent.protocol.local_info import Timing
from kvctl_agent.protocol.messages import Heartbeat, PeerInfo
from kvctl_agent.protocol.ring_gate import RingGate


class PeerState(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"
    REFUSED = "refused"


class FormerIncarnation(NamedTuple):
    """An earlier incarnation that may still be there: what it said of itself, and its return address."""

    who: PeerInfo
    route: bytes


@dataclass(slots=True, eq=False)
class Peer:
    """One peer in one incarnation at a time.

    Attributes:
        proven_dead: the process has ended, so nothing of it can be in flight.
        past: incarnations proven to have ended; what still comes from one is late, never a return.
        former: earlier incarnations that nothing has proven to have ended, and that may still write here.
        route: return address of this incarnation.
        registered: the incarnation that the registry names; 0 where none has.
        lease: the permission to post to this incarnation.
        name_asked_by: the incarnation that was last refused this name, which is noted once.
        hello_due_ns: when to say Hello again; 0 when none is unanswered.
        unlike_since_ns: since when it says that its layout is not that of its instance's other ranks; 0: it does not.
        at, wire: its place in its instance and the plan inputs as they travel, once it has been met.
        gate: on a writer, the view of this reader's ring.
    """

    name: str
    timing: Timing
    state: PeerState = PeerState.CONNECTING
    incarnation: int = 0
    who: PeerInfo | None = None
    inputs: PlanInputs | None = None
    wire: dict[str, int | str] = field(default_factory=dict)
    at: RankCoord = field(default=RankCoord(0, 0, 0, 0))
    gate: RingGate = field(default_factory=RingGate)
    lease: Lease = field(init=False)
    route: bytes = b""
    registered: int = 0
    hello_due_ns: int = 0
    unlike_since_ns: int = 0
    rtt_ns: int | None = None
    differences: tuple[str, ...] = ()
    proven_dead: bool = False
    past: deque[int] = field(default_factory=partial(deque, maxlen=64))
    former: dict[int, FormerIncarnation] = field(default_factory=dict)
    name_asked_by: int = 0
    errors_total: int = 0
    last_error: str | None = None
    watermark_sent: tuple[int, int, int] | None = None
    _heartbeat_due_ns: int = 0
    _echo_ns: int = 0
    _echo_since_ns: int = 0

    def __post_init__(self) -> None:
        self.lease = Lease(self.timing.lease_ns)

    @property
    def usable(self) -> bool:
        """Whether messages of rooms may be exchanged."""
        return self.state in (PeerState.READY, PeerState.SUSPECT)

    @property
    def heard_ns(self) -> int:
        """When this incarnation was last heard from, monotonic; 0: never."""
        return self.lease.renewed_ns

    @heard_ns.setter
    def heard_ns(self, now_ns: int) -> None:
        self.lease.renewed_ns = now_ns

    def may_post(self, now_ns: int) -> bool:
        """The writer's lease: a post needs a peer that was heard from lately."""
        return self.usable and self.lease.valid(now_ns)

    def meet(
        self,
        incarnation: int,
        who: PeerInfo,
        inputs: PlanInputs | None,
        differences: tuple[str, ...],
        route: bytes = b"",
    ) -> None:
        """Start over with this incarnation; ready follows when the transport has connected."""
        if incarnation != self.incarnation:
            if self.who is not None and not self.proven_dead:
                self.former[self.incarnation] = FormerIncarnation(self.who, self.route)
            self.former.pop(incarnation, None)
            self.lease = Lease(self.timing.lease_ns)
        self.incarnation = incarnation
        self.route = route
        self.who = who
        self.inputs = inputs
        if inputs is not None:
            self.wire = inputs.to_wire()
            self.at = RankCoord(*who.coord)
        self.differences = differences
        self.gate = RingGate()
        self.proven_dead = False
        self.watermark_sent = None
        self.state = PeerState.CONNECTING if inputs is not None else PeerState.REFUSED

    def end(self, incarnation: int) -> None:
        """This incarnation, the present one or a former, has ended for certain."""
        if incarnation == self.incarnation:
            self.proven_dead = True
        self.former.pop(incarnation, None)
        self.past.append(incarnation)

    def introduced(self, incarnation: int) -> PeerInfo | None:
        """What an incarnation that may still be there said of itself."""
        if incarnation == self.incarnation:
            return self.who
        former = self.former.get(incarnation)
        return former.who if former is not None else None

    @property
    def refusal(self) -> str:
        """Why it does not fit us, in words."""
        return f"{self.name} refused: {'; '.join(self.differences)}"

    def heard(self, now_ns: int) -> bool:
        """Anything came from this incarnation; True when that ended a suspicion."""
        self.heard_ns = now_ns
        if self.state is PeerState.SUSPECT:
            self.state = PeerState.READY
            return True
        return False

    def heartbeat(self, message: Heartbeat, now_ns: int) -> None:
        self._echo_ns, self._echo_since_ns = message.sent_ns, now_ns
        if message.echo_ns:
            rtt = now_ns - message.echo_ns - message.held_ns
            if rtt >= 0:
                self.rtt_ns = rtt

    def due_heartbeat(self, now_ns: int, watermark: list[int]) -> Heartbeat | None:
        """The next heartbeat to send, when it is time."""
        if not self.usable or now_ns < self._heartbeat_due_ns:
            return None
        self._heartbeat_due_ns = now_ns + self.timing.heartbeat_ns
        held = now_ns - self._echo_since_ns if self._echo_ns else 0
        return Heartbeat(sent_ns=now_ns, echo_ns=self._echo_ns, held_ns=held, watermark=watermark)

    def check(self, now_ns: int) -> PeerState | None:
        """Let time pass; the new state when silence changed it."""
        silence = now_ns - self.heard_ns
        if self.usable and silence >= self.timing.lost_ns:
            self.state = PeerState.LOST
            return self.state
        if self.state is PeerState.READY and silence >= self.timing.suspect_ns:
            self.state = PeerState.SUSPECT
            return self.state
        return None

    def fail(self, text: str) -> None:
        """Remember an error for the operator."""
        self.errors_total += 1
        self.last_error = text
