"""Observer process: serves all workers of one user on this host whose admin sockets are in one directory.

A worker registers over `observer.ctl` (see `link_messages`); its connection is its lease. A worker that cannot, because
it hangs, is found by its region. A worker whose region nobody has locked any more has ended: if it did not close its
agent, the observer keeps serving its region as a black box, under its name until another agent claims that, until the
region's file is removed.

The process ends when no worker and no black box has been left for some seconds, or when its socket was removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvctl_agent.contract.admin import (
    ENDED_SUFFIX,
    LOCK_SUFFIX,
    MAGIC,
    OBSERVER_SOCKET,
    RELAY_SOCKET,
    SOCKET_SUFFIX,
    ErrorCode,
    region_directory,
    socket_path,
)
from kvctl_agent.contract.values import encodable
from kvctl_agent.errors import AdminError, ConfigError, KvctlError, RegionError, RemoteProtocolError, RequestRefused
from kvctl_agent.host.sockets import directory_lock, peer_uid, prune, shortage
from kvctl_agent.observer.endpoints import FRAME_LIMIT, AdminEndpoint, BatchEndpoint, ClientRequest
from kvctl_agent.observer.link_messages import (
    Answer,
    Ask,
    Leave,
    MessageSocket,
    Register,
    Registered,
    Unable,
    Wake,
    from_agent,
    telemetry_variables,
)
from kvctl_agent.observer.process_facts import end_status, open_process, why_ended
from kvctl_agent.observer.requests import request_id
from kvctl_agent.observer.server import PendingReply, RawJson, ServerLoop, to_json
from kvctl_agent.observer.socket_claim import ended_path, prepare_directory
from kvctl_agent.observer.worker import Worker, published_settings, worker_of
from kvctl_agent.security.unix_router import UnixRouter
from kvctl_agent.telemetry.region import NEW_SUFFIX, SUFFIX, Cell, RegionReader, namespace

ANSWER_S = 1.5
_IDLE_S = 5.0  # without workers and black boxes, until the process ends
_SCAN_S = 1.0
_EARLY_SCAN_S, _UNREGISTERED_S = 0.25, 0.5  # that a worker has to register before it is served without that
_NEW_S = 60.0  # that a region of an agent that is not started is left alone
_HANDSHAKE_S = 5.0
_MOST_CONNECTIONS = 4096
_MOST_UNREGISTERED = 64
_MOST_BLACK_BOXES = 16
_MOST_BLACK_BOX_BYTES = 256 << 20
_BLACK_BOX_S = 3600  # for regions that do not say it
_DESCRIPTORS = 16  # for a worker with all its sockets
_SHORTEST_FOLD_S, _LONGEST_FOLD_S = 0.05, 1.0
_LOCK_S = 1.0
_PAUSE_S = 0.01
_MOST_FAULTS = 1000
_LONGEST_TRACEBACK = 16 << 10
_LONGEST_NAME = 200
_MOST_UNREAD = 4 << 20  # bytes of replies to one client, until its requests wait


class Lease:
    """Connection of an agent, from its registration until one side ends."""

    def __init__(self, observer: Observer, connection: socket.socket) -> None:
        self._observer = observer
        self._messages = MessageSocket(connection)
        self.reply = self._messages.send  # to the registration
        self._asked: dict[int, _Forwarded] = {}
        self._number = 0
        self.since_s = time.monotonic()
        self.worker: Worker | None = None
        self.wake: int | None = None

    def fileno(self) -> int:
        """Returns the descriptor of the connection."""
        return self._messages.fileno()

    def ready(self) -> None:
        """Receives and sends what there is."""
        self._messages.flush()
        try:
            received, ended = self._messages.receive()
            for content in received:
                if not self._receive(from_agent.decode(content)):
                    return
        except (RemoteProtocolError, msgspec.MsgspecError):
            ended = True
        except Exception as error:  # costs this connection, but not the other workers
            if self.worker is not None:
                self.worker.note_fault(error)
            ended = True
        if ended:
            self._observer.lost(self)
        else:
            self._watch()

    def _receive(self, message: object) -> bool:
        """Handles a message; returns False if the lease has ended."""
        match message:
            case Answer() if (asked := self._asked.pop(message.number, None)) is not None:
                asked.answer = message
            case Wake() if self.worker is not None:
                self._take_wake()
            case Register() if self.worker is None:
                self._observer.register(self, message)
                return self.worker is not None
            case Leave() if self.worker is not None:
                self._observer.leave(self)
                return False
        return True

    def attach(self, worker: Worker) -> None:
        """Makes it the lease of a worker."""
        self.worker = worker
        worker.act = self.ask
        self._take_wake()

    def _take_wake(self) -> None:
        if self._messages.descriptors and self.worker is not None:
            received = self._messages.descriptors.pop()
            if not _is_eventfd(received):  # the observer would write into what it is
                os.close(received)
                return
            self._close_wake()
            self.wake = received
            self.worker.wake_by(received)

    def _close_wake(self) -> None:
        if self.wake is not None:
            os.close(self.wake)
            self.wake = None

    def ask(self, command: str, args: dict[str, Any]) -> _Forwarded:
        """Sends a command to the agent; raises RequestRefused if the agent does not even take it."""
        worker = self.worker
        assert worker is not None
        self._number += 1
        asked = _Forwarded(worker, command)
        if not self._messages.send(Ask(self._number, command, args, worker.service.client)):
            raise asked.refusal()
        self._asked[self._number] = asked
        if len(self._asked) > _MOST_UNREGISTERED:  # answers that nobody waits for any more
            self._asked = {number: each for number, each in self._asked.items() if not each.late}
        self._watch()
        return asked

    def _watch(self) -> None:
        self._observer.loop.watch(self.fileno(), self.ready, writable=self._messages.sending)

    def close(self) -> None:
        """Closes the connection; the worker is served without it."""
        if self.worker is not None:
            self.worker.wake_by(None)
            self.worker.act = partial(_unreachable, self.worker)
        self._close_wake()
        self._messages.close()


def _is_eventfd(descriptor: int) -> bool:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink()) == "anon_inode:[eventfd]"
    except OSError:
        return False


class _Forwarded:
    """Answer of an agent to a command, or that there is none in time."""

    def __init__(self, worker: Worker, command: str) -> None:
        self._worker = worker
        self._command = command
        self._until_s = time.monotonic() + ANSWER_S
        self.answer: Answer | None = None

    @property
    def late(self) -> bool:
        """Whether nobody waits for it any more."""
        return time.monotonic() >= self._until_s

    def poll(self) -> bool:
        return self.answer is not None or self.late

    def result(self) -> Any:
        answer = self.answer
        if answer is None:
            raise self.refusal()
        if answer.code:
            raise RequestRefused(answer.code, answer.text)
        return RawJson(answer.data)

    def refusal(self) -> RequestRefused:
        """Returns the refusal that says since when the worker has not run."""
        text = f"it has not answered within {ANSWER_S:g} s and may still do it"
        return RequestRefused(ErrorCode.TIMEOUT, f"{text}{_with(self._worker.silence())}")


def _unreachable(worker: Worker, command: str, args: dict[str, Any]) -> Any:
    text = f"it has no connection to its observer, so {command} cannot reach it"
    raise RequestRefused(ErrorCode.TIMEOUT, f"{text}{_with(worker.silence())}")


def _with(text: str) -> str:
    return f": {text}" if text else ""


class Relay:
    """Socket of the observer itself: passes requests to the workers that they name, which reply over it.

    So a client asks hundreds of workers at once. Like their own Unix sockets it is open to this user only.
    A name whose socket another process has bound, as an agent that serves itself does in the place of a black box, is
    not served.

    Args:
        services: the workers, by name of the admin socket.
    """

    def __init__(self, path: Path, services: Mapping[str, _Served]) -> None:
        path.unlink(missing_ok=True)  # of an observer that was killed
        self._endpoint = BatchEndpoint(UnixRouter(path, FRAME_LIMIT), _MOST_UNREAD)
        self.endpoints: list[AdminEndpoint] = [self._endpoint]
        self._services = services
        self._sequence = _first_sequence()

    def answer(self, endpoint: AdminEndpoint, received: ClientRequest) -> PendingReply | None:
        *frames, last = received.frames
        name = last.decode(errors="surrogateescape")
        if (served := self._services.get(name)) is not None and served.worker.service.has_path:
            return served.worker.service.answer(endpoint, received._replace(frames=frames))
        if not name:
            content: dict[str, Any] = {
                "ok": True,
                "data": [name for name, served in self._services.items() if served.worker.service.has_path],
            }
        else:
            text = f"the observer serves no agent named {encodable(name)[:_LONGEST_NAME]}"
            content = {"ok": False, "error": {"code": ErrorCode.UNKNOWN_AGENT, "message": text}}
        self._sequence += 1
        reply = to_json({**content, "generated_at_ns": time.time_ns(), "sequence": self._sequence})
        endpoint.send(received.identity, [MAGIC, request_id(frames), reply])
        return None

    def flush(self) -> None:
        """Sends the replies that wait to be sent together."""
        self._endpoint.flush()

    def close(self) -> None:
        """Closes the socket; its file stays."""
        self._endpoint.close()


class Observer:
    """Serves the workers of one socket directory.

    Args:
        directory: the socket directory.
        listener: listening socket at `observer.ctl` in it.
    """

    def __init__(self, directory: Path, listener: socket.socket) -> None:
        self.loop = ServerLoop(self._on_fault)
        self._directory = directory
        self._regions = region_directory(directory)
        self._listener = listener
        self._path = directory / OBSERVER_SOCKET
        self._inode = self._path.stat().st_ino
        self._served: dict[Path, _Served] = {}  # by path of the region
        self._names: dict[str, _Served] = {}  # by name of the admin socket, without suffix
        self._leases: set[Lease] = set()
        self._paths: dict[str, Path] = {}  # regions and black boxes that the latest scan found, by name
        self._seen_s: dict[Path, float] = {}  # regions whose agents have not registered yet
        self._faulty: set[Path] = set()  # regions at which the scan has failed
        self._fold_s = self._scan_s = 0.0
        self._used_s = time.monotonic()
        self._faults = 0
        self._network = namespace("net")
        self._left_locks = False
        self._relay: Relay | None = None
        try:
            self._relay = Relay(directory / RELAY_SOCKET, self._names)
            self.loop.add(self._relay)
        except OSError:  # such as a path that is too long for a socket: clients ask each worker at its own
            keep_traceback(directory)
        self.loop.watch(listener.fileno(), self._accept)

    def run(self) -> None:
        """Serves until no worker is left, or `stop`."""
        try:
            self.loop.run(self._tick)
        finally:
            for lease in list(self._leases):
                self._drop(lease)
            gone = not self._directory.exists()  # no other observer will look for the black boxes
            for served in list(self._served.values()):
                self._forget(served, remove=gone and served.worker.ended)
            if self._relay is not None:
                self.loop.pause(self._relay)
                self._relay.close()
            self._listener.close()
            self.loop.close()

    def stop(self) -> None:
        """Makes `run` return; for signal handlers."""
        self.loop.stop()

    def _on_fault(self) -> None:
        """Keeps the traceback of a fault, which costs the other workers nothing; raises the last of many."""
        self._faults += 1
        keep_traceback(self._directory)
        if self._faults > _MOST_FAULTS:
            raise

    # ---- registered workers ---------------------------------------------------------------------------------------

    def register(self, lease: Lease, message: Register) -> None:
        """Serves the worker that registers, or tells it why not."""
        path = Path(message.region)
        try:
            if path.parent != self._regions or path.suffix != SUFFIX:
                raise RegionError(f"{path} is no region in {self._regions}")
            if message.network and self._network not in (0, message.network):
                raise RegionError("the observer of this socket directory is in another network namespace")
            if (short := shortage(_DESCRIPTORS)) is not None:
                raise RegionError(short)
            served = self._served.get(path) or self._open(path, message.settings)
            self._serve(served, message)
        except KvctlError as error:
            kind = type(error).__name__ if isinstance(error, AdminError | ConfigError) else ""
            lease.reply(Unable(kind, str(error)))
        except OSError as error:
            lease.reply(Unable("", str(error)))
        else:
            worker = served.worker
            if served.lease is not None:
                self._drop(served.lease)
            served.lease = lease
            lease.attach(worker)
            service = worker.service
            lease.reply(Registered(str(service.path), service.remote_address, worker.metrics_url or ""))
            return
        self._drop(lease)

    def leave(self, lease: Lease) -> None:
        """Ends the service of a worker that closes its agent, and then its lease."""
        if (served := self._of(lease)) is None:
            return
        served.lease = None
        worker = served.worker
        with contextlib.suppress(RegionError):
            worker.catch_up()
        self._leases.discard(lease)
        self.loop.unwatch(lease.fileno())
        self._forget(served, then=lease.close)  # the agent waits for that: then its ports are free

    def lost(self, lease: Lease) -> None:
        """Notes that a connection has ended without being closed by its agent."""
        served = self._of(lease)
        self._drop(lease)
        if served is not None:
            served.lease = None
            self._look(served)

    def _of(self, lease: Lease) -> _Served | None:
        return next((each for each in self._served.values() if each.lease is lease), None)

    def _drop(self, lease: Lease) -> None:
        self._leases.discard(lease)
        self.loop.unwatch(lease.fileno())
        lease.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone, or descriptors are short
            time.sleep(_PAUSE_S)
            return
        unregistered = [lease for lease in self._leases if lease.worker is None]
        if peer_uid(connection) != os.geteuid() or len(self._leases) >= _MOST_CONNECTIONS:
            connection.close()
            return
        if len(unregistered) >= _MOST_UNREGISTERED:
            self._drop(min(unregistered, key=lambda lease: lease.since_s))
        lease = Lease(self, connection)
        self._leases.add(lease)
        self.loop.watch(lease.fileno(), lease.ready)

    # ---- service --------------------------------------------------------------------------------------------------

    def _open(self, path: Path, settings: Mapping[str, Any] | None = None) -> _Served:
        reader = RegionReader(path)
        try:
            settings = settings or published_settings(reader)
            worker = worker_of(reader, settings, _first_sequence())
            worker.act = partial(_unreachable, worker)
            worker.siblings = self._served.__len__
            worker.service.moment = self.loop.moment
            served = _Served(path, worker, open_process(reader.header), settings["black_box_s"])
        except BaseException:
            reader.close()
            raise
        self._served[path] = served
        self._seen_s.pop(path, None)
        if served.process is not None:
            self.loop.watch(served.process, partial(self._ended, served))
        return served

    def _serve(self, served: _Served, message: Register | None) -> None:
        """Binds the sockets of a worker; `message` is its registration, None without one."""
        worker = served.worker
        name = worker.name
        try:
            path = socket_path(name, self._directory)
            if worker.service.path is None:
                self._free_name(name)
                path.unlink(missing_ok=True)  # of an observer that was killed
            self.loop.pause(worker.service)  # a failed start closes its sockets
            if message is None:
                worker.start(path)
            else:
                with _environment(message.environment):
                    worker.start(path, message.settings, message.remote, message.commands)
                served.black_box_s = message.settings["black_box_s"]
        except ValueError as error:
            self._forget(served)
            raise AdminError(str(error)) from None
        except BaseException:
            self._forget(served)
            raise
        served.name = name
        self._names[name] = served
        self.loop.add(worker.service)

    def _free_name(self, name: str) -> None:
        """Gives a black box another name; raises AdminError if an agent that runs has this one."""
        other = self._names.get(name)
        if other is None:
            return
        header = other.worker.header
        if not other.worker.ended:
            raise AdminError(
                f"an agent named {name} runs already, pid {header.pid}: give this one another name, or stop that one"
            )
        service = other.worker.service
        try:
            path = ended_path(socket_path(name, self._directory), header.pid)
            ended = path.name.removesuffix(SOCKET_SUFFIX)
            if (older := self._names.get(ended)) is not None:
                self._forget(older, remove=True)
            if path.exists():  # the claim of the name has moved it
                service.path = path
            else:
                service.move(path)
        except OSError:
            self._forget(other, remove=True)
            return
        del self._names[name]
        self._names[ended] = other
        other.name = ended

    def _forget(self, served: _Served, *, remove: bool = False, then: Callable[[], None] = lambda: None) -> None:
        """Ends the service of a worker, and calls `then`; `remove` its region and its lock file, too."""
        self.loop.remove(served.worker.service)
        if self._names.get(served.name) is served:
            del self._names[served.name]
        self._served.pop(served.path, None)
        if served.lease is not None:
            self._drop(served.lease)
        if served.process is not None:
            self.loop.unwatch(served.process)
            os.close(served.process)
            served.process = None
        served.worker.close(then)
        self._used_s = time.monotonic()
        if remove:
            with contextlib.suppress(OSError):
                served.path.unlink()
            self._left_locks = True

    # ---- black boxes ----------------------------------------------------------------------------------------------

    def _ended(self, served: _Served) -> None:
        """Notes the end of a process, unless its event was of an earlier descriptor with the same number."""
        if served.process is not None and _is_readable(served.process):
            self.loop.unwatch(served.process)
            self._end(served)

    def _look(self, served: _Served) -> None:
        """Finds out whether a worker without a lease has ended."""
        if not served.path.exists():  # removed, or its agent serves itself
            self._forget(served, remove=True)
        elif not is_locked(served.path):
            self._end(served)

    def _end(self, served: _Served) -> None:
        worker = served.worker
        if worker.ended:
            return
        if served.lease is not None:
            lease, served.lease = served.lease, None
            self._drop(lease)
        with contextlib.suppress(RegionError, OSError):  # its file may have been removed
            if worker.folded.reader.cells()[Cell.CLOSED_NS] == 0 and served.black_box_s > 0:
                if served.process is not None and (status := end_status(served.process, worker.header)) is not None:
                    worker.folded.reader.set(Cell.END_STATUS, status + 1)
                self._keep(served, time.monotonic_ns())
                ended = served.path.with_suffix(ENDED_SUFFIX)
                served.path.rename(ended)
                os.utime(ended)
                del self._served[served.path]
                served.path = ended
                self._served[ended] = served
                return
        self._forget(served, remove=True)

    def _keep(self, served: _Served, at_ns: int) -> None:
        """Makes a worker a black box, in the place of the oldest ones if there are too many."""
        status = served.worker.folded.reader.cells()[Cell.END_STATUS]
        served.worker.end(at_ns, why_ended(status - 1) if status > 0 else None)
        served.kept_s = at_ns / 1e9 + served.black_box_s
        kept = sorted((each for each in self._served.values() if each.worker.ended), key=lambda each: each.kept_s)
        size = sum(each.worker.header.size for each in kept)
        kept.remove(served)
        while kept and (len(kept) >= _MOST_BLACK_BOXES or size > _MOST_BLACK_BOX_BYTES):
            oldest = kept.pop(0)
            size -= oldest.worker.header.size
            self._forget(oldest, remove=True)

    def _find_ended(self, path: Path) -> None:
        """Serves the black box of an earlier observer."""
        age_s = time.time() - path.stat().st_mtime
        served = self._open_ended(path)
        if age_s >= served.black_box_s:
            self._forget(served, remove=True)
            return
        self._keep(served, time.monotonic_ns() - max(0, int(age_s * 1e9)))
        self._bind_ended(served)

    def _open_ended(self, path: Path) -> _Served:
        """Opens the region of a worker that has ended; removes an old one that is damaged or of another version."""
        try:
            return self._open(path)
        except RegionError:
            if time.time() - path.stat().st_mtime >= _BLACK_BOX_S and shortage(1) is None:
                path.unlink()
            raise

    def _bind_ended(self, served: _Served) -> None:
        """Binds the socket of a black box that has none."""
        worker = served.worker
        free = worker.name not in self._names and not is_locked(self._directory / f"{worker.name}{LOCK_SUFFIX}")
        path = socket_path(worker.name, self._directory)
        if not free:
            path = ended_path(path, worker.header.pid)
        path.unlink(missing_ok=True)
        worker.start(path)
        served.name = path.name.removesuffix(SOCKET_SUFFIX)
        self._names[served.name] = served
        self.loop.add(worker.service)

    # ---- periodic work --------------------------------------------------------------------------------------------

    def _tick(self) -> float:
        if self._relay is not None:
            self._relay.flush()
        now_s = time.monotonic()
        if now_s >= self._fold_s:
            self._fold_s = now_s + _LONGEST_FOLD_S
            for served in list(self._served.values()):
                if not served.worker.ended:
                    self._fold_s = min(self._fold_s, self._fold(served, now_s))
            # Of a thousand workers one is due each millisecond, and looking through all of them takes 0.17 ms.
            self._fold_s = max(self._fold_s, now_s + _SHORTEST_FOLD_S)
        if now_s >= self._scan_s:
            self._scan_s = now_s + _SCAN_S  # also if the scan raises
            self._scan(now_s)
            if self._seen_s:
                self._scan_s = now_s + _EARLY_SCAN_S
        return max(0.0, min(self._fold_s, self._scan_s) - time.monotonic())

    def _fold(self, served: _Served, now_s: float) -> float:
        try:
            return served.worker.tick(now_s)
        except RegionError:  # the file was cut short
            self._forget(served, remove=True)
        except Exception as error:
            served.worker.note_fault(error)
        return now_s + _LONGEST_FOLD_S

    def _scan(self, now_s: float) -> None:
        try:
            if self._path.stat().st_ino != self._inode:
                raise FileNotFoundError
        except OSError:  # agents that look for an observer do not find this one
            self.stop()
            return
        for lease in [each for each in self._leases if each.worker is None and now_s - each.since_s > _HANDSHAKE_S]:
            self._drop(lease)
        if self._left_locks:  # once for all that have ended, as hundreds may at once
            self._left_locks = False
            remove_locks(self._directory)
        self._find_regions(now_s)
        for served in list(self._served.values()):
            if self._served.get(served.path) is not served:  # forgotten meanwhile
                continue
            if served.worker.ended:
                if now_s >= served.kept_s or not served.path.exists():
                    self._forget(served, remove=True)
                elif self._names.get(served.name) is served and not served.worker.service.has_path:
                    self._free_name(served.name)  # an agent has claimed it, which may serve itself
            elif served.lease is None:
                self._look(served)
        if self._served or self._leases or self._seen_s:
            self._used_s = now_s
        elif now_s - self._used_s > _IDLE_S:
            self.stop()

    def _find_regions(self, now_s: float) -> None:
        """Finds workers that have not registered, and black boxes of earlier observers."""
        try:
            with os.scandir(self._regions) as entries:
                names = [each.name for each in entries if each.name.endswith((SUFFIX, ENDED_SUFFIX, NEW_SUFFIX))]
        except OSError:
            return
        # A new Path takes 10 µs to be hashed, of which there are a thousand in each scan.
        self._paths = {name: self._paths.get(name) or self._regions / name for name in names}
        found = set(self._paths.values())
        self._seen_s = {path: at_s for path, at_s in self._seen_s.items() if path in found}
        self._faulty &= found
        for path in found - self._served.keys() - self._faulty:
            try:
                self._find(path, now_s)
            except (KvctlError, OSError, ValueError):
                pass
            except Exception:
                self._faulty.add(path)
                self._on_fault()

    def _find(self, path: Path, now_s: float) -> None:
        if path.suffix == ENDED_SUFFIX:
            self._find_ended(path)
        elif path.suffix == NEW_SUFFIX and time.time() - path.stat().st_mtime < _NEW_S:
            return  # it may not be locked yet
        elif not is_locked(path):
            self._find_left(path)
        elif path.suffix == SUFFIX and now_s - self._seen_s.setdefault(path, now_s) >= _UNREGISTERED_S:
            self._serve(self._open(path), None)

    def _find_left(self, path: Path) -> None:
        """Serves, as a black box, a worker that has ended while no observer was there."""
        if path.suffix == NEW_SUFFIX:  # its agent was never started
            path.unlink()
            return
        served = self._open_ended(path)
        self._end(served)
        if self._served.get(served.path) is served:
            self._bind_ended(served)


class _Served:
    """A worker and what its service consists of.

    Attributes:
        path: its region.
        process: pidfd of its process; None if unknown.
        lease: its connection; None if it has not registered.
        name: of its admin socket, without suffix.
        black_box_s: time for which it is kept after its end.
        kept_s: monotonic time until which this black box is kept.
    """

    def __init__(self, path: Path, worker: Worker, process: int | None, black_box_s: float) -> None:
        self.path = path
        self.worker = worker
        self.process = process
        self.lease: Lease | None = None
        self.name = worker.name
        self.black_box_s = black_box_s
        self.kept_s = 0.0


def _first_sequence() -> int:
    """Returns a number that is higher than all that an earlier observer has used: replies are numbered by them."""
    return time.monotonic_ns() // 1000


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Replaces the variables of OpenTelemetry, which its exporters read when they are made."""
    own = telemetry_variables()
    for name in own:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(own)


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock on a file; False if the file is missing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_locks(directory: Path) -> None:
    """Removes the lock files of agents that were killed and whose names nobody has claimed."""
    with contextlib.suppress(OSError, TimeoutError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with directory_lock(descriptor, _LOCK_S):
                prune(directory)
        finally:
            os.close(descriptor)


def keep_traceback(directory: Path) -> None:
    """Writes the traceback of the current exception to a file, which tells why an observer ended or has no relay."""
    with contextlib.suppress(OSError):
        (directory / f"{OBSERVER_SOCKET}.log").write_text(traceback.format_exc()[-_LONGEST_TRACEBACK:])


# ---- the process -----------------------------------------------------------------------------------------------------


def serve(directory: Path, ready: Callable[[str], None]) -> None:
    """Serves the workers of a directory until none is left.

    Args:
        ready: called when the observer can be reached, with "", or with the reason why this one cannot serve.
    """
    os.umask(0o077)
    with contextlib.ExitStack() as resources:
        try:
            prepare_directory(directory)
            prepare_directory(region_directory(directory))
            lock = _claimed(directory / f"{OBSERVER_SOCKET}{LOCK_SUFFIX}")
            if lock is None:
                ready("")  # another observer serves
                return
            resources.callback(os.close, lock)
            resources.callback(_remove_ours, directory, lock)
            raise_descriptor_limit()
            observer = Observer(directory, _listening(directory / OBSERVER_SOCKET))
        except (KvctlError, OSError) as error:
            ready(str(error))
            return
        remove_abandoned(region_directory(directory))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: observer.stop())
        ready("")
        observer.run()


def _claimed(path: Path) -> int | None:
    """Locks the file, which may have been removed meanwhile; returns None if another process has the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
        os.close(descriptor)


def _listening(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # of an observer that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_ours(directory: Path, lock: int) -> None:
    """Removes the files of this observer, unless another one has taken its place, and its empty directory."""
    path = directory / f"{OBSERVER_SOCKET}{LOCK_SUFFIX}"
    with contextlib.suppress(OSError):
        if path.stat().st_ino == os.fstat(lock).st_ino:
            for name in (OBSERVER_SOCKET, RELAY_SOCKET):
                (directory / name).unlink(missing_ok=True)
            path.unlink()
    with contextlib.suppress(OSError):  # it is not empty
        if (regions := region_directory(directory)) != directory:
            regions.rmdir()


def remove_abandoned(own: Path) -> None:
    """Removes regions that were left in shared memory by ended agents of socket directories without an observer.

    Args:
        own: the directory of this observer's regions, which it keeps.
    """
    memory = own.parent
    if memory != Path("/dev/shm"):
        return
    named = re.compile(rf"kvctl-{os.geteuid()}-[0-9a-f]{{8}}")
    for directory in memory.glob(f"kvctl-{os.geteuid()}-*"):
        if directory != own and named.fullmatch(directory.name):
            with contextlib.suppress(OSError):
                _remove_regions(directory, time.time() - _BLACK_BOX_S)


def _remove_regions(directory: Path, before_s: float) -> None:
    """Removes the regions of a directory that nobody uses, and the directory if it is empty then.

    Everyone may create names in shared memory, so the directory may be another user's, or a link to any place.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mtime >= before_s:
            return
        with os.scandir(descriptor) as entries:
            paths = [directory / each.name for each in entries if each.stat(follow_symlinks=False).st_mtime < before_s]
        for path in paths:
            is_region = path.suffix in (SUFFIX, ENDED_SUFFIX, NEW_SUFFIX)
            if is_region and not is_locked(path) and not _is_observed(path):
                os.unlink(path.name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    directory.rmdir()  # fails unless it is empty


def _is_observed(region: Path) -> bool:
    """Returns whether an observer may serve a region, which then is its black box."""
    try:
        reader = RegionReader(region)
    except RegionError:
        return False
    reader.close()
    return is_locked(Path(reader.header.directory) / f"{OBSERVER_SOCKET}{LOCK_SUFFIX}")


def raise_descriptor_limit() -> None:
    """Allows the process as many descriptors as it may have: each worker takes some ten."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
