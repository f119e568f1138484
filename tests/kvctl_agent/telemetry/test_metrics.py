"""No count is lost between threads, and a metric that is not declared cannot be counted."""

from __future__ import annotations

import threading

import pytest

from kvctl_agent.contract.metrics import METRICS, Metric
from kvctl_agent.contract.snapshots import MetricFamily
from kvctl_agent.telemetry.metrics import OTHER, Metrics


def family(metrics: Metrics, name: str) -> MetricFamily:
    (found,) = (row for row in metrics.snapshot() if row["name"] == name)
    return found


def run_in_threads(count: int, work: object) -> None:
    assert callable(work)
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class TestDeclarations:
    def test_every_declared_family_is_in_the_snapshot(self) -> None:
        assert [row["name"] for row in Metrics().snapshot()] == [metric.name for metric in METRICS]

    def test_an_unknown_name(self) -> None:
        metrics = Metrics()
        for call in (metrics.add, metrics.set, metrics.observe):
            with pytest.raises(KeyError, match="kvctl_nonsense"):
                call("kvctl_nonsense", 1)

    def test_a_wrong_kind(self) -> None:
        metrics = Metrics()
        with pytest.raises(ValueError, match="is a gauge, not a counter"):
            metrics.add("kvctl_parts_parked", 1)
        with pytest.raises(ValueError, match="is a counter, not a gauge"):
            metrics.set("kvctl_rooms_opened_total", 1)
        with pytest.raises(ValueError, match="is a counter, not a histogram"):
            metrics.observe("kvctl_rooms_opened_total", 1)

    @pytest.mark.parametrize("labels", [(), ("a", "b")])
    def test_a_wrong_number_of_labels(self, labels: tuple[str, ...]) -> None:
        metrics = Metrics()
        with pytest.raises(ValueError, match="takes labels"):
            metrics.add("kvctl_parts_total", 1, *labels)
        with pytest.raises(ValueError, match="takes labels"):
            metrics.set("kvctl_peers", 1, *labels)
        with pytest.raises(ValueError, match="takes labels"):
            metrics.observe("kvctl_stage_seconds", 1, *labels)
        assert metrics.total("kvctl_parts_total") == 0

    def test_a_counter_never_goes_down(self) -> None:
        with pytest.raises(ValueError, match="cannot go down"):
            Metrics().add("kvctl_rooms_opened_total", -1)


class TestValues:
    def test_counters_by_label(self) -> None:
        metrics = Metrics()
        metrics.add("kvctl_parts_total", 2, "bulk")
        metrics.add("kvctl_parts_total", 3, "slice")
        metrics.add("kvctl_parts_total", 4, "bulk")
        assert family(metrics, "kvctl_parts_total")["samples"] == [
            {"labels": {"path": "bulk"}, "value": 6},
            {"labels": {"path": "slice"}, "value": 3},
        ]
        assert metrics.total("kvctl_parts_total") == 9
        assert metrics.total("kvctl_parts_total", "bulk") == 6

    def test_an_untouched_counter_is_zero_and_whatever_else_is_untouched_is_absent(self) -> None:
        metrics = Metrics()
        assert family(metrics, "kvctl_rooms_opened_total")["samples"] == [{"labels": {}, "value": 0}]
        for name in ("kvctl_parts_total", "kvctl_parts_parked", "kvctl_room_seconds"):
            assert family(metrics, name)["samples"] == []

    def test_a_gauge_is_the_last_value(self) -> None:
        metrics = Metrics()
        metrics.set("kvctl_peers", 3, "ready")
        metrics.set("kvctl_peers", 2, "ready")
        metrics.set("kvctl_peers", None, "lost")
        assert family(metrics, "kvctl_peers")["samples"] == [
            {"labels": {"state": "lost"}, "value": None},
            {"labels": {"state": "ready"}, "value": 2},
        ]

    def test_a_histogram_is_cumulative_with_inclusive_bounds(self) -> None:
        metric = Metric("kvctl_x_seconds", "histogram", "seconds", "X.", (), (0.1, 1.0))
        metrics = Metrics({metric.name: metric})
        for value in (0.05, 0.1, 0.11, 1.0, 7.0, -1e-9):
            metrics.observe(metric.name, value)
        (sample,) = family(metrics, metric.name)["samples"]
        assert sample["buckets"] == [[0.1, 3], [1.0, 5], [None, 6]]
        assert sample["count"] == 6
        assert sample["sum"] == pytest.approx(8.26)

    def test_reading_clears_nothing(self) -> None:
        metrics = Metrics()
        metrics.add("kvctl_rooms_opened_total", 1)
        metrics.observe("kvctl_room_seconds", 1)
        assert metrics.snapshot() == metrics.snapshot()

    def test_labels_that_peers_invent_cannot_fill_memory(self) -> None:
        metrics = Metrics()
        for number in range(5000):
            metrics.add("kvctl_room_failures_total", 1, f"code-{number}")
        assert len(metrics.totals("kvctl_room_failures_total")) < 1100
        assert metrics.total("kvctl_room_failures_total") == 5000
        assert metrics.total("kvctl_room_failures_total", OTHER) > 3900


class TestThreads:
    def test_no_count_is_lost(self, switching: None) -> None:
        metrics = Metrics()

        def work() -> None:
            for _ in range(5000):
                metrics.add("kvctl_parts_total", 1, "bulk")
                metrics.observe("kvctl_room_seconds", 0.5)

        run_in_threads(4, work)
        assert metrics.total("kvctl_parts_total", "bulk") == 20_000
        (sample,) = family(metrics, "kvctl_room_seconds")["samples"]
        assert sample["count"] == 20_000
        assert sample["sum"] == 10_000.0

    def test_snapshots_during_counting_never_fail_and_never_go_back(self, switching: None) -> None:
        metrics = Metrics()
        stop = threading.Event()

        def work() -> None:
            worker = threading.current_thread().name
            for number in range(3000):
                metrics.add("kvctl_control_messages_total", 1, "in", f"{worker}-{number}")

        seen: list[float] = []

        def read() -> None:
            while not stop.is_set():
                metrics.snapshot()
                seen.append(metrics.total("kvctl_control_messages_total"))

        reader = threading.Thread(target=read)
        reader.start()
        run_in_threads(3, work)
        stop.set()
        reader.join()
        assert seen == sorted(seen)
        assert metrics.total("kvctl_control_messages_total") == 9000
