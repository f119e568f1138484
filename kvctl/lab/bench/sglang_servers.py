"""Starts SGLang servers as processes, and ends them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

from kvctl.lab.tcp_ports import free_port

HOST = "127.0.0.1"
# A server alone on two cores is up after 20 s; six beside other work take minutes.
START_S = 600.0
END_S = 30.0
LOG_LINES = 40
_INDENTED = " " * 16
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LISTENING = "0A"  # in /proc/net/tcp

# Without a GPU: no kernels that a CPU lacks.
CPU_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph"),
    *("--disable-overlap-schedule", "--mem-fraction-static", "0.5"),
)

Tokens = list[int]
T = TypeVar("T")


def cpu_environment(ranks: int = 1) -> dict[str, str]:
    """Returns the variables of servers without a GPU, each of which has at most `ranks` ranks."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        # The cores of the threads of each rank.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * ranks),
        # No kernels that are compiled at the first request.
        "TORCHDYNAMO_DISABLE": "1",
        # Bytecode of SGLang and torch: without it a server takes three times as long to start.
        "PYTHONDONTWRITEBYTECODE": "",
    }


class ServerError(Exception):
    """A server did not start, or a request to it failed."""


@dataclass
class Process:
    """A process in a group of its own, with a log file; it ends with this process.

    Attributes:
        url: where it answers; `GET url/health` is 200 once it is ready.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    port: int
    _running: subprocess.Popen[bytes] | None = field(default=None, init=False)
    started: float = field(default=0.0, init=False)
    _port_taken: bool = field(default=False, init=False)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._running is not None, f"{self.name} was not started"
        return self._running.pid

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.started = time.monotonic()
            self._running = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.command],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.log.parent,
            )

    def check(self) -> None:
        """Raises ServerError, with the end of its log, if the process has ended."""
        assert self._running is not None, f"{self.name} was not started"
        if (status := self._running.poll()) is not None:
            raise ServerError(f"{self.name} ended with {status}\n{self.log_end()}")

    def ready(self) -> bool:
        """Whether the server answers.

        Raises:
            ServerError: the process has ended or is not ready in time, with the end of its log.
        """
        self.check()
        if time.monotonic() - self.started > START_S:
            cause = f": another process answers on port {self.port}" if self._port_taken else ""
            raise ServerError(f"{self.name} is not ready after {START_S:g} s{cause}\n{self.log_end()}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=20):
                healthy = True
        except urllib.error.HTTPError:
            healthy = False
        except (OSError, HTTPException):
            return False
        self._port_taken = not self._listens()
        return healthy and not self._port_taken

    def _listens(self) -> bool:
        """Returns whether a process of the group has the port: while it starts, another one may answer there."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
        port = f"{self.port:04X}"
        sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTENING and row[1].rpartition(":")[2] == port}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if os.getpgid(int(process.name)) == self.pid and not sockets.isdisjoint(_open_files(process)):
                    return True
        return False

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to every process of the group."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """Ends all processes of the group with SIGKILL, as a crashed host would."""
        if self._running is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)
        self._running.wait(END_S)
        self._running = None

    def end(self) -> None:
        """Asks the process to end, then ends what is left of its group."""
        if self._running is None:
            return
        self._running.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._running.wait(END_S)
        self.kill()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_end(self) -> str:
        # Not the usage of hundreds of options, which precedes the error of a wrong one, nor the marks of tracebacks.
        text = _COLOUR.sub("", self.log_text())
        lines = [line[:300] for line in text.splitlines() if not line.startswith(_INDENTED)]
        return "\n".join([f"--- the end of {self.log}", *lines[-LOG_LINES:]])


def _open_files(process: Path) -> Iterator[str]:
    """Yields the targets of the process's file descriptors; `process` is its folder in /proc."""
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            yield str(descriptor.readlink())


def generation(prompt: Tokens, new_tokens: int) -> dict[str, Any]:
    """A request of SGLang's /generate: greedy, as many tokens as asked for."""
    parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": parameters}


@dataclass(frozen=True)
class Prefill:
    """A prefill server and the port of its bootstrap server."""

    process: Process
    bootstrap_port: int

    def request(self, prompt: Tokens, new_tokens: int) -> dict[str, Any]:
        """Returns a request for both halves of a pair, with a room of its own."""
        return {
            **generation(prompt, new_tokens),
            "bootstrap_host": HOST,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.getrandbits(63),
        }


class Fleet:
    """Processes that share a model, an environment and a folder for their logs.

    Args:
        python: that of an environment with SGLang.
        environment: variables of all processes, beside those of this one.
    """

    def __init__(
        self, python: Path, model: Path, folder: Path, flags: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.python = python
        self.model = model
        self.folder = folder
        self.flags = flags
        self.environment = {"SGLANG_HOST_IP": HOST, "HF_HUB_OFFLINE": "1", **environment}
        self.processes: list[Process] = []

    def server(self, name: str, *arguments: str) -> Process:
        """Adds a server."""
        port = free_port()
        command = ["-P", "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(self.model), *self.flags]
        command += ["--host", HOST, "--port", str(port), *arguments]
        return self._add(name, command, port)

    def prefill(self, name: str, backend: str, *arguments: str) -> Prefill:
        """Adds a prefill server."""
        port = free_port()
        flags = ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", backend]
        flags += ["--disaggregation-bootstrap-port", str(port)]
        return Prefill(self.server(name, *flags, *arguments), port)

    def decode(self, name: str, backend: str, *arguments: str) -> Process:
        """Adds a decode server."""
        flags = ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", backend]
        flags += ["--disaggregation-decode-retraction-backup", "none"]
        return self.server(name, *flags, *arguments)

    def _add(self, name: str, arguments: list[str], port: int) -> Process:
        log = self.folder / f"{name}.log"
        command = [str(self.python), *arguments]
        self.processes.append(Process(name, command, self.environment, log, port))
        return self.processes[-1]

    def end(self) -> None:
        together([process.end for process in self.processes])


def _print(text: str) -> None:
    print(text, file=sys.stderr)


def wait_ready(processes: Iterable[Process], say: Callable[[str], None] = _print) -> None:
    """Waits until all answer; says the seconds that each took.

    Raises:
        ServerError: one of them ended or is not ready in time.
    """
    waiting = list(processes)
    while waiting:
        for process in [each for each in waiting if each.ready()]:
            say(f"{process.name}: ready after {time.monotonic() - process.started:.1f} s")
            waiting.remove(process)
        time.sleep(0.2)


def together(calls: Sequence[Callable[[], T]], threads: int | None = None) -> list[T]:
    """Runs the calls in threads; returns their results once all have ended, or raises the first error."""
    with ThreadPoolExecutor(threads or max(1, len(calls))) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]
