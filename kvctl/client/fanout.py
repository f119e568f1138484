"""Sends requests to many agents at once from one thread: one ROUTER socket for all agents, one poller.

Each agent is a connection of that socket, addressed by a routing id of ours, so that an agent costs one file descriptor
and a poll costs the same for one agent as for a thousand. Agents on TCP share a second socket, which has the keys.
Agents of an observer that was asked for its agents (`Fanout.use_observer`) share one connection, that of the observer,
and one message has the requests to many of them, or their replies.

Requests to one agent are pipelined, so that a command takes one round trip. Agents are asked in a sliding window: an
agent leaves it when it has answered or has been silent for a while, so that the silence of some delays nobody else's
answer, and each has the whole time limit from its own request on. Replies are matched by request id; a reply after the
deadline is recognised and dropped. The first error of a TCP connection fails all requests on it: otherwise an agent
that rejects the client's key would look like an agent that hangs.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import zmq

from kvctl.client.calls import Call
from kvctl.client.endpoints import Endpoint, agent_pid, listener_pid, probe, stopped_pid
from kvctl.client.faults import Fault, FaultCode, stopped, timed_out
from kvctl.client.keys import NO_KEYS, ClientKeys, KeyNames
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.addresses import parse_endpoint
from kvctl_agent.contract.admin import MAGIC, MAX_REPLY_BYTES, OBSERVER_SOCKET, RELAY_SOCKET, ErrorCode
from kvctl_agent.host import resolver
from kvctl_agent.host.sockets import UntrustedPathError, shortage

_DESCRIPTORS_OF_KVCTL = 64
_DESCRIPTORS_OF_ZMQ = 16  # context, sockets and monitor; libzmq aborts if it gets only some of them
_WINDOW = 256  # agents that have been asked and are expected to answer soon; bounds the replies that wait to be read
_EXPECTED_NS = 250_000_000  # an agent that takes longer leaves the window, and others are asked
_HIGH_WATER = 1000  # replies over one connection that wait to be read
_HELLO = Call("hello")
_NAMES_NS = 1_000_000_000  # for an observer to name its agents
SHORTEST_PAUSE_NS = 1_000_000_000
LONGEST_PAUSE_NS = 16_000_000_000
"""Bounds of the pauses after which a silent agent or observer is asked again."""
_FRAME_OF_BATCH = 1024  # bytes: more than a reply of an observer has besides that of its agent
_RECENT_NS = 10_000_000_000  # for which an address of a host name is used again
_LOOK_UP_MS = 5
_SILENCE_MS = 100  # without any answer, after which agents are checked for having ended
# As integers: send_multipart combines enumerations for each part, which takes half of the time of sending.
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)
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
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
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
class _Flight:
    """Requests to one agent: the ids of those without a reply, and whether and until when it is in the window."""

    endpoint: Endpoint
    left: set[bytes]
    expected_until_ns: int
    expected: bool = True


@dataclass(slots=True)
class _Pending:
    """A request without a reply; `carrier` is the agent or the observer whose connection it takes."""

    index: int
    flight: _Flight
    carrier: Endpoint
    call: Call
    sent_at_ns: int
    started_ns: int

    @property
    def endpoint(self) -> Endpoint:
        return self.flight.endpoint


@dataclass(slots=True)
class _Round:
    """Progress of one `Fanout.ask`.

    Attributes:
        window: agents in the order in which they leave the window, some of which have left it already.
        refused: ids of requests that an observer has refused and that the agents themselves have not been sent yet.
        batches: number of each request to an observer that is about to be sent, and the agents that it is for, by the
            observer and the encoded calls.
    """

    replies: dict[int, Reply] = field(default_factory=dict)
    pending: dict[bytes, _Pending] = field(default_factory=dict)
    open: dict[Endpoint, _Flight] = field(default_factory=dict)
    window: deque[_Flight] = field(default_factory=deque)
    expected: int = 0
    refused: deque[bytes] = field(default_factory=deque)
    batches: dict[tuple[Endpoint, tuple[bytes, ...]], tuple[int, list[Endpoint]]] = field(default_factory=dict)

    def begin(self, flight: _Flight) -> None:
        """Adds an agent to which requests are about to be sent."""
        self.open[flight.endpoint] = flight
        self.window.append(flight)
        self.expected += 1

    def end(self, request_id: bytes, reply: Reply) -> None:
        """Stores the reply to a pending request."""
        waiting = self.pending.pop(request_id)
        self.replies[waiting.index] = reply
        flight = waiting.flight
        flight.left.remove(request_id)
        if not flight.left:
            del self.open[flight.endpoint]
            self.leave(flight)

    def leave(self, flight: _Flight) -> None:
        """Takes an agent out of the window, if it is there."""
        if flight.expected:
            flight.expected = False
            self.expected -= 1

    def fail(self, endpoint: Endpoint, code: str, text: str) -> None:
        """Ends all pending requests to `endpoint` with a fault of this code and text."""
        for request_id in tuple(self.open[endpoint].left) if endpoint in self.open else ():
            self.end(request_id, _fault_reply(self.pending[request_id], code, text))


class _Handshakes:
    """Monitors the connections of a TCP socket, because libzmq retries for ever without reporting errors.

    Args:
        watched: a socket without connections.
        keys: keys of the connections, for error texts; None without keys.

    Attributes:
        socket: the monitor socket; readable when `errors` has events to read.
    """

    def __init__(self, watched: zmq.Socket[bytes], keys: ClientKeys | None) -> None:
        self._watched = watched
        self._keys = keys
        self._connected: set[str] = set()
        self.socket: zmq.Socket[bytes] = watched.get_monitor_socket(_HANDSHAKE_EVENTS)

    def errors(self) -> list[tuple[str, FaultCode, str]]:
        """Reads the monitor's events; returns the errors, each with the address, its code and its text."""
        from zmq.utils.monitor import recv_monitor_message  # imports asyncio, which local agents do not need

        found = []
        while self.socket.poll(0):
            message = recv_monitor_message(self.socket)
            address = message["endpoint"].decode()
            if (error := self._error_of(address, message["event"])) is not None:
                self._connected.discard(address)
                found.append((address, *error))
        return found

    def close(self) -> None:
        """Ends the monitoring; call before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)

    def _error_of(self, address: str, event: int) -> tuple[FaultCode, str] | None:
        match event:
            case zmq.EVENT_CONNECTED:
                self._connected.add(address)
            case _ if self._keys is None and event in _HANDSHAKE_FAILURES:
                text = "requires a key: give --server-key, the public half of the fleet's key, and --key"
                return FaultCode.NOT_PERMITTED, text
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                assert self._keys is not None
                key = self._keys.own.public.hex()
                return (
                    FaultCode.NOT_PERMITTED,
                    f"refuses this client's key {key}: it is not in the agent's admin_clients",
                )
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                return FaultCode.PROTOCOL, "uses ZMQ without keys: it is not an admin_endpoint"
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                assert self._keys is not None
                key = self._keys.server.hex()
                text = f"closed the connection: its fleet_key is not {key} (--server-key), or it is not an agent"
                return FaultCode.NOT_PERMITTED, text
            case zmq.EVENT_DISCONNECTED:
                return FaultCode.UNREACHABLE, "closed the connection: the agent has ended, or closed its admin_endpoint"
            case zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED if address not in self._connected:
                return FaultCode.UNREACHABLE, "nobody listens there: is the agent running, with this admin_endpoint?"
        return None


class Fanout:
    """Sends requests to agents over connections that stay open between requests; a context manager.

    Args:
        keys: keys for TCP; None for connections without keys, which only a registry may accept.
    """

    def __init__(self, keys: KeyNames | None = NO_KEYS) -> None:
        self._context = zmq.Context()
        # Of the monitor: libzmq's thread waits for space in its queue, and whoever closes the socket for that thread.
        self._context.setsockopt(zmq.RCVHWM, 0)
        self._key_names = keys
        self._keys: ClientKeys | None = None
        self._handshakes: _Handshakes | None = None
        self._sockets: dict[bool, zmq.Socket[bytes]] = {}  # by whether it is the one for TCP
        self._routes: dict[Endpoint, bytes] = {}  # routing ids of the connections, least recently asked first
        self._by_route: dict[bytes, Endpoint] = {}
        self._by_address: dict[str, Endpoint] = {}  # as libzmq knows them, with IP addresses instead of names
        self._numeric: dict[Endpoint, str] = {}
        self._observers: dict[Path | None, tuple[Endpoint, Set[str]]] = {}  # by directory, with their agents' names
        self._pauses: dict[Path, tuple[int, int]] = {}  # of observers that do not answer: when it ends, and its length
        self._carriers: dict[Endpoint, Endpoint] = {}  # endpoints whose connections requests to agents take
        self._ids = itertools.count(1)

    def __enter__(self) -> Fanout:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handshakes is not None:
            self._handshakes.close()
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._context.term()

    def forget(self, endpoint: Endpoint) -> None:
        """Closes the connection to `endpoint`, if there is one; the next request opens a new one."""
        route = self._routes.pop(endpoint, None)
        if route is not None:
            address = self._numeric.pop(endpoint, endpoint.address)
            del self._by_route[route], self._by_address[address]
            with contextlib.suppress(zmq.ZMQError):  # libzmq has closed it
                self._sockets[bool(endpoint.remote)].disconnect(address)

    def use_observer(self, directory: Path, timeout_ns: int) -> Set[str]:
        """Returns the names of the agents that the observer of a socket directory serves; empty without an observer.

        From now on these are asked over its connection, until the next call. An observer that does not answer, as one
        that is stopped, is asked again after growing pauses, so that it does not cost every call a time limit.
        """
        self._observers.pop(directory, None)
        self._carriers.clear()
        due_ns, pause_ns = self._pauses.get(directory, (0, 0))
        if time.monotonic_ns() < due_ns:
            return frozenset()
        observer = Endpoint(RELAY_SOCKET, directory / RELAY_SOCKET)
        try:
            if probe(directory / RELAY_SOCKET):
                return frozenset()
        except OSError:  # another user could have put the socket there
            return frozenset()
        (reply,) = self.ask([(observer, _HELLO)], min(_NAMES_NS, timeout_ns))
        if not isinstance(reply.data, list):
            self.forget(observer)
            pause_ns = min(max(SHORTEST_PAUSE_NS, 2 * pause_ns), LONGEST_PAUSE_NS)
            self._pauses[directory] = time.monotonic_ns() + pause_ns, pause_ns
            return frozenset()
        self._pauses.pop(directory, None)
        names = {name for name in reply.data if isinstance(name, str)}
        self._observers[directory] = observer, names
        self._carriers.clear()
        return names

    def ask(self, requests: Sequence[tuple[Endpoint, Call]], timeout_ns: int) -> list[Reply]:
        """Sends all requests and waits for the replies of each agent for at most `timeout_ns`.

        Agents beyond the limit of file descriptors are asked when others have answered or have timed out. The call ends
        after one and a half times `timeout_ns`, also if not all agents could be asked.

        Returns:
            One reply per request, in the order of the requests; if an agent fails, its reply has a fault.

        Raises:
            CliError: a key for an agent on TCP is missing or unusable, an address is invalid, or too few file
                descriptors are available.
        """
        by_endpoint: dict[Endpoint, list[tuple[int, Call]]] = {}
        for index, (endpoint, call) in enumerate(requests):
            by_endpoint.setdefault(endpoint, []).append((index, call))
        # An observer may refuse requests, which the agents themselves are sent then.
        most = self._connections_allowed(by_endpoint.keys() | {self._carrier(endpoint) for endpoint in by_endpoint})
        names = {each: host for each in by_endpoint if each not in self._routes and (host := _name_of(each))}
        waiting = deque(each for each in by_endpoint if each not in names)
        if names:
            self._socket(True, next(iter(names)).address)  # a missing key is told without a lookup
        bodies: dict[int, bytes] = {}
        begun_ns = time.monotonic_ns()
        end_ns = begun_ns + timeout_ns * 3 // 2
        # Agents of which none answers are all asked within a quarter of the time limit.
        expected_ns = min(_EXPECTED_NS, timeout_ns // 4 * _WINDOW // max(_WINDOW, len(by_endpoint)))
        progress = _Round()
        while waiting or names or progress.pending:
            if over := time.monotonic_ns() > end_ns:
                for endpoint in (*names, *waiting):
                    self._fail(
                        endpoint, by_endpoint[endpoint], progress, FaultCode.TIMEOUT, _unasked(names.get(endpoint))
                    )
                names.clear()
                waiting.clear()
            self._expire(progress, timeout_ns, everything=over)
            for endpoint, host in list(names.items()):
                if (answer := resolver.find(host, begun_ns, _RECENT_NS)) is None:
                    continue
                del names[endpoint]
                if answer.error:
                    self._fail(endpoint, by_endpoint[endpoint], progress, FaultCode.UNREACHABLE, answer.error)
                else:
                    address = parse_endpoint(endpoint.remote)._replace(host=answer.addresses[0])
                    self._numeric[endpoint] = str(address)
                    waiting.append(endpoint)
            self._send_refused(most, progress)
            while waiting and progress.expected < _WINDOW and self._make_room(waiting[0], most, progress):
                endpoint = waiting.popleft()
                self._send(endpoint, by_endpoint[endpoint], bodies, progress, expected_ns)
            self._send_batches(progress)
            self._receive(progress, timeout_ns, _LOOK_UP_MS if names else _SILENCE_MS)
        return [progress.replies[index] for index in range(len(requests))]

    def _send(
        self,
        endpoint: Endpoint,
        calls: Sequence[tuple[int, Call]],
        bodies: dict[int, bytes],
        progress: _Round,
        expected_ns: int,
    ) -> None:
        """Sends all requests to one agent, or adds them to a batch; `bodies` has the encoded calls by identity."""
        for _, call in calls:
            if id(call) not in bodies:
                bodies[id(call)] = _body(call)
        encoded = tuple([bodies[id(call)] for _, call in calls])
        if (carrier := self._carrier(endpoint)).name == RELAY_SOCKET:
            if (carrier, encoded) not in progress.batches:
                progress.batches[carrier, encoded] = next(self._ids), []
            number, agents = progress.batches[carrier, encoded]
            request_ids = [b"%d.%d.%d" % (number, len(agents), place) for place in range(len(calls))]
            agents.append(endpoint)
            self._begin(endpoint, calls, request_ids, progress, expected_ns)
            return
        request_ids = [b"%d" % next(self._ids) for _ in calls]
        self._begin(endpoint, calls, request_ids, progress, expected_ns)
        for request_id, body in zip(request_ids, encoded, strict=True):
            if not self._put(request_id, body, progress):
                return

    def _send_batches(self, progress: _Round) -> None:
        """Sends the requests to agents of observers."""
        batches, progress.batches = progress.batches, {}
        for (observer, bodies), (number, agents) in batches.items():
            names = [b"" if each == observer else each.name.encode(errors="surrogateescape") for each in agents]
            try:
                self._send_frames(observer, [b"%d" % number, b"\0".join(bodies), b"\0".join(names)])
            except zmq.ZMQError:
                for each in agents:
                    progress.fail(each, FaultCode.UNREACHABLE, "its observer closed the connection")
                self.forget(observer)

    def _put(self, request_id: bytes, body: bytes, progress: _Round) -> bool:
        """Sends a pending request to the agent itself; returns whether the connection takes more."""
        endpoint = progress.pending[request_id].endpoint
        try:
            self._send_frames(endpoint, [request_id, body])
        except zmq.Again:
            text = "its queue is full of unanswered requests"
            progress.end(request_id, _fault_reply(progress.pending[request_id], FaultCode.TIMEOUT, text))
        except zmq.ZMQError:  # no route: libzmq has just closed the connection, and has told its monitor why
            self._fail_closed(progress)
            progress.fail(endpoint, FaultCode.UNREACHABLE, "closed the connection before it was asked")
            self.forget(endpoint)
            return False
        return True

    def _send_frames(self, endpoint: Endpoint, frames: Sequence[bytes]) -> None:
        route = self._route(endpoint)
        socket = self._sockets[bool(endpoint.remote)]
        for frame in (route, MAGIC, *frames[:-1]):
            socket.send(frame, _MORE)
        socket.send(frames[-1], _LAST)

    def _carrier(self, endpoint: Endpoint) -> Endpoint:
        """Returns whose connection requests to an agent take."""
        carrier = self._carriers.get(endpoint)
        if carrier is None:
            observer, names = self._observers.get(endpoint.path.parent if endpoint.path else None, (endpoint, ()))
            carrier = self._carriers[endpoint] = observer if endpoint.name in names else endpoint
        return carrier

    def _begin(
        self,
        endpoint: Endpoint,
        calls: Sequence[tuple[int, Call]],
        request_ids: Sequence[bytes],
        progress: _Round,
        expected_ns: int,
    ) -> None:
        """Adds the requests to one agent to the pending ones."""
        sent_at_ns, started_ns = time.time_ns(), time.monotonic_ns()
        flight = _Flight(endpoint, set(request_ids), started_ns + expected_ns)
        progress.begin(flight)
        carrier = self._carrier(endpoint)
        for request_id, (index, call) in zip(request_ids, calls, strict=True):
            progress.pending[request_id] = _Pending(index, flight, carrier, call, sent_at_ns, started_ns)

    def _fail(
        self, endpoint: Endpoint, calls: Sequence[tuple[int, Call]], progress: _Round, code: str, text: str
    ) -> None:
        """Ends the requests to an agent that cannot be asked."""
        self._begin(endpoint, calls, [b"%d" % next(self._ids) for _ in calls], progress, 0)
        progress.fail(endpoint, code, text)

    def _fail_closed(self, progress: _Round) -> None:
        """Ends the requests over connections on TCP that have failed, each with the reason."""
        if self._handshakes is None:
            return
        for address, code, text in self._handshakes.errors():
            if (failed := self._by_address.get(address)) is not None:
                progress.fail(failed, code, text)
                self.forget(failed)

    def _receive(self, progress: _Round, timeout_ns: int, most_ms: int) -> None:
        """Waits for replies or errors, at most until the next request expires or leaves the window, or `most_ms`."""
        if not progress.pending:
            if most_ms < _SILENCE_MS:
                time.sleep(most_ms / 1000)
            return
        now = time.monotonic_ns()
        dues = [next(iter(progress.pending.values())).started_ns + timeout_ns]
        if progress.window:
            dues.append(progress.window[0].expected_until_ns)
        wait_ms = max(0, min(dues) - now) // 1_000_000 + 1
        poller = zmq.Poller()
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN)
        if self._handshakes is not None:
            poller.register(self._handshakes.socket, zmq.POLLIN)
        ready = poller.poll(min(wait_ms, most_ms))
        if not ready and most_ms == _SILENCE_MS:
            carriers = {each.carrier for each in progress.pending.values() if each.carrier != each.endpoint}
            serving = {carrier for carrier in carriers if _ended(carrier) is None}
            for endpoint, flight in list(progress.open.items()):
                served = any(progress.pending[request_id].carrier in serving for request_id in flight.left)
                if served and endpoint.path is not None and endpoint.path.exists():
                    continue
                if (fault := _ended(endpoint)) is not None:
                    progress.fail(endpoint, fault.code, fault.message)
        for socket, _ in ready:
            if self._handshakes is not None and socket is self._handshakes.socket:
                self._fail_closed(progress)
            else:
                self._drain(socket, progress)

    @staticmethod
    def _expire(progress: _Round, timeout_ns: int, *, everything: bool) -> None:
        """Ends requests without a reply for `timeout_ns`, or all of them; takes slow agents out of the window."""
        now = time.monotonic_ns()
        find_stopped = functools.cache(stopped_pid)  # of an observer once, for all of its agents
        while progress.window and (not progress.window[0].expected or progress.window[0].expected_until_ns <= now):
            progress.leave(progress.window.popleft())
        while progress.pending:
            request_id, waiting = next(iter(progress.pending.items()))
            if waiting.started_ns + timeout_ns > now and not everything:
                break
            progress.end(request_id, _reply(waiting, None, _timeout_fault(waiting.endpoint, timeout_ns, find_stopped)))

    def _route(self, endpoint: Endpoint) -> bytes:
        """Returns the routing id of the connection to an agent, which is opened if there is none."""
        route = self._routes.pop(endpoint, None)
        if route is None:
            address = self._numeric.get(endpoint, endpoint.address)
            if (former := self._by_address.get(address)) is not None:
                self.forget(former)  # a source names this address differently now
            socket = self._socket(bool(endpoint.remote), endpoint.address)
            route = b"kvctl-%d" % next(self._ids)
            socket.setsockopt(zmq.CONNECT_ROUTING_ID, route)
            socket.ipv6 = "[" in address
            # What waits for an observer is bounded by the window: some requests to each of these agents.
            socket.setsockopt(zmq.SNDHWM, 0 if endpoint.name == RELAY_SOCKET else _HIGH_WATER)
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                raise CliError(f"{endpoint.address}: {error.strerror}", ExitCode.USAGE) from None
            self._by_route[route] = self._by_address[address] = endpoint
        self._routes[endpoint] = route
        return route

    def _socket(self, remote: bool, address: str) -> zmq.Socket[bytes]:
        socket = self._sockets.get(remote)
        if socket is None:
            if remote and self._key_names is not None:
                self._keys = self._key_names.load(address)
            socket = self._sockets[remote] = self._context.socket(zmq.ROUTER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES + _FRAME_OF_BATCH)
            # Without it a request to a full queue is dropped silently.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if remote:
                if self._keys is not None:
                    self._keys.apply(socket)
                self._handshakes = _Handshakes(socket, self._keys)
        return socket

    def _connections_allowed(self, endpoints: Set[Endpoint]) -> int:
        """Raises the soft limit of file descriptors if needed; returns the number of connections it then allows.

        Raises:
            CliError: too few file descriptors are available.
        """
        wanted = len(endpoints | self._routes.keys()) + _DESCRIPTORS_OF_KVCTL
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if not self._sockets and (text := shortage(_DESCRIPTORS_OF_ZMQ + 1)) is not None:
            raise CliError(f"kvctl cannot ask {len(endpoints)} agents: {text}")
        # libzmq's thread closes connections a little later, so half of them may be open twice.
        return (
            wanted if soft == resource.RLIM_INFINITY or soft >= wanted else max(1, (soft - _DESCRIPTORS_OF_KVCTL) // 2)
        )

    def _make_room(self, endpoint: Endpoint, most: int, progress: _Round) -> bool:
        """Returns whether a connection to `endpoint` exists or may be opened; closes an idle one for that."""
        if self._carrier(endpoint) in self._routes:
            return True
        if self._by_address.get(self._numeric.get(endpoint, endpoint.address)) in progress.open:
            return False  # two names of one agent: libzmq could not close one of the connections
        if len(self._routes) < most:
            return True
        busy = {each.carrier for each in progress.pending.values()}
        idle = next((each for each in self._routes if each not in busy), None)
        if idle is not None:
            self.forget(idle)
        return idle is not None

    def _drain(self, socket: zmq.Socket[bytes], progress: _Round) -> None:
        while True:
            try:
                route, *frames = socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            endpoint = self._by_route.get(route)
            if endpoint is None:
                continue  # a late reply of a connection that was closed
            if len(frames) != 3 or frames[0] != MAGIC:
                text = f"speaks another protocol than {MAGIC.decode()}: first frame {b''.join(frames[:1])[:16]!r}"
                progress.fail(endpoint, FaultCode.PROTOCOL, text)
                continue
            if endpoint.name != RELAY_SOCKET:
                self._take(endpoint, frames[1], _parsed(frames[2]), progress)
            elif isinstance(answers := _parsed(frames[2]), list):
                for request_id, answer in answers:
                    self._take(endpoint, request_id.encode(), answer, progress)

    def _take(self, carrier: Endpoint, request_id: bytes, answer: Any, progress: _Round) -> None:
        """Takes one answer that has arrived over a connection."""
        answered = progress.pending.get(request_id)
        if answered is None or answered.carrier != carrier:
            return
        reply = _read(answered, answer)
        refused = reply.fault is not None and reply.fault.code == ErrorCode.UNKNOWN_AGENT
        if refused and carrier != answered.endpoint:
            answered.carrier = self._carriers[answered.endpoint] = answered.endpoint
            progress.refused.append(request_id)
        else:
            progress.end(request_id, reply)

    def _send_refused(self, most: int, progress: _Round) -> None:
        """Sends requests for agents that their observer serves no more to these, over connections of their own.

        Requests that the observer has taken before are not sent again: an action would be carried out twice.
        """
        while progress.refused:
            refused = progress.pending.get(progress.refused[0])
            if refused is not None and not self._make_room(refused.endpoint, most, progress):
                return
            request_id = progress.refused.popleft()
            if refused is not None:
                self._put(request_id, _body(refused.call), progress)


def _body(call: Call) -> bytes:
    return orjson.dumps({"cmd": call.command, "args": call.args})


def _parsed(body: bytes) -> Any:
    """Returns the value of JSON, or the error if it is none."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return error


def _read(waiting: _Pending, answer: Any) -> Reply:
    match answer:
        case orjson.JSONDecodeError():
            text = f"its answer to {waiting.call.command} is not JSON: {answer}"
            return _fault_reply(waiting, FaultCode.PROTOCOL, text)
        case {"ok": True, "data": data}:
            return _reply(waiting, data, None)
        case {"ok": False, "error": {"code": str(code), "message": str(message)}}:
            return _fault_reply(waiting, code, message)
    text = f"its answer to {waiting.call.command} has neither data nor an error"
    return _fault_reply(waiting, ErrorCode.PROTOCOL, text)


def _ended(endpoint: Endpoint) -> Fault | None:
    """Returns the fault of a local agent that nobody serves any more; None otherwise."""
    if endpoint.path is None:
        return None
    try:
        code = probe(endpoint.path)
    except UntrustedPathError as error:
        return Fault(endpoint.name, FaultCode.NOT_PERMITTED, str(error))
    except OSError:  # without a free descriptor nobody can say
        return None
    if code in (errno.ECONNREFUSED, errno.ENOENT) and agent_pid(endpoint.path) is None:
        return Fault(endpoint.name, FaultCode.UNREACHABLE, "its process ended before it answered")
    return None


def _timeout_fault(endpoint: Endpoint, timeout_ns: int, find_stopped: Callable[[Path], int | None]) -> Fault:
    local = endpoint.path is not None
    if endpoint.path is not None:
        for whose, path in (("its process", endpoint.path), ("its observer", endpoint.path.with_name(OBSERVER_SOCKET))):
            # None listens if more clients wait than the socket's backlog has room for.
            if (pid := find_stopped(path)) is not None and listener_pid(endpoint.path) in (None, pid):
                return stopped(endpoint.name, whose, pid)
    if local and (text := shortage(1)) is not None:
        return Fault(endpoint.name, FaultCode.TIMEOUT, f"was not reached: {text}")
    return _ended(endpoint) or timed_out(endpoint.name, timeout_ns, local=local)


def _name_of(endpoint: Endpoint) -> str:
    """Returns the host of a TCP endpoint if it is a name, which has to be looked up; "" otherwise."""
    return "" if not endpoint.remote or (address := parse_endpoint(endpoint.remote)).ip is not None else address.host


def _unasked(host: str | None) -> str:
    if host:
        return f"host {host}: no answer from the resolver in /etc/resolv.conf within the time limit"
    return "was not asked: others used up the time limit or the file descriptors (ulimit -n); raise --timeout"


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
