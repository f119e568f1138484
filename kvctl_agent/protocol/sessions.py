"""Liveness of the peers of one machine: heard, suspect, lost, proven dead, replaced by another incarnation."""

from __future__ import annotations

from collections.abc import Callable

from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.context import MachineContext
from kvctl_agent.protocol.peer import Peer, PeerState


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
