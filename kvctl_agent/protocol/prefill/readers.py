"""Decode ranks that a prefill rank writes to: Hello and its answer, connection, names that are in use."""

from __future__ import annotations

from dataclasses import dataclass

from kvctl_agent.contract.values import encodable
from kvctl_agent.layout.local_shard import local_shards
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.context import MachineContext
from kvctl_agent.protocol.local_info import plan_with_peer
from kvctl_agent.protocol.peer import Peer, PeerState
from kvctl_agent.protocol.prefill.dispatch import Dispatch
from kvctl_agent.protocol.prefill.rooms import PrefillState
from kvctl_agent.protocol.sessions import PeerSessions
from kvctl_agent.protocol.staging_credits import StagingCredits, writer_quota

MAX_PEERS = 4096


@dataclass(eq=False)
class Readers:
    """Meets every decode rank that says Hello."""

    context: MachineContext
    state: PrefillState
    dispatch: Dispatch
    sessions: PeerSessions

    def on_hello(self, event: ev.Received, message: msg.Hello) -> None:
        peer_name, incarnation = event.peer, event.incarnation
        peer = self.context.peers.get(peer_name)
        if message.who.name != peer_name or (
            peer is not None and peer.incarnation == incarnation and peer.route != event.route
        ):
            self.context.drop("stranger")
            return
        peer = peer or self._new_peer(peer_name)
        if peer is None:
            self.context.drop("too-many-peers")
            return
        if peer.incarnation != incarnation and peer.state is PeerState.READY:
            self._refuse_name(peer, event)
            return
        if self.sessions.late(peer, incarnation):
            return
        if peer.incarnation == incarnation and peer.state is not PeerState.LOST:
            if peer.usable:
                lapsed = not peer.may_post(self.context.now_ns)
                self.sessions.hear(peer)
                if lapsed:
                    self.dispatch.on_lease_renewed(peer)
            if peer.state is not PeerState.CONNECTING:  # else the answer follows when the transport has connected
                self._say_hello(peer)  # our answer was lost
            return
        self.sessions.replace(peer, incarnation)
        inputs, differences = plan_with_peer(self.context.local, message.who)
        if message.version != msg.PROTOCOL_VERSION:
            differences = (f"protocol version {msg.PROTOCOL_VERSION} ≠ {message.version}",)
            inputs = None
        peer.meet(incarnation, message.who, inputs, differences, event.route)
        peer.former.clear()  # what an earlier one wrote is its own affair: here it can only have read
        peer.heard_ns = self.context.now_ns
        self.state.parked.setdefault(peer_name, {})
        if inputs is None:
            self.context.note("peer-refused", peer.refusal, "error", peer=peer_name)
            self._say_hello(peer)
        else:
            share = writer_quota(inputs, message.who.ring_bytes)
            self.state.allowances[peer_name] = StagingCredits(share)
            theirs = local_shards(inputs.shape, inputs.page_size, inputs.decode, peer.at)
            self.context.act(ev.ConnectPeer(peer_name, incarnation, message.who, theirs))

    def _refuse_name(self, peer: Peer, event: ev.Received) -> None:
        """Another process says Hello under the name of a peer that is well.

        Either two agents were given one name, and the first keeps it; or it is the next life of a process that ended
        just now, which is let in as soon as the end is proven or the silence has grown.
        """
        self.context.drop("name-taken")
        if event.incarnation in peer.past:
            return
        assert peer.who is not None
        heard_s = (self.context.now_ns - peer.heard_ns) / 1e9
        text = (
            f"the name {peer.name} is in use at {self.context.local.name} by {peer.who.process} (incarnation "
            f"{peer.incarnation:016x}, heard {heard_s:.1f} s ago): give every agent its own name"
        )
        if peer.name_asked_by != event.incarnation:
            peer.name_asked_by = event.incarnation
            self.context.note(
                "name-taken", f"incarnation {event.incarnation:016x} is refused: {text}", "error", peer=peer.name
            )
        ack = msg.HelloAck(msg.PROTOCOL_VERSION, self.context.local.introduction(), event.incarnation, taken=text)
        self.context.send(peer.name, ack, event.route)

    def on_peer_connected(self, event: ev.PeerConnected) -> None:
        peer = self.context.peers.get(event.peer)
        if peer is None or peer.state is not PeerState.CONNECTING:
            return
        peer.state = PeerState.READY
        self.context.note("peer-ready", f"{peer.name} is ready (incarnation {peer.incarnation:016x})", peer=peer.name)
        self._say_hello(peer)

    def on_peer_unusable(self, event: ev.PeerUnusable) -> None:
        peer = self.context.peers.get(event.peer)
        if peer is None or peer.state is not PeerState.CONNECTING:
            return
        peer.differences = (event.text,)
        peer.state = PeerState.REFUSED
        peer.fail(event.text)
        self.context.note("peer-refused", f"{peer.name} cannot be written to: {event.text}", "error", peer=peer.name)
        self._say_hello(peer)

    def _say_hello(self, peer: Peer) -> None:
        differences = [encodable(text)[: msg.MAX_TEXT] for text in peer.differences]
        ack = msg.HelloAck(msg.PROTOCOL_VERSION, self.context.local.introduction(), peer.incarnation, differences)
        self.context.send(peer.name, ack)

    def _new_peer(self, name: str) -> Peer | None:
        """A peer we have not met; when there are very many, in the place of one that is gone and has nothing here."""
        if len(self.context.peers) >= MAX_PEERS:
            busy = {leg.peer for leg in self.state.legs.values()}
            gone = (peer for peer in self.context.peers.values() if not peer.usable and peer.name not in busy)
            oldest = min(gone, key=lambda peer: peer.heard_ns, default=None)
            if oldest is None:
                return None
            del self.context.peers[oldest.name]
            self.state.parked.pop(oldest.name, None)
            self.state.allowances.pop(oldest.name, None)
        peer = self.context.peers[name] = Peer(name, self.context.timing)
        return peer
