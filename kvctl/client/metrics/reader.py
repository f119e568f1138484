"""Answers requests to endpoints of metrics as an agent would answer `hello`, `status` and `metrics`.

What an engine does not export is None or empty. Other commands have no answer.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.endpoints import Endpoint, public
from kvctl.client.fanout import Reply
from kvctl.client.faults import Fault, FaultCode, metrics_only
from kvctl.client.metrics.names import ALIVE, Families, Moved, Use, exported, moved, reads_prefill, totals
from kvctl.client.metrics.scrape import ScrapeError, scrape
from kvctl_agent.contract.admin import PROTOCOL_MAX, PROTOCOL_MIN
from kvctl_agent.contract.snapshots import LatencySummary, Status
from kvctl_agent.contract.values import shown

MODE = "metrics"
"""Mode of the integration in the answers to `status`."""

_AT_ONCE = 32
_LARGEST = (1 << 63) - 1  # of JSON
_ROLES = ("prefill", "decode")


class MetricsReader:
    """Reads endpoints of metrics, several at once; remembers the transfers of each, for rates."""

    def __init__(self) -> None:
        self._before: dict[Endpoint, Moved] = {}

    @contextmanager
    def asking(self, requests: Sequence[tuple[Endpoint, Call]], timeout_ns: int) -> Iterator[Callable[[], list[Reply]]]:
        """Gets the metrics of each endpoint once, in other threads, while the body of the context runs.

        Yields a function that waits for them, and returns one reply per request, in their order.

        Args:
            requests: requests to endpoints with `Endpoint.metrics`.
            timeout_ns: longest time to wait for the metrics of one endpoint.
        """
        pool = ThreadPoolExecutor(_AT_ONCE, "kvctl-metrics")
        try:
            endpoints = {endpoint: None for endpoint, _ in requests}
            reads = {endpoint: pool.submit(self._read, endpoint, timeout_ns) for endpoint in endpoints}
            yield lambda: [self._reply(endpoint, call, *reads[endpoint].result()) for endpoint, call in requests]
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, endpoint: Endpoint, timeout_ns: int) -> tuple[Mapping[str, Any] | Fault, int, int]:
        """Returns the answers of an endpoint by command, or its fault; the time of the request, and its duration."""
        sent_at_ns, begun_ns = time.time_ns(), time.monotonic_ns()
        answers: dict[str, Any] | Fault
        try:
            answers = self._answers(endpoint, scrape(endpoint.remote, begun_ns + timeout_ns))
        except ScrapeError as error:
            text = str(error)
            if error.code is FaultCode.TIMEOUT:
                text = (
                    f"no answer within {timeout_ns / 1e9:g} s: the server is busy, stopped, hung or cut off; "
                    f"`curl -m 10 {shlex.quote(public(endpoint.remote))}` waits longer"
                )
            answers = Fault(endpoint.name, error.code, text)
        except Exception as error:  # one server's answer must not end the command for all
            text = f"its answer cannot be read: {type(error).__name__}: {shown(str(error))}"
            answers = Fault(endpoint.name, FaultCode.PROTOCOL, text)
        return answers, sent_at_ns, time.monotonic_ns() - begun_ns

    @staticmethod
    def _reply(
        endpoint: Endpoint, call: Call, answers: Mapping[str, Any] | Fault, sent_at_ns: int, took_ns: int
    ) -> Reply:
        fault = answers if isinstance(answers, Fault) else None
        data = None if isinstance(answers, Fault) else answers.get(call.command)
        if fault is None and data is None:
            fault = metrics_only(endpoint.name, call.command)
        return Reply(endpoint, call, data, fault, sent_at_ns, sent_at_ns + took_ns, took_ns)

    def _answers(self, endpoint: Endpoint, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        families = {row["name"]: row for row in rows}
        now_ns = time.time_ns()
        started_s = _value(families, ALIVE)
        if started_s is not None and not 0 <= started_s * 1e9 <= now_ns:
            started_s = None
        worker = {
            "name": endpoint.name,
            "role": _role(families),
            "host": endpoint.host_name,
            "pid": None,
            "version": "",
            # A process that starts again begins to count anew.
            "incarnation": "" if started_s is None else f"{started_s:.2f}",
            "uptime_ns": None if started_s is None else now_ns - int(started_s * 1e9),
            "ended_age_ns": None,
            "observer": MODE,
        }
        hello = {
            **worker,
            "protocol": [PROTOCOL_MIN, PROTOCOL_MAX],
            "level": "read",
            "capabilities": [],
            "draining": False,
            "now_ns": now_ns,
        }
        return {"hello": hello, "status": self._status(endpoint, worker, families), "metrics": list(rows)}

    def _status(self, endpoint: Endpoint, worker: Mapping[str, Any], families: Families) -> dict[str, Any]:
        engines = exported(families)
        rooms: dict[str, int] = {}
        finished: dict[str, int] = {}
        for engine in engines:
            for signal, value in totals(engine, families, Use.QUEUE):
                if signal.state:
                    rooms[signal.state] = _whole(rooms.get(signal.state, 0) + value)
            for use, result in ((Use.FINISHED, "Success"), (Use.FAILED, "Failed")):
                for _, value in totals(engine, families, use):
                    finished[result] = _whole(finished.get(result, 0) + value)
            if engine.finished_or_failed and "Success" in finished:
                finished["Success"] = max(0, finished["Success"] - finished.get("Failed", 0))
        transfers = next((found for engine in engines if (found := moved(engine, families))), None)
        return {
            **dict.fromkeys(Status.__annotations__),
            **{key: {} for key in ("rooms_finished_5m", "peers", "pool", "dtypes", "process")},
            **worker,
            "rank": dict.fromkeys(("dp", "pp", "cp", "tp", "unique"), 0),
            "sizes": dict.fromkeys(("dp", "pp", "cp", "tp"), 1),
            "integration": {"engine": engines[0].name, "engine_version": "", "mode": MODE, "settings": {}},
            "transport": {"engine": "", "backend": "", "lanes": []},
            "device": "",
            "rooms": rooms,
            "rooms_finished_total": finished,
            "bytes_total": 0 if transfers is None else _whole(transfers.nbytes),
            "rate": self._rate(endpoint, transfers),
            "latency": _latency(families, [engine.transfers for engine in engines if engine.transfers]),
            "metrics_url": public(endpoint.remote),
            "accepting": True,
            "draining": False,
            "engine_in_call": False,
        }

    def _rate(self, endpoint: Endpoint, transfers: Moved | None) -> dict[str, Any]:
        """Returns the rate of the transfers since the previous reading, or without any of all transfers."""
        before = self._before.get(endpoint)
        if transfers is not None:
            self._before[endpoint] = transfers
        latest = None if transfers is None or before is None else transfers.since(before).gb_per_s
        rate = latest if latest is not None or transfers is None else transfers.gb_per_s
        return {"window_ns": None, "bytes": None, "gb_per_s": rate, "rooms_per_s": None}


def _whole(value: float) -> int:
    return max(0, min(round(value), _LARGEST))


def _value(families: Families, name: str) -> float | None:
    samples = families[name]["samples"] if name in families else ()
    return next((float(sample["value"]) for sample in samples if sample["value"] is not None), None)


def _role(families: Families) -> str:
    """Returns the role that labels tell, or of vLLM that KV from prefill tells; "" if it is unknown."""
    for engine in exported(families):
        for family in families.values():
            for sample in family["samples"] if family["name"].startswith(engine.prefix) else ():
                for label in engine.role_labels:
                    if sample["labels"].get(label) in _ROLES:
                        return str(sample["labels"][label])
    return "decode" if reads_prefill(families) else ""


def _latency(families: Families, transfers: Sequence[Any]) -> LatencySummary:
    """Returns quantiles of the time of one transfer, as far as the buckets of the histogram tell them."""
    for each in transfers:
        buckets: dict[float, float] = {}
        for sample in families.get(each.time, {}).get("samples", ()):
            for bound, count in sample.get("buckets", ()):
                bound = float("inf") if bound is None else bound
                buckets[bound] = buckets.get(bound, 0.0) + count
        if count := _whole(max(buckets.values(), default=0)):
            ordered = sorted(buckets.items())
            p50, p90, p99 = (_quantile(ordered, share * count, each.time_ns) for share in (0.5, 0.9, 0.99))
            return {"p50_ns": p50, "p90_ns": p90, "p99_ns": p99, "count": count}
    return {"p50_ns": None, "p90_ns": None, "p99_ns": None, "count": 0}


def _quantile(buckets: Sequence[tuple[float, float]], rank: float, unit_ns: int) -> int | None:
    """Returns an observation (ns) by its rank, interpolated in its bucket; None in the bucket without a bound."""
    below, lower = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and bound < float("inf"):
            return _whole((lower + (bound - lower) * (rank - below) / (count - below)) * unit_ns)
        below, lower = count, bound
    return None
