"""Writes whose requests native code makes, posts and polls, without the GIL (`kvctl_agent/native/nixl_requests.cpp`).

Every call of NIXL's binding releases the GIL and takes it again. Beside an engine's thread that runs Python each of
them may wait for it for 5 ms, and Python threads that post wait for each other. Here the threads of the copy pool make
and post the requests of a write, on path staged each as soon as its piece is gathered, while the piece is in the cache
of that core.

Native code calls C++ functions of NIXL by their names, and depends on how NIXL lays out its options and lists. It was
written for NIXL 1.5; with another version, or another build whose functions are not found, the transport posts through
the binding (`nixl.requests`), and the agent says so in its log of events.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from kvctl_agent.errors import PeerDisconnected, TransportError
from kvctl_agent.memory.copier import PendingCopy
from kvctl_agent.memory.host_copier import CopyPool
from kvctl_agent.native import nixl_requests
from kvctl_agent.transport.base import Addresses, Sizes
from kvctl_agent.transport.nixl.binding import Engine, status_error, translate
from kvctl_agent.transport.nixl.requests import NO_PTRACE, InFlight, Peer


class Described(NamedTuple):
    """Descriptors of a write.

    Attributes:
        devices: Device of the local and of the remote memory.
    """

    local: Addresses
    remote: Addresses
    sizes: Sizes
    devices: tuple[int, int]


UNLIMITED_NS = (1 << 63) - 1
"""A time limit that never passes."""

_VERSION = "1.5."
_CAPI = "libnixl_capi.so"
_ABI = re.compile(rb"__pybind11_internals_v\d+_([a-z0-9_]*abi[a-z0-9_]*?)__\0")


def open_library(engine: Engine) -> nixl_requests.Library:
    """Returns NIXL's functions for the engine's agent.

    Raises:
        TransportError: native code cannot call this NIXL; the text names its version and what is missing.
    """

    def refused(why: str) -> TransportError:
        return TransportError(f"NIXL {engine.version} {why}; kvctl calls NIXL 1.5 natively: pip install 'nixl~=1.5.0'")

    if not engine.version.startswith(_VERSION):
        raise refused("is another version")
    file = Path(getattr(engine.binding, "__file__", ""))
    abi = _ABI.search(file.read_bytes()) if file.is_file() else None
    if abi is None:
        raise refused("has a binding that is not built with pybind11")
    capi = file.parents[1] / f".{file.parent.name}.mesonpy.libs" / _CAPI
    if not capi.is_file():
        raise refused(f"has no {_CAPI} beside its binding")
    try:
        return nixl_requests.Library(str(capi), abi[1], engine.agent)
    except (OSError, AttributeError) as error:  # AttributeError: its pybind11 has no conduit
        raise refused(f"cannot be called ({error})") from error


class NativeWrite:
    """A write of one or more requests that native code posts, as a `DeferredWrite`.

    It ends when all requests have ended; if one fails, the others may still be in flight until then.
    """

    def __init__(
        self,
        in_flight: InFlight,
        engine: Engine,
        peer: Peer,
        requests: nixl_requests.WriteRequests,
        nbytes: int,
        ends: list[int],
    ) -> None:
        """Creates a write, which is in flight until it ends; request i ends before descriptor ends[i]."""
        self.bytes = nbytes
        self.descriptors = ends[-1]
        self.peer = peer
        self.error: TransportError | None = None
        self._running: PendingCopy | None = None
        self._in_flight = in_flight
        self._engine = engine
        self._requests: nixl_requests.WriteRequests | None = requests
        self._count = len(ends)
        in_flight.add(self)

    @property
    def then(self) -> object:
        assert self._requests is not None
        return self._requests.then

    @property
    def skipped(self) -> bool:
        return self._requests is not None and self._requests.skipped

    @property
    def post_ns(self) -> int:
        return 0 if self._requests is None else self._requests.post_ns

    def post(self) -> None:
        """Posts the requests on this thread.

        Raises:
            PeerDisconnected, TransportError: a post failed.
        """
        assert self._requests is not None
        self._engine.enter()
        self._requests.post(self.peer.reached)
        if self._requests.error and self.advance():
            assert self.error is not None
            raise self.error

    def run_on(self, copy_pool: CopyPool) -> None:
        """Posts the requests on the threads of a copy pool."""
        assert self._requests is not None
        self._running = copy_pool.run(self._count, self)

    def resume(self, until_ns: int) -> None:
        if self._requests is not None:
            self._requests.resume(until_ns)

    def stop(self) -> None:
        if self._requests is not None:
            self._requests.stop()

    def poll(self) -> bool:
        if not self.advance():
            return False
        if self.error is not None:
            raise self.error
        return True

    def release(self) -> bool:
        return self._in_flight.drain(self)

    def advance(self) -> bool:
        """Polls the requests and returns whether all have ended; the first failure is in `error`."""
        requests = self._requests
        if requests is None:
            return True
        self._engine.enter()
        ended, status = requests.poll(), requests.error
        if status:
            self.error = self.error or self._translated(status)
        elif requests.post_ns:
            self.peer.reached = True
        if ended and self.error is None and requests.unposted:
            self.error = PeerDisconnected(f"nixl: a write to peer {self.peer.key!r} was stopped before all was posted")
        if ended:
            self.close()
        return ended

    def close(self) -> None:
        """Ends the write: nothing of it is posted or polled any more."""
        self.stop()
        self._running = None  # waits for a thread that posts
        self._requests = None
        self._in_flight.discard(self)

    def _translated(self, status: int) -> TransportError:
        # If the kernel denies UCX the copy between processes, UCX reports a disconnect instead of falling back.
        what = "a write failed" if self.peer.reached else f"the first write failed{NO_PTRACE}"
        error: Any = status_error(self._engine, status)
        translated = translate(self._engine, error, what, self.peer.key, self.peer.engine_name)
        self.peer.gone = self.peer.gone or isinstance(translated, PeerDisconnected)
        return translated
