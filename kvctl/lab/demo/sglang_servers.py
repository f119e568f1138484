"""Starts SGLang servers and a router as processes, sends them requests and ends them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

from kvctl.lab.tcp_ports import free_port

HOST = "127.0.0.1"
# A server alone on two cores is up after 20 s; six beside other work take minutes.
START_S = 600.0
REQUEST_S = 120.0
END_S = 30.0
LOG_LINES = 40
_INDENTED = " " * 16

# Of every server: the tiny model has no tokenizer, and the pool is as small as the model.
COMMON_FLAGS = (
    *("--skip-tokenizer-init", "--random-seed", "7", "--max-total-tokens", "8192", "--max-running-requests", "16"),
    *("--page-size", "16", "--enable-metrics", "--sleep-on-idle"),
)
# Without a GPU: no kernels that a CPU lacks.
CPU_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph"),
    *("--disable-overlap-schedule", "--mem-fraction-static", "0.5"),
)
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # Two ranks of one server each name the cores of their threads.
    "SGLANG_CPU_OMP_THREADS_BIND": "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * 2),
    # No kernels that are compiled at the first request.
    "TORCHDYNAMO_DISABLE": "1",
    # Bytecode of SGLang and torch: without it a server takes three times as long to start.
    "PYTHONDONTWRITEBYTECODE": "",
}

Tokens = list[int]
T = TypeVar("T")


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
            raise ServerError(f"{self.name} is not ready after {START_S:g} s\n{self.log_end()}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=20):
                return True
        except OSError:
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
        lines = [line[:300] for line in self.log_text().splitlines() if not line.startswith(_INDENTED)]
        return "\n".join([f"--- the end of {self.log}", *lines[-LOG_LINES:]])


@dataclass(frozen=True)
class Answer:
    """The reply of a server to one request.

    Attributes:
        tokens: the generated tokens.
        cached: prompt tokens that the server had in its radix cache.
    """

    tokens: Tokens
    cached: int

    @classmethod
    def read(cls, reply: Mapping[str, Any]) -> Answer:
        return cls(reply["output_ids"], reply["meta_info"]["cached_tokens"])


def request(url: str, body: bytes, timeout_s: float = REQUEST_S) -> bytes:
    """Posts a body and returns that of the reply.

    Raises:
        ServerError: no connection, no reply in time, or an error status.
    """
    message = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(message, timeout=timeout_s) as reply:
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}: {error.code} {error.read().decode(errors='replace')[:300]}") from None
    except (OSError, HTTPException) as error:  # refused, reset, timed out, cut short
        raise ServerError(f"{url}: {error!r}") from None


def post(url: str, document: Mapping[str, Any], timeout_s: float = REQUEST_S) -> Any:
    """Posts a document as JSON and returns the decoded reply; errors as of `request`."""
    return json.loads(request(url, json.dumps(document).encode(), timeout_s))


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

    def send(self, decode: Process, message: Mapping[str, Any], timeout_s: float = REQUEST_S) -> tuple[Answer, Answer]:
        """Returns the replies of this server, which has the first token, and of a decode server, which has all.

        Raises:
            ServerError: either request failed; the other one has ended too.
        """
        urls = [f"{at.url}/generate" for at in (self.process, decode)]
        mine, its = together([partial(post, url, message, timeout_s) for url in urls])
        return Answer.read(mine), Answer.read(its)

    def generate(
        self, decode: Process, prompt: Tokens, new_tokens: int = 16, timeout_s: float = REQUEST_S
    ) -> tuple[Answer, Answer]:
        """Sends a request with a room of its own."""
        return self.send(decode, self.request(prompt, new_tokens), timeout_s)


class Fleet:
    """Processes that share a model, an environment and a folder for their logs.

    Args:
        python: that of an environment with SGLang.
        model: folder of the checkpoint.
        folder: where the logs are written.
        flags: of every server, beside `common`.
        environment: variables of all processes, beside those of this one.
        common: flags of every server; the default is for the tiny model.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        folder: Path,
        flags: Sequence[str],
        environment: Mapping[str, str],
        common: Sequence[str] = COMMON_FLAGS,
    ) -> None:
        self.python = python
        self.model = model
        self.folder = folder
        self.flags = (*common, *flags)
        self.environment = {"SGLANG_HOST_IP": HOST, "HF_HUB_OFFLINE": "1", **environment}
        self.processes: list[Process] = []
        self._prefills: list[Prefill] = []
        self._decodes: list[Process] = []

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
        self._prefills.append(Prefill(self.server(name, *flags, *arguments), port))
        return self._prefills[-1]

    def decode(self, name: str, backend: str, *arguments: str) -> Process:
        """Adds a decode server."""
        flags = ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", backend]
        flags += ["--disaggregation-decode-retraction-backup", "none"]
        self._decodes.append(self.server(name, *flags, *arguments))
        return self._decodes[-1]

    def router(self, name: str) -> Process:
        """Adds SGLang's router for the servers added so far, in its small version for PD pairs."""
        port = free_port()
        command = ["-P", "-W", "ignore", "-m", "sglang_router.launch_router", "--pd-disaggregation", "--mini-lb"]
        command += ["--host", HOST, "--port", str(port)]
        for prefill in self._prefills:
            command += ["--prefill", prefill.process.url, str(prefill.bootstrap_port)]
        for decode in self._decodes:
            command += ["--decode", decode.url]
        return self._add(name, command, port)

    def _add(self, name: str, arguments: list[str], port: int) -> Process:
        log = self.folder / f"{name}.log"
        command = [str(self.python), *arguments]
        self.processes.append(Process(name, command, self.environment, log, port))
        return self.processes[-1]

    def __enter__(self) -> Fleet:
        """Starts the processes that are not running, together.

        Raises:
            ServerError: one of them did not become ready; all have ended.
        """
        try:
            for process in self.processes:
                process.start()
            wait_ready(self.processes)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self.end()

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
