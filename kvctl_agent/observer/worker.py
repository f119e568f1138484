"""One worker as an observer has it: the fold of its region, its documents, its admin service and its exporters."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.contract.commands import Command
from kvctl_agent.contract.config import KEYS, Key
from kvctl_agent.errors import RegionError, RequestRefused
from kvctl_agent.observer.documents import Configuration, RegionDocuments
from kvctl_agent.observer.endpoints import RemoteEndpoint
from kvctl_agent.observer.exports import Exports
from kvctl_agent.observer.fold import Fold, FoldedRegion, limits_of
from kvctl_agent.observer.observed_rank import ObservedRank
from kvctl_agent.observer.probes import liveness, readiness
from kvctl_agent.observer.process_facts import ProcessFacts, process_facts
from kvctl_agent.observer.room_records import FoldedRoom
from kvctl_agent.observer.server import AdminService, Later
from kvctl_agent.security.unix_router import SPARE_DESCRIPTORS
from kvctl_agent.telemetry.region import Cell, Document, MemoryReader, RegionReader, RegionWriter

FRESH_S = 0.1
"""Longest wait for documents that a worker was asked for."""

ACTIONS = frozenset({"abort", "release", "forget", "drain", "resume", "set", "probe", "stacks"})
"""Declared commands that only the worker's own process can carry out."""

_MANY, _RECENT_NS = 64, 1_500_000_000  # agents publish their state once a second
_WITHOUT_DOCUMENTS = frozenset({"events", "history", "slow", "layers", "nics", "cost"})
# What many agents are asked at once, and the documents with ages that it reads.
_SPARED = {
    "status": (Document.STATE,),
    "health": (Document.STATE, Document.PEERS, Document.STAGING, Document.ROOMS),
}
_LATE_TURN_NS = 1_000_000_000  # a loop that is later than this publishes nothing in time
_SHORTEST_S, _LONGEST_S = 0.25, 1.0  # between looks at a log: while something is written, and otherwise

Act = Callable[[str, dict[str, Any]], Any]


class Worker:
    """One worker; any thread may use `call`, the other methods belong to the thread of the server's loop.

    Attributes:
        name, header: of its region.
        folded: reader and fold of its region.
        documents: its documents.
        rank: the worker as the queries see it.
        service: its admin commands.
        exports: its exporters, once they are started.
        act: carries out an action, given command and arguments; returns the answer or a `Later`.
        siblings: returns the number of workers of its observer.
    """

    def __init__(
        self,
        folded: FoldedRegion,
        documents: RegionDocuments,
        facts: Callable[[], ProcessFacts],
        act: Act,
        observer: Literal["process", "thread"],
        sequence: int = 0,
    ) -> None:
        """Creates the worker without sockets.

        Args:
            facts: returns what the kernel tells of its process.
            act: carries out the commands in `ACTIONS`, and those that `add` brings.
            observer: where this is.
            sequence: as for `AdminService`.
        """
        self.header = folded.reader.header
        self.name = self.header.name
        self.folded = folded
        self.documents = documents
        self.act = act
        self.siblings: Callable[[], int] = lambda: 1
        self.exports: Exports | None = None
        self.ended = False
        self._lock = threading.RLock()
        self._facts = facts
        self._due_s = 0.0
        self._wait_s = _SHORTEST_S
        self._seen: tuple[int, ...] = ()
        fold = folded.fold
        self._look = look = _Look(folded, facts)
        documents.cells = look.cells
        self.rank = ObservedRank(folded, documents, look.facts, observer, lambda: self.metrics_url)
        self.rank.catch_up, self.rank.cells = look.fold, look.cells
        reads = self.rank.handlers()
        self._reads = reads
        handlers: dict[str, Callable[[dict[str, Any]], Any]] = {name: partial(self._answer, name) for name in reads}
        handlers.update((name, partial(self._carry_out, name)) for name in ACTIONS)
        hello = partial(self._read, self.rank.hello)
        self.service = AdminService(self.name, handlers, hello, fold.metrics, fold.recorder, fold.clock, sequence)

    @property
    def metrics_url(self) -> str | None:
        """URL of its metrics; None without them."""
        return self.exports.metrics_url or None if self.exports is not None else None

    def start(
        self,
        path: Path,
        settings: Mapping[str, Any] | None = None,
        remote: RemoteEndpoint | None = None,
        added: Iterable[Command] = (),
    ) -> None:
        """Binds the sockets and starts the exporters that are not there yet; after an error, none is.

        Args:
            path: path of the Unix socket.
            settings: the agent's configuration; None: unknown.
            remote: TCP endpoint; None without one.
            added: actions that `contract.commands` does not declare.

        Raises:
            AdminError, ConfigError: as `AdminService.bind` and `Exports`.
        """
        service = self.service
        for command in added:
            service.add(command, partial(self._carry_out, command.name))
        try:
            if service.path is None:  # of spare descriptors an observer of hundreds of workers has none
                service.bind(path, SPARE_DESCRIPTORS if self.rank.observer == "thread" else 0)
            if remote is not None and not service.remote_address:
                service.bind_remote(remote)
            if settings is not None and self.exports is None:
                self.exports = Exports(
                    settings,
                    self.name,
                    self.rank.role,
                    partial(self.call, "metrics"),
                    self.folded.fold,
                    partial(self._fresh, "readyz", partial(readiness, self.rank)),
                    partial(self._fresh, "livez", partial(liveness, self.rank)),
                    self.header.pid,
                )
        except BaseException:
            service.close()
            raise

    def call(self, command: str, *arguments: Any, **named: Any) -> Any:
        """Returns the answer to a reading command, with documents as fresh as the worker can give them in 0.1 s.

        Arguments are those of the method of `ObservedRank`.

        Raises:
            RequestRefused: as the command.
        """
        return self._fresh(command, partial(getattr(self.rank, command), *arguments, **named))

    def _fresh(self, command: str, read: Callable[[], Any]) -> Any:
        """Returns what `read` does with fresh documents; for threads other than the loop's."""
        with self._lock:
            waits = self._asks(command)
        until_s = time.monotonic() + FRESH_S
        while waits and time.monotonic() < until_s:
            time.sleep(0.001)
            with self._lock:
                waits = not self.documents.served()
        with self._lock:
            self._look.begin(object())
            return read()

    def find(self, room: int) -> list[FoldedRoom]:
        """Returns what is known of the rooms with this number, active and recent ones."""
        with self._lock:
            return self.folded.catch_up().rooms.find(room)

    def tick(self, now_s: float) -> float:
        """Folds what the worker has written, if it is time for that; returns when to call again."""
        if now_s >= self._due_s:
            with self._lock:
                cells = self.folded.reader.cells()
                if (seen := cells[: Cell.WRITTEN + 1]) != self._seen:
                    self.folded.catch_up()
                    self._seen, self._wait_s = seen, _SHORTEST_S
                else:
                    self._wait_s = min(2 * self._wait_s, _LONGEST_S)
            self._due_s = now_s + self._wait_s
        return self._due_s

    def wake_by(self, descriptor: int | None) -> None:
        """Sets the eventfd that makes the agent publish its documents; None: there is none."""
        self.documents.wake = descriptor

    def end(self, at_ns: int, why: str | None) -> None:
        """Makes it a black box: what is known of a worker that ended at monotonic `at_ns`, as far as that is known."""
        with self._lock, contextlib.suppress(RegionError):
            self._look.begin(object())
            self.rank.end(at_ns, why)
        self.ended = True
        self._finish(lambda: None, close_reader=False)

    def stop(self) -> None:
        """Closes the sockets and stops the exporters, which may take some seconds; `start` may follow."""
        self.service.close()
        exports, self.exports = self.exports, None
        if exports is not None:
            exports.close()

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        """Closes the sockets at once, and exporters and region on another thread, which calls `then`."""
        self.service.close()
        self._finish(then, close_reader=True)

    def _finish(self, then: Callable[[], None], *, close_reader: bool) -> None:
        exports, self.exports = self.exports, None

        def finish() -> None:
            if exports is not None:
                exports.close()
            if close_reader:
                with self._lock:
                    self.folded.reader.close()
            then()

        if exports is not None and exports.active:
            threading.Thread(target=finish, name=f"kvctl-close-{self.name}", daemon=True).start()
        else:
            finish()

    def silence(self) -> str:
        """Returns a text that says why the agent may not answer; "" if nothing is known."""
        try:
            cells = self.folded.reader.cells()
        except RegionError:
            return ""
        state, turn_ns = self._facts().state, cells[Cell.TURN_NS]
        texts = [f"its process is {state}"] if state in ("stopped", "uninterruptible", "zombie", "gone") else []
        if turn_ns:
            texts.append(f"its control loop last turned {(time.monotonic_ns() - turn_ns) / 1e9:.1f} s ago")
        return ", ".join(texts)

    def note_fault(self, error: Exception) -> None:
        """Counts and records an error of the observer itself."""
        fold = self.folded.fold
        fold.metrics.add("kvctl_internal_errors_total", 1)
        fold.recorder.record("observer", f"{type(error).__name__}: {error}"[:2000], "error")

    def catch_up(self) -> None:
        """Folds what the worker has written; raises RegionError."""
        with self._lock:
            self.folded.catch_up()

    def _answer(self, command: str, arguments: dict[str, Any]) -> Any:
        with self._lock:
            read = partial(self._read, self._reads[command], arguments)
            return _Fresh(self, read) if self._asks(command) else read()

    def _read(self, read: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            self._look.begin(self.service.moment())
            return read(*arguments)

    def _asks(self, command: str) -> bool:
        """Asks for documents that a command needs; returns whether to wait for them."""
        if self.ended or command in _WITHOUT_DOCUMENTS or self._is_spared(command):
            return False
        if not self.documents.ask():
            return False
        cells = self.folded.reader.cells()
        turn_ns = cells[Cell.TURN_NS] or cells[Cell.CALL_NS]  # without a control loop the engine's turns publish
        return time.monotonic_ns() - turn_ns < _LATE_TURN_NS

    def _is_spared(self, command: str) -> bool:
        """Returns whether its last documents will do, as publishing them anew would cost many workers 0.4 ms each."""
        if command not in _SPARED or self.siblings() < _MANY or self.documents.expired:
            return False
        self._look.begin(self.service.moment())
        return self.documents.are_recent(_SPARED[command], _RECENT_NS)

    def _carry_out(self, command: str, arguments: dict[str, Any]) -> Any:
        if self.ended:
            raise RequestRefused(ErrorCode.REFUSED, f"it has ended: {command} needs a running agent")
        try:
            answer = self.act(command, arguments)
        except RequestRefused as refusal:
            return self._ended_room(command, arguments, refusal)
        refused = partial(self._ended_room, command, arguments)
        return _Acted(answer, refused, self.documents.expire) if hasattr(answer, "poll") else answer

    def _ended_room(self, command: str, arguments: dict[str, Any], refusal: RequestRefused) -> Any:
        """Returns that a room has ended whose number the agent no longer knows; raises any other refusal."""
        room = arguments.get("room")
        if refusal.code == ErrorCode.UNKNOWN_ROOM and command in ("abort", "release") and room is not None:
            ended = self._read(self.rank.ended_room, room)
            if ended is not None:
                return [ended]
        raise refusal


class _Look:
    """What the answers of one moment read of a region and of its process: each once, however often it is needed."""

    def __init__(self, folded: FoldedRegion, facts: Callable[[], ProcessFacts]) -> None:
        self._folded = folded
        self._read_facts = facts
        self._moment: object = None
        self.begin(self)

    def begin(self, moment: object) -> None:
        """Forgets what was read at an earlier moment."""
        if moment is self._moment:
            return
        self._moment = moment
        self._fold: Fold | None = None
        self._cells: tuple[int, ...] | None = None
        self._facts: ProcessFacts | None = None

    def fold(self) -> Fold:
        if self._fold is None:
            self._fold = self._folded.catch_up()
        return self._fold

    def cells(self) -> tuple[int, ...]:
        if self._cells is None:
            self._cells = self._folded.reader.cells()
        return self._cells

    def facts(self) -> ProcessFacts:
        if self._facts is None:
            self._facts = self._read_facts()
        return self._facts


def worker_of(reader: RegionReader, settings: Mapping[str, Any], sequence: int) -> Worker:
    """Returns the worker of a region in shared memory; its actions reach nobody yet.

    Args:
        settings: its configuration.
        sequence: as for `AdminService`.
    """
    folded, documents = FoldedRegion(reader, lambda: None, **limits_of(settings)), RegionDocuments(reader)
    return Worker(folded, documents, partial(_facts, reader), _no_agent, "process", sequence)


def published_settings(reader: RegionReader) -> dict[str, Any]:
    """Returns the configuration that a worker has published, of use before it registers and after its end.

    A value that it has not published, or that the key does not permit, is the default.
    """
    rows = RegionDocuments(reader).read(Document.CONFIG, Configuration).rows
    found = {row["key"]: row["value"] for row in rows}
    return {key.name: _permitted(key, found.get(key.name)) for key in KEYS}


def _permitted(key: Key, value: object) -> object:
    if type(value) is not key.type:
        return key.default
    if isinstance(value, int | float) and not (key.minimum or 0) <= value <= (key.maximum or value):
        return key.default
    return value


def worker_in_process(
    region: RegionWriter,
    settings: Mapping[str, Any],
    act: Act,
    documents: RegionDocuments | None,
    flush: Callable[[], None],
) -> Worker:
    """Returns the worker whose region this process writes; arguments as for `ObserverLink`."""
    reader = MemoryReader(region)
    folded = FoldedRegion(reader, flush, **limits_of(settings))
    return Worker(folded, documents or RegionDocuments(reader), partial(_facts, reader), act, "thread")


def _facts(reader: RegionReader) -> ProcessFacts:
    """Returns the facts of the process that writes a region, with the state of the engine's thread."""
    return process_facts(reader.header, reader.cells()[Cell.CALL_TASK])


def _no_agent(command: str, _: dict[str, Any]) -> Any:
    raise RequestRefused(ErrorCode.REFUSED, f"no agent carries out {command}")


class _Fresh:
    """Answer that waits until the worker has published its documents, for at most 0.1 s."""

    def __init__(self, worker: Worker, read: Callable[[], Any]) -> None:
        self._worker = worker
        self._until_s = time.monotonic() + FRESH_S
        self.result = read

    def poll(self) -> bool:
        return self._worker.documents.served() or time.monotonic() >= self._until_s


class _Acted:
    """Answer of the agent to an action.

    Args:
        refused: what becomes of a refusal.
        done: called when the answer is there.
    """

    def __init__(self, answer: Later, refused: Callable[[RequestRefused], Any], done: Callable[[], None]) -> None:
        self.poll = answer.poll
        self._answer = answer
        self._refused = refused
        self._done = done

    def result(self) -> Any:
        self._done()
        try:
            return self._answer.result()
        except RequestRefused as refusal:
            return self._refused(refusal)
