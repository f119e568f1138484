"""The rank processes of one fleet: their names, their private directory, and one event loop over all of them.

Everything runs on one thread with one selector. However a fleet ends, `close` ends every process that was started, by
SIGKILL if it does not exit by itself, and removes the directory and the sockets. Control and bootstrap sockets are in
the private directory; admin sockets are in the directory that `kvctl status` reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
import selectors
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any, NamedTuple, NoReturn, Self

from kvctl.client.endpoints import agent_pid, discover
from kvctl.lab.ranks.messages import FLEET_PREFIX, Command
from kvctl.lab.ranks.plan import PlannedRank
from kvctl.lab.ranks.process import PROGRAM, RankProcess
from kvctl_agent.contract.admin import (
    ENDED_SUFFIX,
    LOCK_SUFFIX,
    SOCKET_SUFFIX,
    region_directory,
    socket_dir,
    socket_path,
)

CLOSE_S = 10.0
"""Time that ranks have to close their agents before they are killed; a rank itself gives up after 5 s."""

TICK_S = 0.2
_EXIT_AFTER_FATAL_S = 1.0
# Socket names of engines and agents below the directory must fit into 107 bytes.
_MAX_TMP_BYTES = 40


class FleetError(Exception):
    """Raised when a fleet cannot continue; the text is meant for users."""


class RankDied(FleetError):
    """Raised when a rank's process ended without a Stop command."""

    def __init__(self, name: str, pid: int, returncode: int, doing: str, last_output: str) -> None:
        self.rank = name
        if returncode < 0:
            try:
                how = f"was killed by {signal.Signals(-returncode).name}"
            except ValueError:
                how = f"was killed by signal {-returncode}"
        else:
            how = f"exited with code {returncode}"
        indented = "\n".join(f"  {line}" for line in last_output.splitlines())
        output = f"; its last output:\n{indented}" if last_output else "; it printed nothing"
        super().__init__(f'rank "{name}" (pid {pid}) {how} during {doing}{output}')


class RankFailed(FleetError):
    """Raised when a rank reported a fatal error; `code` is the class name of that error."""

    def __init__(self, name: str, code: str, message: str, doing: str) -> None:
        self.rank = name
        self.code = code
        super().__init__(f'rank "{name}" gave up during {doing}: {message} ({code})')


class RankOverdue(FleetError):
    """Raised when a rank did not answer a command in time."""

    def __init__(self, name: str, doing: str, timeout_s: float, last: str, others: int) -> None:
        self.rank = name
        more = f" (and {others} more)" if others else ""
        state = f"; last heard: {last}" if last else ""
        super().__init__(f'rank "{name}"{more} did not finish {doing} within {timeout_s:g} s{state}')


class Event(NamedTuple):
    """A message of a rank, or the exit of its process.

    Attributes:
        kind: kind of the message (see `messages.Message`), or "exited".
        data: data of the message; for an exit `returncode` and `output`, the last lines that the process printed.
    """

    process: RankProcess
    kind: str
    data: Mapping[str, Any]
    at_ns: int

    @property
    def rank(self) -> str:
        """Name of the rank that caused the event."""
        return self.process.name


class RankGroup:
    """Starts, polls and ends the rank processes of one fleet.

    Attributes:
        prefix: prefix of the rank names; "" unless another agent on this machine already uses one of the names.
        directory: private temporary directory of the fleet, made when it is first used; `close` removes it.
        processes: the latest process of each rank that was started, by name.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        """Starts no process yet. `names` are those of the ranks, without the prefix."""
        self.prefix = _free_prefix(names)
        self.names = [self.prefix + name for name in names]
        self.processes: dict[str, RankProcess] = {}
        self.running: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()
        self._closed = False

    @functools.cached_property
    def directory(self) -> Path:
        return Path(tempfile.mkdtemp(prefix=FLEET_PREFIX, dir=_short_temporary_directory()))

    def launch(
        self,
        name: str,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PROGRAM,
        *,
        stdio: bool = False,
    ) -> RankProcess:
        """Starts a process for a rank.

        Call it from the main thread: the kernel sends SIGTERM to a rank when the thread that started it ends.

        Args:
            program: command line of the process, without the options that `RankProcess` adds.
            stdio: as for `RankProcess`; the process may run on another host, and does not use `directory`.
        """
        inherited = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if not stdio:
            inherited["TMPDIR"] = str(self.directory)
        with _signals_deferred():
            process = self.processes[name] = RankProcess(
                name, {**inherited, **(environment or {})}, program, stdio=stdio
            )
            self.running.append(process)
            self._register(process)
        return process

    def poll(self, timeout_s: float) -> list[Event]:
        """Waits for messages and exits of the processes, at most for `timeout_s`, and returns them."""
        for process in self.running:
            if not process.channel_closed:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.flush() else 0)
                if self._selector.get_key(process.channel).events != wanted:
                    self._selector.modify(process.channel, wanted, process)
        ready = {id(key.data): key.data for key, _ in self._selector.select(timeout_s)}
        return [event for process in ready.values() for event in self._read(process)]

    def ask(self, commands: Mapping[str, Command], timeout_s: float, doing: str) -> dict[str, Mapping[str, Any]]:
        """Sends commands to ranks and waits for all answers.

        Returns:
            The answers by rank name.

        Raises:
            RankDied: a rank, not necessarily one of those in `commands`, exited.
            RankFailed: a rank reported a fatal error.
            RankOverdue: an answer did not arrive within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        for name, command in commands.items():
            self.processes[name].send(command)
        while True:
            self._check(doing)
            missing = [name for name in commands if self.processes[name].answer is None]
            if not missing:
                return {name: self.processes[name].answer or {} for name in commands}
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RankOverdue(missing[0], doing, timeout_s, self.processes[missing[0]].doing, len(missing) - 1)
            self.poll(min(left_s, TICK_S))

    def close(self) -> dict[str, int]:
        """Ends all processes, killing those that still run after `CLOSE_S`; removes the directory and all sockets.

        Returns:
            The exit status of each rank's latest process, by rank name; the negative signal number if it was killed.
        """
        if not self._closed:
            self._closed = True
            try:
                self._end()
            finally:
                self._selector.close()
                for name in self.names:
                    _remove_leftovers(name)
                if "directory" in vars(self):
                    shutil.rmtree(self.directory, ignore_errors=True)
        return {name: rank.returncode or 0 for name, rank in self.processes.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        try:
            for process in self.running:
                if not process.stopping:
                    process.hang_up()
            while self.running and (left_s := deadline - time.monotonic()) > 0:
                self.poll(min(left_s, TICK_S))  # also reads output: a rank that blocks in a print cannot exit
        finally:
            for process in self.running:
                process.signal(SIGKILL)  # also ends a process stopped by SIGSTOP
            while self.running:
                self.running.pop().reap()

    def _register(self, process: RankProcess) -> None:
        for file in (process.channel, process.output, process.exit_fd):
            self._selector.register(file, selectors.EVENT_READ, process)

    def _read(self, process: RankProcess) -> list[Event]:
        messages = process.read()
        ended = process.returncode is not None
        if ended:
            messages += process.read()  # sent between the first read and the exit
        now_ns = time.monotonic_ns()
        events = [Event(process, message["kind"], message["data"], now_ns) for message in messages]
        at_end = (
            (process.channel, process.channel_closed),
            (process.output, process.output_closed),
            (process.exit_fd, ended),
        )
        for file, done in at_end:
            if done or ended:  # a file at its end is always readable
                with contextlib.suppress(KeyError):
                    self._selector.unregister(file)
        if ended:
            process.reap()
            self.running.remove(process)
            data = {"returncode": process.returncode, "output": process.last_output}
            events.append(Event(process, "exited", data, now_ns))
        return events

    def _check(self, doing: str) -> None:
        """Raises an error if a rank has died or failed.

        An exit takes precedence over a reported error, because the death of one rank causes errors in its peers.
        """
        self._check_alive(doing)
        failed = next((rank for rank in self.processes.values() if rank.fatal is not None), None)
        if failed is not None:
            self._raise_first_cause(failed, doing)

    def _check_alive(self, doing: str) -> None:
        for rank in self.processes.values():
            if rank not in self.running and rank.fatal is None and not (rank.stopping and rank.answer is not None):
                raise RankDied(rank.name, rank.pid, rank.returncode or 0, doing, rank.last_output)

    def _raise_first_cause(self, failed: RankProcess, doing: str) -> NoReturn:
        """Raises RankFailed for `failed`, or RankDied if another rank's exit turns out to be the cause.

        Polls for up to `_EXIT_AFTER_FATAL_S` first: a rank that lost its peer may report the loss before the peer's
        exit is seen.
        """
        deadline = time.monotonic() + _EXIT_AFTER_FATAL_S
        while failed in self.running and time.monotonic() < deadline:
            self.poll(0.05)
            self._check_alive(doing)
        fatal = failed.fatal or {}
        raise RankFailed(failed.name, str(fatal.get("code", "")), str(fatal.get("message", "")), doing)


def rank_names(ranks: Sequence[PlannedRank]) -> list[str]:
    """Returns the name of each rank: "prefill-0", "decode-3"; with several prefill instances "p1-prefill-0"."""
    several = any(rank["instance"] > 0 for rank in ranks)
    names = []
    for rank in ranks:
        instance = f"p{rank['instance']}-" if several and rank["role"] == "prefill" else ""
        names.append(f"{instance}{rank['role']}-{rank['unique']}")
    return names


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defers SIGINT and SIGTERM to the end of the block.

    Otherwise a signal could arrive between the start of a process and its entry in `running`, and `close` would not end
    that process.
    """
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    replaced = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in replaced:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
        for each in received:
            signal.raise_signal(each)


def _free_prefix(names: Sequence[str]) -> str:
    """Returns a prefix for rank names: "" if no agent on this machine uses one of the names, otherwise a random one."""
    taken = {each.name for each in discover().live if each.path is not None and agent_pid(each.path) is not None}
    return "" if taken.isdisjoint(names) else f"b{secrets.randbelow(9000) + 1000}-"


def _short_temporary_directory() -> str:
    configured = tempfile.gettempdir()
    return configured if len(os.fsencode(configured)) <= _MAX_TMP_BYTES else "/tmp"


def _remove_leftovers(name: str) -> None:
    """Removes sockets and regions that a killed rank left, unless another process has locked the name since."""
    directory = socket_dir()
    lock = directory / f"{name}{LOCK_SUFFIX}"
    with contextlib.suppress(OSError):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            former = directory.glob(f"{name}{ENDED_SUFFIX}-*{SOCKET_SUFFIX}")
            regions = region_directory(directory).glob(f"{name}.*")  # the observer forgets a rank without its region
            for path in (socket_path(name), *former, *regions, lock):
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
