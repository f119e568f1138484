"""Gets an engine's metrics over HTTP and parses them, with a limit on time, size and redirects.

The request and the answer are read here byte by byte, because the time limits of `http.client` are those of single
reads: a server that sends slowly would hold its caller.
"""

from __future__ import annotations

import io
import math
import socket
import ssl
import time
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import IO, Any
from urllib.parse import SplitResult, urljoin, urlsplit

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvctl.client.faults import FaultCode
from kvctl.client.metrics.names import ALIVE, ENGINES
from kvctl_agent.contract.values import shown
from kvctl_agent.host import resolver

MAX_BYTES = 16 << 20
"""Largest answer; a server of eight ranks has half a megabyte."""

_LARGEST = 1e15
_PIECE_BYTES = 1 << 16
_RECENT_NS = 10_000_000_000  # for which an address of a host name is used again
_LOOK_UP_S = 0.005
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_PREFIXES = (ALIVE, *(engine.prefix for engine in ENGINES))


class ScrapeError(Exception):
    """An endpoint has no metrics for us; `code` is that of the fault, the text its message."""

    def __init__(self, code: FaultCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def scrape(url: str, deadline_ns: int) -> list[dict[str, Any]]:
    """Returns the metrics of engines that an endpoint exports, as rows of an answer to `metrics` (`MetricFamily`).

    Args:
        url: http or https URL with host and port.
        deadline_ns: monotonic time at which the answer must be there.

    Raises:
        ScrapeError: there is no answer in time, or it has no metrics that kvctl knows.
    """
    return parse(_get(urlsplit(url), deadline_ns, redirected=False))


def parse(body: bytes) -> list[dict[str, Any]]:
    """Returns the metrics of engines in a text in Prometheus's format, as `scrape` does; its errors are those, too."""
    try:
        found = text_string_to_metric_families(body.decode("utf-8", "replace"))
        rows = [_row(family) for family in found if family.name.startswith(_PREFIXES)]
    except (ValueError, KeyError, IndexError) as error:
        text = f"its answer has no metrics in Prometheus's text format: {shown(str(error))}"
        raise ScrapeError(FaultCode.PROTOCOL, text) from None
    if all(row["name"] == ALIVE for row in rows):
        known = ", ".join(f"{engine.prefix}*" for engine in ENGINES)
        text = f"it exports no metrics of an engine that kvctl knows ({known}); give the URL of an engine's server"
        raise ScrapeError(FaultCode.PROTOCOL, text)
    return rows


def _get(url: SplitResult, deadline_ns: int, *, redirected: bool) -> bytes:
    """Returns the body of the answer to GET; follows one redirect within the server."""
    try:
        answer = _exchange(url, deadline_ns)
        response = HTTPResponse(_Received(answer))  # type: ignore[arg-type]
        response.begin()
        body = response.read()
    except TimeoutError:
        raise ScrapeError(FaultCode.TIMEOUT, "no answer in time") from None
    except ssl.SSLError as error:
        raise ScrapeError(FaultCode.PROTOCOL, f"no TLS connection: {error.reason or error}") from None
    except HTTPException as error:
        text = f"its answer is not HTTP: {type(error).__name__}: {shown(str(error))}"
        raise ScrapeError(FaultCode.PROTOCOL, text) from None
    except OSError as error:
        text = f"cannot connect: {error.strerror or error}; is the server running, with this host and port?"
        raise ScrapeError(FaultCode.UNREACHABLE, text) from None
    if response.status in _REDIRECTS:
        target = urlsplit(urljoin(url.geturl(), response.getheader("Location") or ""))
        if redirected or target[:2] != url[:2]:
            text = f"redirects to {shown(target.geturl())}, which is not followed; give that URL if it is the server's"
            raise ScrapeError(FaultCode.PROTOCOL, text)
        return _get(target, deadline_ns, redirected=True)
    if response.status == 404:
        text = f"has no {url.path}; start SGLang with --enable-metrics, vLLM without --disable-log-stats"
        raise ScrapeError(FaultCode.PROTOCOL, text)
    if response.status in {401, 403}:
        raise ScrapeError(FaultCode.NOT_PERMITTED, f"refuses {url.path} ({response.status})")
    if response.status != 200:
        raise ScrapeError(FaultCode.PROTOCOL, f"answers {url.path} with status {response.status}")
    return body


def _exchange(url: SplitResult, deadline_ns: int) -> bytes:
    """Sends the request and returns all bytes of the answer; raises OSError, or TimeoutError at the deadline."""
    path = f"{url.path}?{url.query}" if url.query else url.path
    request = f"GET {path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\nAccept-Encoding: identity\r\n\r\n"
    with _connect(url, deadline_ns) as connection:
        connection.settimeout(_left_s(deadline_ns))
        connection.sendall(request.encode())
        pieces: list[bytes] = []
        nbytes = 0
        while True:
            connection.settimeout(_left_s(deadline_ns))
            piece = connection.recv(_PIECE_BYTES)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            nbytes += len(piece)
            if nbytes > MAX_BYTES:
                raise ScrapeError(FaultCode.PROTOCOL, f"its answer has more than {MAX_BYTES >> 20} MiB")


def _connect(url: SplitResult, deadline_ns: int) -> socket.socket:
    host = url.hostname or ""
    begun_ns = time.monotonic_ns()
    while (found := resolver.find(host, begun_ns - _RECENT_NS)) is None:
        time.sleep(min(_LOOK_UP_S, _left_s(deadline_ns)))
    if not found.addresses:
        raise ScrapeError(FaultCode.UNREACHABLE, found.error)
    port = url.port or _PORTS[url.scheme]
    for number, address in enumerate(found.addresses, 1):
        try:
            connection = socket.create_connection((address, port), _left_s(deadline_ns))
            break
        except OSError:
            if number == len(found.addresses) or time.monotonic_ns() >= deadline_ns:
                raise
    if url.scheme == "http":
        return connection
    try:
        return ssl.create_default_context().wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise


def _left_s(deadline_ns: int) -> float:
    left_ns = deadline_ns - time.monotonic_ns()
    if left_ns <= 0:
        raise TimeoutError
    return left_ns / 1e9


class _Received:
    """Bytes as the socket that HTTPResponse reads."""

    def __init__(self, received: bytes) -> None:
        self._received = received

    def makefile(self, mode: str) -> IO[bytes]:
        return io.BytesIO(self._received)


def _row(family: Metric) -> dict[str, Any]:
    if family.type == "histogram":
        samples = list(_histograms(family))
    else:
        samples = [
            {"labels": dict(sample.labels), "value": _number(sample.value)}
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return {"name": name, "kind": family.type, "unit": family.unit, "help": family.documentation, "samples": samples}


def _number(value: float) -> float | None:
    """Returns a value; None for NaN, infinity and what no counter reaches."""
    return value if math.isfinite(value) and abs(value) <= _LARGEST else None


def _histograms(family: Metric) -> Iterator[dict[str, Any]]:
    """Yields the samples of a histogram, each of which the text has as one line for each bucket, sum and count."""
    found: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        row = found.setdefault(
            tuple(labels.items()), {"labels": labels, "value": None, "buckets": [], "sum": 0.0, "count": 0}
        )
        value = _number(sample.value) or 0.0
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels.get("le", "inf"))
            row["buckets"].append([bound if math.isfinite(bound) else None, value])
        elif sample.name.endswith("_sum"):
            row["sum"] = value
        elif sample.name.endswith("_count"):
            row["count"] = int(value)
    yield from found.values()
