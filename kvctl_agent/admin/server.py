"""Admin server: answers requests from the admin sockets on its own thread.

The thread polls the Unix socket, the TCP socket if there is one, and a wake-up descriptor. If a handler raises, its
client gets an error reply; replies to a client that does not read are dropped; malformed requests are refused.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import zmq

from kvctl_agent.admin.endpoints import (
    FRAME_LIMIT,
    AdminEndpoint,
    ClientRequest,
    RemoteEndpoint,
    UnixEndpoint,
    open_remote_endpoint,
)
from kvctl_agent.admin.requests import parse_body, parse_frames, request_id
from kvctl_agent.admin.socket_claim import Claim
from kvctl_agent.contract.admin import MAGIC, MAX_REPLY_BYTES, ErrorCode
from kvctl_agent.contract.commands import COMMANDS, COMMANDS_BY_NAME, Command, Level
from kvctl_agent.contract.snapshots import CommandInfo, Hello, ThreadStack
from kvctl_agent.contract.values import encodable
from kvctl_agent.errors import AdminError, DeadlineExceeded, RequestRefused
from kvctl_agent.security.curve import RefusedConnections
from kvctl_agent.security.unix_router import UnixRouter
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.metrics import Metrics

Handler = Callable[[dict[str, Any]], Any]

SERVED_HERE = frozenset({"hello", "commands", "stacks"})
_LONGEST_TEXT = 2000


class AdminServer:
    """Admin server of one agent.

    A handler receives the validated arguments that the client passed, with rooms as int. It returns the type declared
    in `contract/snapshots.py`, or raises `RequestRefused`. Handlers run on the server's thread, one at a time.

    Attributes:
        client: origin of the request being answered, as in `ClientRequest.origin`.
    """

    def __init__(
        self,
        name: str,
        handlers: Mapping[str, Handler],
        hello: Callable[[], Hello],
        directory: Path | None = None,
        metrics: Metrics | None = None,
        recorder: FlightRecorder | None = None,
        clock: Clock | None = None,
        remote: RemoteEndpoint | None = None,
        endpoint: str = "",
    ) -> None:
        """Creates the server without binding its sockets; `start` does.

        Args:
            name: the agent's name, from which the socket's name is derived.
            handlers: handler of each declared command, except those that the server answers itself (`SERVED_HERE`).
            hello: returns the answer to `hello`; the server fills in `level`.
            directory: directory of the socket; None for `contract.admin.socket_dir()`.
            metrics, recorder: where requests, refusals and failed handlers are counted and recorded; None: nowhere.
            clock: the agent's clock, so that `generated_at_ns` agrees with the times in the data.
            remote: TCP endpoint for clients with keys; None without one.
            endpoint: address under which the rank's peers know it, for the lock file; "" if they know its name.

        Raises:
            AdminError: handlers and declared commands differ.
        """
        declared = COMMANDS_BY_NAME.keys() - SERVED_HERE
        if handlers.keys() != declared:
            raise AdminError(
                f"admin handlers differ from the declared commands: missing {sorted(declared - handlers.keys())}, "
                f"undeclared {sorted(handlers.keys() - declared)}"
            )
        self._name = name
        self._hello = hello
        self._directory = directory
        self._clock = clock or Clock()
        self._metrics = metrics or Metrics()
        self._recorder = recorder or FlightRecorder(self._clock, name, 1)
        self._remote = remote
        self._endpoint = endpoint
        self._refused_connections = RefusedConnections(self._metrics, self._recorder)
        self._commands = dict(COMMANDS_BY_NAME)
        self._handlers: dict[str, Handler] = {
            **handlers,
            "hello": self._answer_hello,
            "commands": lambda _: command_list(self._commands.values()),
            "stacks": lambda _: stacks(),
        }
        self._path: Path | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._wake: int | None = None
        self._wake_lock = threading.Lock()  # no write after close: the descriptor's number may be in use again
        self._sequence = 0
        self._handling: str | None = None
        self._client_level = Level.READ
        self.client = ""
        self._remote_address = ""

    def add(self, command: Command, handler: Handler) -> None:
        """Adds a command that `contract.commands` does not declare; call it before `start`."""
        self._commands[command.name] = command
        self._handlers[command.name] = handler

    def replace(self, handlers: Mapping[str, Handler]) -> None:
        """Replaces handlers of commands; a request that is being answered keeps its handler."""
        self._handlers.update(handlers)

    @property
    def path(self) -> Path | None:
        """Path of the Unix socket while it is served."""
        return self._path

    @property
    def remote_address(self) -> str:
        """TCP endpoint with its actual port; "" if there is no TCP endpoint."""
        return self._remote_address

    def start(self) -> AdminServer:
        """Claims the agent's name, binds the sockets and starts the thread.

        Raises:
            AdminError: another agent has the name, or a socket cannot be bound.
        """
        if self._thread is not None:
            raise AdminError(f"the admin server of {self._name} was started before")
        with contextlib.ExitStack() as resources:
            claim = Claim(self._name, self._directory, self._endpoint)
            resources.callback(claim.release)
            try:
                endpoints = self._bind(claim.path, resources)
            except (zmq.ZMQError, OSError) as error:
                raise AdminError(f"cannot bind the admin socket {claim.path}: {error.strerror}") from None
            owned = resources.pop_all()
        self._path = claim.path
        thread = threading.Thread(
            target=self._serve, args=(endpoints, owned), name=f"kvctl-admin-{self._name}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the process may have no more threads
            owned.close()
            raise
        self._thread = thread
        return self

    def _bind(self, path: Path, resources: contextlib.ExitStack) -> list[AdminEndpoint]:
        """Binds the sockets; registers with `resources` what the thread must close when it ends."""
        refused = self._refused_connections.add
        router = UnixRouter(path, FRAME_LIMIT, refused=refused)
        resources.callback(router.close)
        endpoints: list[AdminEndpoint] = [UnixEndpoint(router)]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # takes no descriptor before its first socket
        resources.callback(context.destroy, linger=0)
        if self._remote is not None:
            endpoint, authenticator = open_remote_endpoint(
                context, self._remote, self._name, refused, self._record_warning
            )
            resources.callback(authenticator.close)
            endpoints.append(endpoint)
            self._remote_address = endpoint.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        resources.callback(self._forget_socket)
        return endpoints

    def _forget_socket(self) -> None:
        self._path = None
        with self._wake_lock:
            assert self._wake is not None
            os.close(self._wake)
            self._wake = None

    def close(self, timeout: float = 2.0) -> None:
        """Stops the thread, removes the socket and releases the agent's name. Idempotent.

        Raises:
            DeadlineExceeded: a handler is still running after `timeout` seconds; when it ends, the thread ends and
                releases socket and name.
        """
        thread = self._thread
        if thread is None:
            return
        self._stopping = True
        with self._wake_lock:
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)
        thread.join(timeout)
        if thread.is_alive():
            raise DeadlineExceeded(
                f"the admin server of {self._name} did not stop within {timeout:g} s: "
                f"it is still answering {self._handling!r}"
            )

    def __enter__(self) -> AdminServer:
        return self.start() if self._thread is None else self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, endpoints: Sequence[AdminEndpoint], resources: contextlib.ExitStack) -> None:
        assert self._wake is not None
        with resources:
            poller = zmq.Poller()
            for endpoint in endpoints:
                poller.register(endpoint.poll_key, zmq.POLLIN)
            poller.register(self._wake, zmq.POLLIN)
            while not self._stopping:
                limits_ms = [endpoint.max_wait_ms for endpoint in endpoints if endpoint.max_wait_ms is not None]
                ready = dict(poller.poll(min(limits_ms, default=None)))
                for endpoint in endpoints:
                    if endpoint.poll_key in ready or endpoint.max_wait_ms is not None:
                        for request in endpoint.receive():
                            self._reply(endpoint, request)

    def _reply(self, endpoint: AdminEndpoint, received: ClientRequest) -> None:
        self.client = received.origin
        try:
            reply = self._answer(received.frames, received.level)
        except RequestRefused as refusal:
            self._metrics.add("kvctl_admin_errors_total", 1, refusal.code)
            reply = self._refused(refusal)
        if not endpoint.send(received.identity, [MAGIC, request_id(received.frames), reply]):
            self._record_warning("a client does not read its replies: dropping them")

    def _answer(self, frames: Sequence[bytes], level: Level | None) -> bytes:
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
        now = self._clock.now_ns()
        self._handling = name
        try:
            reply = self._envelope(now, {"ok": True, "data": self._handlers[name](request.args)})
        except RequestRefused:
            raise
        except Exception as error:
            text = f"{name} failed inside the agent: {type(error).__name__}: {error}"[:_LONGEST_TEXT]
            self._recorder.record("admin", text, severity="error")
            raise RequestRefused(ErrorCode.INTERNAL, text) from error
        finally:
            self._handling = None
        if len(reply) > MAX_REPLY_BYTES:
            raise RequestRefused(
                ErrorCode.TOO_LARGE,
                f"the answer to {name} has {len(reply)} bytes, at most {MAX_REPLY_BYTES} are sent: "
                "ask for less, for example with limit",
            )
        return reply

    def _refused(self, refusal: RequestRefused) -> bytes:
        # Errors of the operating system contain file names, which need not be valid text.
        error = {"code": str(refusal.code), "message": encodable(str(refusal))}
        return self._envelope(self._clock.now_ns(), {"ok": False, "error": error})

    def _envelope(self, moment_ns: int, content: dict[str, Any]) -> bytes:
        generated = {"generated_at_ns": self._clock.wall_ns(moment_ns), "sequence": self._sequence + 1}
        try:
            reply = orjson.dumps({**content, **generated})
        except TypeError:  # text that UTF-8 cannot encode: file names in errors and settings, or texts of an engine
            reply = orjson.dumps(_encodable({**content, **generated}))
        self._sequence += 1
        return reply

    def _record_warning(self, text: str) -> None:
        self._recorder.record("admin", text, "warning")

    def _answer_hello(self, _: dict[str, Any]) -> Hello:
        hello = self._hello()
        hello["level"] = self._client_level.label
        hello["capabilities"] = sorted(self._commands)
        return hello


def _encodable(value: Any) -> Any:
    """Returns a copy of a reply in which all texts have their lone surrogates escaped."""
    match value:
        case str():
            return encodable(value)
        case dict():
            return {_encodable(key): _encodable(each) for key, each in value.items()}
        case list() | tuple():
            return [_encodable(each) for each in value]
    return value


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
