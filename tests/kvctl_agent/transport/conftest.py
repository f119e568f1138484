"""Transports for tests: one in this process, others in separate processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvctl_agent
from kvctl_agent.transport import Arrival, Region, Transport, Write
from tests.support.engines import open_engine

POOL_BYTES = 4 << 20
DUTY_S = 0.005
REPOSITORY = Path(kvctl_agent.__file__).parents[1]
PEER = Path(__file__).with_name("peer.py")


class Agent:
    """A transport of this process with a registered pool.

    Waiting for one agent progresses all `neighbours`: they may be each other's targets, and no other thread drives
    them.
    """

    def __init__(self, engine: str, name: str, neighbours: list[Agent]) -> None:
        self._neighbours = neighbours
        self.transport: Transport = open_engine(engine, name)
        self.pool = np.zeros(POOL_BYTES, np.uint8)
        self.addr = self.pool.ctypes.data
        self.transport.register([Region(self.addr, POOL_BYTES)])

    def at(self, *offsets: int) -> np.ndarray:
        """Addresses in the pool."""
        return np.array(offsets, np.uint64) + np.uint64(self.addr)

    def collect(self, count: int, timeout_s: float = 60.0) -> list[Arrival]:
        """Waits for `count` arrivals."""
        until = time.monotonic() + timeout_s
        landed: list[Arrival] = []
        while len(landed) < count and time.monotonic() < until:
            landed += self.transport.arrivals()
            self.wait()
        return landed

    def finish(self, write: Write, timeout_s: float = 60.0) -> None:
        """Polls a write until it is complete."""
        until = time.monotonic() + timeout_s
        while not write.poll():
            assert time.monotonic() < until, "the write does not complete"
            self.wait()

    def wait(self) -> None:
        """Progresses the engines between two polls."""
        do_duty(self._neighbours)
        time.sleep(0.0002)


def do_duty(agents: list[Agent]) -> None:
    """Progresses the engines of agents that are not being polled."""
    for agent in agents:
        agent.transport.progress()


class PeerProcess:
    """A process that runs `peer.py` with one agent; checks at the end that it exited cleanly and printed nothing on
    stdout.

    Waiting for its answers progresses `ours`, the agents of this process.
    """

    def __init__(self, engine: str, name: str, logs: Path, ours: list[Agent], env: dict[str, str]) -> None:
        self._ours = ours
        reader, writer = os.pipe()
        self._stdout, self._stderr = logs / "stdout", logs / "stderr"
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(PEER), engine, name, str(writer)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                pass_fds=[writer],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
            )
        os.close(writer)
        self._answers = os.fdopen(reader, "rb", buffering=0)
        try:
            hello = self.answer()
        except AssertionError:
            self.close()
            raise
        self.metadata, self.addr = bytes.fromhex(hello["metadata"]), int(hello["addr"])

    def at(self, *offsets: int) -> np.ndarray:
        """Addresses in its pool."""
        return np.array(offsets, np.uint64) + np.uint64(self.addr)

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Runs one command there and returns the answer."""
        self.send(do, **fields)
        return self.answer()

    def send(self, do: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self.process.stdin.flush()

    def collect(self, count: int, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Waits there for `count` arrivals; returns peer, tag and the pool's first byte at that moment."""
        landed: list[dict[str, Any]] = self.ask("collect", count=count, timeout_s=timeout_s)["arrivals"]
        return landed

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes.fromhex(self.ask("read", offset=offset, nbytes=nbytes)["hex"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)  # it may be stopped where a test has failed
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        killed = self.process.returncode == -signal.SIGKILL
        try:
            code = self.process.wait(60)
        finally:
            self._answers.close()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        assert killed or code == 0, f"the peer exited with {code}: {self._stderr.read_text()}"
        assert self._stdout.read_text() == ""

    def answer(self) -> dict[str, Any]:
        """Returns the answer to the last command sent."""
        line = b""
        while not line.endswith(b"\n"):
            while not select.select([self._answers], [], [], DUTY_S)[0]:
                do_duty(self._ours)
            more = self._answers.read(1 << 16)
            if not more:
                self.process.wait()
                raise AssertionError(f"the peer died: {self._stderr.read_text()}")
            line += more
        told: dict[str, Any] = json.loads(line)
        return told


ENGINES = ["nixl", "mooncake", "loopback"]
WITH_THREADS = pytest.mark.parametrize(
    "engine",
    [*ENGINES, "nixl+binding", "nixl+pool num_threads=3,split_batch_size=1"],
    indirect=True,
    scope="module",
)
"""Runs a module's tests also on NIXL by its binding, and with threads, of Python's or of a native pool.

Threads then divide even a write of two descriptors.
"""


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Runs each test that uses it on every transport; parameters follow the transport's name after a space."""
    name: str = request.param
    if name == "mooncake":
        request.getfixturevalue("mooncake_started")
    return name


class Crew:
    """Starts agents and peer processes, and ends them all."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._agents: list[Agent] = []
        self._peers: list[PeerProcess] = []

    def agent(self, engine: str, name: str = "here") -> Agent:
        """Starts an agent in this process."""
        agent = Agent(engine, name, self._agents)
        self._agents.append(agent)
        return agent

    def peer(self, engine: str, name: str = "peer", **env: str) -> PeerProcess:
        """Starts an agent in a separate process."""
        logs = self._logs / str(len(self._peers))
        logs.mkdir()
        self._peers.append(PeerProcess(engine, name, logs, self._agents, env))
        return self._peers[-1]

    def forget(self, agent: Agent) -> None:
        """Forgets an agent that the test has closed."""
        self._agents.remove(agent)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for one in (*self._peers, *(agent.transport for agent in self._agents)):
                stack.callback(one.close)


@pytest.fixture
def crew(no_leaks: None, tmp_path: Path) -> Iterator[Crew]:
    """A crew for one test."""
    crew = Crew(tmp_path)
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def module_crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """A crew shared by the tests of a module, because an engine takes seconds to start."""
    crew = Crew(tmp_path_factory.mktemp("crew"))
    yield crew
    crew.close()


ODD_NAME = "prefill/0 #%é\0'\n"


class Pair(NamedTuple):
    """An agent of this process, and a peer process that has connected it as "writer"."""

    agent: Any
    peer: Any


@pytest.fixture(scope="module")
def pair(engine: str, module_crew: Any) -> Pair:
    agent, peer = module_crew.agent(engine, ODD_NAME), module_crew.peer(engine, "decode-0")
    agent.transport.connect("peer", peer.metadata)
    peer.ask("connect", peer="writer", metadata=agent.transport.metadata().hex())
    # Engines wire up with the first use; what that opens belongs to the module and not to its first test.
    agent.finish(
        agent.transport.write(
            "peer", agent.at(*range(0, 65536, 128)), peer.at(*range(0, 65536, 128)), sizes(64, 512), b"ping"
        )
    )
    peer.collect(1)
    peer.ask("tell", peer="writer", tag=b"pong".hex())
    agent.collect(1)
    return Pair(agent, peer)


def sizes(nbytes: int, count: int = 1) -> np.ndarray:
    return np.full(count, nbytes, np.uint64)
