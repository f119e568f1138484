"""Admin server: one loop that answers requests from the admin sockets of one worker or many.

If a handler raises, its client gets an error reply; replies to a client that does not read are dropped; malformed
requests are refused.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson
import zmq

from kvctl_agent.contract.admin import MAGIC, MAX_REPLY_BYTES, ErrorCode
from kvctl_agent.contract.commands import COMMANDS, COMMANDS_BY_NAME, Command, Level
from kvctl_agent.contract.snapshots import CommandInfo, Hello, ThreadStack
from kvctl_agent.contract.values import all_encodable, encodable
from kvctl_agent.errors import AdminError, RequestRefused
from kvctl_agent.observer.endpoints import (
    FRAME_LIMIT,
    AdminEndpoint,
    ClientRequest,
    RemoteEndpoint,
    UnixEndpoint,
    open_remote_endpoint,
)
from kvctl_agent.observer.requests import parse_body, parse_frames, request_id
from kvctl_agent.security.curve import RefusedConnections
from kvctl_agent.security.unix_router import SPARE_DESCRIPTORS, UnixRouter
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.metrics import Counters

Handler = Callable[[dict[str, Any]], Any]

SERVED_HERE = frozenset({"hello", "commands", "stacks"})
_LONGEST_TEXT = 2000
_FIRST_POLL_S, _LONGEST_POLL_S = 0.001, 0.016  # between looks for answers that are not there yet
_LONGEST_WAIT_S = 1.0
_BEHIND_S = 1.5  # for which a reply waits for a client that is behind
_MOST_KEPT = 4096  # requests of clients that are behind


class Later(Protocol):
    """Answer of a handler that is not there yet."""

    def poll(self) -> bool:
        """Returns whether `result` has it; called by the server's loop, again and again."""

    def result(self) -> Any:
        """Returns the answer; raises RequestRefused."""


class Service(Protocol):
    """What answers the requests that arrive at some endpoints."""

    endpoints: list[AdminEndpoint]

    def answer(self, endpoint: AdminEndpoint, received: ClientRequest) -> PendingReply | None:
        """Answers a request, or returns what must be polled until it is answered."""


class AdminService:
    """Admin commands of one worker, and its sockets.

    A handler receives the validated arguments that the client passed, with rooms as int. It returns the type declared
    in `contract/snapshots.py`, or a `Later` that has it in time, or raises `RequestRefused`. Handlers run on the thread
    of the server's loop, one at a time.

    Attributes:
        name: the worker's name.
        client: origin of the request being answered, as in `ClientRequest.origin`.
        path: path of the Unix socket while it is bound.
        remote_address: TCP endpoint with its actual port; "" if there is none.
        endpoints: the bound sockets.
        moment: returns an object that stays the same while the loop answers requests that have arrived before.
    """

    def __init__(
        self,
        name: str,
        handlers: Mapping[str, Handler],
        hello: Callable[[], Hello],
        metrics: Counters,
        recorder: FlightRecorder,
        clock: Clock,
        sequence: int = 0,
    ) -> None:
        """Creates the service without sockets; `bind` has them.

        Args:
            name: the worker's name.
            handlers: handler of each declared command, except those that the service answers itself (`SERVED_HERE`).
            hello: returns the answer to `hello`; the service fills in `level` and `capabilities`.
            metrics, recorder: where requests, refusals and failed handlers are counted and recorded.
            clock: the worker's clock, so that `generated_at_ns` agrees with the times in the data.
            sequence: number before that of the first reply.

        Raises:
            AdminError: handlers and declared commands differ.
        """
        declared = COMMANDS_BY_NAME.keys() - SERVED_HERE
        if handlers.keys() - SERVED_HERE != declared:
            raise AdminError(
                f"admin handlers differ from the declared commands: missing {sorted(declared - handlers.keys())}, "
                f"undeclared {sorted(handlers.keys() - declared)}"
            )
        self.name = name
        self._hello = hello
        self._metrics = metrics
        self._recorder = recorder
        self._clock = clock
        self._refused_connections = RefusedConnections(metrics, recorder)
        self._commands = dict(COMMANDS_BY_NAME)
        self._handlers: dict[str, Handler] = {
            "commands": lambda _: command_list(self._commands.values()),
            "stacks": lambda _: stacks(),
            **handlers,
            "hello": self._answer_hello,
        }
        self._capabilities = sorted(self._commands)
        self._sequence = sequence
        self._client_level = Level.READ
        self._resources = contextlib.ExitStack()
        self.client = ""
        self.path: Path | None = None
        self._socket: tuple[int, int] | None = None
        self.remote_address = ""
        self.endpoints: list[AdminEndpoint] = []
        self.moment: Callable[[], object] = object

    def add(self, command: Command, handler: Handler) -> None:
        """Adds a command that `contract.commands` does not declare."""
        self._commands[command.name] = command
        self._capabilities = sorted(self._commands)
        self._handlers[command.name] = handler

    def bind(self, path: Path, spare: int = SPARE_DESCRIPTORS) -> None:
        """Binds the Unix socket, whose file must not exist; raises AdminError.

        Args:
            spare: descriptors in reserve for when the process has no others.
        """
        with self._binding(str(path)) as resources:
            router = UnixRouter(path, FRAME_LIMIT, refused=self._refused_connections.add, spare=spare)
            resources.callback(router.close)
            self.endpoints.append(UnixEndpoint(router))
            self.path = path
            self._socket = _identity(path)
            resources.callback(self._remove_socket)  # before the router closes: then the inode cannot be in use again

    def bind_remote(self, remote: RemoteEndpoint) -> None:
        """Binds the TCP socket for clients with keys; raises AdminError."""
        with self._binding(remote.endpoint) as resources:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            resources.callback(context.destroy, linger=0)
            endpoint, authenticator = open_remote_endpoint(
                context, remote, self.name, self._refused_connections.add, self._record_warning
            )
            resources.callback(authenticator.close)
            self.endpoints.append(endpoint)
            self.remote_address = endpoint.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @contextlib.contextmanager
    def _binding(self, address: str) -> Iterator[contextlib.ExitStack]:
        """Keeps the resources of a socket until `close`, unless it cannot be bound."""
        with contextlib.ExitStack() as resources:
            try:
                yield resources
            except (zmq.ZMQError, OSError) as error:
                raise AdminError(f"cannot bind the admin socket {address}: {error.strerror}") from None
            self._resources.push(resources.pop_all())

    def move(self, path: Path) -> None:
        """Moves the Unix socket to another path, where it replaces a file that is there; connections stay.

        Raises:
            OSError: it cannot be moved.
        """
        assert self.path is not None
        self.path.rename(path)
        self.path = path

    @property
    def has_path(self) -> bool:
        """Whether clients that connect to `path` reach this service: nobody has moved, replaced or removed its file."""
        return self.path is not None and _identity(self.path) == self._socket

    def close(self) -> None:
        """Closes the sockets and removes the Unix socket's file; idempotent. The loop must not serve them any more."""
        self._resources.close()
        self.endpoints.clear()
        self.remote_address = ""

    def _remove_socket(self) -> None:
        has_path, path, self.path = self.has_path, self.path, None
        if path is not None and has_path:  # another agent may have bound the path after a move
            path.unlink(missing_ok=True)

    def answer(self, endpoint: AdminEndpoint, received: ClientRequest) -> PendingReply | None:
        self.client = received.origin
        name, later, reply = "", None, b""
        try:
            name, answer = self._handle(received.frames, received.level)
            if hasattr(answer, "poll"):
                later = answer
            else:
                reply = self._accepted(name, answer)
        except RequestRefused as refusal:
            reply = self._refused(refusal)
        if later is not None:
            return PendingReply(self, endpoint, received, name, later, time.monotonic() + _BEHIND_S)
        self.reply(endpoint, received, reply)
        return None

    def complete(self, name: str, later: Later) -> bytes:
        """Returns the reply to a request that had to be polled."""
        try:
            return self._accepted(name, self._call(name, later.result))
        except RequestRefused as refusal:
            return self._refused(refusal)

    def reply(self, endpoint: AdminEndpoint, received: ClientRequest, reply: bytes) -> None:
        """Sends a reply, unless its client does not read."""
        if not endpoint.send(received.identity, [MAGIC, request_id(received.frames), reply]):
            self._record_warning("a client does not read its replies: dropping them")

    def _handle(self, frames: Sequence[bytes], level: Level | None) -> tuple[str, Any]:
        if level is None:
            raise RequestRefused(ErrorCode.NOT_PERMITTED, "this key has been removed from the agent's admin_clients")
        request = parse_body(parse_frames(frames), self._commands)
        name, needs = request.command.name, request.command.level
        if needs > level:
            raise RequestRefused(
                ErrorCode.NOT_PERMITTED, f"{name} needs level {needs.label}, this client has {level.label}"
            )
        self._client_level = level
        self._metrics.add("kvctl_admin_requests_total", 1, name)
        return name, self._call(name, partial(self._handlers[name], request.args))

    def _call(self, name: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except RequestRefused:
            raise
        except Exception as error:
            raise self._failure(name, error) from error

    def _failure(self, name: str, error: Exception) -> RequestRefused:
        text = f"{name} failed inside the agent: {type(error).__name__}: {error}"[:_LONGEST_TEXT]
        self._recorder.record("admin", text, severity="error")
        return RequestRefused(ErrorCode.INTERNAL, text)

    def _accepted(self, name: str, answer: Any) -> bytes:
        try:
            reply = self._envelope({"ok": True, "data": answer})
        except Exception as error:  # the handler's answer is no JSON
            raise self._failure(name, error) from error
        if len(reply) > MAX_REPLY_BYTES:
            raise RequestRefused(
                ErrorCode.TOO_LARGE,
                f"the answer to {name} has {len(reply)} bytes, at most {MAX_REPLY_BYTES} are sent: "
                "ask for less, for example with limit",
            )
        return reply

    def _refused(self, refusal: RequestRefused) -> bytes:
        self._metrics.add("kvctl_admin_errors_total", 1, refusal.code)
        # Errors of the operating system contain file names, which need not be valid text.
        error = {"code": str(refusal.code), "message": encodable(str(refusal))}
        return self._envelope({"ok": False, "error": error})

    def _envelope(self, content: dict[str, Any]) -> bytes:
        generated = {"generated_at_ns": self._clock.wall_ns(self._clock.now_ns()), "sequence": self._sequence + 1}
        reply = to_json({**content, **generated})
        self._sequence += 1
        return reply

    def _record_warning(self, text: str) -> None:
        self._recorder.record("admin", text, "warning")

    def _answer_hello(self, _: dict[str, Any]) -> Hello:
        hello = self._hello()
        hello["level"] = self._client_level.label
        hello["capabilities"] = self._capabilities
        return hello


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns the device and inode of a file; None without it."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class PendingReply(NamedTuple):
    """Request whose answer is not there yet.

    Attributes:
        due_s: monotonic time from which the reply waits no longer for a client that is behind with reading.
    """

    service: AdminService
    endpoint: AdminEndpoint
    received: ClientRequest
    command: str
    later: Later
    due_s: float


class ServerLoop:
    """Loop of one thread that serves the sockets of any number of workers; its methods belong to that thread.

    Only `wake` and `stop` may be called by others, and `add` before `run`.

    Args:
        on_fault: called when a callback has raised; None: `run` raises.
    """

    def __init__(self, on_fault: Callable[[], None] | None = None) -> None:
        self._on_fault = on_fault
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # No write after close, as the descriptor's number may be in use again; signal handlers write, too.
        self._wake_lock = threading.RLock()
        self._watched: dict[int, Callable[[], None]] = {}
        self._again: dict[AdminEndpoint, Service] = {}  # may have requests that their descriptors do not show
        self._services: dict[AdminEndpoint, Service] = {}
        self._pending: list[PendingReply] = []
        self._arrived: deque[tuple[Service, AdminEndpoint, ClientRequest]] = deque()
        self._poll_s = _FIRST_POLL_S
        self._replenish_s = 0.0
        self._stopping = self._closed = False
        self._moment = object()
        self.watch(self._wake, self._read_wake)

    def watch(self, descriptor: int, ready: Callable[[], None], *, writable: bool = False) -> None:
        """Calls `ready` whenever the descriptor is readable, or `writable` if that is asked for, too."""
        events = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        if descriptor in self._watched:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)
        self._watched[descriptor] = ready

    def unwatch(self, descriptor: int) -> None:
        """Ends `watch`; does nothing for a descriptor that is not watched."""
        if self._watched.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def add(self, service: Service) -> None:
        """Serves the bound sockets of a worker, or of the observer itself."""
        for endpoint in service.endpoints:
            self._services[endpoint] = service
            self.watch(endpoint.fileno(), partial(self._again.__setitem__, endpoint, service))

    def remove(self, service: AdminService) -> None:
        """Ends `add`; requests that wait for an answer get none."""
        self.pause(service)
        self._pending = [each for each in self._pending if each.service is not service]

    def pause(self, service: Service) -> None:
        """Receives nothing for a worker until `add`."""
        for endpoint in service.endpoints:
            if self._services.pop(endpoint, None) is not None:
                self.unwatch(endpoint.fileno())
                self._again.pop(endpoint, None)

    def moment(self) -> object:
        """Returns `AdminService.moment` of services that this loop serves."""
        return self._moment

    def wake(self) -> None:
        """Makes the loop turn at once; for any thread."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Makes `run` return; for any thread."""
        self._stopping = True
        self.wake()

    def run(self, tick: Callable[[], float] | None = None) -> None:
        """Serves until `stop`.

        Args:
            tick: called in each turn; returns the longest time in seconds until it must be called again.
        """
        while not self._stopping:
            try:
                self._run_once(tick)
            except Exception:
                if self._on_fault is None:
                    raise
                self._on_fault()

    def _run_once(self, tick: Callable[[], float] | None) -> None:
        wait_s = tick() if tick is not None else _LONGEST_WAIT_S
        if self._again:
            wait_s = 0.0
        elif self._pending:
            wait_s = min(wait_s, self._poll_s)
            self._poll_s = min(2 * self._poll_s, _LONGEST_POLL_S)
        self._turn(min(wait_s, _LONGEST_WAIT_S))
        if (now_s := time.monotonic()) >= self._replenish_s:
            self._replenish_s = now_s + _LONGEST_WAIT_S
            self._again.update(
                (endpoint, service) for endpoint, service in self._services.items() if endpoint.max_wait_ms is not None
            )

    def close(self) -> None:
        """Closes the loop's own descriptors; idempotent."""
        with self._wake_lock:
            if not self._closed:
                self._closed = True
                self._epoll.close()
                os.close(self._wake)

    def _turn(self, wait_s: float) -> None:
        for descriptor, _ in self._epoll.poll(wait_s):
            if (ready := self._watched.get(descriptor)) is not None:
                ready()
        for endpoint, service in list(self._again.items()):
            if self._again.pop(endpoint, None) is None:  # removed meanwhile
                continue
            requests = endpoint.receive()
            if requests and not endpoint.level_triggered:
                self._again[endpoint] = service
            self._arrived.extend((service, endpoint, request) for request in requests)
        self._moment = object()
        for _ in range(len(self._arrived)):
            service, endpoint, request = self._arrived.popleft()
            if self._services.get(endpoint) is not service:
                continue
            if endpoint.is_behind(request.identity) and len(self._arrived) < _MOST_KEPT:
                # Until its client has read earlier replies: otherwise the reply could be dropped.
                self._arrived.append((service, endpoint, request))
            elif (pending := service.answer(endpoint, request)) is not None:
                self._pending.append(pending)
                self._poll_s = _FIRST_POLL_S
        if self._pending:
            waiting, self._pending = self._pending, []
            self._moment = object()
            now_s = time.monotonic()
            for each in waiting:
                behind = now_s < each.due_s and each.endpoint.is_behind(each.received.identity)
                if not behind and each.later.poll():
                    self._finish(each)
                else:
                    self._pending.append(each)

    def _finish(self, pending: PendingReply) -> None:
        service = pending.service
        service.reply(pending.endpoint, pending.received, service.complete(pending.command, pending.later))
        if not pending.endpoint.level_triggered:
            self._again[pending.endpoint] = service

    def _read_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


RawJson = orjson.Fragment
"""JSON that goes into a reply as it is."""


def to_json(value: Any) -> bytes:
    """Encodes an answer, also one with text that UTF-8 cannot encode, such as file names or texts of an engine.

    Raises:
        TypeError: the value cannot be encoded.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(all_encodable(value))


def command_list(commands: Iterable[Command] = COMMANDS) -> list[CommandInfo]:
    """Returns the reply to the admin command `commands`."""
    return [
        {
            "name": command.name,
            "level": command.level.label,
            "help": command.help,
            "args": [
                {
                    "name": arg.name,
                    "type": arg.type,
                    "help": arg.help,
                    "required": arg.required,
                    "choices": list(arg.choices),
                }
                for arg in command.args
            ],
        }
        for command in commands
    ]


def stacks() -> list[ThreadStack]:
    """Returns the Python stack of each thread, innermost frame last; includes threads that Python did not start."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    rows: list[ThreadStack] = []
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        rows.append(
            {
                "name": thread.name if thread else f"foreign-{ident}",
                "ident": ident,
                "daemon": thread.daemon if thread else True,
                "frames": [
                    f"{entry.filename}:{entry.lineno} {entry.name}" + (f": {entry.line}" if entry.line else "")
                    for entry in traceback.extract_stack(frame)
                ],
            }
        )
    return sorted(rows, key=lambda row: row["name"])
