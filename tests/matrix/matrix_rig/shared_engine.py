"""One engine for all ranks of a process: an engine takes half a second to start, a facade nothing.

Each rank gets a `Facade`, which is a transport. The ranks share the engine, its registered memory and its connections;
each rank has its own connections to peers, tags and lists. A tag contains the number of the receiving rank and the name
of the sender, so that any rank that polls the engine distributes the arrivals to all ranks.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, NoReturn

from kvctl_agent.errors import PeerDisconnected, TransportError
from kvctl_agent.memory.region import Region
from kvctl_agent.native import Turns
from kvctl_agent.transport.base import Addresses, Arrival, SharedTag, Sizes, Transport, Write

_MAGIC = b"shared"
_ADDRESS = struct.Struct("<6s16sIH")  # magic, the engine's name, the rank's number, length of the rank's name
_ENVELOPE = struct.Struct("<IIH")  # the receiving rank's number, the sender's, length of the sender's name


class Address(NamedTuple):
    """Contents of a facade's metadata."""

    engine: str
    number: int
    name: str
    metadata: bytes


class SharedEngine:
    """A real transport and its facades.

    Args:
        transport: the engine; closed with this.
        name: 16 characters, unique per engine.
        regions: memory that contains all facades' memory; registered once.
    """

    def __init__(self, transport: Transport, name: str, regions: Sequence[Region]) -> None:
        assert len(name.encode()) == 16
        self.transport = transport
        self.name = name
        self._regions = list(regions)
        self._lock = threading.RLock()  # names, numbers and connections
        self._asking = threading.Lock()  # one thread at a time sorts arrivals; others find theirs sorted
        self._numbers = count()
        self._facades: dict[int, Facade] = {}
        self._users: dict[str, int] = {}  # facades connected to each engine
        transport.register(self._regions)
        self.metadata = transport.metadata()

    def open(self, agent_name: str, params: Mapping[str, str], *unused: Any) -> Facade:
        """Creates a facade for one rank; registered as a transport."""
        with self._lock:
            number = next(self._numbers)
            facade = self._facades[number] = Facade(self, number, agent_name)
        return facade

    def close(self) -> None:
        """Closes the engine; all facades have been closed."""
        self.transport.close()

    def covers(self, region: Region) -> bool:
        """Whether a rank's memory lies in the registered regions."""
        return any(
            each.addr <= region.addr and region.addr + region.nbytes <= each.addr + each.nbytes
            for each in self._regions
        )

    def join(self, address: Address) -> None:
        """Counts one more facade connected to a rank of that engine."""
        with self._lock:
            if not self._users.get(address.engine):
                self.transport.connect(address.engine, address.metadata)
            self._users[address.engine] = self._users.get(address.engine, 0) + 1

    def part(self, address: Address) -> None:
        """Counts one facade less; the last one frees what the engine holds for that peer."""
        with self._lock:
            self._users[address.engine] -= 1
            if not self._users[address.engine]:
                self.transport.disconnect(address.engine)

    def forget(self, number: int) -> None:
        with self._lock:
            self._facades.pop(number, None)

    def sort_arrivals(self) -> None:
        """Polls the engine for tags and passes each to its rank; tags for a rank that is gone are dropped."""
        if not self._asking.acquire(blocking=False):
            return
        try:
            for arrival in self.transport.arrivals():
                to, sender, size = _ENVELOPE.unpack_from(arrival.tag)
                body = arrival.tag[_ENVELOPE.size :]
                facade = self._facades.get(to)
                if facade is not None:
                    known = facade.known_as(arrival.peer, sender)
                    facade.landed.append(Arrival(known or body[:size].decode(), body[size:]))
        finally:
            self._asking.release()


class Facade:
    """One rank's transport; `number` is unique within its engine."""

    def __init__(self, engine: SharedEngine, number: int, agent_name: str) -> None:
        self.landed: deque[Arrival] = deque()
        self._engine = engine
        self._number = number
        self._agent_name = agent_name.encode()
        self._peers: dict[str, tuple[bytes, Address]] = {}
        self._closed = False

    @property
    def name(self) -> str:
        return self._engine.transport.name

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        for region in regions:
            if not self._engine.covers(region):
                raise TransportError(f"{region} lies outside the memory that this process shares")

    def metadata(self) -> bytes:
        self._check_open()
        address = _ADDRESS.pack(_MAGIC, self._engine.name.encode(), self._number, len(self._agent_name))
        return address + self._agent_name + self._engine.metadata

    def connect(self, peer: str, metadata: bytes) -> None:
        self._check_open()
        if peer in self._peers and self._peers[peer][0] == metadata:
            return
        address = _address(metadata)
        self.disconnect(peer)
        self._engine.join(address)
        self._peers[peer] = metadata, address

    def disconnect(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            self._engine.part(known[1])

    def ended(self, metadata: bytes) -> None:
        self._engine.transport.ended(_address(metadata).metadata)

    def share_tag(self, tag: bytes, descriptors: int) -> None:
        """The ranks of all cases share one engine, whose tags name the rank: none is shared."""

    def defers(self, peer: str) -> bool:
        """As tags are not shared, every write is made by `write`, which seals its tag."""
        return False

    def defer_write(self, *write: Any) -> NoReturn:
        raise TransportError("there are no deferred writes")

    def write(
        self, peer: str, local_addrs: Addresses, remote_addrs: Addresses, sizes: Sizes, tag: bytes | SharedTag | None
    ) -> Write:
        to = self._address(peer)
        assert not isinstance(tag, SharedTag)
        write = self._engine.transport.write(to.engine, local_addrs, remote_addrs, sizes, self._sealed(to, tag))
        return _FacadeWrite(self, peer, to, write)

    def tell(self, peer: str, tag: bytes) -> None:
        to = self._address(peer)
        sealed = self._sealed(to, tag)
        assert sealed is not None
        self._engine.transport.tell(to.engine, sealed)

    def progress(self) -> None:
        self._check_open()
        self._engine.sort_arrivals()

    def arrivals(self) -> list[Arrival]:
        self.progress()
        return [self.landed.popleft() for _ in range(len(self.landed))]

    def wait_for_tags(self, polled: ctypes.Array[Any], turns: Turns, timeout_s: float, pause_s: float) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return self._engine.transport.describe()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers):
            self.disconnect(peer)
        self._engine.forget(self._number)

    def known_as(self, engine: str, number: int) -> str | None:
        """Returns the name under which this rank is connected to a rank of another engine."""
        for peer, (_, address) in list(self._peers.items()):
            if (address.engine, address.number) == (engine, number):
                return peer
        return None

    def still(self, peer: str, address: Address) -> bool:
        """Whether `peer` is still connected as before."""
        known = self._peers.get(peer)
        return known is not None and known[1] is address

    def _sealed(self, to: Address, tag: bytes | None) -> bytes | None:
        if tag is None:
            return None
        return _ENVELOPE.pack(to.number, self._number, len(self._agent_name)) + self._agent_name + tag

    def _address(self, peer: str) -> Address:
        self._check_open()
        if peer not in self._peers:
            raise TransportError(f"peer {peer!r} is not connected")
        return self._peers[peer][1]

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the transport is closed")


class _FacadeWrite:
    """A write of the engine that ends with an error if its rank has disconnected the peer."""

    def __init__(self, facade: Facade, peer: str, to: Address, write: Write) -> None:
        self.bytes = write.bytes
        self.descriptors = write.descriptors
        self._facade, self._peer, self._to, self._write = facade, peer, to, write

    def poll(self) -> bool:
        if self._write.poll():
            return True
        if not self._facade.still(self._peer, self._to):
            raise PeerDisconnected(f"peer {self._peer!r} was disconnected")
        return False

    def release(self) -> bool:
        return self._write.release()


def _address(metadata: bytes) -> Address:
    if len(metadata) < _ADDRESS.size:
        raise TransportError(f"{len(metadata)} bytes are no metadata of a shared engine")
    magic, engine, number, size = _ADDRESS.unpack_from(metadata)
    if magic != _MAGIC:
        raise TransportError("the metadata is not that of a shared engine")
    rest = metadata[_ADDRESS.size :]
    return Address(engine.decode(), number, rest[:size].decode(), rest[size:])
