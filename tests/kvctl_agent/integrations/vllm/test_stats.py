"""Statistics of agents as vLLM adds them up, logs them and shows them to Prometheus."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import prometheus_client as prometheus
import pytest

from tests.support.vllm import stand_ins as vllm
from tests.support.vllm.modules import connector, stats

KINDS = (prometheus.Counter, prometheus.Gauge, prometheus.Histogram)


ONE: dict[str, Any] = {"kvctl_rooms_finished_total": {"Success": 2}, "kvctl_room_seconds": [0.002, 0.001]}
TWO: dict[str, Any] = {
    "kvctl_rooms_finished_total": {"Success": 1, "Failed": 1},
    "kvctl_room_seconds": [0.010],
    "kvctl_part_bytes_total": {"bulk": 1_500_000, "staged": 500_000},
}
SUM: dict[str, Any] = {
    "kvctl_rooms_finished_total": {"Success": 3, "Failed": 1},
    "kvctl_room_seconds": [0.002, 0.001, 0.010],
    "kvctl_part_bytes_total": {"bulk": 1_500_000, "staged": 500_000},
}


class FakeAgent:
    """An agent with these statistics."""

    def __init__(self) -> None:
        self.rooms: dict[str, int] = {}
        self.done, self.failed, self.sent_bytes, self.ring = 0, dict[str, int](), 0, 0
        self.seconds: list[float] = []

    def stats(self) -> dict[str, Any]:
        return {
            "rooms": self.rooms,
            "rooms_finished_total": {"Success": self.done, "Failed": sum(self.failed.values())},
            "failures_total": dict(self.failed),
            "bytes_total": {"bulk": self.sent_bytes},
            "ring": {"used_bytes": self.ring},
            "quarantined_bytes": 0,
        }

    def latencies(self, after: int) -> tuple[list[float], int]:
        return self.seconds[after:], len(self.seconds)


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def shown() -> Any:
    """vLLM's metrics of two engines, and a function that reads one of them."""
    registry = prometheus.CollectorRegistry()
    kinds: Any = {kind: partial(kind, registry=registry) for kind in KINDS}
    engines: dict[int, list[object]] = {number: ["llama", str(number)] for number in range(2)}
    made = connector.KvctlConnector.build_prom_metrics(vllm.VllmConfig(), kinds, ["model_name", "engine"], engines)

    def read(name: str, engine: int = 0, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:{name}", {"model_name": "llama", "engine": str(engine), **labels})

    return SimpleNamespace(metrics=made, read=read)


class TestReader:
    def test_nothing_has_changed(self, agent: FakeAgent) -> None:
        reader = stats.StatsReader(agent)
        assert reader.changes() is None

    def test_changes_since_the_last_step(self, agent: FakeAgent) -> None:
        reader = stats.StatsReader(agent)
        agent.rooms, agent.ring = {"Transferring": 2}, 4096
        assert reader.changes().data == {
            "kvctl_rooms_active": {"Transferring": 2},
            "kvctl_ring_used_bytes": {"": 4096},
        }
        agent.rooms, agent.ring, agent.done, agent.sent_bytes = {}, 1024, 1, 100
        agent.failed, agent.seconds = {"ABORTED": 1}, [0.25]
        assert reader.changes().data == {
            "kvctl_rooms_active": {"Transferring": -2},
            "kvctl_ring_used_bytes": {"": -3072},
            "kvctl_rooms_finished_total": {"Success": 1, "Failed": 1},
            "kvctl_room_failures_total": {"ABORTED": 1},
            "kvctl_part_bytes_total": {"bulk": 100},
            "kvctl_room_seconds": [0.25],
        }
        assert reader.changes() is None


class TestStats:
    def test_workers_and_steps_are_added_up(self) -> None:
        one, two = deepcopy(ONE), deepcopy(TWO)
        found = connector.KvctlConnector.build_kv_connector_stats(one).aggregate(stats.KvctlStats(two))
        assert found.data == SUM
        assert (one, two) == (ONE, TWO)

    def test_they_survive_the_way_between_processes(self) -> None:
        data = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.KvctlStats(SUM).to_dict()))
        assert connector.KvctlConnector.build_kv_connector_stats(data).data == SUM

    def test_the_line_of_the_log(self) -> None:
        assert stats.KvctlStats(SUM).reduce() == {
            "Rooms": 3,
            "Failed rooms": 1,
            "MB": 2.0,
            "P50 room time (ms)": 2.0,
            "P90 room time (ms)": 10.0,
        }
        assert set(stats.KvctlStats({"kvctl_rooms_active": {"Transferring": 1}}).reduce().values()) == {0}

    def test_empty(self) -> None:
        empty = connector.KvctlConnector.build_kv_connector_stats()
        assert empty.is_empty()
        assert not stats.KvctlStats(ONE).is_empty()
        full = stats.KvctlStats(dict(ONE))
        full.reset()
        assert full.is_empty()


class TestPrometheus:
    def test_counters_and_durations(self, shown: Any) -> None:
        shown.metrics.observe(SUM)
        shown.metrics.observe(ONE)
        shown.metrics.observe({"kvctl_room_failures_total": {"KV_PEER_LOST": 1}}, 1)
        assert shown.read("kvctl_rooms_finished_total", result="Success") == 5
        assert shown.read("kvctl_part_bytes_total", path="staged") == 500_000
        assert shown.read("kvctl_room_failures_total", 1, code="KV_PEER_LOST") == 1
        assert shown.read("kvctl_room_failures_total", code="KV_PEER_LOST") is None
        assert shown.read("kvctl_room_seconds_count") == 5
        assert shown.read("kvctl_room_seconds_bucket", le="0.0025") == 4

    def test_gauges_follow_the_changes_of_all_workers(self, shown: Any) -> None:
        for change in (5, 3, -6):
            shown.metrics.observe(
                {"kvctl_rooms_active": {"Transferring": change}, "kvctl_ring_used_bytes": {"": change}}
            )
        shown.metrics.observe({"kvctl_ring_used_bytes": {"": 7}}, 1)
        assert shown.read("kvctl_rooms_active", state="Transferring") == 2
        assert shown.read("kvctl_ring_used_bytes") == 2
        assert shown.read("kvctl_ring_used_bytes", 1) == 7
