"""Gets an engine's metrics over HTTP and parses them, with a limit on time and size; follows no redirect.

Of the text only the lines about engines are parsed, none of which is long, because the parser takes time in the square
of their length.
"""

from __future__ import annotations

import math
import re
import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from typing import Any
from urllib.parse import SplitResult, urlsplit

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_fd_to_metric_families

from kvctl.client.faults import FaultCode
from kvctl.client.metrics.names import ALIVE, ENGINES
from kvctl_agent.contract.values import shown
from kvctl_agent.host.http_client import AnswerTooLarge, LookupFailed, connect, exchange, left_s

MAX_BYTES = 16 << 20
"""Largest answer; a server of eight ranks has half a megabyte."""

_LINE_CHARACTERS = 1 << 14
_MOST_LINES = 50_000
_LARGEST = 1e15
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_PREFIXES = (ALIVE, *(engine.prefix for engine in ENGINES))
_OURS = re.compile(rf"(?:# *(?:HELP|TYPE) +)?(?:{'|'.join(map(re.escape, _PREFIXES))})")
_ANY_METRIC = re.compile(r"#|[a-zA-Z_:][a-zA-Z0-9_:]*[ {]")


class ScrapeError(Exception):
    """An endpoint has no metrics for us; `code` is that of the fault, the text its message."""

    def __init__(self, text: str, code: FaultCode = FaultCode.PROTOCOL) -> None:
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
    return parse(_get(urlsplit(url), deadline_ns), deadline_ns)


def parse(body: bytes, deadline_ns: int | None = None) -> list[dict[str, Any]]:
    """Returns the metrics of engines in a text in Prometheus's format, as `scrape` does; its errors are those, too."""
    lines = body.decode("utf-8", "replace").split("\n")
    ours = [line for line in lines if _OURS.match(line)]
    if len(ours) > _MOST_LINES or any(len(line) > _LINE_CHARACTERS for line in ours):
        limits = f"{_MOST_LINES} lines of metrics, or one of {_LINE_CHARACTERS >> 10} Ki characters"
        raise ScrapeError(f"its answer has more than {limits}")
    try:
        if not any(_ANY_METRIC.match(line) for line in lines):
            raise ValueError(lines[0][:80])
        rows = [_row(family) for family in text_fd_to_metric_families(_until(deadline_ns, ours))]
    except (ValueError, KeyError, IndexError) as error:
        raise ScrapeError(f"its answer has no metrics in Prometheus's text format: {shown(str(error))}") from None
    if all(row["name"] == ALIVE for row in rows):
        known = ", ".join(f"{engine.prefix}*" for engine in ENGINES)
        text = f"it exports no metrics of an engine that kvctl knows ({known}); give the URL of an engine's server"
        raise ScrapeError(text)
    return rows


def _until(deadline_ns: int | None, lines: Iterable[str]) -> Any:
    """Yields the lines, as a text file does; raises ScrapeError after the deadline."""
    for line in lines:
        if deadline_ns is not None and time.monotonic_ns() > deadline_ns:
            raise ScrapeError("its answer is too large to be read within the time limit")
        yield line


def _get(url: SplitResult, deadline_ns: int) -> bytes:
    """Returns the body of the answer to GET; follows no redirect."""
    path = f"{url.path}?{url.query}" if url.query else url.path
    request = f"GET {path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\nAccept-Encoding: identity\r\n\r\n"
    try:
        with _connect(url, deadline_ns / 1e9) as connection:
            status, headers, body = exchange(connection, request.encode(), deadline_ns / 1e9, MAX_BYTES)
    except TimeoutError:
        raise ScrapeError("no answer in time", FaultCode.TIMEOUT) from None
    except AnswerTooLarge:
        raise ScrapeError(f"its answer has more than {MAX_BYTES >> 20} MiB") from None
    except ssl.SSLError as error:
        raise ScrapeError(f"no TLS connection: {error.reason or error}") from None
    except HTTPException as error:
        raise ScrapeError(f"its answer is not HTTP: {type(error).__name__}: {shown(str(error))}") from None
    except LookupFailed as error:
        raise ScrapeError(str(error), FaultCode.UNREACHABLE) from None
    except OSError as error:
        text = f"cannot connect: {error.strerror or error}; is the server running, with this host and port?"
        raise ScrapeError(text, FaultCode.UNREACHABLE) from None
    if status in _REDIRECTS:
        where = shown(str(headers["Location"] or "").partition("?")[0])
        raise ScrapeError(f"redirects to {where}, which is not followed; give that URL if it is the server's")
    if status == 404:
        raise ScrapeError(f"has no {url.path}; start SGLang with --enable-metrics, vLLM without --disable-log-stats")
    if status in {401, 403}:
        raise ScrapeError(f"refuses {url.path} ({status})", FaultCode.NOT_PERMITTED)
    if status != 200:
        raise ScrapeError(f"answers {url.path} with status {status}")
    return body


def _connect(url: SplitResult, deadline_s: float) -> socket.socket:
    host = url.hostname or ""
    connection = connect(host, url.port or _PORTS[url.scheme], deadline_s)
    if url.scheme == "http":
        return connection
    try:
        connection.settimeout(left_s(deadline_s))
        return ssl.create_default_context().wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise


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
            if bound == math.inf or _number(bound) is not None:
                row["buckets"].append([_number(bound), value])
        elif sample.name.endswith("_sum"):
            row["sum"] = value
        elif sample.name.endswith("_count"):
            row["count"] = int(value)
    yield from found.values()
