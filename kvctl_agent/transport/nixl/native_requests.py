"""Writes whose requests native code makes, posts and polls: the form of `nixl.requests` that does not need the GIL.

Every call of NIXL's binding releases the GIL and takes it again. Beside an engine's thread that runs Python each of
them may wait for it for 5 ms, and Python threads that post wait for each other. Here the threads of the native copy
pool make and post the requests of a write (`_requests.cpp`), on path staged each as soon as its piece is gathered,
while the piece is in the cache of that core.

The extension is optional, as that of the copies is, and knows NIXL 1.5 only. Without it, or with another version, the
transport uses the binding.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from kvctl_agent.errors import PeerDisconnected, TransportError
from kvctl_agent.memory.copier import PendingCopy
from kvctl_agent.memory.native_copier import NativeCopyPool
from kvctl_agent.transport.base import Addresses, Sizes
from kvctl_agent.transport.nixl.binding import Engine, status_error, translate
from kvctl_agent.transport.nixl.requests import NO_PTRACE, InFlight, Peer

try:
    from kvctl_agent.transport.nixl import _requests

    Library, WriteRequests = _requests.Library, _requests.WriteRequests
except (ImportError, AttributeError):  # not built, or built by an earlier version
    BUILT = False
else:
    BUILT = True


class Described(NamedTuple):
    """Descriptors of a write.

    Attributes:
        local, remote: Addresses.
        sizes: Bytes of each descriptor.
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


def open_library(engine: Engine) -> _requests.Library | None:
    """Returns NIXL's functions for the engine's agent; None if this NIXL cannot be called without its binding."""
    if not BUILT or not engine.version.startswith(_VERSION):
        return None
    file = Path(getattr(engine.binding, "__file__", ""))
    if not file.is_file():
        return None
    abi = _ABI.search(file.read_bytes())
    capi = file.parents[1] / f".{file.parent.name}.mesonpy.libs" / _CAPI
    if abi is None or not capi.is_file():
        return None
    try:
        return Library(str(capi), abi[1], engine.agent)
    except OSError:
        return None


class NativeWrite:
    """A write of one or more requests that native code posts, as a `DeferredWrite`.

    It ends when all requests have ended; if one fails, the others may still be in flight until then.
    """

    def __init__(
        self,
        in_flight: InFlight,
        engine: Engine,
        peer: Peer,
        requests: _requests.WriteRequests,
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
        self._requests: _requests.WriteRequests | None = requests
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

    def run_on(self, copy_pool: NativeCopyPool) -> None:
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
