"""Agents to test with: one in this process, others in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvctl_agent
from kvctl_agent.transport import Arrival, Region, Transport, Write, open_transport

POOL_BYTES = 4 << 20
REPOSITORY = Path(kvctl_agent.__file__).parents[1]
PEER = Path(__file__).with_name("peer.py")


class Agent:
    """A transport of this process with a registered pool of its own."""

    def __init__(self, engine: str, name: str) -> None:
        self.transport: Transport = open_transport(engine, name)
        self.pool = np.zeros(POOL_BYTES, np.uint8)
        self.addr = self.pool.ctypes.data
        self.transport.register([Region(self.addr, POOL_BYTES)])

    def at(self, *offsets: int) -> np.ndarray:
        """Addresses in the pool."""
        return np.array(offsets, np.uint64) + np.uint64(self.addr)

    def collect(self, count: int, timeout_s: float = 5.0) -> list[Arrival]:
        """Waits for `count` arrivals."""
        until = time.monotonic() + timeout_s
        landed: list[Arrival] = []
        while len(landed) < count and time.monotonic() < until:
            landed += self.transport.arrivals()
            time.sleep(0.0002)
        return landed

    def finish(self, write: Write, timeout_s: float = 5.0) -> None:
        """Polls a write until it is complete."""
        until = time.monotonic() + timeout_s
        while not write.poll():
            assert time.monotonic() < until, "the write does not complete"
            time.sleep(0.0002)


class PeerProcess:
    """`peer.py` with one agent; asserts at the end that it exited cleanly and printed nothing on stdout."""

    def __init__(self, engine: str, name: str, logs: Path, env: dict[str, str] | None = None) -> None:
        reader, writer = os.pipe()
        self._stdout, self._stderr = logs / "stdout", logs / "stderr"
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(PEER), engine, name, str(writer)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                pass_fds=[writer],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(env or {})},
            )
        os.close(writer)
        self._answers = os.fdopen(reader)
        try:
            hello = self._answer()
        except AssertionError:
            self.close()
            raise
        self.metadata, self.addr = bytes.fromhex(hello["metadata"]), int(hello["addr"])

    def at(self, *offsets: int) -> np.ndarray:
        """Addresses in its pool."""
        return np.array(offsets, np.uint64) + np.uint64(self.addr)

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Runs one command there."""
        self.send(do, **fields)
        return self._answer()

    def send(self, do: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self.process.stdin.flush()

    def collect(self, count: int, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """Waits there for `count` arrivals: their peer, tag and the pool's first byte when they were seen."""
        landed: list[dict[str, Any]] = self.ask("collect", count=count, timeout_s=timeout_s)["arrivals"]
        return landed

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes.fromhex(self.ask("read", offset=offset, nbytes=nbytes)["hex"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        killed = self.process.returncode == -signal.SIGKILL
        try:
            code = self.process.wait(20)
        finally:
            self._answers.close()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        assert killed or code == 0, f"the peer exited with {code}: {self._stderr.read_text()}"
        assert self._stdout.read_text() == ""

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            self.process.wait()
            raise AssertionError(f"the peer died: {self._stderr.read_text()}")
        told: dict[str, Any] = json.loads(line)
        return told


@pytest.fixture(scope="module", params=["nixl", "loopback"])
def engine(request: pytest.FixtureRequest) -> str:
    """Every test that uses it runs on every transport."""
    name: str = request.param
    return name


class Crew:
    """Starts agents and peer processes, and ends them all."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._agents: list[Agent] = []
        self._peers: list[PeerProcess] = []

    def agent(self, engine: str, name: str = "here") -> Agent:
        """An agent in this process."""
        self._agents.append(Agent(engine, name))
        return self._agents[-1]

    def peer(self, engine: str, name: str = "peer", **env: str) -> PeerProcess:
        """An agent in a process of its own."""
        logs = self._logs / str(len(self._peers))
        logs.mkdir()
        self._peers.append(PeerProcess(engine, name, logs, env))
        return self._peers[-1]

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for one in (*self._peers, *(agent.transport for agent in self._agents)):
                stack.callback(one.close)


@pytest.fixture
def crew(no_leaks: None, tmp_path: Path) -> Iterator[Crew]:
    """For tests with agents of their own."""
    crew = Crew(tmp_path)
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def module_crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """For agents that the tests of a module share, since an engine takes seconds to start."""
    crew = Crew(tmp_path_factory.mktemp("crew"))
    yield crew
    crew.close()
