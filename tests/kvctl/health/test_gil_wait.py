"""KV_GIL_WAIT: real agents beside a thread that runs Python without a pause, and beside none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvctl.client.fleet import Fleet as Client
from kvctl.client.health_reads import HEALTH_CALLS
from kvctl.health.codes import CODES_BY_NAME
from kvctl.health.finding import Finding
from kvctl.health.snapshot import Snapshot
from kvctl_agent.telemetry import durations
from kvctl_agent.telemetry.region import Cell
from tests.kvctl.health.fleets import Fleet
from tests.support.agents import Fleet as Agents
from tests.support.agents import MakeFleet, make_fleet
from tests.support.polling import until

__all__ = ["make_fleet"]


@contextmanager
def busy_thread() -> Iterator[None]:
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            sum(range(1000))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def measure(fleet: Agents) -> None:
    """Waits until every agent has a figure of waits that all began after the call."""
    agents = fleet.prefill + fleet.decode
    for _ in range(2):  # the first window began before the call
        for agent in agents:
            agent.telemetry.region.cells[Cell.INTERPRETER_WAIT_NS] = -1
        until(
            lambda: not any(agent.telemetry.region.cells[Cell.INTERPRETER_WAIT_NS] < 0 for agent in agents),
            pause_s=0.05,
        )


def findings() -> list[Finding]:
    with Client((), {}, 10_000_000_000) as client:
        snapshot = Snapshot(client.survey(HEALTH_CALLS), time.monotonic_ns())
    assert len(snapshot.agents) == 2
    return list(CODES_BY_NAME["KV_GIL_WAIT"].find(snapshot))


def test_agents_beside_a_busy_thread(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "INTERPRETER_WINDOW_NS", 3_000_000_000)
    fleet = make_fleet(prefill=(1, 1)).start()
    fleet.run(1, pages=4)
    measure(fleet)
    assert findings() == []
    with busy_thread():
        measure(fleet)
        # Time without a core does not count.
        found = until(lambda: both if len(both := findings()) == 2 else [], pause_s=0.5)
    prefill, decode = sorted(found, key=lambda each: each.subject, reverse=True)
    assert (prefill.subject, decode.subject) == ("prefill-0", "decode-0")
    assert prefill.evidence["gil_wait_ns"] > 1_000_000
    assert "kvctl stacks -e prefill-0" in prefill.remedy


def test_is_raised_by_agents_with_traffic_only() -> None:
    fleet = Fleet()
    fleet.metric("prefill-0", "kvctl_interpreter_wait_seconds", 0.0051)
    (found,) = fleet.examine()
    assert (found.code, found.subject, found.evidence) == ("KV_GIL_WAIT", "prefill-0", {"gil_wait_ns": 5_100_000})
    assert "waits 5.1 ms for the interpreter" in found.cause
    fleet.metric("prefill-0", "kvctl_parts_total", 0, path="staged")
    assert fleet.find("KV_GIL_WAIT") == []
