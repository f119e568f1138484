"""Engines as processes of their own, and pairs of them through which a prompt goes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Tokens = list[int]
Params = dict[str, Any]

# Two cores start several engines.
START_S = 600.0
ANSWER_S = 120.0
SCRIPT = Path(__file__).parent / "engine.py"
REPOSITORY = SCRIPT.parents[2]


@dataclass
class Request:
    """A request of one engine, as far as it has been answered.

    Attributes:
        tokens: the generated tokens.
        finish: vLLM's reason of the end; None before it.
        params: `kv_transfer_params` of the answer.
        cached: tokens of the prompt that were not computed, in vLLM's count.
        submitted, finished: monotonic times.
        transfer: id of its transfer.
    """

    number: int
    submitted: float
    tokens: Tokens
    finish: str | None = None
    params: Params | None = None
    cached: int = 0
    finished: float = 0.0
    transfer: str = ""


class Engine:
    """One engine; its log is a file in `folder`.

    Args:
        python: the interpreter with vLLM.
        folder: of logs.
        name: of this engine.
        environment: variables beside those of this process.
        arguments: vLLM's engine arguments.
    """

    def __init__(
        self,
        python: Path,
        folder: Path,
        name: str,
        environment: dict[str, str],
        arguments: dict[str, Any],
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = [str(python), str(SCRIPT)]
        self._environment = {**os.environ, **environment, "PYTHONPATH": str(REPOSITORY)}
        self._arguments = arguments
        self._requests: dict[int, Request] = {}
        self._numbers = 0
        self._process: subprocess.Popen[bytes] | None = None

    # ---- the process -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the process; `wait_ready` waits for it."""
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._requests.clear()
        self._connection.send(self._arguments)

    def wait_ready(self) -> None:
        self.free_blocks = self._result("start", START_S)["free_blocks"]

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its workers."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kills the process and its workers with -9, if it runs."""
        if self._process is not None:
            if self._process.poll() is None:
                self.signal(signal.SIGKILL)
            self._process.wait(ANSWER_S)
            self._process = None
            self._connection.close()

    def stop(self) -> None:
        """Ends the process as vLLM does, or kills it."""
        if self._process is not None:
            self._connection.close()
            try:
                self._process.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
            self._process.wait(ANSWER_S)
            self._process = None

    def log_end(self) -> str:
        return f"{self.log}:\n{self.log.read_text(errors='replace')[-3000:]}"

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(self, prompt: Tokens, tokens: int, params: Params | None = None) -> Request:
        self._numbers += 1
        transfer = str((params or {}).get("transfer_id", ""))
        request = self._requests[self._numbers] = Request(self._numbers, time.monotonic(), [], transfer=transfer)
        self.call("submit", request.number, prompt, tokens, params)
        return request

    def answer(self, request: Request, timeout_s: float = ANSWER_S) -> Request:
        """Waits for the end of a request."""
        deadline = time.monotonic() + timeout_s
        while request.finish is None:
            self._receive(f"the end of request {request.number}", deadline)
        return request

    def abort(self, *requests: Request) -> None:
        for request in requests:
            self.call("abort", request.number)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the process (`engine.Served`) between two steps; returns its result."""
        self._connection.send((method, arguments))
        return self._result(method, ANSWER_S)

    def wait_for_counts(self, reached: Callable[[dict[str, int]], bool], stepping: bool = False) -> None:
        """Waits for counts of the process (`engine.Served.counts`); makes the steps itself if the engine is held."""
        deadline = time.monotonic() + ANSWER_S
        while not reached(counts := self.call("counts")):
            assert time.monotonic() < deadline, f"{self.name}: {counts}\n{self.log_end()}"
            if stepping:
                self.call("step", 1)
            else:
                time.sleep(0.02)

    def _result(self, name: str, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while (message := self._receive(f"the result of {name}", deadline)) is None:
            pass
        return message[0]

    def _receive(self, what: str, deadline: float) -> tuple[Any] | None:
        """Takes one message: returns the result of a call in a tuple, None after an output."""
        try:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"{self.name}: waited too long for {what}\n{self.log_end()}")
            kind, *message = self._connection.recv()
        except (EOFError, ConnectionError):
            raise AssertionError(f"{self.name} ended before {what}\n{self.log_end()}") from None
        if kind == "result":
            return (message[0],)
        number, tokens, finish, params, cached, at = message
        if request := self._requests.get(number):
            request.tokens, request.finish, request.finished = tokens, finish, at
            request.params, request.cached = params or request.params, cached or request.cached
        return None


def start_all(engines: Sequence[Engine]) -> None:
    """Starts engines side by side and waits for all."""
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.wait_ready()


CONNECTOR = {
    "kv_connector": "KvctlConnector",
    "kv_connector_module_path": "kvctl_agent.integrations.vllm.connector",
}


class Pair:
    """A prefill and a decode engine.

    Args:
        prefill, decode: the engines, which may belong to other pairs too.
        registry: endpoint of the registry of the prefill engine.
    """

    def __init__(self, prefill: Engine, decode: Engine, registry: str) -> None:
        self.prefill = prefill
        self.decode = decode
        self.registry = registry

    def send(self, prompt: Tokens, transfer: str | None = None) -> Request:
        """Submits a prompt to prefill."""
        return self.prefill.submit(prompt, 1, {"do_remote_decode": True, "transfer_id": transfer or uuid.uuid4().hex})

    def receive(self, prompt: Tokens, transfer: str | None = None, tokens: int = 16) -> Request:
        """Submits a prompt to decode, whether prefill has answered or not."""
        params = {"do_remote_prefill": True, "transfer_id": transfer or uuid.uuid4().hex}
        return self.decode.submit(prompt, tokens, {**params, "kvctl_prefill": self.registry})

    def submit(self, prompt: Tokens, tokens: int = 16) -> tuple[Request, Request]:
        """Submits a prompt to both engines; returns their requests."""
        sent = self.send(prompt)
        return sent, self.receive(prompt, sent.transfer, tokens)

    def generate_all(self, prompts: Sequence[Tokens], order: str = "both", tokens: int = 16) -> list[Request]:
        """Takes prompts through both engines at once; returns decode's answers.

        Args:
            prompts: the prompts.
            order: `both` submits each prompt to both engines, `prefill_first` to decode when prefill has answered,
                with the parameters of the answer.
            tokens: how many to generate.
        """
        if order == "both":
            pairs = [self.submit(prompt, tokens) for prompt in prompts]
        else:
            sent = [self.send(prompt) for prompt in prompts]
            pairs = [
                (request, self.decode.submit(prompt, tokens, self.prefill.answer(request).params))
                for prompt, request in zip(prompts, sent, strict=True)
            ]
        for request, _ in pairs:
            self.prefill.answer(request)
        return [self.decode.answer(request) for _, request in pairs]

    def generate(self, prompt: Tokens, order: str = "both", tokens: int = 16) -> Tokens:
        [request] = self.generate_all([prompt], order, tokens)
        return request.tokens
