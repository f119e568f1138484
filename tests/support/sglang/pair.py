"""A prefill and a decode server of rank processes, as a test drives them."""

import atexit
import contextlib
import functools
import itertools
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from kvctl.lab.tcp_ports import free_port
from kvctl_agent.contract.admin import region_directory
from tests.support.observers import end_observer
from tests.support.sglang.cases import Case, Ended, Place, Role, Room, places
from tests.support.sglang.runtime import FOLDER, HOST, bare_environment, environment

ROOT = Path(__file__).parents[3]
START_S = 90.0  # for an import of torch and SGLang per rank, on two cores with other tests
DEADLINE_S = 40.0


def installed() -> bool:
    return (FOLDER / "sglang").is_dir()


class RankError(AssertionError):
    """A rank raised, ended, or did not answer in time."""


class Forker:
    """A process that has imported SGLang and forks ranks. Tests share one, since the import takes seconds."""

    def __init__(self, device: str = "cpu") -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.sglang.rank", str(theirs.fileno())],
            cwd=ROOT,
            env=bare_environment(device),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.socket.settimeout(START_S)

    def fork(self, variables: dict[str, str], log: int, pipe: int) -> int:
        """Starts a rank and returns its pidfd."""
        socket.send_fds(self.socket, [pickle.dumps(variables)], [log, pipe])
        answer = self.socket.recv(64)
        if not answer:
            raise RankError("the process that imports SGLang ended: its error is on stderr")
        return os.pidfd_open(int(answer))

    def stop(self) -> None:
        """Ends the process, and with it the ranks that it forked."""
        self.process.kill()
        self.process.wait()
        self.socket.close()


@functools.cache
def forker() -> Forker:
    """The process that all ranks on the CPU are forked from."""
    started = Forker()
    atexit.register(started.stop)
    return started


def in_sglang(function: Callable[..., Any], *arguments: Any, **variables: str) -> Any:
    """Returns what a function of an importable module returns in a process with SGLang and these variables."""
    ours, theirs = socket.socketpair()
    with theirs, tempfile.TemporaryFile() as log, Connection(ours.detach()) as pipe:
        pidfd = forker().fork(bare_environment() | variables, log.fileno(), theirs.fileno())
        try:
            theirs.close()
            pipe.send((function, *arguments))
            if pipe.poll(START_S):
                with contextlib.suppress(EOFError):
                    return pipe.recv()[1]
            log.seek(0)
            raise RankError(f"{function.__name__} did not return: {log.read().decode(errors='replace')[-3000:]}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], 10)
            os.close(pidfd)


class Rank:
    """One rank process. `names`: the classes that SGLang chose for the backend."""

    def __init__(
        self, case: Case, role: Role, place: Place, port: int, folder: Path, socket_dir: Path, deadline_s: float
    ) -> None:
        self.case, self.role, self.place, self.deadline_s = case, role, place, deadline_s
        self.name = f"{role} {place}"
        self.events: list[tuple[str, int]] = []
        self.log = folder / f"{self.name.replace(' ', '-')}.log"
        # CUDA does not survive a fork, and SGLang's modules look for devices when they are imported.
        self.forker = Forker("cuda") if case.device == "cuda" else None
        ours, theirs = socket.socketpair()
        with self.log.open("wb") as log:
            self.pidfd = (self.forker or forker()).fork(
                environment(case, role, socket_dir), log.fileno(), theirs.fileno()
            )
        theirs.close()
        self.pipe = Connection(ours.detach())
        self.pipe.send((case, role, place, port, folder, deadline_s))
        self.names: dict[str, str] = {}

    def send(self, *command: Any) -> None:
        self.pipe.send(command)

    def take(self) -> tuple[str, Any] | None:
        """Next message that is no event; None if the one that had come was an event."""
        try:
            kind, *rest = self.pipe.recv()
        except (EOFError, OSError):
            raise RankError(f"{self.name} ended: {self.tail()}") from None
        if kind == "event":
            self.events.append((rest[0], rest[1]))
            return None
        if kind == "error":
            raise RankError(f"{self.name} raised: {rest[0]}\n{self.tail()}")
        return kind, rest[0]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def end(self) -> None:
        if self.pipe.closed:
            return
        self.signal(signal.SIGKILL)
        select.select([self.pidfd], [], [], 10)
        os.close(self.pidfd)
        self.pipe.close()
        if self.forker is not None:
            self.forker.stop()


@dataclass
class Outcome:
    """How the rooms of a transfer ended, by room and by rank's name ("decode dp0 pp0 cp0 tp0")."""

    rooms: dict[int, dict[str, Ended]] = field(default_factory=dict)
    stray: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def check(self) -> "Outcome":
        """Asserts that every room succeeded with the right bytes and that nothing else was written."""
        bad = [
            f"room {room} on {name}: {ended.state} {ended.reason} {', '.join(ended.wrong)}"
            for room, ends in self.rooms.items()
            for name, ended in ends.items()
            if ended.state != "success" or ended.wrong
        ]
        bad += [f"{name}: {', '.join(found)}" for name, found in self.stray.items() if found]
        assert self.rooms
        assert not bad, "\n".join(bad)
        return self

    def states(self, room: int, role: Role) -> set[str]:
        return {ended.state for name, ended in self.rooms[room].items() if name.startswith(role)}

    def reasons(self, room: int, role: Role) -> str:
        return " | ".join(ended.reason for name, ended in self.rooms[room].items() if name.startswith(role))


class PDPair:
    """The two servers of a case. Used as a context manager; every wait has a deadline and says what it waited for."""

    def __init__(self, case: Case, deadline_s: float = DEADLINE_S) -> None:
        self.case, self.deadline_s = case, deadline_s
        self.ranks: dict[Role, list[Rank]] = {"prefill": [], "decode": []}
        self._folder = tempfile.TemporaryDirectory(prefix="kvctl-sglang-")
        # The pair of a whole module begins before the tests have directories. Agents of all pairs have the same names.
        self._own_sockets = "KVCTL_SOCKET_DIR" not in os.environ
        self.socket_dir = Path(os.environ.get("KVCTL_SOCKET_DIR", self._folder.name))
        self._starts = itertools.count()
        self.port = free_port(HOST)

    def __enter__(self) -> "PDPair":
        try:
            for role in self.ranks:
                self.launch(role)
            self.ready(self.all())
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def launch(self, role: Role) -> list[Rank]:
        """Starts the processes of a server, in place of those that were there. They are not ready yet."""
        folder = Path(self._folder.name) / str(next(self._starts))
        folder.mkdir()
        self.ranks[role] = [
            Rank(self.case, role, place, self.port, folder, self.socket_dir, self.deadline_s)
            for place in places(self.case.ranks(role))
        ]
        return self.ranks[role]

    def all(self) -> list[Rank]:
        return [*self.ranks["prefill"], *self.ranks["decode"]]

    def ready(self, ranks: Sequence[Rank]) -> None:
        for rank, names in self.collect(ranks, "ready", START_S).items():
            rank.names = names

    def collect(self, ranks: Iterable[Rank], what: str, timeout_s: float | None = None) -> dict[Rank, Any]:
        """The answer of each rank."""
        answers: dict[Rank, Any] = {}

        def complete() -> bool:
            return not missing

        missing = {rank.pipe: rank for rank in ranks}

        def take(rank: Rank) -> None:
            message = rank.take()
            if message is not None:
                answers[rank] = message[1]
                del missing[rank.pipe]

        self._pump(missing, take, complete, what, timeout_s)
        return answers

    def _pump(
        self,
        pipes: dict[Connection, Rank],
        take: Callable[[Rank], None],
        done: Callable[[], bool],
        what: str,
        timeout_s: float | None = None,
    ) -> None:
        limit = self.deadline_s + 5 if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        while not done():
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(rank.name for rank in pipes.values())
                stacks = "".join(self._stack(rank) for rank in pipes.values())
                raise RankError(f"{what}: no answer from {late} in {limit:.0f} s\n{stacks}")
            for pipe in ready:
                take(pipes[pipe])

    @staticmethod
    def _stack(rank: Rank) -> str:
        rank.signal(signal.SIGUSR1)
        time.sleep(0.2)
        return f"--- {rank.name}\n{rank.tail()}\n"

    def wait_event(self, role: Role, event: str, room: int, count: int = 1) -> None:
        """Waits until `count` ranks of a server reported an event of a room: "opened", "chunk" or "sent"."""
        pipes = {rank.pipe: rank for rank in self.ranks[role]}

        def done() -> bool:
            return sum((event, room) in rank.events for rank in pipes.values()) >= count

        def take(rank: Rank) -> None:
            if rank.take() is not None:
                raise RankError(f"{rank.name} had ended its rooms before {event} of room {room}")

        self._pump(pipes, take, done, f"{event} of room {room} on {role}")

    def prefill_dp(self, room: Room) -> int:
        return room.room % self.case.prefill.dp if room.prefill_dp is None else room.prefill_dp

    def begin(self, rooms: Sequence[Room], role: Role, window: int = 4) -> None:
        """Hands rooms to one server; `finish` collects how they ended."""
        for rank in self.ranks[role]:
            if role == "prefill":
                mine = [room for room in rooms if self.prefill_dp(room) == rank.place.dp]
            else:
                mine = [room for room in rooms if room.opened and room.decode_dp == rank.place.dp]
            rank.send("run", mine, window)

    def finish(self, role: Role, outcome: Outcome | None = None) -> Outcome:
        outcome = Outcome() if outcome is None else outcome
        for rank, ends in self.collect(self.ranks[role], f"rooms on {role}").items():
            for ended in ends:
                outcome.rooms.setdefault(ended.room, {})[rank.name] = ended
        return outcome

    def transfer(self, rooms: Sequence[Room], window: int = 4, settle: bool = True) -> Outcome:
        self.begin(rooms, "decode", window)
        self.begin(rooms, "prefill", window)
        outcome = Outcome()
        answers = self.collect(self.all(), "rooms")
        for rank, ends in answers.items():
            for ended in ends:
                outcome.rooms.setdefault(ended.room, {})[rank.name] = ended
        if settle:
            outcome.stray = self.settle()
        return outcome

    def settle(self) -> dict[str, tuple[str, ...]]:
        """What decode's ranks found written where nothing should be."""
        for rank in self.ranks["decode"]:
            rank.send("settle")
        return {rank.name: found for rank, found in self.collect(self.ranks["decode"], "settle").items()}

    def call(self, role: Role, function: Callable[..., Any], *arguments: Any) -> dict[Rank, Any]:
        """Runs a function of an importable module with each rank's scheduler."""
        for rank in self.ranks[role]:
            rank.send("call", function, *arguments)
        return self.collect(self.ranks[role], function.__name__)

    def kill(self, role: Role) -> None:
        """kill -9 of all ranks of a server, as when its launcher dies."""
        for rank in self.ranks[role]:
            rank.signal(signal.SIGKILL)
        for rank in self.ranks[role]:
            rank.end()

    def freeze(self, role: Role) -> None:
        for rank in self.ranks[role]:
            rank.signal(signal.SIGSTOP)

    def thaw(self, role: Role) -> None:
        for rank in self.ranks[role]:
            rank.signal(signal.SIGCONT)

    def stop(self) -> None:
        for rank in self.all():
            rank.end()
        if self._own_sockets:
            end_observer(self.socket_dir)
            shutil.rmtree(region_directory(self.socket_dir), ignore_errors=True)
        for left in self.socket_dir.glob("*.sock"):
            left.unlink()  # of agents, which were killed with their ranks
        self._folder.cleanup()
