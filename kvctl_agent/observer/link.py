"""An agent's link to its observer: the observer process, or, where there is none, a thread that does its work.

The link claims the agent's name, starts the process if none runs, registers with it, and carries out what it asks the
agent for. If the process ends, the link looks for another or starts one; after repeated failures it goes on with the
thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import site
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvctl_agent.contract.admin import (
    LOCK_SUFFIX,
    OBSERVER_SOCKET,
    ErrorCode,
    region_directory,
    socket_dir,
    socket_path,
)
from kvctl_agent.contract.commands import Command
from kvctl_agent.contract.values import encodable
from kvctl_agent.errors import (
    AdminError,
    ConfigError,
    DeadlineExceeded,
    KvctlError,
    RegionError,
    RemoteProtocolError,
    RequestRefused,
)
from kvctl_agent.host.sockets import peer_uid
from kvctl_agent.observer.documents import RegionDocuments
from kvctl_agent.observer.endpoints import RemoteEndpoint
from kvctl_agent.observer.link_messages import (
    Answer,
    Ask,
    Leave,
    MessageSocket,
    Register,
    Registered,
    Unable,
    Wake,
    from_observer,
    telemetry_variables,
)
from kvctl_agent.observer.server import Handler, ServerLoop, stacks, to_json
from kvctl_agent.observer.socket_claim import Claim, prepare_directory
from kvctl_agent.observer.worker import Worker, worker_in_process
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.region import NEW_SUFFIX, SUFFIX, Cell, Header, RegionWriter, fitting_log_bytes, namespace

SETTINGS = (
    "black_box_s",
    "failed_rooms",
    "history_rooms",
    "host",
    "insecure",
    "metrics_endpoint",
    "metrics_public",
    "otel_endpoint",
    "recorder_events",
    "timeline_events",
)
"""Configuration keys that the observer uses."""

_START_S = 20.0  # a process that starts beside busy engines on few cores takes seconds
_REGISTER_S = 10.0
_CLOSE_S = 2.0
_TICK_S, _IDLE_S = 1.0, 600.0
_RETRY_S = (0.0, 0.1, 0.3, 1.0, 3.0)  # waits before looking for another observer; after the last one the thread begins
_ATTEMPTS = 3  # to register at the start
_LASTED_S = 1.0  # a registration that lasted this long was none of repeated failures
_POLL_S = 0.02
_LONGEST_TEXT = 2000
_MEMORY_LOG_BYTES = 1 << 20  # of a log that a thread of the same process reads


class _Unavailable(Exception):
    """No observer process can serve the agent; the text says why."""


class _Ended(_Unavailable):
    """The observer has ended before it has registered the agent; another one may be able to."""


class ObserverLink:
    """Link of one agent, or of another worker with a region, to its observer.

    Handlers of actions get validated arguments, with rooms as int, and return the type declared in
    `contract/snapshots.py` or raise `RequestRefused`. They run on the link's thread, one at a time.

    Attributes:
        client: origin of the request being answered, as in `ClientRequest.origin`.
        path: path of the admin socket while it is served.
        remote_address: TCP address of the admin socket with its actual port; "" without one.
        metrics_url: URL of the metrics; "" without them.
        observer: "process" or "thread"; "" before `start`.
    """

    def __init__(
        self,
        region: RegionWriter,
        settings: Mapping[str, Any],
        handlers: Mapping[str, Handler],
        *,
        documents: RegionDocuments | None = None,
        flush: Callable[[], None] = lambda: None,
        remote: RemoteEndpoint | None = None,
        endpoint: str = "",
        wake: int | None = None,
        note: Callable[[str], None] = lambda _: None,
        tick: Callable[[], None] | None = None,
        directory: Path | None = None,
    ) -> None:
        """Creates the link; `start` connects it.

        Args:
            region: what the agent writes; without a file the thread serves it.
            settings: the agent's configuration.
            handlers: handlers of the actions that the agent carries out, by command.
            documents: the agent's documents, for readers in this process; None: those in the region.
            flush: writes what the agent has not yet written to the region, for readers in this process.
            remote: TCP endpoint for clients with keys; None without one.
            endpoint: address under which the rank's peers know it, for the lock file; "" if they know its name.
            wake: eventfd that makes the agent's loop publish documents; None: it finds out by itself.
            note: records a warning.
            tick: called about once a second on the link's thread.
            directory: directory of the admin socket; None for `contract.admin.socket_dir()`.
        """
        self._region = region
        self._name = region.header.name
        self._settings = settings
        self._handlers: dict[str, Handler] = {"stacks": lambda _: stacks(), **handlers}
        self._added: list[Command] = []
        self._documents = documents
        self._flush = flush
        self._remote = remote
        self._endpoint = endpoint
        self._wake_agent = wake
        self._note = note
        self._tick = tick
        self._directory = directory or socket_dir()
        self._worker: Worker | None = None
        self._making = threading.Lock()
        self._waking = threading.Lock()  # no use after close: a descriptor's number may be in use again
        self._claim: Claim | None = None
        self._connection: MessageSocket | None = None
        self._loop: ServerLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._unread: list[bytes] = []  # messages that came with the reply to the registration
        self._handling: str | None = None
        self._wake = -1
        self._new_wake = False
        self._tick_s = 0.0
        self.client = ""
        self.path: Path | None = None
        self.remote_address = self.metrics_url = self.observer = ""

    # ---- for the agent --------------------------------------------------------------------------------------------

    @property
    def worker(self) -> Worker:
        """The worker as the thread serves it, for readers in this process."""
        with self._making:
            if self._worker is None:
                self._worker = worker_in_process(self._region, self._settings, self._act, self._documents, self._flush)
            return self._worker

    @property
    def queries(self) -> Queries:
        """The reading commands, as methods with the arguments of those of `ObservedRank`, in this process."""
        return Queries(self)

    def add(self, command: Command, handler: Handler) -> None:
        """Adds a command that `contract.commands` does not declare; call it before `start`."""
        self._added.append(command)
        self._handlers[command.name] = handler

    def replace(self, handlers: Mapping[str, Handler], wake: int | None) -> None:
        """Replaces handlers and eventfd by those of the agent's new components; None lets it close the old one."""
        self._handlers.update(handlers)
        with self._waking:
            self._wake_agent, self._new_wake = wake, wake is not None
        self._wake_link()

    def start(self) -> ObserverLink:
        """Claims the name and has the agent served.

        Raises:
            AdminError: another agent has the name, or a socket cannot be bound.
            ConfigError: no port of an exporter is free, or its package is not installed.
        """
        if self._thread is not None:
            raise AdminError(f"the admin server of {self._name} was started before")
        self._claim = Claim(self._name, self._directory, self._endpoint)
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            _links.add(self)
            if self._region.path is not None:
                try:
                    self._region.move(self._region.path.with_suffix(SUFFIX))
                    self._connect_first()
                except (_Unavailable, RegionError) as error:
                    self._leave_process(str(error))
            if self._connection is None:
                self._bind_in_thread()
            thread = threading.Thread(target=self._run, name=f"kvctl-admin-{self._name}", daemon=True)
            thread.start()  # RuntimeError: the process may have no more threads
            self._thread = thread
        except BaseException:
            self._end()
            raise
        return self

    def close(self, timeout: float = _CLOSE_S) -> None:
        """Ends the service and releases the agent's name. Idempotent.

        Raises:
            DeadlineExceeded: an action is still running after `timeout` seconds; when it ends, so does the service.
        """
        self._flush()
        self._region.cells[Cell.CLOSED_NS] = time.monotonic_ns()
        thread = self._thread
        if thread is None:
            return
        self._closing = True
        self._wake_link()
        thread.join(timeout + _CLOSE_S)
        if thread.is_alive():
            raise DeadlineExceeded(
                f"the admin server of {self._name} did not stop within {timeout:g} s: "
                f"it is still answering {self._handling!r}"
            )

    def _wake_link(self) -> None:
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        if (loop := self._loop) is not None:
            loop.wake()

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            since_s, failures = time.monotonic(), 0
            while self._connection is not None:
                self._answer(self._connection)
                if self._closing:
                    return
                if time.monotonic() - since_s >= _LASTED_S:
                    failures = 0
                failures = self._reconnect(failures)
                since_s = time.monotonic()
            if not self._closing:
                self._serve_in_thread()
        finally:
            self._end()

    def _end(self) -> None:
        """Releases everything; the thread has nothing more to do."""
        _links.discard(self)
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._loop is not None:
            self.worker.stop()
            self._loop.close()
            self._loop = None
        with self._waking:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1
        if self._claim is not None:
            self._claim.release()
        self.path = None

    def _call_tick(self) -> None:
        if self._tick is not None and (now_s := time.monotonic()) >= self._tick_s:
            self._tick_s = now_s + _TICK_S
            try:
                self._tick()
            except Exception as error:  # must not cost the admin socket
                self._tick = None
                self._note(f"{type(error).__name__}: {error}"[:_LONGEST_TEXT])

    def _handle(self, command: str, arguments: dict[str, Any], client: str) -> Any:
        """Carries out an action; raises RequestRefused."""
        handler = self._handlers.get(command)
        if handler is None:
            raise RequestRefused(ErrorCode.REFUSED, f"{self._name} has no {command}")
        self.client, self._handling = client, command
        try:
            return handler(arguments)
        finally:
            self._handling = None

    # ---- with the observer process --------------------------------------------------------------------------------

    def _connect_first(self) -> None:
        """Connects; an observer that is just ending, as it has nothing to serve, is replaced. Raises as `_connect`."""
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(_Ended):
                self._connect()
                return
        self._connect()

    def _connect(self, *, again: bool = False) -> None:
        """Registers with the observer process, which it starts if none runs.

        Args:
            again: whether to ask for the addresses that the agent had before.

        Raises:
            _Unavailable: no process can serve the agent.
            AdminError, ConfigError: neither can a thread.
        """
        until_s = time.monotonic() + _START_S
        connection = reach_observer(self._directory, until_s)
        messages = MessageSocket(connection)
        try:
            registration = self._registration(again=again)
            with self._waking:
                self._new_wake = False
                sent = messages.send(registration, self._wake_agent)
            if not sent:
                raise _Ended("the observer has ended")
            match self._first_message(messages):
                case Registered(path, address, url):
                    self.path, self.remote_address, self.metrics_url = Path(path), address, url
                    self.observer = "process"
                case Unable("AdminError", text):
                    raise AdminError(text)
                case Unable("ConfigError", text):
                    raise ConfigError(text)
                case Unable(_, text):
                    raise _Unavailable(text)
                case _:
                    raise _Unavailable("the observer does not register workers")
        except (RemoteProtocolError, msgspec.MsgspecError) as error:
            messages.close()
            raise _Unavailable(f"the observer is of another version: {error}") from None
        except BaseException:
            messages.close()
            raise
        self._connection = messages

    def _registration(self, *, again: bool) -> Register:
        settings = {key: self._settings[key] for key in SETTINGS}
        remote = self._remote
        if again:  # ports may have been chosen by the kernel
            if remote is not None and self.remote_address:
                remote = remote._replace(endpoint=self.remote_address)
            if self.metrics_url:
                settings["metrics_endpoint"] = self.metrics_url.removeprefix("http://").partition("/")[0]
        variables = telemetry_variables()
        texts = {name: value for name, value in variables.items() if _is_text(name) and _is_text(value)}
        if not again and (unsent := [encodable(name) for name in variables if name not in texts]):
            self._note(f"its observer does without variables that are not UTF-8: {', '.join(unsent)}")
        return Register(str(self._region.path), settings, remote, self._added, namespace("net"), texts)

    def _first_message(self, messages: MessageSocket) -> object:
        until_s = time.monotonic() + _REGISTER_S
        while (left_s := until_s - time.monotonic()) > 0:
            _wait(messages, left_s)
            messages.flush()
            received, ended = messages.receive()
            if received:
                self._unread = received[1:]
                return from_observer.decode(received[0])
            if ended:
                raise _Ended("the observer has ended")
        raise _Unavailable(f"the observer has not registered it within {_REGISTER_S:g} s")

    def _answer(self, messages: MessageSocket) -> None:
        """Carries out what the observer asks for, until the connection ends."""
        leave_s = 0.0
        unread, self._unread = self._unread, []
        while not leave_s or time.monotonic() < leave_s:
            if self._closing and not leave_s:
                leave_s = time.monotonic() + _CLOSE_S
                messages.send(Leave())
            if self._new_wake and not messages.sending:
                self._send_wake(messages)
            # A thread that wakes takes the interpreter from the engine: without work of its own it does not.
            has_work = leave_s or self._tick is not None or self._worker is not None
            _wait(messages, 0.0 if unread else _TICK_S if has_work else _IDLE_S, self._wake)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            messages.flush()
            try:
                received, ended = messages.receive()
                received, unread = unread + received, []
                for content in received:
                    if isinstance(asked := from_observer.decode(content), Ask):
                        messages.send(self._answer_to(asked))
            except (KvctlError, msgspec.MsgspecError):
                ended = True
            if ended:
                break
            self._call_tick()
            if self._worker is not None:  # so that it misses nothing
                self._worker.tick(time.monotonic())
        self._connection = None
        messages.close()

    def _send_wake(self, messages: MessageSocket) -> None:
        with self._waking:
            if self._new_wake and not self._closing:
                self._new_wake = False
                messages.send(Wake(), self._wake_agent)

    def _answer_to(self, asked: Ask) -> Answer:
        try:
            return Answer(asked.number, to_json(self._handle(asked.command, asked.args, asked.client)))
        except RequestRefused as refusal:
            return Answer(asked.number, code=refusal.code, text=encodable(str(refusal)))
        except Exception as error:
            text = f"{asked.command} failed inside the agent: {type(error).__name__}: {error}"[:_LONGEST_TEXT]
            self._note(text)
            return Answer(asked.number, code=ErrorCode.INTERNAL, text=encodable(text))

    def _reconnect(self, failures: int) -> int:
        """Registers with another observer, or leaves it to the thread; returns the number of failures in a row."""
        reason = "it ends again and again"
        while not self._closing:
            if failures >= len(_RETRY_S):
                self._leave_process(reason)
                try:
                    self._bind_in_thread()
                except Exception as error:
                    self._note(f"the admin socket is not served any more: {error}")
                break
            _wait(None, _RETRY_S[failures], self._wake)
            failures += 1
            try:
                self._connect(again=failures < len(_RETRY_S))
                return failures
            except Exception as error:  # such as RuntimeError without threads
                reason = str(error)
        return failures

    def _leave_process(self, reason: str) -> None:
        """Notes that the thread serves the agent, and removes the region's file, which an observer could find."""
        self._note(f"no observer process serves this agent, a thread of its own does: {reason}")
        if self._region.path is not None:
            with contextlib.suppress(OSError):
                self._region.path.unlink()

    # ---- without it -----------------------------------------------------------------------------------------------

    def _bind_in_thread(self) -> None:
        """Binds the sockets that the thread is going to serve; raises AdminError, ConfigError."""
        assert self._claim is not None
        worker = self.worker
        self._claim.path.unlink(missing_ok=True)  # of an observer that was killed
        worker.start(self._claim.path, self._settings, self._remote, self._added)
        self._loop = ServerLoop()
        self._loop.add(worker.service)
        self.path, self.observer = worker.service.path, "thread"
        self.remote_address, self.metrics_url = worker.service.remote_address, worker.metrics_url or ""

    def _serve_in_thread(self) -> None:
        if self._loop is not None:
            self._loop.run(self._turn)

    def _turn(self) -> float:
        assert self._loop is not None
        if self._closing:
            self._loop.stop()
            return 0.0
        self._call_tick()
        due_s = self.worker.tick(time.monotonic())
        return max(0.0, min(due_s - time.monotonic(), _TICK_S))

    def _act(self, command: str, arguments: dict[str, Any]) -> Any:
        return self._handle(command, arguments, self.worker.service.client)


class Queries:
    """Reading admin commands as methods: for tests, and for workers that measure themselves."""

    def __init__(self, link: ObserverLink) -> None:
        self._link = link

    def __getattr__(self, command: str) -> Callable[..., Any]:
        return partial(self._link.worker.call, command)


def _is_text(text: str) -> bool:
    """Returns whether UTF-8 can encode a text, as it can encode variables of the environment only if they are UTF-8."""
    return encodable(text) == text


def _wait(messages: MessageSocket | None, timeout_s: float, *descriptors: int) -> None:
    """Waits until one of the descriptors is readable, or the socket can be read or, if it waits for that, written."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    if messages is not None:
        poller.register(messages.fileno(), select.POLLIN | (select.POLLOUT if messages.sending else 0))
    poller.poll(timeout_s * 1000)


_links: weakref.WeakSet[ObserverLink] = weakref.WeakSet()


def _leave_connections_to_the_parent() -> None:
    # With a copy in a forked child, the observer would not notice that the agent was killed.
    for link in list(_links):
        if link._connection is not None:
            link._connection.close()


os.register_at_fork(after_in_child=_leave_connections_to_the_parent)


# ---- regions and processes ------------------------------------------------------------------------------------------


def new_region(
    settings: Mapping[str, Any],
    name: str,
    role: str,
    incarnation: int,
    clock: Clock,
    note: Callable[[str], None],
    directory: Path | None = None,
) -> RegionWriter:
    """Returns the region of an agent: in a file that `ObserverLink.start` shows to observers, or in memory.

    Args:
        note: records a warning: there is no room for a file.
        directory: directory of the admin socket; None for `contract.admin.socket_dir()`.
    """
    sockets = directory or socket_dir()
    wanted = settings["log_mb"] << 20
    header = partial(
        Header.of_this_process,
        role,
        name,
        os.fspath(sockets),
        incarnation=incarnation,
        clock_offset_ns=clock.wall_ns(0),
    )
    if settings["observer"] == "process":
        regions = region_directory(sockets)
        for left in (1, 0):
            try:
                socket_path(name, sockets)  # a name that is no file name is refused at the start
                prepare_directory(regions)
                path = regions / f"{name}.{os.getpid()}.{incarnation:016x}{NEW_SUFFIX}"
                return RegionWriter(header(log_bytes=fitting_log_bytes(regions, wanted)), path)
            except (KvctlError, OSError, ValueError) as error:
                if left and not regions.exists():  # an observer that ends has just removed it
                    continue
                note(f"what this agent notes is not in shared memory, so no observer process can serve it: {error}")
                break
    return RegionWriter(header(log_bytes=min(wanted, _MEMORY_LOG_BYTES)))


def reach_observer(directory: Path, until_s: float) -> socket.socket:
    """Returns a connection to the observer of a directory, which it starts if none runs.

    Raises:
        _Unavailable: none can be reached until monotonic `until_s`.
    """
    path = directory / OBSERVER_SOCKET
    while (left_s := until_s - time.monotonic()) > 0:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(left_s)
        try:
            connection.connect(os.fspath(path))
            if peer_uid(connection) == os.geteuid():
                return connection
            connection.close()
            raise _Unavailable(f"{path} belongs to another user's process")
        except (ConnectionRefusedError, FileNotFoundError):
            connection.close()
        except OSError as error:
            connection.close()
            raise _Unavailable(f"cannot connect to {path}: {error.strerror or error}") from None
        with _starting(directory) as starts:
            if starts:
                _start_process(directory, left_s)
            else:
                time.sleep(_POLL_S)
    raise _Unavailable(f"{path} cannot be reached")


@contextlib.contextmanager
def _starting(directory: Path) -> Iterator[bool]:
    """Lets one of all processes start the observer: after its end there may be hundreds that want to."""
    try:
        path = directory / f"{OBSERVER_SOCKET}.start{LOCK_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _Unavailable(f"cannot use {directory}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _start_process(directory: Path, timeout_s: float) -> None:
    root = os.fspath(Path(__file__).absolute().parents[2])
    installed = root in (*site.getsitepackages(), site.getusersitepackages())
    # Of an installed package the path would put all others before the standard library.
    places = filter(None, ("" if installed else root, os.environ.get("PYTHONPATH")))
    command = [sys.executable or "python3", "-P", "-m", "kvctl_agent.observer", os.fspath(directory.absolute())]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=timeout_s,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            start_new_session=True,
            check=False,
        )
    except (OSError, ValueError) as error:
        raise _Unavailable(f"cannot start {command[0]}: {error}") from None
    except subprocess.TimeoutExpired:
        raise _Unavailable(f"the observer has not started within {timeout_s:.0f} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _Unavailable(f"the observer cannot start: {lines[-1] if lines else f'exit status {done.returncode}'}")
