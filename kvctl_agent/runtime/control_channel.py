"""Control channel of one agent: a ROUTER that decode ranks connect to, or one DEALER for each prefill rank.

Decode ranks open the connections. The ROUTER identifies each connection by a random return address chosen by its agent,
so a process that merely claims a peer's name can neither replace that peer nor send in its name.

Messages to one peer are collected during a turn of the control loop and sent in one frame. Messages that delay no
request (`_PATIENT`) wait a few milliseconds for the next frame to that peer, which at hundreds of rooms per second
halves the number of frames. Sending never blocks: messages that cannot be sent are counted and dropped, and the
machines send them again.

Messages over one connection leave in the order in which they were queued: a Goodbye is the last message, and a room is
opened again only after its end. So there is one queue for each connection, and each socket keeps the order; what a
socket drops while it is not connected is older than what it sends later.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Container, Iterator, Sequence, Set
from typing import NamedTuple

import zmq
from msgspec.structs import replace

from kvctl_agent.contract.values import encodable
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.host.keys import KeyPair
from kvctl_agent.protocol import codec
from kvctl_agent.protocol.events import Received, Unsendable
from kvctl_agent.protocol.messages import Ack, Message, PartAck, ReadersDone, RoomDone, RoomKept
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.runtime.control_endpoints import NamedDealer
from kvctl_agent.security.unix_dealer import UnixDealer
from kvctl_agent.telemetry.hub import Telemetry

_LOG_EVERY_NS = 60_000_000_000
_TOKEN_BYTES = 16
_MOST_NAMES = 4096  # limit of the tables by peer name: peers choose their names
# Not only answers: pages are released when the parts are sent, and no request on a prefill rank waits for RoomDone.
_PATIENT = (Ack, PartAck, ReadersDone, RoomDone, RoomKept)
_PATIENCE_NS = 5_000_000
_PATIENCE_ALONE_NS = 700_000
# An Ack of RoomDone only ends its repetition.
_ROOM_DONE = RoomDone.__struct_config__.tag
_LONG_PATIENCE_NS = 20_000_000
# The last frames report failed rooms; without a linger the context drops frames that are not on the wire yet.
_GOODBYE_MS = 200


class PeerAddress(NamedTuple):
    """Address of a connection's other end: the peer's name and its return address (at a DEALER, its endpoint)."""

    peer: str
    route: bytes


class ControlChannel:
    """Control sockets of one agent; owned by the control loop's thread.

    Attributes:
        changes: incremented whenever the result of `sockets` changes.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        incarnation: int,
        telemetry: Telemetry,
        keys: KeyPair | None = None,
    ) -> None:
        """Creates the channel without sockets; `keys` protect the sockets that use TCP."""
        self._context = context
        self._identity = name.encode() + b"\0" + secrets.token_bytes(_TOKEN_BYTES)
        self._incarnation = incarnation
        self._telemetry = telemetry
        self._keys = keys
        self.changes = 0
        self._router: control_endpoints.Router | None = None
        self._router_key: zmq.Socket[bytes] | int | None = None
        self._dealers: dict[PeerAddress, control_endpoints.Dealer] = {}
        self._dealer_keys: tuple[tuple[zmq.Socket[bytes] | int, PeerAddress], ...] = ()
        self._endpoints: dict[str, str] = {}
        # Messages, and for patient ones the monotonic time of `queue`, otherwise 0.
        self._outbox: dict[PeerAddress, list[tuple[Message, int]]] = {}
        self._patient_due_ns: int | None = None
        self._urgent: dict[PeerAddress, None] = {}  # with messages that are not patient, in the order of the first
        self._logged: dict[str, int] = {}
        self._unsendable: list[Unsendable] = []
        self._unsent: dict[str, int] = {}  # messages dropped since the peer's socket last accepted a frame

    def serve(self, endpoint: str) -> str:
        """Binds the ROUTER to `endpoint`; returns the endpoint with the port that was chosen, for the registry."""
        self.changes += 1
        self._router = control_endpoints.bind(self._context, endpoint, codec.MAX_FRAME_BYTES, self._keys)
        self._router_key = control_endpoints.poll_key(self._router)
        return control_endpoints.address(self._router)

    def connect(self, peer: str, endpoint: str) -> bool:
        """Connects to `peer` at `endpoint`; returns False if that is the peer's endpoint already.

        A connection to an earlier endpoint stays open until `keep`: the process there may still send messages.
        """
        if self._endpoints.get(peer) == endpoint:
            return False
        address = PeerAddress(peer, endpoint.encode())
        if address not in self._dealers:
            self._open(address)
        self._endpoints[peer] = endpoint
        if unaddressed := self._outbox.pop(PeerAddress(peer, b""), None):  # queued before the endpoint was known
            self._outbox.setdefault(address, []).extend(unaddressed)
            self._urgent[address] = None
        return True

    def _open(self, address: PeerAddress) -> None:
        """Connects a DEALER; replaces a connection to the same address."""
        # Connect first: if no descriptor is left, the old connection stays in use.
        made = control_endpoints.connect_to_peer(
            self._context, address.route.decode(), self._identity, codec.MAX_FRAME_BYTES, self._keys
        )
        self._close(address)
        self._dealers[address] = made
        self._dealers_changed()

    def keep(self, peer: str, routes: Set[bytes]) -> None:
        """Closes the connections to `peer` other than to its current endpoint and to the endpoints in `routes`."""
        for address in [address for address in self._dealers if address.peer == peer]:
            if address.route not in routes and address.route != self.endpoint(peer).encode():
                self._close(address)

    def renew(self, peer: str) -> None:
        """Reconnects to a lost peer, so that messages queued in the old connection do not delay new ones."""
        for address in [address for address in self._outbox if address.peer == peer]:
            del self._outbox[address]
        self._unsent.pop(peer, None)
        if endpoint := self.endpoint(peer):
            self._open(PeerAddress(peer, endpoint.encode()))

    def disconnect(self, peer: str) -> None:
        """Sends a peer's messages, then closes the connections to it and forgets it; ignores unknown names."""
        for address in [address for address in self._outbox if address.peer == peer]:
            self._send(address, [message for message, _ in self._outbox.pop(address)])
        for table in (self._unsent, self._endpoints, self._logged):
            table.pop(peer, None)
        for address in [address for address in self._dealers if address.peer == peer]:
            self._close(address, _GOODBYE_MS)

    def _close(self, address: PeerAddress, linger_ms: int = 0) -> None:
        self._outbox.pop(address, None)
        dealer = self._dealers.pop(address, None)
        if dealer is not None:
            self._dealers_changed()
            dealer.close(0 if isinstance(dealer, UnixDealer) else linger_ms)  # a UnixDealer would wait here

    def _dealers_changed(self) -> None:
        self.changes += 1
        self._dealer_keys = tuple(
            (control_endpoints.poll_key(dealer), address) for address, dealer in self._dealers.items()
        )

    def endpoint(self, peer: str) -> str:
        """Returns the endpoint of a peer; "" if it is unknown, and on prefill ranks."""
        return self._endpoints.get(peer, "")

    def waiting(self, peer: str) -> int:
        """Returns the number of unsent messages to a peer: queued, or dropped since its socket last accepted a frame.

        The machines send dropped messages again. Any thread may call this method.
        """
        waiting = sum(len(box) for address, box in self._outbox.copy().items() if address.peer == peer)
        return waiting + self._unsent.get(peer, 0)

    @property
    def due_ns(self) -> int | None:
        """Monotonic time of the next flush that is needed even if nothing else happens; None if there is none."""
        return self._patient_due_ns

    def tick(self, now_ns: int) -> list[tuple[str, str]]:
        """Looks host names up again where needed; returns the peers whose Unix socket was refused, with the reason."""
        for address, dealer in self._dealers.items():
            if isinstance(dealer, NamedDealer):
                dealer.turn(now_ns)
                if dealer.error:
                    self._log(address.peer, f"to {address.peer}: {dealer.error}")
        return [
            (address.peer, dealer.refused)
            for address, dealer in self._dealers.items()
            if isinstance(dealer, UnixDealer)
            and dealer.refused
            and address.route == self.endpoint(address.peer).encode()
        ]

    def sockets(self) -> list[zmq.Socket[bytes] | int]:
        """Returns the sockets and descriptors to poll."""
        dealers = [key for key, _ in self._dealer_keys]
        return [*dealers, *([self._router_key] if self._router_key is not None else [])]

    def queue(self, peer: str, message: Message, route: bytes = b"", alone: bool = False) -> None:
        """Queues a message for the next flush; messages of the types in `_PATIENT` may wait for a later one.

        Args:
            route: return address; empty at a DEALER for the peer's current endpoint.
            alone: no other room is open, whose messages RoomDone could wait for.
        """
        address = PeerAddress(peer, route or self.endpoint(peer).encode())
        since_ns = 0
        if isinstance(message, _PATIENT):
            patience_ns = _PATIENCE_ALONE_NS if alone and isinstance(message, RoomDone) else _PATIENCE_NS
            if isinstance(message, Ack) and message.of == _ROOM_DONE:
                patience_ns = _LONG_PATIENCE_NS
            since_ns = self._telemetry.clock.now_ns()
            if self._patient_due_ns is None or since_ns + patience_ns < self._patient_due_ns:
                self._patient_due_ns = since_ns + patience_ns
        else:
            self._urgent[address] = None
        box = self._outbox.get(address)
        if box is None:
            self._outbox[address] = [(message, since_ns)]
        else:
            box.append((message, since_ns))

    def flush(self, *, everything: bool = False) -> list[Unsendable]:
        """Sends one frame to each peer with messages that are due; all messages if `everything`.

        Returns:
            the messages of rooms that were dropped because they can never be sent.
        """
        urgent, self._urgent = self._urgent, {}
        now_ns = self._telemetry.clock.now_ns() if self._patient_due_ns is not None else 0
        if everything or (self._patient_due_ns is not None and now_ns >= self._patient_due_ns):
            outbox, self._outbox = self._outbox, {}
        else:
            outbox = {address: self._outbox.pop(address) for address in urgent if address in self._outbox}
        if not self._outbox:
            self._patient_due_ns = None
        for address, box in outbox.items():
            messages = [_aged(message, now_ns - since_ns) if since_ns else message for message, since_ns in box]
            self._count("out", messages)
            self._send(address, messages)
        dropped, self._unsendable = self._unsendable, []
        return dropped

    def _send(self, address: PeerAddress, messages: list[Message]) -> None:
        peer = address.peer
        try:
            frame = codec.encode(self._incarnation, messages)
        except Exception as error:  # a bug: values from engines are checked so that they can be encoded
            reason, why = "unencodable", f"cannot be encoded: {error}"
        else:
            if len(frame) <= codec.MAX_FRAME_BYTES and len(messages) <= codec.MAX_MESSAGES:
                self._put(address, frame, len(messages))
                return
            # The peer would close the connection, and lose with it all other messages that are on their way.
            reason, why = "oversize", f"of {len(frame)} bytes is too large to be sent"
        if len(messages) > 1:
            half = len(messages) // 2
            self._send(address, messages[:half])
            self._send(address, messages[half:])
        else:
            self._drop(peer, messages[0], reason, f"to {peer}: {type(messages[0]).__name__} {why}")

    def _drop(self, peer: str, message: Message, reason: str, text: str) -> None:
        """Drops a message that can never be sent; `flush` returns it, so that the machine fails its room."""
        self._telemetry.metrics.add("kvctl_control_dropped_total", 1, reason)
        text = encodable(text)
        self._log(peer, text)
        room, nonce = getattr(message, "room", None), getattr(message, "nonce", None)
        if room is not None and nonce is not None:
            self._unsendable.append(Unsendable(peer, room, nonce, text))

    def _put(self, address: PeerAddress, frame: bytes, messages: int) -> None:
        """Passes a frame of `messages` messages to the peer's socket; counts them as unsent if it is not accepted."""
        peer = address.peer
        try:
            if self._router is not None:
                self._router.send_multipart([address.route, frame], zmq.NOBLOCK)
            else:
                dealer = self._dealers[address]
                dealer.send(frame, zmq.NOBLOCK)
                if isinstance(dealer, UnixDealer) and not dealer.connected:  # only the newest frame waits
                    self._telemetry.metrics.add("kvctl_control_dropped_total", messages, "absent")
            if self._unsent:
                self._unsent.pop(peer, None)
        except (zmq.ZMQError, KeyError):
            if peer in self._unsent or len(self._unsent) < _MOST_NAMES:
                self._unsent[peer] = self._unsent.get(peer, 0) + messages
            self._telemetry.metrics.add("kvctl_control_dropped_total", messages, "unsent")

    def receive(self, ready: Container[object]) -> Iterator[Received]:
        """Yields the messages received from the sockets in `ready`.

        Each call takes at most a few hundred frames from each socket, so that no peer can starve the loop. One frame is
        decoded at a time: all frames of a hostile peer would decode to gigabytes of objects.
        """
        if self._router is not None and self._router_key in ready:
            for route, *frames in control_endpoints.received(self._router):
                name, _, token = route.partition(b"\0")
                if name and len(token) == _TOKEN_BYTES:
                    yield from self._read(PeerAddress(name.decode(errors="replace"), route), frames)
                else:  # not an agent, or a connection that another one has replaced
                    self._telemetry.metrics.add("kvctl_control_dropped_total", 1, "stranger")
        for key, address in self._dealer_keys:
            dealer = self._dealers.get(address)
            if dealer is not None and (key in ready or (isinstance(dealer, UnixDealer) and not dealer.connected)):
                for frames in control_endpoints.received(dealer):
                    yield from self._read(address, frames)
                    if self._dealers.get(address) is not dealer:  # closed because of a message, such as a Goodbye
                        break

    def _read(self, source: PeerAddress, frames: list[bytes]) -> list[Received]:
        metrics, peer = self._telemetry.metrics, source.peer
        try:
            if len(frames) != 1:
                raise RemoteProtocolError(f"a control message has one frame, this one {len(frames)}")
            incarnation, messages, unknown = codec.decode(frames[0])
        except RemoteProtocolError as error:
            metrics.add("kvctl_control_dropped_total", 1, "malformed")
            self._log(peer, f"from {peer}: {error}")
            return []
        if unknown:
            metrics.add("kvctl_control_dropped_total", unknown, "unknown-message")
            self._log(peer, f"from {peer}: {unknown} control messages of unknown type or wrong fields")
        self._count("in", messages)
        return [Received(peer, incarnation, message, source.route) for message in messages]

    def _count(self, direction: str, messages: Sequence[Message]) -> None:
        kinds = list(map(type, messages))
        self._telemetry.count(
            [
                ("kvctl_control_messages_total", kinds.count(kind), (direction, kind.__name__))
                for kind in dict.fromkeys(kinds)
            ]
        )

    def _log(self, peer: str, text: str) -> None:
        """Records a text at most once per peer and minute, so that a broken peer does not fill the flight recorder."""
        now = self._telemetry.clock.now_ns()
        if now - self._logged.get(peer, -_LOG_EVERY_NS) >= _LOG_EVERY_NS and len(self._logged) < _MOST_NAMES:
            self._logged[peer] = now
            self._telemetry.recorder.record("protocol", text, "warning", peer=peer)

    def close(self) -> None:
        """Closes all sockets after they have sent their queued frames, or after a short linger."""
        if self._router is not None:
            control_endpoints.close(self._router, _GOODBYE_MS)
        until_ns = time.monotonic_ns() + _GOODBYE_MS * 1_000_000
        for dealer in self._dealers.values():
            dealer.close(max(0, until_ns - time.monotonic_ns()) // 1_000_000)
        self._dealers.clear()
        self._router = None


def _aged(message: Message, kept_ns: int) -> Message:
    """Returns a message that was kept for `kept_ns`, with its age if the peer needs that."""
    if not isinstance(message, RoomDone | ReadersDone):
        return message
    return replace(message, age_ns=message.age_ns + kept_ns)
