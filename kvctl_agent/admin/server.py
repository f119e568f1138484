"""Serves the admin socket on a thread of its own; nothing a client does may reach the agent's work.

The thread sleeps in one poll over the socket and a wake-up descriptor. A handler that raises costs its client an
error; a client that does not read costs itself its replies; garbage costs its sender a refusal.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import zmq

from kvctl_agent.admin.requests import parse_body, parse_frames, request_id
from kvctl_agent.admin.socket import Claim
from kvctl_agent.admin.stacks import stacks
from kvctl_agent.contract.admin import MAGIC, MAX_REPLY_BYTES, MAX_REQUEST_BYTES, ErrorCode
from kvctl_agent.contract.commands import COMMANDS, COMMANDS_BY_NAME, Level
from kvctl_agent.contract.snapshots import CommandInfo, Hello
from kvctl_agent.errors import AdminError, DeadlineExceeded, RequestRefused
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.metrics import Metrics
from kvctl_agent.telemetry.recorder import FlightRecorder

Handler = Callable[[dict[str, Any]], Any]

SERVED_HERE = frozenset({"hello", "commands", "stacks"})
SEND_TIMEOUT_MS = 250
# Per client: few queued replies and requests, so that one that does not read holds little of our memory.
_SEND_QUEUE = 64
_RECEIVE_QUEUE = 64
# Between the limit and this a request is refused with words; above it libzmq drops the connection.
_FRAME_LIMIT = 2 * MAX_REQUEST_BYTES
_MOST_STALLED = 1024
_LONGEST_TEXT = 2000
_MOST_FRAMES = 4  # as many as tell a request of three frames from a longer one


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
    ) -> None:
        """Nothing is bound before `start`.

        Args:
            name: the agent's name; names the socket.
            handlers: one per declared command, but for those that the server answers itself (`SERVED_HERE`).
            hello: who answers; its `level` is filled in here.
            directory: where the socket goes; None is `contract.admin.socket_dir()`.
            metrics, recorder: where requests, refusals and failed handlers are counted and told.
            clock: the agent's clock, so that `generated_at_ns` agrees with the moments in the data.

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
        self._handlers: dict[str, Handler] = {
            **handlers,
            "hello": self._answer_hello,
            "commands": lambda _: command_list(),
            "stacks": lambda _: stacks(),
        }
        self._claim: Claim | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._wake: int | None = None
        self._wake_lock = threading.Lock()  # the descriptor's number may be given out again once it is closed
        self._sequence = 0
        self._handling: str | None = None
        self._stalled: set[bytes] = set()

    @property
    def path(self) -> Path | None:
        """The socket's path while it is served."""
        return self._claim.path if self._claim else None

    def start(self) -> AdminServer:
        """Claims the name, binds and serves.

        Raises:
            AdminError: another agent has the name, or the socket cannot be made.
        """
        if self._thread is not None:
            raise AdminError(f"the admin server of {self._name} was started before")
        claim = Claim(self._name, self._directory)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            router = context.socket(zmq.ROUTER)
            router.linger = 0
            router.setsockopt(zmq.MAXMSGSIZE, _FRAME_LIMIT)
            router.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
            router.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
            # Without it a full queue would drop replies silently and a stalled client could not be told.
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.bind(f"ipc://{claim.path}")
            claim.restrict()
            wake = self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except (zmq.ZMQError, OSError) as error:
            context.destroy(linger=0)
            claim.release()
            raise AdminError(f"cannot bind the admin socket {claim.path}: {error.strerror}") from None
        except BaseException:
            context.destroy(linger=0)
            claim.release()
            raise
        self._claim = claim
        self._thread = threading.Thread(
            target=self._serve, args=(claim, context, router, wake), name=f"kvctl-admin-{self._name}", daemon=True
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
        self, claim: Claim, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], wake: int
    ) -> None:
        try:
            poller = zmq.Poller()
            poller.register(router, zmq.POLLIN)
            poller.register(wake, zmq.POLLIN)
            while not self._stopping:
                ready = dict(poller.poll())
                if router in ready:
                    self._turn(router)
        finally:
            # libzmq removes the socket's file, so the name must still be ours.
            context.destroy(linger=0)
            claim.release()
            self._claim = None
            with self._wake_lock:
                os.close(wake)
                self._wake = None

    def _turn(self, router: zmq.Socket[bytes]) -> None:
        """One request, one reply."""
        try:
            identity, frames = _receive(router)
        except zmq.Again:
            return
        try:
            reply = self._answer(frames)
        except RequestRefused as refusal:
            if self._metrics:
                self._metrics.add("kvctl_admin_errors_total", 1, refusal.code)
            reply = self._refused(refusal)
        self._send(router, identity, [MAGIC, request_id(frames), reply])

    def _answer(self, frames: Sequence[bytes]) -> bytes:
        request = parse_body(parse_frames(frames))
        name, needs = request.command.name, request.command.level
        if needs > _level():
            raise RequestRefused(
                ErrorCode.NOT_PERMITTED, f"{name} needs level {needs.label}, this client has {_level().label}"
            )
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
        message = str(refusal).encode("utf-8", "backslashreplace").decode()
        error = {"code": str(refusal.code), "message": message}
        return self._envelope(self._clock.now_ns(), {"ok": False, "error": error})

    def _envelope(self, moment_ns: int, content: dict[str, Any]) -> bytes:
        generated = {"generated_at_ns": self._clock.wall_ns(moment_ns), "sequence": self._sequence + 1}
        reply = orjson.dumps({**content, **generated})
        self._sequence += 1
        return reply

    def _send(self, router: zmq.Socket[bytes], identity: bytes, frames: list[bytes]) -> None:
        # A client gets one chance to catch up; from then on its full queue costs nobody else time.
        router.setsockopt(zmq.SNDTIMEO, 0 if identity in self._stalled else SEND_TIMEOUT_MS)
        try:
            router.send_multipart([identity, *frames])
            self._stalled.discard(identity)
        except zmq.Again:
            if len(self._stalled) >= _MOST_STALLED:
                self._stalled.clear()
            if identity not in self._stalled and self._recorder:
                self._recorder.record("admin", "a client does not read its replies: dropping them", "warning")
            self._stalled.add(identity)
        except zmq.ZMQError:  # it is gone
            self._stalled.discard(identity)

    def _answer_hello(self, _: dict[str, Any]) -> Hello:
        hello = self._hello()
        hello["level"] = _level().label
        return hello


def command_list() -> list[CommandInfo]:
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
        for command in COMMANDS
    ]


def _level() -> Level:
    """Level of a client: an ipc socket of mode 0600 lets in our own uid only, which may do everything."""
    return Level.ADMIN


def _receive(router: zmq.Socket[bytes]) -> tuple[bytes, list[bytes]]:
    """Identity and frames of one request; frames beyond what a request can have are read and dropped."""
    identity = router.recv(zmq.DONTWAIT)
    frames: list[bytes] = []
    while router.getsockopt(zmq.RCVMORE):
        frame = router.recv()
        if len(frames) < _MOST_FRAMES:
            frames.append(frame)
    return identity, frames
