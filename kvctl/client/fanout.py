"""Sends requests to many agents at once from one thread: a DEALER socket per agent, one poller, one deadline.

Requests to one agent are pipelined, so that a command takes one round trip. Replies are matched by request id; a reply
after the deadline is recognised and dropped. The first error of a TCP connection fails all requests on it: otherwise an
agent that rejects the client's key would look like an agent that hangs.
"""

from __future__ import annotations

import errno
import itertools
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import orjson
import zmq

from kvctl.client.calls import Call
from kvctl.client.endpoints import Endpoint, probe, stopped_pid
from kvctl.client.faults import Fault, FaultCode, stopped
from kvctl.client.keys import NO_KEYS, ClientKeys, KeyNames
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.admin import MAGIC, MAX_REPLY_BYTES, ErrorCode
from kvctl_agent.contract.sockets import shortage

# libzmq keeps a mailbox, a connection and, while it connects, a timer's worth of descriptors per socket.
_DESCRIPTORS_PER_SOCKET = 4
_DESCRIPTORS_OF_KVCTL = 64
_DESCRIPTORS_OF_ZMQ = 8  # per context; libzmq aborts if it gets only some of them
_SILENCE_MS = 100  # without any answer, after which agents are checked for having ended
_HANDSHAKE_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True, slots=True)
class Reply:
    """Outcome of one request: `data`, or a `fault` instead.

    Attributes:
        sent_at_ns, received_at_ns: local wall clock, from which the clock offset is estimated.
        rtt_ns: round trip by the monotonic clock.
    """

    endpoint: Endpoint
    call: Call
    data: Any
    fault: Fault | None
    sent_at_ns: int
    received_at_ns: int
    rtt_ns: int


@dataclass(slots=True)
class _Pending:
    index: int
    endpoint: Endpoint
    call: Call
    sent_at_ns: int
    started_ns: int


class _Handshake:
    """Monitors the connection of one TCP socket, because libzmq retries for ever without reporting errors.

    Args:
        watched: a socket that is not connected yet.
        keys: keys of the connection, for error texts.

    Attributes:
        socket: the monitor socket; readable when `error` has events to read.
    """

    def __init__(self, watched: zmq.Socket[bytes], keys: ClientKeys) -> None:
        self._watched = watched
        self._keys = keys
        self._connected = False
        self.socket: zmq.Socket[bytes] = watched.get_monitor_socket(_HANDSHAKE_EVENTS)

    def error(self) -> tuple[FaultCode, str] | None:
        """Reads the monitor's events; returns the code and text of the first error, or None."""
        from zmq.utils.monitor import recv_monitor_message  # imports asyncio, which local agents do not need

        while self.socket.poll(0):
            if (error := self._error_of(recv_monitor_message(self.socket)["event"])) is not None:
                return error
        return None

    def close(self) -> None:
        """Ends the monitoring; call before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)

    def _error_of(self, event: int) -> tuple[FaultCode, str] | None:
        match event:
            case zmq.EVENT_CONNECTED:
                self._connected = True
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                key = self._keys.own.public.hex()
                return (
                    FaultCode.NOT_PERMITTED,
                    f"refuses this client's key {key}: it is not in the agent's admin_clients",
                )
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                return FaultCode.PROTOCOL, "uses ZMQ without keys: it is not an admin_endpoint"
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                key = self._keys.server.hex()
                text = f"closed the connection: its fleet_key is not {key} (--server-key), or it is not an agent"
                return FaultCode.NOT_PERMITTED, text
            case zmq.EVENT_DISCONNECTED:
                return FaultCode.UNREACHABLE, "closed the connection: the agent has ended, or closed its admin_endpoint"
            case zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED if not self._connected:
                return FaultCode.UNREACHABLE, "nobody listens there: is the agent running, with this admin_endpoint?"
        return None


class Fanout:
    """Sends requests to agents over sockets that stay open between requests; a context manager."""

    def __init__(self, keys: KeyNames = NO_KEYS) -> None:
        self._context = zmq.Context()
        self._key_names = keys
        self._keys: ClientKeys | None = None
        self._handshakes: dict[Endpoint, _Handshake] = {}
        self._sockets: dict[Endpoint, zmq.Socket[bytes]] = {}
        self._ids = itertools.count(1)

    def __enter__(self) -> Fanout:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for endpoint in list(self._sockets):
            self.forget(endpoint)
        self._context.term()

    def forget(self, endpoint: Endpoint) -> None:
        """Closes the socket to `endpoint`, if there is one; the next request opens a new one."""
        if endpoint in self._handshakes:
            self._handshakes.pop(endpoint).close()
        if endpoint in self._sockets:
            self._sockets.pop(endpoint).close(linger=0)

    def ask(self, requests: Sequence[tuple[Endpoint, Call]], timeout_ns: int) -> list[Reply]:
        """Sends all requests and waits for the replies for at most `timeout_ns`.

        Returns:
            One reply per request, in the order of the requests; if an agent fails, its reply has a fault.

        Raises:
            CliError: a key for an agent on TCP is missing or unusable, an address is invalid, or too few file
                descriptors are available.
        """
        replies: dict[int, Reply] = {}
        pending: dict[bytes, _Pending] = {}
        poller = zmq.Poller()
        self._raise_descriptor_limit({endpoint for endpoint, _ in requests})
        for index, (endpoint, call) in enumerate(requests):
            request_id = b"%d" % next(self._ids)
            body = orjson.dumps({"cmd": call.command, "args": call.args})
            waiting = _Pending(index, endpoint, call, time.time_ns(), time.monotonic_ns())
            socket = self._socket(endpoint)
            try:
                socket.send_multipart([MAGIC, request_id, body], flags=zmq.NOBLOCK)
            except zmq.Again:
                replies[index] = _fault_reply(waiting, FaultCode.TIMEOUT, "its queue is full of unanswered requests")
                continue
            pending[request_id] = waiting
            poller.register(socket, zmq.POLLIN)
        by_socket = {socket: endpoint for endpoint, socket in self._sockets.items()}
        watched = {handshake.socket: (endpoint, handshake) for endpoint, handshake in self._handshakes.items()}
        for monitor in watched:
            poller.register(monitor, zmq.POLLIN)
        deadline = time.monotonic_ns() + timeout_ns
        while pending and (left_ns := deadline - time.monotonic_ns()) > 0:
            ready = poller.poll(min(left_ns // 1_000_000 + 1, _SILENCE_MS))
            if not ready:
                for endpoint in {waiting.endpoint for waiting in pending.values()}:
                    if (fault := _ended_or_stopped(endpoint)) is not None:
                        self._fail_pending(endpoint, fault.code, fault.message, pending, replies)
            for socket, _ in ready:
                if socket in by_socket:
                    self._drain(socket, by_socket[socket], pending, replies)
                    continue
                endpoint, handshake = watched[socket]
                if (error := handshake.error()) is not None:
                    self._fail_pending(endpoint, *error, pending, replies)
                    for each in (socket, self._sockets[endpoint]):
                        if each in poller:
                            poller.unregister(each)
                    self.forget(endpoint)
        for waiting in pending.values():
            replies[waiting.index] = _reply(waiting, None, _timeout_fault(waiting.endpoint, timeout_ns))
        return [replies[index] for index in range(len(requests))]

    def _socket(self, endpoint: Endpoint) -> zmq.Socket[bytes]:
        socket = self._sockets.get(endpoint)
        if socket is None:
            if endpoint.remote and self._keys is None:
                self._keys = self._key_names.load(endpoint.remote)
            socket = self._sockets[endpoint] = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            if endpoint.remote and self._keys is not None:
                self._keys.apply(socket)
                self._handshakes[endpoint] = _Handshake(socket, self._keys)
                socket.ipv6 = "[" in endpoint.remote
            try:
                socket.connect(endpoint.address)
            except zmq.ZMQError as error:
                raise CliError(f"{endpoint.address}: {error.strerror}", ExitCode.USAGE) from None
        return socket

    def _raise_descriptor_limit(self, endpoints: set[Endpoint]) -> None:
        """Raises the soft limit of file descriptors if sockets to `endpoints` need more than it allows.

        The usual limit of a shell, 1,024, suffices for about 250 agents.

        Raises:
            CliError: too few file descriptors are available.
        """
        wanted = len(endpoints | self._sockets.keys()) * _DESCRIPTORS_PER_SOCKET + _DESCRIPTORS_OF_KVCTL
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        new = len(endpoints - self._sockets.keys())
        if new and (text := shortage(new * _DESCRIPTORS_PER_SOCKET + _DESCRIPTORS_OF_ZMQ)) is not None:
            raise CliError(f"kvctl cannot ask {new} agents: {text}")

    def _drain(
        self,
        socket: zmq.Socket[bytes],
        endpoint: Endpoint,
        pending: dict[bytes, _Pending],
        replies: dict[int, Reply],
    ) -> None:
        while True:
            try:
                frames = socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or frames[0] != MAGIC:
                text = f"speaks another protocol than {MAGIC.decode()}: first frame {frames[0][:16]!r}"
                self._fail_pending(endpoint, FaultCode.PROTOCOL, text, pending, replies)
                continue
            answered = pending.pop(frames[1], None)
            if answered is not None:
                replies[answered.index] = _decoded(answered, frames[2])

    def _fail_pending(
        self,
        endpoint: Endpoint,
        code: str,
        text: str,
        pending: dict[bytes, _Pending],
        replies: dict[int, Reply],
    ) -> None:
        """Ends all pending requests to `endpoint` with a fault of this code and text."""
        for request_id in [key for key, each in pending.items() if each.endpoint == endpoint]:
            waiting = pending.pop(request_id)
            replies[waiting.index] = _fault_reply(waiting, code, text)


def _decoded(waiting: _Pending, body: bytes) -> Reply:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return _fault_reply(waiting, FaultCode.PROTOCOL, f"its answer to {waiting.call.command} is not JSON: {error}")
    match answer:
        case {"ok": True, "data": data}:
            return _reply(waiting, data, None)
        case {"ok": False, "error": {"code": str(code), "message": str(message)}}:
            return _fault_reply(waiting, code, message)
    text = f"its answer to {waiting.call.command} has neither data nor an error"
    return _fault_reply(waiting, ErrorCode.PROTOCOL, text)


def _ended_or_stopped(endpoint: Endpoint) -> Fault | None:
    """Returns the fault of a local agent whose process has ended or is stopped; None otherwise."""
    if endpoint.path is None:
        return None
    if (pid := stopped_pid(endpoint.path)) is not None:
        return stopped(endpoint.name, pid)
    if probe(endpoint.path) in (errno.ECONNREFUSED, errno.ENOENT):
        return Fault(endpoint.name, FaultCode.UNREACHABLE, "its process ended before it answered")
    return None


def _timeout_fault(endpoint: Endpoint, timeout_ns: int) -> Fault:
    text = f"no answer within {timeout_ns / 1e9:g} s: the process hangs, or raise --timeout"
    return _ended_or_stopped(endpoint) or Fault(endpoint.name, FaultCode.TIMEOUT, text)


def _fault_reply(waiting: _Pending, code: str, message: str) -> Reply:
    return _reply(waiting, None, Fault(waiting.endpoint.name, str(code), message))


def _reply(waiting: _Pending, data: Any, fault: Fault | None) -> Reply:
    return Reply(
        waiting.endpoint,
        waiting.call,
        data,
        fault,
        waiting.sent_at_ns,
        time.time_ns(),
        time.monotonic_ns() - waiting.started_ns,
    )
