"""The control channel of one agent: a ROUTER that decode ranks connect to, or DEALERs towards prefill ranks.

Connections are made by the decode side. A ROUTER knows each by a return address that its agent has drawn at random, so
a process that merely claims a peer's name can neither take that peer's place nor speak for it.

Messages to one peer are collected during a turn of the control loop and leave in one frame. Messages that nobody waits
for (`_PATIENT`) ride along with the next frame to that peer, for a few milliseconds: at hundreds of rooms a second this
halves the frames. A send never blocks: what cannot leave is counted and dropped, and the machines say it again.
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterator, Set
from typing import NamedTuple

import zmq

from kvctl_agent.contract.keys import KeyPair
from kvctl_agent.contract.values import encodable
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import codec
from kvctl_agent.protocol.events import Received, Unsendable
from kvctl_agent.protocol.messages import Ack, Message, PartAck, RoomDone
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.telemetry.hub import Telemetry

_FRAMES_A_TURN = 256
_LOG_EVERY_NS = 60_000_000_000
_TOKEN_BYTES = 16
_MOST_NAMES = 4096  # that something is remembered of: names are what peers say
# RoomDone too: pages are released when the parts are sent, and nobody decodes on a prefill rank.
_PATIENT = (Ack, PartAck, RoomDone)
_PATIENCE_NS = 5_000_000
# The last frames say that rooms have failed; without this the context drops what is not on the wire yet.
_GOODBYE_MS = 200


class PeerAddress(NamedTuple):
    """The other end of a connection: a peer's name and its return address, which at a DEALER is its endpoint."""

    peer: str
    route: bytes


class ControlChannel:
    """Owned by the control loop's thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        incarnation: int,
        telemetry: Telemetry,
        keys: KeyPair | None = None,
    ) -> None:
        """Nothing is bound or connected yet; with `keys` all that will be is guarded by them."""
        self._context = context
        self._identity = name.encode() + b"\0" + secrets.token_bytes(_TOKEN_BYTES)
        self._incarnation = incarnation
        self._telemetry = telemetry
        self._keys = keys
        self.changes = 0  # grows whenever `sockets` gives others than before
        self._router: control_endpoints.Router | None = None
        self._router_key: zmq.Socket[bytes] | int | None = None
        self._dealers: dict[PeerAddress, zmq.Socket[bytes]] = {}
        self._endpoints: dict[str, str] = {}
        self._outbox: dict[PeerAddress, list[Message]] = {}
        self._patient: dict[PeerAddress, list[Message]] = {}
        self._patient_due_ns: int | None = None
        self._logged: dict[str, int] = {}
        self._unsendable: list[Unsendable] = []
        self._unsent: dict[str, int] = {}  # messages that found no place in a peer's socket, since they last did

    def serve(self, endpoint: str) -> str:
        """Bind the ROUTER; returns the endpoint to register (with the port that was found)."""
        self.changes += 1
        self._router = control_endpoints.bind(self._context, endpoint, codec.MAX_FRAME_BYTES, self._keys)
        self._router_key = control_endpoints.poll_key(self._router)
        return control_endpoints.address(self._router)

    def connect(self, peer: str, endpoint: str) -> bool:
        """Make sure of a connection to `peer`; True when it is new, or leads elsewhere than before.

        The one that led elsewhere stays until `keep`: the process there may have something to say yet.
        """
        if self._endpoints.get(peer) == endpoint:
            return False
        address = PeerAddress(peer, endpoint.encode())
        if address not in self._dealers:
            self._open(address)
        self._endpoints[peer] = endpoint
        return True

    def _open(self, address: PeerAddress) -> None:
        """Connect, in the place of the connection to the same address if there is one."""
        # First, because there may be no descriptor for it: then the old one is better than none.
        made = control_endpoints.connect(
            self._context, address.route.decode(), self._identity, codec.MAX_FRAME_BYTES, self._keys
        )
        self._close(address)
        self.changes += 1
        self._dealers[address] = made

    def keep(self, peer: str, routes: Set[bytes]) -> None:
        """Close the connections to `peer` that are neither its present one nor in `routes`."""
        for address in [address for address in self._dealers if address.peer == peer]:
            if address.route not in routes and address.route != self.endpoint(peer).encode():
                self._close(address)

    def renew(self, peer: str) -> None:
        """Connect to a lost peer anew: whatever sits in the old connection must not delay what is said next."""
        for boxes in (self._outbox, self._patient):
            for address in [address for address in boxes if address.peer == peer]:
                del boxes[address]
        self._unsent.pop(peer, None)
        if endpoint := self.endpoint(peer):
            self._open(PeerAddress(peer, endpoint.encode()))

    def disconnect(self, peer: str) -> None:
        """Close the connections to a rank that left its instance, and drop what was queued for it; unknown names are
        fine. Without this a decode rank would keep a socket for every prefill rank it ever met."""
        self._unsent.pop(peer, None)
        self._endpoints.pop(peer, None)
        self.keep(peer, frozenset())

    def _close(self, address: PeerAddress) -> None:
        self._outbox.pop(address, None)
        self._patient.pop(address, None)
        dealer = self._dealers.pop(address, None)
        if dealer is not None:
            self.changes += 1
            dealer.close(0)

    def endpoint(self, peer: str) -> str:
        return self._endpoints.get(peer, "")

    def waiting(self, peer: str) -> int:
        """Messages to a peer that have not left: those of this turn, and those that its socket had no place for since
        it last took one (dropped, and said again by the machines). Safe to ask from any thread."""
        boxes = (*self._outbox.copy().items(), *self._patient.copy().items())
        return sum(len(box) for address, box in boxes if address.peer == peer) + self._unsent.get(peer, 0)

    def sockets(self) -> list[zmq.Socket[bytes] | int]:
        """What to poll: sockets and descriptors."""
        return [*self._dealers.values(), *([self._router_key] if self._router_key is not None else [])]

    def queue(self, peer: str, message: Message, route: bytes = b"") -> None:
        """Send with the next flush, or soon after where nobody waits for it.

        `route`: the return address; empty at a DEALER for the peer's present endpoint.
        """
        boxes = self._outbox
        if isinstance(message, _PATIENT):
            boxes = self._patient
            if self._patient_due_ns is None:
                self._patient_due_ns = self._telemetry.clock.now_ns() + _PATIENCE_NS
        address = PeerAddress(peer, route or self.endpoint(peer).encode())
        box = boxes.get(address)
        if box is None:
            boxes[address] = [message]
        else:
            box.append(message)

    @property
    def due_ns(self) -> int | None:
        """When the next flush is needed although nothing happens."""
        return self._patient_due_ns

    def flush(self, *, everything: bool = False) -> list[Unsendable]:
        """Send one frame to each peer that has something to be sent now.

        Returns the messages of rooms that were dropped, because they can never be sent.
        """
        outbox, self._outbox = self._outbox, {}
        due = self._patient_due_ns
        if due is not None and (everything or self._telemetry.clock.now_ns() >= due):
            addresses = list(self._patient)
            self._patient_due_ns = None
        else:
            addresses = [address for address in outbox if address in self._patient]
        for address in addresses:
            outbox.setdefault(address, []).extend(self._patient.pop(address))
        if not self._patient:
            self._patient_due_ns = None
        metrics = self._telemetry.metrics
        for address, messages in outbox.items():
            for message in messages:
                metrics.add("kvctl_control_messages_total", 1, "out", type(message).__name__)
            self._send(address, messages)
        dropped, self._unsendable = self._unsendable, []
        return dropped

    def _send(self, address: PeerAddress, messages: list[Message]) -> None:
        peer = address.peer
        try:
            frame = codec.encode(self._incarnation, messages)
        except Exception as error:  # a bug: what engines hand over is checked, so that it can be encoded
            reason, why = "unencodable", f"cannot be encoded: {error}"
        else:
            if len(frame) <= codec.MAX_FRAME_BYTES and len(messages) <= codec.MAX_MESSAGES:
                self._put(address, frame, len(messages))
                return
            # The peer's socket would hang up, and everything else that is on its way would be lost with this frame.
            reason, why = "oversize", f"of {len(frame)} bytes is too large to be sent"
        if len(messages) > 1:
            half = len(messages) // 2
            self._send(address, messages[:half])
            self._send(address, messages[half:])
        else:
            self._drop(peer, messages[0], reason, f"to {peer}: {type(messages[0]).__name__} {why}")

    def _drop(self, peer: str, message: Message, reason: str, text: str) -> None:
        """A message that can never be sent costs itself; its room is to fail."""
        self._telemetry.metrics.add("kvctl_control_dropped_total", 1, reason)
        text = encodable(text)
        self._log(peer, text)
        room, nonce = getattr(message, "room", None), getattr(message, "nonce", None)
        if room is not None and nonce is not None:
            self._unsendable.append(Unsendable(peer, room, nonce, text))

    def _put(self, address: PeerAddress, frame: bytes, messages: int) -> None:
        """Hand a frame that carries so many messages to the socket."""
        peer = address.peer
        try:
            if self._router is not None:
                self._router.send_multipart([address.route, frame], zmq.NOBLOCK)
            else:
                self._dealers[address].send(frame, zmq.NOBLOCK)
            if self._unsent:
                self._unsent.pop(peer, None)
        except (zmq.ZMQError, KeyError):
            if peer in self._unsent or len(self._unsent) < _MOST_NAMES:
                self._unsent[peer] = self._unsent.get(peer, 0) + messages
            self._telemetry.metrics.add("kvctl_control_dropped_total", messages, "unsent")

    def receive(self, ready: Container[object]) -> Iterator[Received]:
        """What has come in at the sockets in `ready`.

        At most a few hundred frames a turn and socket, so that nobody can starve the loop.
        """
        if self._router is not None and self._router_key in ready:
            for route, *frames in _frames(self._router):
                name, _, token = route.partition(b"\0")
                if name and len(token) == _TOKEN_BYTES:
                    yield from self._read(PeerAddress(name.decode(errors="replace"), route), frames)
                else:  # nobody of ours, or of a connection that another one has replaced
                    self._telemetry.metrics.add("kvctl_control_dropped_total", 1, "stranger")
        for address, dealer in list(self._dealers.items()):
            if dealer in ready:
                for frames in _frames(dealer):
                    yield from self._read(address, frames)

    def _read(self, source: PeerAddress, frames: list[bytes]) -> Iterator[Received]:
        metrics, peer = self._telemetry.metrics, source.peer
        try:
            if len(frames) != 1:
                raise RemoteProtocolError(f"a control message has one frame, this one {len(frames)}")
            incarnation, messages, unknown = codec.decode(frames[0])
        except RemoteProtocolError as error:
            metrics.add("kvctl_control_dropped_total", 1, "malformed")
            self._log(peer, f"from {peer}: {error}")
            return
        if unknown:
            metrics.add("kvctl_control_dropped_total", unknown, "unknown-message")
            self._log(peer, f"from {peer}: {unknown} control messages of unknown type or wrong fields")
        for message in messages:
            metrics.add("kvctl_control_messages_total", 1, "in", type(message).__name__)
            yield Received(peer, incarnation, message, source.route)

    def _log(self, peer: str, text: str) -> None:
        """Once per peer and minute: a broken peer must not fill the recorder."""
        now = self._telemetry.clock.now_ns()
        if now - self._logged.get(peer, -_LOG_EVERY_NS) >= _LOG_EVERY_NS and len(self._logged) < _MOST_NAMES:
            self._logged[peer] = now
            self._telemetry.recorder.record("protocol", text, "warning", peer=peer)

    def close(self) -> None:
        if self._router is not None:
            control_endpoints.close(self._router, _GOODBYE_MS)
        for dealer in self._dealers.values():
            dealer.close(_GOODBYE_MS)
        self._dealers.clear()
        self._router = None


def _frames(socket: control_endpoints.Router) -> Iterator[list[bytes]]:
    for _ in range(_FRAMES_A_TURN):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return
