"""Counters of the agent and of its observer add up, and a metric that is not declared cannot be counted."""

from __future__ import annotations

import pytest

from kvctl_agent.contract.metrics import METRICS, Metric
from kvctl_agent.contract.snapshots import MetricFamily
from kvctl_agent.observer.metrics import Metrics
from kvctl_agent.telemetry.metrics import Totals


def family(metrics: Metrics, name: str) -> MetricFamily:
    (found,) = (row for row in metrics.snapshot() if row["name"] == name)
    return found


class TestDeclarations:
    def test_every_declared_family_is_in_the_snapshot(self) -> None:
        assert [row["name"] for row in Metrics().snapshot()] == [metric.name for metric in METRICS]

    @pytest.mark.parametrize(
        ("call", "name", "labels", "text"),
        [
            *((call, "kvctl_nonsense", (), "kvctl_nonsense") for call in ("add", "set", "observe")),
            ("add", "kvctl_parts_parked", (), "is a gauge, not a counter"),
            ("set", "kvctl_rooms_opened_total", (), "is a counter, not a gauge"),
            ("observe", "kvctl_rooms_opened_total", (), "is a counter, not a histogram"),
            *(("add", "kvctl_parts_total", labels, "takes labels") for labels in ((), ("a", "b"))),
            *(("set", "kvctl_peers", labels, "takes labels") for labels in ((), ("a", "b"))),
            *(("observe", "kvctl_stage_seconds", labels, "takes labels") for labels in ((), ("a", "b"))),
        ],
    )
    def test_what_is_not_declared_so_is_a_mistake(
        self, call: str, name: str, labels: tuple[str, ...], text: str
    ) -> None:
        metrics = Metrics()
        with pytest.raises((KeyError, ValueError), match=text):
            getattr(metrics, call)(name, 1, *labels)
        assert metrics.snapshot() == Metrics().snapshot()

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

    def test_chosen_families_come_without_buckets(self) -> None:
        metrics = Metrics()
        metrics.observe("kvctl_stage_seconds", 1.0, "wire")
        metrics.observe("kvctl_room_seconds", 1.0)
        sample = {"labels": {"stage": "wire"}, "value": None, "sum": 1.0, "count": 1}
        family = {"name": "kvctl_stage_seconds", "kind": "histogram", "unit": "seconds", "help": ""}
        assert metrics.snapshot(["kvctl_stage_seconds"]) == [{**family, "samples": [sample]}]

    def test_counters_of_the_agent_and_of_the_observer_add_up(self) -> None:
        metrics = Metrics()
        written: dict[str, Totals] = {"kvctl_parts_total": {("bulk",): 2, ("slice",): 3}}
        metrics.written = lambda name: written.get(name, {}).copy()
        metrics.add("kvctl_parts_total", 4, "bulk")
        metrics.add("kvctl_connections_refused_total", 1)
        assert metrics.totals("kvctl_parts_total") == {("bulk",): 6, ("slice",): 3}
        assert metrics.total("kvctl_connections_refused_total") == 1
        assert len(family(metrics, "kvctl_parts_total")["samples"]) == 2
