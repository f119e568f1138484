"""Calls of several threads, and of a signal handler, that meet: every room ends, and a closed agent leaves nothing."""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvctl_agent import agent as facade
from kvctl_agent.agent import Agent
from kvctl_agent.errors import DeadlineExceeded, LocalProtocolError
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.rank import Rank
from kvctl_agent.runtime import control_loop, handles, lifecycle
from kvctl_agent.runtime.handles import Receive, Send
from tests.support.agents import Model

BLOCKED_S = 0.02  # a call that has not returned by then waits for the other one
_LOCKED = frozenset({lifecycle.__file__, control_loop.__file__})
_FILES = _LOCKED | {facade.__file__}
_CONFIG: dict[str, Any] = {
    "transport": "loopback",
    "staging_buffer_mb": 1,
    "staging_ring_mb": 1,
    "bootstrap_timeout_s": 0.1,
}


class Place:
    """Agents of one directory, and what they have left behind when all are closed."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        monkeypatch.setenv("KVCTL_SOCKET_DIR", str(self.path / "admin"))
        self._threads = set(threading.enumerate())
        self._pools: list[KVPool] = []
        self._number = 0
        self.agent("decode").start().close()  # what is created once
        self._descriptors = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names

    def agent(self, role: Any) -> Agent:
        self._number += 1
        model = Model(layers=1, pages=8)
        pool = model.pool(Rank().parallel_config, 0)
        self._pools.append(pool)
        name, bootstrap = f"{role}-{self._number}", f"ipc://{self.path}/b{self._number}"
        return Agent(role=role, rank=Rank(), pool=pool, name=name, bootstrap=bootstrap, model=model.shape, **_CONFIG)

    def left(self) -> list[str]:
        """Returns the threads, descriptors and files of the agents."""
        deadline = time.monotonic() + 5
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return found

    def _found(self) -> list[str]:
        threads = [thread.name for thread in threading.enumerate() if thread not in self._threads]
        descriptors = set(os.listdir("/proc/self/fd")) - self._descriptors  # noqa: PTH208 - names
        opened = [f"{each} {target}" for each in descriptors if (target := _target(each))]
        return [*threads, *opened, *(str(path) for path in self.path.rglob("*") if not path.is_dir())]

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - need not be a path
    except OSError:
        return ""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as path:
        place = Place(Path(path), monkeypatch)
        yield place
        place.close()


class Interrupted:
    """Runs a call in this thread, with another one at the line of ours of a given number.

    Attributes:
        result: what the call returned or raised.
        reached: whether there was such a line.
    """

    def __init__(
        self, call: Callable[[], Any], number: int, other: Callable[[], Any], files: frozenset[str | None] = _FILES
    ) -> None:
        # Between two lines of the files with locks nothing is shared, so that rooms need no others.
        self.reached = False
        self._files = files
        self._left, self._other = number, other
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            self.result: Any = call()
        except (LocalProtocolError, DeadlineExceeded) as error:
            self.result = error
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files and (code.co_filename, code.co_name) != (handles.__file__, "add"):
            return None
        if event == "line" and not self.reached:
            self._left -= 1
            if self._left < 0:
                self.reached = True
                sys.settrace(None)
                self._other()
        return None if self.reached else self._trace


class Beside:
    """Runs a call in another thread, which gets `BLOCKED_S` before the first one continues; `end` waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self.result: Any = None

    def __call__(self) -> None:
        self._thread.start()
        self._thread.join(BLOCKED_S)

    def _run(self) -> None:
        try:
            self.result = self._call()
        except (LocalProtocolError, DeadlineExceeded) as error:
            self.result = error

    def end(self) -> Any:
        self._thread.join(30)
        assert not self._thread.is_alive(), "the other call hangs"
        return self.result


def begin(agent: Agent) -> Send | Receive:
    return agent.send(7) if agent.role == "prefill" else agent.receive(7, [1, 2])


def test_a_room_that_begins_while_the_agent_closes_ends(place: Place) -> None:
    begun: set[bool] = set()
    for number in itertools.count():
        agent = place.agent("decode").start()
        close = Beside(agent.close)
        room = Interrupted(lambda: begin(agent), number, close, _LOCKED)  # noqa: B023
        if not room.reached:
            break
        close.end()
        refused = isinstance(room.result, LocalProtocolError)
        begun.add(not refused)
        assert refused or room.result.wait(5).finished, f"line {number}"
        assert refused or room.result.error["code"] in ("AGENT_CLOSED", "ABORTED")
    agent.close()
    assert begun == {True, False}
    assert place.left() == []


def test_a_signal_handler_that_closes_waits_for_no_lock_of_its_own_thread(place: Place) -> None:
    """The room that it interrupts ends; what the interrupted call keeps from being released, a later close releases."""
    for number in range(0, 100, 9):
        agent = place.agent("decode").start()
        room = Interrupted(lambda: begin(agent), number, lambda: agent.close(0), _LOCKED)  # noqa: B023
        agent.close()
        assert isinstance(room.result, LocalProtocolError) or room.result.wait(5).finished, f"line {number}"
        if not room.reached:
            break
    assert place.left() == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_agent_that_has_given_its_memory_back_has_no_room(place: Place, role: str) -> None:
    """One that begins meanwhile is refused, or named by an `unregister` that fails."""
    agent = place.agent(role).start()
    outcomes: set[str] = set()
    number, reached = 0, True
    while reached:
        other = Beside(lambda: agent.unregister(0.05))
        room = Interrupted(lambda: begin(agent), number, other, _LOCKED)
        reached, number = room.reached, number + 1
        result = other.end() if reached else None
        if isinstance(room.result, LocalProtocolError):
            outcomes.add("refused")
        else:
            assert isinstance(result, DeadlineExceeded) or not reached, f"line {number}"
            outcomes.add("named")
            room.result.abort("test")
            assert room.result.wait(5).finished
            while agent.parts.handles.rooms or agent.parts.machine.rooms:
                time.sleep(0.001)
        if agent.parts.lifecycle.state == "unregistered":
            agent.register()
        assert agent.accepting
    assert outcomes == {"refused", "named"}
    agent.close()
    assert place.left() == []


@pytest.mark.parametrize("call", ["refuse", "renew", "connect"])
def test_a_call_that_meets_unregister_is_kept_or_refused(place: Place, call: str) -> None:
    calls: dict[str, Callable[[Agent], None]] = {
        "refuse": lambda agent: agent.refuse(9, "no pages"),
        "renew": lambda agent: agent.renew([9]),
        "connect": lambda agent: agent.connect(f"ipc://{place.path}/further"),
    }
    agent = place.agent("decode").start()
    posted: list[Any] = []
    number, reached = 0, True
    while reached:
        feed = agent.parts.control._feed
        agent.parts.control._feed = lambda event, feed=feed: (posted.append(event), feed(event))  # type: ignore
        posted.clear()
        other = Beside(lambda: agent.unregister(5))
        made = Interrupted(lambda: calls[call](agent), number, other)
        reached, number = made.reached, number + 1
        if reached:
            assert other.end() is None
            agent.register()
        number += number // 8
        if call == "connect":
            assert f"ipc://{place.path}/further" in agent.parts.lifecycle.instances
            agent.disconnect(f"ipc://{place.path}/further")
        elif not isinstance(made.result, LocalProtocolError) and reached:
            assert any(type(event).__name__ in ("OpenRoom", "RenewRooms") for event in posted), f"line {number}"
    agent.close()
    assert place.left() == []


def _asleep(agent: Agent) -> None:
    agent.start()
    agent.unregister(5)


@pytest.mark.parametrize(
    ("prepare", "call"),
    [
        (lambda agent: None, Agent.start),
        (Agent.start, Agent.unregister),
        (_asleep, Agent.register),
        (Agent.start, lambda agent: agent.drain(1)),
        (Agent.start, Agent.close),
        (_asleep, Agent.close),
        (lambda agent: None, Agent.close),
    ],
    ids=["start", "unregister", "register", "drain", "close", "close asleep", "close new"],
)
def test_a_close_leaves_nothing_whatever_it_meets(place: Place, prepare: Any, call: Any) -> None:
    number, reached = 0, True
    while reached:
        agent = place.agent("prefill")
        prepare(agent)
        close = Beside(agent.close)
        met = Interrupted(lambda: call(agent), number, close)  # noqa: B023
        reached, number = met.reached, number + 1 + number // 12  # every line at first, then fewer
        if reached:
            assert close.end() is None
        else:
            agent.close()
        assert agent.parts.lifecycle.state == "closed"
        left = place.left()
        assert left == [], f"line {number}: {left}"
        for later in (agent.start, agent.unregister, agent.register):
            with pytest.raises(LocalProtocolError, match="is closed"):
                later()
    assert number > 10


@pytest.mark.parametrize("call", ["start", "unregister", "register"])
def test_two_threads_change_an_agent_one_after_the_other(place: Place, call: str) -> None:
    number, reached = 0, True
    while reached:
        agent = place.agent("decode")
        if call == "unregister":
            agent.start()
        elif call == "register":
            _asleep(agent)
        other = Beside(lambda: getattr(agent, call)())  # noqa: B023
        one = Interrupted(getattr(agent, call), number, other)
        reached, number = one.reached, number + 3 + number // 2
        results = [one.result, other.end()] if reached else [one.result]
        refused = [each for each in results if isinstance(each, LocalProtocolError)]
        assert len(refused) == len(results) - 1, results
        agent.close()
    assert place.left() == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_start_that_gets_no_thread_leaves_nothing(place: Place, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    for most in itertools.count():
        started: list[threading.Thread] = []

        def limited(thread: threading.Thread, started: list[threading.Thread] = started, most: int = most) -> None:
            if len(started) >= most:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        agent = place.agent(role)
        monkeypatch.setattr(threading.Thread, "start", limited)
        try:
            agent.start()
            break
        except RuntimeError as error:
            assert str(error) == "can't start new thread"  # noqa: PT017
        finally:
            monkeypatch.undo()
            monkeypatch.setenv("KVCTL_SOCKET_DIR", str(place.path / "admin"))
        assert place.left() == []
        with pytest.raises(LocalProtocolError, match="is closed"):
            agent.start()
    assert most >= 2
    agent.close()
    assert place.left() == []


def test_threads_that_do_anything_leave_nothing(place: Place) -> None:
    seed = random.randrange(1 << 30)
    for turn in range(12):
        agent = place.agent("decode" if turn % 2 else "prefill")
        rooms: list[Any] = []
        calls: list[Callable[[], Any]] = [
            agent.start,
            lambda: agent.unregister(0.05),  # noqa: B023
            agent.register,
            agent.begin_drain,
            agent.resume,
            lambda: rooms.append(agent.receive(random.getrandbits(63), [random.randrange(8)])),  # noqa: B023
            lambda: rooms.append(agent.send(random.getrandbits(63))),  # noqa: B023
        ]

        def run(chosen: random.Random, calls: list[Callable[[], Any]] = calls) -> None:
            until = time.monotonic() + 0.15
            while time.monotonic() < until:
                try:
                    chosen.choice(calls)()
                except (LocalProtocolError, DeadlineExceeded):
                    time.sleep(0.001)

        threads = [threading.Thread(target=run, args=(random.Random(seed + turn * 8 + each),)) for each in range(4)]
        agent.start() if turn % 3 else None
        for thread in threads:
            thread.start()
        time.sleep(random.uniform(0, 0.1))
        closers = [threading.Thread(target=agent.close) for _ in range(2)]
        for thread in [*closers, *threads]:
            thread.start() if thread in closers else None
        for thread in [*closers, *threads]:
            thread.join(30)
            assert not thread.is_alive(), f"seed {seed}: a call hangs"
        assert [room.room for room in rooms if not room.state.finished] == [], f"seed {seed}"
        assert place.left() == [], f"seed {seed}"
