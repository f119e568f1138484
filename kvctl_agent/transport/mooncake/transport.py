"""The `mooncake` transport: Mooncake's engine writes into the peer's registered memory, tags use a TCP connection.

Module `mooncake.engine` deals with wheels, protocols, listeners and shutdown, `mooncake.writes` with windows and status
calls, and this module with these properties of the engine:

- The engine checks an address at the target and reports only "failed". Metadata therefore contains the registered
  regions, and descriptors are checked against them before they are posted.
- Registration time is quadratic in the number of regions (5,000 take 1.3 s): adjacent regions are merged, and a warning
  is logged if many remain.
- Opening a session waits for the peer's engine, up to a minute if that is stopped. Each `connect` therefore opens it in
  a thread of its own, which usually takes 2 ms; until then writes wait inside the transport as if they were in flight.
- A session is "host:port", and the engine never forgets the state of one. An incarnation that got the port of an
  earlier one is therefore rejected with an error.

Arrival. Mooncake can send a notification with a write (`TransferNotify`); alternatively a connection of the transport
carries the tag once the write is done. On two busy cores a round trip between two processes takes 227 µs (99th
percentile 378) over the connection and 424 µs (995) with a notification, with 2 MiB 2.5 ms (3.7) and 4.0 ms (10.5).

In addition, a notification requires the blocking call, and thus one thread per write; a single silent client at the
engine's port blocks all of them for 5 s; and it can carry only text. Tags are therefore sent by `mooncake.tags`. Their
order is correct, because the engine reports an entry as done only when the target has acknowledged that its bytes are
in memory.

A tag is sent in the `Write.poll` (or `arrivals` and `progress`, for released writes) that finds the last entry of its
write done. Bytes are moved by threads of the engines, independent of calls.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvctl_agent.contract.addresses import AddressError, tcp_address
from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import ConfigError, TransportError
from kvctl_agent.host import resolver
from kvctl_agent.memory.region import Region, merge_adjacent
from kvctl_agent.native import Turns
from kvctl_agent.transport.base import Addresses, Arrival, Sizes
from kvctl_agent.transport.checks import CheckedTransport, Ranges, check_tag
from kvctl_agent.transport.mooncake import engine
from kvctl_agent.transport.mooncake.tags import IDENT_BYTES, SECRET_BYTES, Sender, TagLink, TagListener, greeting
from kvctl_agent.transport.mooncake.writes import InFlight, MooncakeWrite, Peer, flush

_MAGIC = b"kvctl-mooncake-1"
_PARAMS = {"protocol": "tcp", "device": "", "host": "127.0.0.1"}
_LINGER_S = 0.2
_EXIT_S = 0.5
_CLOSE_EVERY_S = 5.0
_MANY_REGIONS = 1000

_log = logging.getLogger(__name__)


class MooncakeTransport(CheckedTransport[Peer, MooncakeWrite]):
    """Transport of a Mooncake engine.

    `params` may have `protocol` (tcp, rdma, nvlink, nvlink_intra or efa), `device` (RDMA devices to use, joined by +;
    default all) and `host` (the address at which peers reach this agent; default 127.0.0.1, for peers on this host
    only).
    """

    name = "mooncake"

    def __init__(self, agent_name: str, params: Mapping[str, str]) -> None:
        for key in params:
            if key not in _PARAMS:
                raise ConfigError(f"transport_params: mooncake has no parameter {key!r}; allowed: {', '.join(_PARAMS)}")
        super().__init__()
        settings = {**_PARAMS, **params}
        self._protocol = settings["protocol"]
        self._host = _numeric(settings["host"])
        self._engine = engine.start(self._protocol, settings["device"], self._host)
        self._in_flight = InFlight(self._engine)
        self._listener = TagListener(self._host)
        self._agent_name = agent_name
        self._ident = secrets.token_hex(IDENT_BYTES // 2)
        self._keys: dict[str, str] = {}
        self._sessions: dict[str, str] = {}
        self._disconnected: dict[str, Peer] = {}
        self._next_close = 0.0
        self._peers_lock = threading.RLock()
        self._landed: deque[tuple[Sender, bytes]] = deque()

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        if not regions:
            return
        merged = merge_adjacent(regions)
        if len(self._regions) + len(merged) > _MANY_REGIONS:
            _log.warning(
                "mooncake: %d regions of memory, and registration time is quadratic in their number: allocate the pool "
                "as one slab",
                len(self._regions) + len(merged),
            )
        self._engine.register(merged)
        self._regions += merged
        self._ranges = Ranges(self.name, self._regions)

    def metadata(self) -> bytes:
        self._check_open()
        fields = {
            "ident": self._ident,
            "session": self._engine.session,
            "protocol": self._protocol,
            "tags": [self._host, self._listener.port],
            "secret": self._listener.secret.hex(),
            "regions": self._regions,
        }
        body = json.dumps(fields).encode()
        return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body

    def connect(self, peer: str, metadata: bytes) -> None:
        self._check_open()
        with self._peers_lock:
            known = self._peers.get(peer)
            if known is not None and known.metadata == metadata and not known.refused:
                # Only a broken connection, or a session that did not open, is replaced.
                with contextlib.suppress(TransportError):
                    known.link.check_alive()
                    return
            fresh = self._read(peer, metadata)
            self.disconnect(peer)
            self._peers[peer] = fresh
            self._keys[fresh.ident] = peer
            self._sessions[fresh.session] = fresh.ident
            self._disconnected.pop(fresh.session, None)
        _start(_open, self._engine, fresh)

    def disconnect(self, peer: str) -> None:
        with self._peers_lock:
            known = self._peers.pop(peer, None)
            if known is not None:
                known.forgotten = True
                self._keys.pop(known.ident, None)
                known.link.close()
                self._disconnected[known.session] = known
                self._next_close = 0.0

    def tell(self, peer: str, tag: bytes) -> None:
        self._peer(peer).link.enqueue(check_tag(tag))

    def progress(self) -> None:
        self._check_open()
        self._in_flight.drain_on()
        for peer in list(self._peers.values()):
            flush(peer.link)
        self._listener.collect(self._landed)
        if self._disconnected and time.monotonic() > self._next_close:
            self._next_close = time.monotonic() + _CLOSE_EVERY_S
            _start(_close_ended, self._engine, self._disconnected)

    def arrivals(self) -> list[Arrival]:
        self.progress()
        landed: list[Arrival] = []
        with contextlib.suppress(IndexError):
            while True:
                sender, tag = self._landed.popleft()
                landed.append(Arrival(self._keys.get(sender.ident) or sender.name, tag))
        return landed

    def wait_for_tags(self, polled: ctypes.Array[Any], turns: Turns, timeout_s: float, pause_s: float) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        # Over TCP, a GPU's bytes are copied to the host, sent, and copied again.
        through_host = self._protocol == "tcp" and any(region.device != HOST for region in self._regions)
        use = self._engine.use()
        return {
            "engine": f"mooncake ({self._engine.wheel})",
            "backend": self._protocol,
            "protocol": use.protocol,
            "devices": use.devices,
            "lanes": [f"{self._protocol} for bytes{', through the host' if through_host else ''}", "tcp for tags"],
            "session": self._engine.session,
            "reachable": "from this host" if self._engine.private else "on all interfaces",
        }

    def close(self) -> None:
        if self._closed:
            return
        deadline = time.monotonic() + _LINGER_S
        while time.monotonic() < deadline and any(peer.link.pending for peer in self._peers.values()):
            self.progress()
            time.sleep(0.0005)
        self._in_flight.close()
        self._closed = True
        for peer in list(self._peers):
            self.disconnect(peer)
        self._disconnected.clear()
        self._listener.close()
        self._engine.stop()

    def _post(
        self, peer: Peer, descriptors: int, local: Addresses, remote: Addresses, sizes: Sizes, tag: bytes | None
    ) -> MooncakeWrite:
        write = MooncakeWrite(self._in_flight, peer, descriptors, (local, remote, sizes), tag)
        peer.link.check_alive()
        self._in_flight.post(write)
        return write

    def _read(self, peer: str, metadata: bytes) -> Peer:
        """Checks the metadata of a peer, starts its tag connection and returns the peer.

        Raises:
            TransportError: the metadata is malformed, or does not fit this agent.
            PeerDisconnected: the peer cannot be reached.
        """
        magic, checksum, body = metadata[: len(_MAGIC)], metadata[len(_MAGIC) :][:4], metadata[len(_MAGIC) + 4 :]
        if magic != _MAGIC or checksum != zlib.crc32(body).to_bytes(4, "little"):
            raise TransportError(
                f"mooncake: {len(metadata)} bytes of metadata for peer {peer!r} are not mooncake's or damaged"
            )
        try:
            fields = json.loads(body)
            ident, session, protocol = str(fields["ident"]), str(fields["session"]), str(fields["protocol"])
            tags = tcp_address(fields["tags"][0], fields["tags"][1])
            secret = bytes.fromhex(fields["secret"])
            ranges = Ranges(self.name, [Region(*map(int, region)) for region in fields["regions"]])
            if tags.ip is None or len(ident) != IDENT_BYTES or len(secret) != SECRET_BYTES:
                raise ValueError("wrong address or lengths")
        except (AddressError, ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
            raise TransportError(f"mooncake: the metadata of peer {peer!r} is malformed: {error!r}") from error
        if protocol != self._protocol:
            raise TransportError(f"mooncake: peer {peer!r} uses protocol {protocol}, this agent {self._protocol}")
        if self._keys.get(ident, peer) != peer:
            raise TransportError(f"mooncake: peer {peer!r} has the metadata of {self._keys[ident]!r}")
        if self._sessions.get(session, ident) != ident:
            raise TransportError(
                f"mooncake: peer {peer!r} has the port of an earlier agent ({session}), which this engine cannot "
                f"forget: restart that peer"
            )
        link = TagLink(f"peer {peer!r}", (tags.host, tags.port), greeting(secret, self._ident, self._agent_name))
        return Peer(peer, metadata, ident, session, ranges, link)


_threads: set[threading.Thread] = set()


def _start(target: Callable[..., None], *arguments: object) -> None:
    """Runs a function that waits for the engine in a thread of its own."""

    def run() -> None:
        try:
            target(*arguments)
        finally:
            _threads.discard(thread)

    thread = threading.Thread(target=run, name=f"mooncake{target.__name__.replace('_', '-')}", daemon=True)
    _threads.add(thread)
    thread.start()


def _open(engine: engine.Engine, peer: Peer) -> None:
    """Opens the session to a peer and records the outcome, which may take a minute."""
    try:
        peer.refused = engine.open(peer.session)
    except AttributeError:  # the engine was stopped in the meantime
        peer.refused = "the transport was closed"
    peer.opened = not peer.refused


def _close_ended(engine: engine.Engine, disconnected: dict[str, Peer]) -> None:
    """Lets the engine close its connections to disconnected peers that have ended, and forgets those peers."""
    with contextlib.suppress(AttributeError):  # the engine was stopped in the meantime
        for session, peer in list(disconnected.items()):
            if (peer.opened or peer.refused) and peer.idle and engine.close_ended(session):
                disconnected.pop(session, None)


@atexit.register
def _let_threads_end() -> None:
    """Waits up to 0.5 s for the threads.

    A thread that returns from the engine while Python exits aborts the process (SIGABRT).
    """
    deadline = time.monotonic() + _EXIT_S
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


def _numeric(host: str) -> str:
    """Returns the numeric address of `host`, so that peers need no name lookup during a transfer.

    Raises:
        ConfigError: `host` has no address, or is 0.0.0.0.
    """
    answer = resolver.resolve(host.strip("[]"))
    if answer.error:
        raise ConfigError(f"transport_params: mooncake: {answer.error}")
    addr = answer.addresses[0]
    if addr in ("0.0.0.0", "::"):
        raise ConfigError(f"transport_params: mooncake: host must be an address that peers can reach, not {addr}")
    return addr
