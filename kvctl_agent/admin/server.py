"""Serves the admin socket on a thread of its own; nothing a client does may reach the agent's work.

The thread sleeps in one poll over the socket, the one for other machines where there is one, and a wake-up descriptor.
A handler that raises costs its client an error; a client that does not read costs itself its replies; garbage costs its
sender a refusal.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import zmq

from kvctl_agent.admin.endpoints import FRAME_LIMIT, AdminEndpoint, UnixEndpoint
from kvctl_agent.admin.process import stacks
from kvctl_agent.admin.remote_endpoint import RemoteEndpoint, open_remote_endpoint
from kvctl_agent.admin.requests import parse_body, parse_frames, request_id
from kvctl_agent.admin.socket_claim import Claim
from kvctl_agent.contract.admin import MAGIC, MAX_REPLY_BYTES, ErrorCode
from kvctl_agent.contract.commands import COMMANDS, COMMANDS_BY_NAME, Command, Level
from kvctl_agent.contract.snapshots import CommandInfo, Hello
from kvctl_agent.contract.values import encodable
from kvctl_agent.errors import AdminError, DeadlineExceeded, RequestRefused
from kvctl_agent.security.rejected_keys import RejectedKeys
from kvctl_agent.security.unix_router import UnixRouter
from kvctl_agent.security.zap_authenticator import ZapAuthenticator
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.metrics import Metrics

Handler = Callable[[dict[str, Any]], Any]

SERVED_HERE = frozenset({"hello", "commands", "stacks"})
_LONGEST_TEXT = 2000


class AdminServer:
    """The admin socket of one agent.

    Handlers get the checked arguments of their command (absent ones are absent, rooms are ints) and return what
    `contract/snapshots.py` says, or raise `RequestRefused`. They run on the server's thread, one at a time.
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
    ) -> None:
        """Nothing is bound before `start`.

        Args:
            name: the agent's name; names the socket.
            handlers: one per declared command, but for those that the server answers itself (`SERVED_HERE`).
            hello: who answers; its `level` is filled in here.
            directory: where the socket goes; None is `contract.admin.socket_dir()`.
            metrics, recorder: where requests, refusals and failed handlers are counted and told.
            clock: the agent's clock, so that `generated_at_ns` agrees with the moments in the data.
            remote: where clients with keys may ask from other machines; None for nowhere.

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
        self._metrics = metrics
        self._recorder = recorder
        self._clock = clock or Clock()
        self._remote = remote
        self._strangers = RejectedKeys(metrics, recorder)
        self._commands = dict(COMMANDS_BY_NAME)
        self._handlers: dict[str, Handler] = {
            **handlers,
            "hello": self._answer_hello,
            "commands": lambda _: command_list(self._commands.values()),
            "stacks": lambda _: stacks(),
        }
        self._claim: Claim | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._wake: int | None = None
        self._wake_lock = threading.Lock()  # the descriptor's number may be given out again once it is closed
        self._sequence = 0
        self._handling: str | None = None
        self._asking = Level.READ  # level of the client that is being answered
        self.asker = ""  # how that one came in: by our Unix socket, or with which key
        self._remote_address = ""

    def add(self, command: Command, handler: Handler) -> None:
        """Serve one more command, which not every agent has; before `start`."""
        self._commands[command.name] = command
        self._handlers[command.name] = handler

    @property
    def path(self) -> Path | None:
        """The socket's path while it is served."""
        return self._claim.path if self._claim else None

    @property
    def remote_address(self) -> str:
        """Where clients with keys are served, with the port that was found; "" for nowhere."""
        return self._remote_address

    def start(self) -> AdminServer:
        """Claims the name, binds and serves.

        Raises:
            AdminError: another agent has the name, or the socket cannot be made.
        """
        if self._thread is not None:
            raise AdminError(f"the admin server of {self._name} was started before")
        claim = Claim(self._name, self._directory)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # takes no descriptor before its first socket
        gatekeeper: ZapAuthenticator | None = None
        router: UnixRouter | None = None
        try:
            router = UnixRouter(claim.path, FRAME_LIMIT, refused=self._strangers.refused)
            doors: list[AdminEndpoint] = [UnixEndpoint(router)]
            if self._remote is not None:
                door, gatekeeper = open_remote_endpoint(
                    context, self._remote, self._name, self._strangers.refused, self._tell_warning
                )
                doors.append(door)
                self._remote_address = door.socket.getsockopt_string(zmq.LAST_ENDPOINT)
            wake = self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException as error:
            if gatekeeper is not None:
                gatekeeper.close()
            context.destroy(linger=0)
            if router is not None:
                router.close()
            claim.release()
            if isinstance(error, zmq.ZMQError | OSError):
                raise AdminError(f"cannot bind the admin socket {claim.path}: {error.strerror}") from None
            raise
        self._claim = claim
        self._thread = threading.Thread(
            target=self._serve,
            args=(claim, router, context, doors, gatekeeper, wake),
            name=f"kvctl-admin-{self._name}",
            daemon=True,
        )
        self._thread.start()
        return self

    def close(self, timeout: float = 2.0) -> None:
        """Stops serving and removes the socket. Idempotent.

        Raises:
            DeadlineExceeded: a handler is still running after `timeout` seconds; thread, socket and name go when
                it ends.
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

    def _serve(
        self,
        claim: Claim,
        router: UnixRouter,
        context: zmq.Context[zmq.Socket[bytes]],
        doors: Sequence[AdminEndpoint],
        gatekeeper: ZapAuthenticator | None,
        wake: int,
    ) -> None:
        try:
            poller = zmq.Poller()
            for door in doors:
                poller.register(door.poll_key, zmq.POLLIN)
            poller.register(wake, zmq.POLLIN)
            while not self._stopping:
                patience = [door.max_wait_ms for door in doors if door.max_wait_ms is not None]
                ready = dict(poller.poll(min(patience, default=None)))
                for door in doors:
                    if door.poll_key in ready or door.max_wait_ms is not None:
                        self._turn(door)
        finally:
            if gatekeeper is not None:
                gatekeeper.close()
            context.destroy(linger=0)
            router.close()
            claim.release()
            self._claim = None
            with self._wake_lock:
                os.close(wake)
                self._wake = None

    def _turn(self, door: AdminEndpoint) -> None:
        """One request, one reply."""
        asked = door.receive()
        if asked is None:
            return
        self.asker = asked.who
        try:
            reply = self._answer(asked.frames, asked.level)
        except RequestRefused as refusal:
            if self._metrics:
                self._metrics.add("kvctl_admin_errors_total", 1, refusal.code)
            reply = self._refused(refusal)
        if not door.send(asked.identity, [MAGIC, request_id(asked.frames), reply]):
            self._tell_warning("a client does not read its replies: dropping them")

    def _answer(self, frames: Sequence[bytes], level: Level | None) -> bytes:
        if level is None:
            raise RequestRefused(ErrorCode.NOT_PERMITTED, "this key has been taken out of the agent's admin_clients")
        request = parse_body(parse_frames(frames), self._commands)
        name, needs = request.command.name, request.command.level
        if needs > level:
            raise RequestRefused(
                ErrorCode.NOT_PERMITTED, f"{name} needs level {needs.label}, this client has {level.label}"
            )
        self._asking = level
        if self._metrics:
            self._metrics.add("kvctl_admin_requests_total", 1, name)
        now = self._clock.now_ns()
        self._handling = name
        try:
            reply = self._envelope(now, {"ok": True, "data": self._handlers[name](request.args)})
        except RequestRefused:
            raise
        except Exception as error:
            text = f"{name} failed inside the agent: {type(error).__name__}: {error}"[:_LONGEST_TEXT]
            if self._recorder:
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
        # Errors of the operating system carry file names, which may not be text.
        error = {"code": str(refusal.code), "message": encodable(str(refusal))}
        return self._envelope(self._clock.now_ns(), {"ok": False, "error": error})

    def _envelope(self, moment_ns: int, content: dict[str, Any]) -> bytes:
        generated = {"generated_at_ns": self._clock.wall_ns(moment_ns), "sequence": self._sequence + 1}
        try:
            reply = orjson.dumps({**content, **generated})
        except TypeError:  # text that UTF-8 does not have: file names in errors and settings, what an engine raised
            reply = orjson.dumps(_encodable({**content, **generated}))
        self._sequence += 1
        return reply

    def _tell_warning(self, text: str) -> None:
        if self._recorder:
            self._recorder.record("admin", text, "warning")

    def _answer_hello(self, _: dict[str, Any]) -> Hello:
        hello = self._hello()
        hello["level"] = self._asking.label
        hello["capabilities"] = sorted(self._commands)
        return hello


def _encodable(value: Any) -> Any:
    """The same answer with lone surrogates escaped in all of its text."""
    match value:
        case str():
            return encodable(value)
        case dict():
            return {_encodable(key): _encodable(each) for key, each in value.items()}
        case list() | tuple():
            return [_encodable(each) for each in value]
    return value


def command_list(commands: Iterable[Command] = COMMANDS) -> list[CommandInfo]:
    """Answer to `commands`."""
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
