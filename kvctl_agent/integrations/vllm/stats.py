"""The agent's metrics in vLLM: in the lines of its log, and at its own Prometheus endpoint.

They are those of `contract.metrics` under the same names after `vllm:`, of all workers of an engine together. Workers
report changes, of gauges too, so that reports can be added up in any order.
"""

from __future__ import annotations

from typing import Any

import prometheus_client as prometheus
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvctl_agent import Agent, RoomState
from kvctl_agent.contract.metrics import METRICS_BY_NAME
from kvctl_agent.contract.values import nearest_rank

_SECONDS = "kvctl_room_seconds"
_FINISHED = "kvctl_rooms_finished_total"
_FAILURES = "kvctl_room_failures_total"
_BYTES = "kvctl_part_bytes_total"
_ACTIVE = "kvctl_rooms_active"
_RING = "kvctl_ring_used_bytes"
_QUARANTINED = "kvctl_quarantined_bytes"


class KvctlStats(KVConnectorStats):
    """Changes of metrics: for each one its change by label, "" if it has none; for a histogram the new values."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, changes in other.data.items():
            if isinstance(changes, list):
                self.data[name] = self.data.get(name, []) + changes
            else:
                own = self.data.get(name, {})
                self.data[name] = own | {label: own.get(label, 0) + change for label, change in changes.items()}
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        finished = self.data.get(_FINISHED, {})
        millis = sorted(round(seconds * 1e3, 3) for seconds in self.data.get(_SECONDS, []))
        return {
            "Rooms": finished.get(RoomState.SUCCESS.label, 0),
            "Failed rooms": finished.get(RoomState.FAILED.label, 0),
            "MB": round(sum(self.data.get(_BYTES, {}).values()) / 1e6, 3),
            "P50 room time (ms)": nearest_rank(millis, 0.5) or 0,
            "P90 room time (ms)": nearest_rank(millis, 0.9) or 0,
        }


class StatsReader:
    """Reads what has changed in an agent's statistics."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._before: dict[str, dict[str, int]] = {}
        self._rooms = 0

    def changes(self) -> KvctlStats | None:
        """Returns the changes since the last call; None if there are none."""
        stats = self._agent.stats()
        now = {
            _ACTIVE: stats["rooms"],
            _FINISHED: stats["rooms_finished_total"],
            _FAILURES: stats["failures_total"],
            _BYTES: stats["bytes_total"],
            _RING: {"": stats["ring"]["used_bytes"] if stats["ring"] else 0},
            _QUARANTINED: {"": stats["quarantined_bytes"]},
        }
        data: dict[str, Any] = {}
        for name, values in now.items():
            before = self._before.get(name, {})
            found = {label: values.get(label, 0) - before.get(label, 0) for label in values.keys() | before.keys()}
            if changes := {label: change for label, change in found.items() if change}:
                data[name] = changes
        seconds, self._rooms = self._agent.latencies(self._rooms)
        if seconds:
            data[_SECONDS] = seconds
        self._before = now
        return KvctlStats(data) if data else None


class KvctlPromMetrics(KVConnectorPromMetrics):
    """The metrics at vLLM's Prometheus endpoint."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds: dict[str, tuple[type, dict[str, Any]]] = {
            "counter": (prometheus.Counter, {}),
            "gauge": (prometheus.Gauge, {"multiprocess_mode": "sum"}),  # each API server counts what it has seen
            "histogram": (prometheus.Histogram, {"buckets": METRICS_BY_NAME[_SECONDS].buckets}),
        }
        self._metrics: dict[str, Any] = {}
        self._levels: dict[tuple[int, str, str], int] = {}
        for name in (_FINISHED, _FAILURES, _BYTES, _SECONDS, _ACTIVE, _RING, _QUARANTINED):
            metric = METRICS_BY_NAME[name]
            kind, options = kinds[metric.kind]
            self._metrics[name] = metric_types[kind](
                name=f"vllm:{name.removesuffix('_total')}",
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **options,
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for seconds in transfer_stats_data.get(_SECONDS, ()):
            self._metrics[_SECONDS].labels(*engine).observe(seconds)
        for name in (_FINISHED, _FAILURES, _BYTES):
            for label, change in transfer_stats_data.get(name, {}).items():
                self._metrics[name].labels(*engine, label).inc(change)
        for name in (_ACTIVE, _RING, _QUARANTINED):
            for label, change in transfer_stats_data.get(name, {}).items():
                place = engine_idx, name, label
                self._levels[place] = self._levels.get(place, 0) + change
                self._metrics[name].labels(*engine, *filter(None, [label])).set(self._levels[place])
