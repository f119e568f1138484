"""SGLang servers of tests: a fleet with a router, and requests to a prefill and a decode server together."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from kvctl.lab.bench import sglang_servers
from kvctl.lab.bench.sglang_servers import HOST, Process, ServerError, Tokens, together, wait_ready
from kvctl.lab.tcp_ports import free_port

REQUEST_S = 120.0
# Of every server: the tiny model has no tokenizer, and the pool is as small as the model.
COMMON_FLAGS = (
    *("--skip-tokenizer-init", "--random-seed", "7", "--max-total-tokens", "8192", "--max-running-requests", "16"),
    *("--page-size", "16", "--enable-metrics", "--sleep-on-idle"),
)


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


class Prefill(sglang_servers.Prefill):
    """A prefill server, to which requests are sent together with those to a decode server."""

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


class Fleet(sglang_servers.Fleet):
    """A fleet that runs within a `with` statement; `common` are flags of every server, by default of the tiny model."""

    def __init__(
        self,
        python: Path,
        model: Path,
        folder: Path,
        flags: Sequence[str],
        environment: Mapping[str, str],
        common: Sequence[str] = COMMON_FLAGS,
    ) -> None:
        super().__init__(python, model, folder, (*common, *flags), environment)
        self._prefills: list[Prefill] = []
        self._decodes: list[Process] = []

    def prefill(self, name: str, backend: str, *arguments: str) -> Prefill:
        added = super().prefill(name, backend, *arguments)
        self._prefills.append(Prefill(added.process, added.bootstrap_port))
        return self._prefills[-1]

    def decode(self, name: str, backend: str, *arguments: str) -> Process:
        self._decodes.append(super().decode(name, backend, *arguments))
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
