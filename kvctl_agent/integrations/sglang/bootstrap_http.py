"""HTTP client for SGLang's bootstrap servers, whose addresses come with requests and whose answers are not trusted.

SGLang's own client, `requests`, limits the time of each read and nothing else: a server that sends byte by byte holds
the scheduler's thread, and an endless answer takes all memory. Here each exchange has a total deadline and a size limit
and runs on a thread of its own, which the scheduler waits for only briefly.
"""

from __future__ import annotations

import json as text
import threading
import time
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec
import requests

from kvctl_agent import KvctlError
from kvctl_agent.contract.addresses import Address, parse_place, tcp_address
from kvctl_agent.contract.states import MAX_RANKS
from kvctl_agent.contract.values import shown
from kvctl_agent.host.http_client import AnswerTooLarge, connect, exchange

_TOTAL_S = 5.0  # SGLang's own limit, which it applies to each read
_WAIT_S = 0.5  # SGLang asks again in its next cycle, or after a second
_KEPT_S = 5.0  # answers that come too late, for the next call with the same request
_MAX_BYTES = 1 << 20  # of an answer with its headers
_MOST, _MOST_TO_ONE = 64, 8  # exchanges at a time
_DP_RANKS, _HEALTH = "/query_dp_ranks", "/health"

_Document = TypeVar("_Document")
_DpRanks = dict[str, Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]]


class BootstrapError(KvctlError):
    """A bootstrap server does not answer, or not with the expected document."""


class _Row(msgspec.Struct):
    rank_ip: str
    rank_port: int


class Answer(NamedTuple):
    """Answer of a server; it has the part of the interface of `requests.Response` that SGLang uses."""

    url: str
    status_code: int
    body: bytes

    @property
    def text(self) -> str:
        """The body in one short line, for an error text."""
        return shown(self.body.decode(errors="replace"))

    def json(self) -> dict[str, Any]:
        """Returns the document, a JSON object: of `/query_dp_ranks` the dp rank of each room.

        Raises:
            BootstrapError: the body is something else.
        """
        return self.document(_DpRanks if self.url.endswith(_DP_RANKS) else dict[str, Any])

    def document(self, kind: type[_Document]) -> _Document:
        """Returns the body, a JSON document of this type; raises BootstrapError if it is something else."""
        if self.status_code != 200:
            raise BootstrapError(f"{self.url} answers HTTP {self.status_code}: {self.text}")
        try:
            return msgspec.json.decode(self.body, type=kind, strict=False)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BootstrapError(f"{self.url} answers with an invalid document: {error}") from None


class BootstrapClient:
    """Exchanges with bootstrap servers, from any thread.

    It has the part of the interface of the module `requests` and of its sessions that SGLang uses with such servers.
    """

    adapters = requests.adapters
    put = staticmethod(requests.put)  # at prefill, to the bootstrap server of its own instance

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._exchanges: dict[tuple[str, str, bytes], _Exchange] = {}

    def Session(self) -> BootstrapClient:  # the name in `requests`
        return self

    def mount(self, prefix: str, adapter: object) -> None:
        """Does nothing: every exchange has a connection of its own."""

    def get(self, url: str, timeout: object = None, headers: object = None) -> Answer:
        """As `fetch`; waits for the whole time limit only at the address that SGLang's heartbeat thread asks."""
        return self.fetch("GET", url, wait_s=_TOTAL_S if url.endswith(_HEALTH) else _WAIT_S)

    def post(self, url: str, json: object, timeout: float) -> Answer:
        """As `fetch`; waits for the whole time limit except at the address that SGLang's scheduler asks."""
        return self.fetch("POST", url, json, _WAIT_S if url.endswith(_DP_RANKS) else timeout, timeout)

    def row(self, server: str, dp_rank: int, wait_s: float) -> Address:
        """Returns the address that a dp group of a prefill server has registered with its bootstrap server.

        Raises:
            BootstrapError, AddressError: as for `fetch`, or the server knows none.
        """
        query = {"prefill_dp_rank": dp_rank, "prefill_cp_rank": 0, "target_tp_rank": 0, "target_pp_rank": 0}
        row = self.fetch("GET", f"http://{server}/route?{urlencode(query)}", wait_s=wait_s).document(_Row)
        return tcp_address(row.rank_ip, row.rank_port)

    def fetch(
        self, method: str, url: str, document: object = None, wait_s: float = _WAIT_S, total_s: float = _TOTAL_S
    ) -> Answer:
        """Returns the answer to a request.

        A call does not wait for an exchange that an earlier one has begun, but takes its answer if that has come.

        Args:
            total_s: time limit of the exchange, which goes on after the call.

        Raises:
            BootstrapError: the server has not answered, its answer is no HTTP, or too many exchanges are running.
            AddressError: the URL has no valid address.
        """
        key = method, url, b"" if document is None else text.dumps(document).encode()
        exchange, is_new = self._begin(key, total_s)
        if is_new:
            exchange.ended.wait(wait_s)
        if not exchange.ended.is_set():
            raise BootstrapError(f"{exchange.url} has not answered within {wait_s:g} s")
        with self._changing:
            self._exchanges.pop(key, None)
        assert exchange.outcome is not None
        if isinstance(exchange.outcome, BootstrapError):
            raise exchange.outcome
        return exchange.outcome

    def _begin(self, key: tuple[str, str, bytes], total_s: float) -> tuple[_Exchange, bool]:
        """Returns the exchange of a request, and whether it is a new one."""
        now = time.monotonic()
        with self._changing:
            for old in [old for old, each in self._exchanges.items() if each.is_old(now)]:
                del self._exchanges[old]
            if (known := self._exchanges.get(key)) is not None:
                return known, False
            new = _Exchange(*key, now + total_s)
            running = [each.address for each in self._exchanges.values() if not each.ended.is_set()]
            if len(running) >= _MOST or running.count(new.address) >= _MOST_TO_ONE:
                raise BootstrapError(f"{new.address.place} is not asked: {len(running)} bootstrap servers are slow")
            self._exchanges[key] = new
        try:
            threading.Thread(target=new.run, name="kvctl-bootstrap-http", daemon=True).start()
        except RuntimeError as error:  # the process may have no more threads
            new.end(BootstrapError(f"{new.address.place} is not asked: {error}"))
        return new, True


class _Exchange:
    """A request to a server, its URL without the query, and its outcome once it has ended.

    Raises:
        AddressError: the URL has no valid address.
    """

    def __init__(self, method: str, url: str, body: bytes, deadline: float) -> None:
        place, slash, path = url.removeprefix("http://").partition("/")
        self.address = parse_place(place)
        self.outcome: Answer | BootstrapError | None = None
        self.ended = threading.Event()
        self._request = method, slash + path, body
        self.url, self._deadline = url.partition("?")[0], deadline

    def is_old(self, now: float) -> bool:
        """Whether it has ended and nobody has asked for its outcome since."""
        return self.ended.is_set() and now > self._deadline + _KEPT_S

    def run(self) -> None:
        try:
            self.end(self._exchange())
        except AnswerTooLarge:
            self.end(BootstrapError(f"the answer of {self.url} is larger than {_MAX_BYTES >> 20} MiB"))
        except TimeoutError:
            self.end(BootstrapError(f"{self.url} has not answered in time"))
        except Exception as error:  # of the parser of HTTP too, whatever a server sends
            self.end(BootstrapError(f"{self.url}: {type(error).__name__}: {shown(str(error))}"))

    def end(self, outcome: Answer | BootstrapError) -> None:
        self.outcome = outcome
        self.ended.set()

    def _exchange(self) -> Answer:
        method, path, body = self._request
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.address.place}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with connect(self.address.host, self.address.port, self._deadline) as connection:
            status, _, found = exchange(connection, head.encode("ascii") + body, self._deadline, _MAX_BYTES)
        return Answer(self.url, status, found)


CLIENT = BootstrapClient()
