"""CURVE authentication: the fleet's key pair, the permitted admin clients, and the ZAP authenticator.

The agents of a fleet share one key pair, which can be distributed with the rest of a job's configuration. With a key
pair per rank, a rank would need its peers' public keys, but it learns of its peers only from the registry, whose socket
is encrypted with the same key.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq
from zmq.utils import z85

from kvctl_agent.contract.commands import Level
from kvctl_agent.errors import ConfigError
from kvctl_agent.host.keys import Client, KeyFileError, KeyPair, read_clients, read_pair
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.metrics import Counters

DOMAIN = b"kvctl"
REGISTRY_DOMAIN = b"kvctl-registry"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_FRAMES = 7  # version, request id, domain, address, identity, mechanism, public key
_REPORT_INTERVAL_NS = 60_000_000_000


def load_fleet_key(path: str) -> KeyPair | None:
    """Loads the fleet's key pair from a file; returns None if `path` is empty.

    Raises:
        ConfigError: the file named by `fleet_key` cannot be used, or libzmq was built without CURVE.
    """
    if not path:
        return None
    if not zmq.has("curve"):
        raise ConfigError("fleet_key needs libzmq with CURVE, but the installed one lacks it: pip install pyzmq")
    try:
        pair = read_pair(Path(path).expanduser())
    except KeyFileError as error:
        raise ConfigError(f"fleet_key: {error}") from None
    if _public_of(pair) != pair.public:
        raise ConfigError(f"fleet_key: the two keys in {path} are not a pair: create a new one with kvctl key new")
    return pair


def configure_server(socket: zmq.Socket[bytes], pair: KeyPair | None, domain: bytes = DOMAIN) -> None:
    """Makes an unbound socket accept only clients that the context's ZAP authenticator admits to `domain`.

    Does nothing if `pair` is None.
    """
    if pair is None:
        return
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)


def configure_client(socket: zmq.Socket[bytes], pair: KeyPair | None) -> None:
    """Makes an unconnected socket authenticate with the fleet's key pair, and require the same key of the server.

    Does nothing if `pair` is None.
    """
    if pair is None:
        return
    socket.setsockopt(zmq.CURVE_SERVERKEY, pair.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)


def _public_of(pair: KeyPair) -> bytes:
    return z85.decode(zmq.curve_public(z85.encode(pair.secret)))


class Clients:
    """Clients permitted on an admin endpoint, from a client file that is read again when it changes. Thread-safe."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        """Reads the client file.

        Args:
            path: the client file.
            complain: called with an error text, once per change, if the changed file cannot be used.

        Raises:
            KeyFileError: the file cannot be used.
        """
        self._path = path
        self._complain = complain
        self._lock = threading.Lock()
        self._version = self._file_version()
        self._known: Mapping[bytes, Client] = read_clients(path)

    def level(self, public: bytes) -> Level | None:
        """Returns the level of the client with this public key; None if it is not listed."""
        with self._lock:
            version = self._file_version()
            if version != self._version:
                self._version = version
                self._known = self._read_again()
            client = self._known.get(public)
        return client.level if client is not None else None

    def _read_again(self) -> Mapping[bytes, Client]:
        try:
            return read_clients(self._path)
        except KeyFileError as error:
            self._complain(f"{error}; no client is accepted until the file is corrected")
            return {}

    def _file_version(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)


def load_clients(path: str, complain: Callable[[str], None]) -> Clients | None:
    """Loads a client file; returns None if `path` is empty. Arguments as for `Clients`.

    Raises:
        ConfigError: the file named by `admin_clients` cannot be used.
    """
    if not path:
        return None
    try:
        return Clients(Path(path).expanduser(), complain)
    except KeyFileError as error:
        raise ConfigError(f"admin_clients: {error}") from None


class RefusedConnections:
    """Counts refused connections, and records at most one per minute so as not to fill the flight recorder."""

    def __init__(self, metrics: Counters, recorder: FlightRecorder) -> None:
        self._metrics = metrics
        self._recorder = recorder
        self._reported_ns = -_REPORT_INTERVAL_NS
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        """Counts one refused connection; `text` describes it."""
        self._metrics.add("kvctl_connections_refused_total", 1)
        now = time.monotonic_ns()
        with self._lock:
            if now - self._reported_ns < _REPORT_INTERVAL_NS:
                return
            self._reported_ns = now
        self._recorder.record("security", text, "warning")


class ZapAuthenticator:
    """Thread that decides which CURVE clients may connect to the sockets of one ZMQ context (ZAP, ZeroMQ RFC 27).

    Without an authenticator libzmq accepts every key. Call `close` before the context is terminated. Messages of an
    accepted client have its public key, in hexadecimal digits, as their `User-Id`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        admits: Callable[[bytes, bytes], bool],
        refused: Callable[[str], None],
    ) -> None:
        """Starts the thread.

        Args:
            context: context of the sockets to protect; the caller terminates it after `close`.
            name: name of the thread.
            admits: returns whether a public key is accepted, given the key and the ZAP domain of the socket; runs on
                the authenticator's thread.
            refused: called with a description of each refused client, on the authenticator's thread.
        """
        self._admits = admits
        self._refused = refused
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread; idempotent."""
        if self._wake < 0:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._wake = -1

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while self._wake not in (ready := dict(poller.poll())):
                if self._socket in ready:
                    self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:  # the context was terminated before `close`
            pass
        finally:
            self._socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        version, request = frames[0], frames[1]
        key, address = frames[-1], frames[3].decode("ascii", "replace")
        try:
            admitted = len(frames) == _ZAP_FRAMES and frames[5] == b"CURVE" and self._admits(key, frames[2])
            reason = f"key {key.hex()} is not permitted"
        except Exception as error:
            # An error refuses this client; later requests are answered as usual.
            admitted, reason = False, f"{type(error).__name__}: {error}"
        if admitted:
            return [version, request, b"200", b"OK", key.hex().encode(), b""]
        self._refused(f"refused a client at {address or 'ipc'}: {reason}")
        return [version, request, b"400", b"not permitted", b"", b""]
