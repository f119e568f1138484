"""Fixtures with ranks in separate processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvctl_agent

REPOSITORY = Path(kvctl_agent.__file__).parents[1]
PYTHONPATH = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
SCRIPT = Path(__file__).with_name("rank_process.py")


class RankProcess:
    """A process that runs `rank_process.py`; requests are names of methods of its `Worker`."""

    def __init__(
        self, role: str, number: int, size: int, bootstrap: str, logs: Path, directory: Path, **config: Any
    ) -> None:
        self.name = f"{role}-{number}"
        reader, writer = os.pipe()
        self._stdout, self._stderr = logs / f"{self.name}.out", logs / f"{self.name}.err"
        arguments = [role, str(number), str(size), bootstrap, json.dumps(config), str(writer)]
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", str(SCRIPT), *arguments],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                pass_fds=[writer],
                env={**os.environ, "PYTHONPATH": PYTHONPATH, "KVCTL_SOCKET_DIR": str(directory)},
            )
        os.close(writer)
        self._answers = os.fdopen(reader)
        self._greeted = False

    def tell(self, do: str, **fields: Any) -> None:
        """Sends a request without waiting for its answer, which `hear` returns."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        if not self._greeted:
            self._greeted = True
            self._line()
        return self._line()["answer"]

    def ask(self, do: str, **fields: Any) -> Any:
        self.tell(do, **fields)
        return self.hear()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self, timeout: float = 60.0) -> tuple[int, str, str]:
        """Closes its input; returns its exit code and output."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            code = self.process.wait(timeout)
        finally:
            self._answers.close()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        return code, self._stdout.read_text(), self._stderr.read_text()

    def close(self) -> None:
        killed = self.process.returncode == -signal.SIGKILL
        code, out, err = self.end()
        assert killed or code == 0, f"{self.name} exited with {code}: {err}"
        assert out == ""

    def _line(self) -> Any:
        line = self._answers.readline()
        if not line:
            self.process.wait()
            raise AssertionError(f"{self.name} died: {self._stderr.read_text()}")
        return json.loads(line)


class Cluster:
    """A prefill instance of some TP size and a decode instance of some DP size, one process per rank."""

    def __init__(self, directory: Path, logs: Path, prefill: int, decode: int, **config: Any) -> None:
        self.directory = directory
        self.bootstrap = f"ipc://{directory}/boot"
        self.sizes = {"prefill": prefill, "decode": decode}
        self.config = config
        self._logs = logs
        self.ranks: dict[str, RankProcess] = {}

    def launch(self, role: str, number: int, **config: Any) -> RankProcess:
        """Starts a rank's process, or starts it again after it was killed."""
        if (old := self.ranks.pop(f"{role}-{number}", None)) is not None:
            old.close()
        logs = self._logs / str(len(list(self._logs.iterdir())))
        logs.mkdir()
        place = (role, number, self.sizes[role], self.bootstrap, logs, self.directory)
        rank = RankProcess(*place, **{**self.config, **config})
        self.ranks[rank.name] = rank
        return rank

    def start(self) -> Cluster:
        for role, size in self.sizes.items():
            for number in range(size):
                self.launch(role, number)
        self.all("start")
        self.all("ready", timeout=60)
        return self

    def of(self, role: str) -> list[RankProcess]:
        return [rank for name, rank in self.ranks.items() if name.startswith(role)]

    def all(self, do: str, role: str = "", **fields: Any) -> dict[str, Any]:
        """Sends a request to all ranks of a role at the same time."""
        ranks = self.of(role)
        for rank in ranks:
            rank.tell(do, **fields)
        return {rank.name: rank.hear() for rank in ranks}

    def receive(self, rooms: list[int]) -> None:
        """Opens a room on the decode rank given by the room number modulo the ranks."""
        decode = self.of("decode")
        for rank in decode:
            rank.ask("receive", rooms=[room for room in rooms if rank.name == self.target(room)])

    def target(self, room: int) -> str:
        return f"decode-{room % self.sizes['decode']}"

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for rank in self.ranks.values():
                stack.callback(rank.close)


@pytest.fixture
def make_cluster(no_leaks: None, socket_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def make(transport: str = "loopback", prefill: int = 2, decode: int = 2, **config: Any) -> Cluster:
        logs = tmp_path / str(len(clusters))
        logs.mkdir()
        clusters.append(Cluster(socket_dir, logs, prefill, decode, transport=transport, **config))
        return clusters[-1]

    yield make
    with contextlib.ExitStack() as stack:
        for cluster in clusters:
            stack.callback(cluster.close)


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Cluster]]:
    """Creates clusters of one prefill and one decode rank, not launched, shared by a module's tests."""
    directories: list[Path] = []

    def make(transport: str) -> Cluster:
        directories.append(Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp")))
        return Cluster(directories[-1], tmp_path_factory.mktemp("logs"), 1, 1, transport=transport)

    yield make
    for directory in directories:
        shutil.rmtree(directory)


@pytest.fixture
def launch(tmp_path: Path, short_directory: Path) -> Iterator[Callable[..., RankProcess]]:
    """Starts ranks that find each other over TCP, each with its own socket directory, as on separate hosts.

    There are two prefill ranks and one decode rank; a peer is lost after three seconds of silence.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        bootstrap = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    made: list[RankProcess] = []
    soon = {"heartbeat_s": 0.2, "suspect_s": 1.0, "lost_s": 3.0}

    def new(role: str, number: int, **config: Any) -> RankProcess:
        logs, directory = tmp_path / str(len(made)), short_directory / str(len(made))
        logs.mkdir()
        directory.mkdir(mode=0o700)
        rank = RankProcess(role, number, 2 if role == "prefill" else 1, bootstrap, logs, directory, **soon, **config)
        made.append(rank)
        rank.ask("start")
        return rank

    yield new
    for rank in made:
        if rank.process.poll() is None:
            rank.signal(signal.SIGCONT)
            rank.tell("close")
    for rank in made:
        rank.close()
