"""The `mooncake` transport: Mooncake's engine writes into the peer's registered memory, tags go by a link of our own.

What Mooncake asks of its user and where it is met: wheels and libraries in `mooncake_wheels`; protocols, listeners and
the end of an engine in `mooncake_engine`; windows and status calls in `mooncake_writes`; names, memory and sessions
here:

- The engine checks an address where it lands and says only "failed". Metadata carries the regions, and descriptors
  are checked against them before they are posted.
- Registering is quadratic in the number of regions (5,000 take 1.3 s): neighbours are merged, and a warning says
  when many are left.
- Opening a session waits for the peer's engine, up to a minute for a stopped one. So each `connect` does it in a
  thread of its own, which lives for 2 ms; writes wait for it inside the transport, as if they were in flight.
- A session is "host:port", and the engine keeps what it knows of one for ever. An incarnation that got the port of a
  dead one is refused, with words.

Arrival. Mooncake can send a notification with a write (`TransferNotify`), and a link of our own can carry a tag once
the write is done. Round trips between two processes on two busy cores, median / 99th percentile / CPU of both sides in
µs, from `benchmarks/mooncake_arrival.py`, 2,000 of each in turn:

    write      TransferNotify           own link
    none        424 /    995 /   427     227 /   378 /   192
    4 KiB       736 /  7,880 / 1,742     735 / 1,114 /   570
    2 MiB     3,979 / 10,513 / 4,985   2,487 / 3,744 / 2,411

Besides, a notification goes with the blocking call only, so it would need a thread for each write; one silent stranger
at the engine's port holds all of them up for 5 s; and it is text. So tags go by `mooncake_tags`. Their order is sound:
the engine calls an entry done once the target has acknowledged that its bytes are in memory.

A tag leaves in the `Write.poll` (or `arrivals` and `progress`, for released writes) that finds its last entry done;
bytes move whatever anybody calls, in threads of the engines.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import secrets
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import ConfigError, TransportError
from kvctl_agent.memory.region import Region
from kvctl_agent.transport.base import Addresses, Arrival, Indices, Prepared, Sizes, check_tag
from kvctl_agent.transport.descriptors import CheckedList, Ranges, merge, pair
from kvctl_agent.transport.mooncake import engine
from kvctl_agent.transport.mooncake.tags import IDENT_BYTES, SECRET_BYTES, Sender, TagLink, TagListener, greeting
from kvctl_agent.transport.mooncake.writes import InFlight, MooncakeWrite, Peer, flush

_MAGIC = b"kvctl-mooncake-1"
_PARAMS = {"protocol": "tcp", "device": "", "host": "127.0.0.1"}
_LINGER_S = 0.2
_EXIT_S = 0.5
_MANY_REGIONS = 1000

_log = logging.getLogger(__name__)


class MooncakeTransport:
    """One Mooncake engine.

    `params`: `protocol` (tcp, rdma, nvlink, nvlink_intra, efa), `device` (RDMA devices to use, joined by +; default
    all), `host` (where peers reach us; by default this host alone can).
    """

    name = "mooncake"

    def __init__(self, agent_name: str, params: Mapping[str, str]) -> None:
        for key in params:
            if key not in _PARAMS:
                raise ConfigError(f"transport_params: mooncake has no parameter {key!r}; allowed: {', '.join(_PARAMS)}")
        given = {**_PARAMS, **params}
        self._protocol = given["protocol"]
        self._host = _numeric(given["host"])
        self._engine = engine.start(self._protocol, given["device"], self._host)
        self._in_flight = InFlight(self._engine)
        self._listener = TagListener(self._host)
        self._agent_name = agent_name
        self._ident = secrets.token_hex(IDENT_BYTES // 2)
        self._closed = False
        self._regions: list[Region] = []
        self._ranges = Ranges(self.name, [])
        self._peers: dict[str, Peer] = {}
        self._keys: dict[str, str] = {}
        self._sessions: dict[str, str] = {}
        self._peers_lock = threading.RLock()
        self._landed: deque[tuple[Sender, bytes]] = deque()

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        if not regions:
            return
        merged = _merged(regions)
        if len(self._regions) + len(merged) > _MANY_REGIONS:
            _log.warning(
                "mooncake: %d regions of memory, and registering takes the square of that: allocate the pool as one "
                "slab",
                len(self._regions) + len(merged),
            )
        self._engine.register(merged)
        self._regions += merged
        self._ranges = Ranges(self.name, self._regions)

    def metadata(self) -> bytes:
        self._check_open()
        told = {
            "ident": self._ident,
            "session": self._engine.session,
            "protocol": self._protocol,
            "tags": [self._host, self._listener.port],
            "secret": self._listener.secret.hex(),
            "regions": self._regions,
        }
        body = json.dumps(told).encode()
        return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body

    def connect(self, peer: str, metadata: bytes) -> None:
        self._check_open()
        with self._peers_lock:
            known = self._peers.get(peer)
            if known is not None and known.metadata == metadata and not known.refused:
                # Only a link that broke, or a session that did not open, is made anew.
                with contextlib.suppress(TransportError):
                    known.link.check_alive()
                    return
            fresh = self._read(peer, metadata)
            self.disconnect(peer)
            self._peers[peer] = fresh
            self._keys[fresh.ident] = peer
            self._sessions[fresh.session] = fresh.ident
        opener = threading.Thread(target=_open, args=(self._engine, fresh), name="mooncake-open", daemon=True)
        _openers.add(opener)
        opener.start()

    def disconnect(self, peer: str) -> None:
        with self._peers_lock:
            known = self._peers.pop(peer, None)
            if known is not None:
                known.forgotten = True
                self._keys.pop(known.ident, None)
                known.link.close()

    def prepare_local(self, addrs: Addresses, sizes: Sizes) -> CheckedList:
        self._check_open()
        self._ranges.check(addrs, sizes, "this agent")
        return CheckedList(addrs, sizes, None)

    def prepare_remote(self, peer: str, addrs: Addresses, sizes: Sizes) -> CheckedList:
        known = self._peer(peer)
        known.ranges.check(addrs, sizes, f"peer {peer!r}")
        return CheckedList(addrs, sizes, known)

    def write(
        self, peer: str, local_addrs: Addresses, remote_addrs: Addresses, sizes: Sizes, tag: bytes | None
    ) -> MooncakeWrite:
        known = self._peer(peer)
        self._ranges.check(local_addrs, sizes, "this agent")
        known.ranges.check(remote_addrs, sizes, f"peer {peer!r}")
        if len(sizes) == 1:
            return self._post(known, 1, (local_addrs, remote_addrs, sizes), tag)
        return self._post(known, len(sizes), merge(local_addrs, remote_addrs, sizes), tag)

    def write_prepared(
        self,
        peer: str,
        local: Prepared,
        local_index: Indices,
        remote: Prepared,
        remote_index: Indices,
        tag: bytes | None,
    ) -> MooncakeWrite:
        known = self._peer(peer)
        arrays = pair(self.name, peer, known, local, local_index, remote, remote_index)
        return self._post(known, len(local_index), arrays, tag)

    def tell(self, peer: str, tag: bytes) -> None:
        self._peer(peer).link.enqueue(check_tag(tag))

    def progress(self) -> None:
        self._check_open()
        self._in_flight.drain_on()
        for peer in list(self._peers.values()):
            flush(peer.link)
        self._listener.collect(self._landed)

    def arrivals(self) -> list[Arrival]:
        self.progress()
        landed: list[Arrival] = []
        with contextlib.suppress(IndexError):
            while True:
                sender, tag = self._landed.popleft()
                landed.append(Arrival(self._keys.get(sender.ident) or sender.name, tag))
        return landed

    def describe(self) -> dict[str, Any]:
        # Over TCP, a GPU's bytes are copied to the host, sent, and copied again.
        through_host = self._protocol == "tcp" and any(region.device != HOST for region in self._regions)
        return {
            "engine": f"mooncake ({self._engine.wheel})",
            "backend": self._protocol,
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
        self._listener.close()
        self._engine.stop()

    def _post(
        self, peer: Peer, descriptors: int, arrays: tuple[Addresses, Addresses, Sizes], tag: bytes | None
    ) -> MooncakeWrite:
        write = MooncakeWrite(self._in_flight, peer, descriptors, arrays, check_tag(tag) if tag is not None else None)
        peer.link.check_alive()
        self._in_flight.post(write)
        return write

    def _read(self, peer: str, metadata: bytes) -> Peer:
        """The peer that `metadata` describes, its link begun."""
        magic, checksum, body = metadata[: len(_MAGIC)], metadata[len(_MAGIC) :][:4], metadata[len(_MAGIC) + 4 :]
        if magic != _MAGIC or checksum != zlib.crc32(body).to_bytes(4, "little"):
            raise TransportError(
                f"mooncake: {len(metadata)} bytes of metadata for peer {peer!r} are not mooncake's or damaged"
            )
        try:
            told = json.loads(body)
            ident, session, protocol = str(told["ident"]), str(told["session"]), str(told["protocol"])
            host, port = str(told["tags"][0]), int(told["tags"][1])
            secret = bytes.fromhex(told["secret"])
            ranges = Ranges(self.name, [Region(*map(int, region)) for region in told["regions"]])
            socket.inet_aton(host)
            if len(ident) != IDENT_BYTES or len(secret) != SECRET_BYTES or not 0 < port < 65536:
                raise ValueError("wrong lengths")
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError, OSError) as error:
            raise TransportError(f"mooncake: the metadata of peer {peer!r} is malformed: {error!r}") from error
        if protocol != self._protocol:
            raise TransportError(f"mooncake: peer {peer!r} speaks {protocol}, this agent {self._protocol}")
        if self._keys.get(ident, peer) != peer:
            raise TransportError(f"mooncake: peer {peer!r} has the metadata of {self._keys[ident]!r}")
        if self._sessions.get(session, ident) != ident:
            raise TransportError(
                f"mooncake: peer {peer!r} has the port of an agent that is gone ({session}), which this engine cannot "
                f"forget: restart that peer"
            )
        link = TagLink(f"peer {peer!r}", (host, port), greeting(secret, self._ident, self._agent_name))
        return Peer(peer, metadata, ident, session, ranges, link)

    def _peer(self, peer: str) -> Peer:
        self._check_open()
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"mooncake: peer {peer!r} is not connected")
        return known

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("mooncake: the transport is closed")


_openers: set[threading.Thread] = set()


def _open(engine: engine.Engine, peer: Peer) -> None:
    """Makes the peer's session known to the engine; however long that takes, nobody waits here."""
    try:
        peer.refused = engine.open(peer.session)
    except AttributeError:  # the engine was stopped meanwhile
        peer.refused = "the transport was closed"
    finally:
        _openers.discard(threading.current_thread())
    peer.opened = not peer.refused


@atexit.register
def _let_openers_end() -> None:
    """A thread that comes back from the engine while Python ends takes the process down (SIGABRT)."""
    deadline = time.monotonic() + _EXIT_S
    for thread in list(_openers):
        thread.join(max(0.0, deadline - time.monotonic()))


def _numeric(host: str) -> str:
    """The address of `host`: peers must not have to look it up in the middle of a transfer."""
    try:
        addr = socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"transport_params: mooncake: no address for host {host!r}: {error}") from error
    if addr == "0.0.0.0":
        raise ConfigError("transport_params: mooncake: host is where peers reach us; 0.0.0.0 is nowhere")
    return addr


def _merged(regions: Sequence[Region]) -> list[Region]:
    """The regions in order, neighbours joined."""
    merged: list[Region] = []
    for region in sorted(regions):
        last = merged[-1] if merged else None
        if last is not None and last.addr + last.nbytes == region.addr and last.device == region.device:
            merged[-1] = Region(last.addr, last.nbytes + region.nbytes, last.device)
        else:
            merged.append(region)
    return merged
