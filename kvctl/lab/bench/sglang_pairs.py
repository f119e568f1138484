"""Pairs of SGLang servers, a prefill and a decode server under one transfer backend, and requests to them.

A side is a transfer backend or a setting of one, with KEY=VALUE after slashes for the environment of its servers, as in
kvctl/KVCTL_PATH=staged. Servers run with SGLang's own defaults: on a GPU an idle scheduler spins.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple, Self

from kvctl.lab.bench.sglang_servers import (
    CPU_FLAGS,
    HOST,
    Fleet,
    Prefill,
    Process,
    ServerError,
    Tokens,
    cpu_environment,
    generation,
)
from kvctl.lab.bench.variants import size
from kvctl.lab.ranks.request import Sizes
from kvctl_agent.contract.values import near

UNDIVIDED = "undivided"
_KVCTL = {"KVCTL_SGLANG": "backend", "KVCTL_PIPELINE": "off"}
SIDES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "nixl": ("nixl", {"KVCTL_SGLANG": "off"}),
    "staging": ("nixl", {"KVCTL_SGLANG": "off", "SGLANG_DISAGG_STAGING_BUFFER": "1"}),
    "kvctl": ("kvctl", _KVCTL),
    "kvctl-pipelined": ("kvctl", {**_KVCTL, "KVCTL_PIPELINE": "on"}),
    "replace": ("nixl", {**_KVCTL, "KVCTL_SGLANG": "replace"}),
    "observe": ("nixl", {"KVCTL_SGLANG": "observe"}),
    UNDIVIDED: ("", {"KVCTL_SGLANG": "off"}),
}
"""--disaggregation-transfer-backend and environment of each side; an undivided server has no backend."""

_REQUEST_S = 300.0  # hundreds of long prompts at a time wait for each other
_LATE_S = 2.0
_PAGE_RESERVE = 512  # tokens that decode reserves for each request
_LEAST_POOL = 16384
_LEAST_TOKEN = 10


class Side(NamedTuple):
    """A side as it was written, its backend, and the environment of its servers."""

    text: str
    backend: str
    environment: Mapping[str, str]


def parse_sides(text: str) -> tuple[Side, ...]:
    """Parses `nixl,kvctl,kvctl/KVCTL_PATH=staged`; a comma may be in the value of a variable.

    Raises:
        ValueError: a side is unknown or is given twice, or a setting is no KEY=VALUE.
    """
    sides: list[Side] = []
    for word in re.split(r",(?=[a-z]+(?:-[a-z]+)?(?:[,/]|$))", text):
        name, *settings = re.split(r"/(?=\w+=|$)", word.strip())
        if name not in SIDES:
            raise ValueError(
                f"{word!r} is not a side; allowed: {', '.join(SIDES)}, with /KEY=VALUE for variables{near(name, SIDES)}"
            )
        if not all(settings):
            raise ValueError(f"{word!r}: write {name}/KEY=VALUE")
        backend, environment = SIDES[name]
        sides.append(Side(word.strip(), backend, {**environment, **dict(each.split("=", 1) for each in settings)}))
    if len({side.text for side in sides}) < len(sides):
        raise ValueError(f"{text!r}: a side is given twice")
    return tuple(sides)


class ServerPlan(NamedTuple):
    """What the servers of all sides have in common.

    Attributes:
        model: folder of a checkpoint, or a name that SGLang resolves.
        prefill, decode: parallel sizes; an undivided server has those of prefill.
        prefill_gpus, decode_gpus: numbers of the GPUs, evenly spaced; empty: servers without a GPU.
        longest: tokens of the longest request with its output.
    """

    model: str
    prefill: Sizes = Sizes()
    decode: Sizes = Sizes()
    prefill_gpus: Sequence[int] = ()
    decode_gpus: Sequence[int] = ()
    page_size: int = 16
    longest: int = 4096
    concurrency: int = 16
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    vocabulary: int = 512

    @property
    def common_flags(self) -> tuple[str, ...]:
        """The flags of every server; the pool has room for the load, so that several servers can share a GPU."""
        pool = max(_LEAST_POOL, self.concurrency * (self.longest + _PAGE_RESERVE) * 5 // 4)
        pool = -(-pool // self.page_size) * self.page_size
        most = str(max(64, 2 * self.concurrency))
        return (
            *("--skip-tokenizer-init", "--random-seed", "7", "--page-size", str(self.page_size)),
            *("--max-total-tokens", str(pool), "--max-running-requests", most),
            *(() if self.prefill_gpus else (*CPU_FLAGS, "--sleep-on-idle")),
            *self.flags,
        )


def role_flags(sizes: Sizes, gpus: Sequence[int]) -> list[str]:
    """Returns the flags for parallel sizes on these GPUs; dp groups share a server, as with DP attention."""
    flags = ["--tp-size", str(sizes.tp * sizes.dp), "--pp-size", str(sizes.pp)]
    if sizes.dp > 1:
        flags += ["--dp-size", str(sizes.dp), "--enable-dp-attention"]
        if not gpus:  # CPUs lack the operator that exchanges logits
            flags += ["--enable-dp-lm-head"]
    if gpus:
        step = gpus[1] - gpus[0] if len(gpus) > 1 else 1
        flags += ["--base-gpu-id", str(gpus[0]), "--gpu-id-step", str(step)]
    return flags


class Generated(NamedTuple):
    """The answer to one request.

    Attributes:
        first_s: from sending the request to both servers until the first token from decode, in seconds.
        token_s: of each further token, in seconds; None if there was one.
    """

    tokens: Tokens
    first_s: float
    token_s: float | None


class Pair:
    """The servers of one side, which nobody has started.

    Args:
        folder: new folder for the servers' logs.
        python: that of an environment with SGLang.

    Attributes:
        prefill: None: the server is undivided.
    """

    def __init__(self, side: Side, plan: ServerPlan, folder: Path, python: Path = Path(sys.executable)) -> None:
        folder.mkdir()
        cpu = {} if plan.prefill_gpus else cpu_environment(max(size(plan.prefill), size(plan.decode)))
        environment = {**cpu, "SGLANG_DISAGG_STAGING_BUFFER": "0", **plan.environment, **side.environment}
        self.side = side
        self.plan = plan
        self.fleet = Fleet(python, Path(plan.model), folder, plan.common_flags, environment)
        prefill = role_flags(plan.prefill, plan.prefill_gpus)
        self.prefill: Prefill | None = None
        if not side.backend:
            self.decode: Process = self.fleet.server("server", *prefill)
        else:
            self.prefill = self.fleet.prefill("prefill", side.backend, *prefill)
            self.decode = self.fleet.decode("decode", side.backend, *role_flags(plan.decode, plan.decode_gpus))

    def prompt(self, length: int, source: random.Random) -> Tokens:
        """Draws a prompt."""
        return [source.randrange(_LEAST_TOKEN, self.plan.vocabulary) for _ in range(length)]

    def generate(self, prompt: Tokens, new_tokens: int) -> Generated:
        """Sends a request to both servers and reads the answer of decode token by token.

        Raises:
            ServerError: a server does not answer, refuses the request, or generates fewer tokens.
        """
        prefill = self.prefill
        request = generation(prompt, new_tokens) if prefill is None else prefill.request(prompt, new_tokens)
        with contextlib.ExitStack() as stack:
            at_prefill = None if prefill is None else stack.enter_context(_Exchange(prefill.process, request))
            at_decode = stack.enter_context(_Exchange(self.decode, {**request, "stream": True}))
            started = time.perf_counter()
            try:
                if at_prefill is not None:
                    at_prefill.send()
                at_decode.send()
                # Read first: hundreds of requests share this process, and each event has all tokens so far.
                arrived = [(time.perf_counter(), line) for line in at_decode.lines()]
                first, last = (at_decode.event(line) for _, line in (arrived[0], arrived[-1])) if arrived else ({}, {})
                tokens = last.get("output_ids", [])
                if len(tokens) < new_tokens:
                    raise ServerError(f"{self.decode.name} generated too few tokens: {str(last)[:300]}")
            except ServerError as error:
                raise ServerError(f"{error}{at_prefill.failure() if at_prefill else ''}") from None
            if at_prefill is not None:
                at_prefill.read()  # a connection that is closed before would abort the request
        (first_at, _), (last_at, _) = arrived[0], arrived[-1]
        more = len(tokens) - len(first["output_ids"])
        return Generated(tokens, first_at - started, (last_at - first_at) / more if more else None)


class _Exchange:
    """One request to a server on a connection of its own, which is open before the request is sent."""

    def __init__(self, server: Process, request: Mapping[str, Any]) -> None:
        self._name = server.name
        self._body = json.dumps(request).encode()
        self._connection = HTTPConnection(HOST, server.port, timeout=_REQUEST_S)

    def __enter__(self) -> Self:
        with self._errors():
            self._connection.connect()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._connection.close()

    def send(self) -> None:
        with self._errors():
            self._connection.request("POST", "/generate", self._body, {"Content-Type": "application/json"})

    def lines(self) -> Iterator[bytes]:
        """Yields the lines of the events of the answer as they arrive."""
        with self._errors():
            yield from (line for line in self._reply() if line.startswith(b"data:") and b"[DONE]" not in line)

    def event(self, line: bytes) -> Mapping[str, Any]:
        """Returns the event of a line."""
        event: dict[str, Any] = json.loads(line.removeprefix(b"data:"))
        if "error" in event:
            raise ServerError(f"{self._name}: {str(event)[:300]}")
        return event

    def read(self) -> None:
        """Waits for the end of the answer."""
        with self._errors():
            self._reply().read()

    def failure(self) -> str:
        """Returns why the server failed the request, for the text of an error; "" if it did not."""
        if self._connection.sock is None:
            return ""
        self._connection.sock.settimeout(_LATE_S)
        try:
            self.read()
        except ServerError as error:
            return f"; {error}"
        return ""

    def _reply(self) -> HTTPResponse:
        reply = self._connection.getresponse()
        if reply.status != HTTPStatus.OK:
            raise ServerError(f"{self._name}: {reply.status} {reply.read().decode(errors='replace')[:300]}")
        return reply

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, HTTPException) as error:  # refused, reset, timed out, cut short
            raise ServerError(f"{self._name}: {error!r}") from None
