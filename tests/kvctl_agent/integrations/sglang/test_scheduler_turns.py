"""Turns of SGLang's event loop are noted where its scheduler runs, and its calls for many rooms are one batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from kvctl_agent.integrations.sglang.scheduler_turns import unwatch, watch


class Agent:
    """Counts the turns that it is told of, and knows whether a batch is open."""

    def __init__(self) -> None:
        self.turns = self.batches = 0
        self.open = False

    def note_turn(self) -> None:
        self.turns += 1

    @contextmanager
    def batch(self) -> Iterator[None]:
        self.batches += 1
        self.open = True
        try:
            yield
        finally:
            self.open = False


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    agents = [Agent(), Agent()]
    yield agents
    for agent in agents:
        unwatch(agent.note_turn)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch, agents: list[Agent]) -> Any:
    """Stand-ins of SGLang's scheduler and decode queue, in their modules."""

    class SchedulerDisaggregationPrefillMixin:
        def process_batch_result_disagg_prefill(self, batch: int, result: int) -> tuple[int, list[bool]]:
            if result < 0:
                raise ValueError(result)
            return batch + result, [agent.open for agent in agents]

    class Scheduler(SchedulerDisaggregationPrefillMixin):
        def ingest_requests(self, stop_at_pause: bool = False) -> list[bool]:
            return [stop_at_pause]

    class DecodePreallocQueue:
        def pop_preallocated(self, **options: int) -> tuple[dict[str, int], list[bool]]:
            return options, [agent.open for agent in agents]

    scheduler: Any = ModuleType("sglang.srt.managers.scheduler")
    scheduler.Scheduler = Scheduler
    monkeypatch.setitem(sys.modules, scheduler.__name__, scheduler)
    prefill: Any = ModuleType("sglang.srt.disaggregation.prefill")
    prefill.SchedulerDisaggregationPrefillMixin = SchedulerDisaggregationPrefillMixin
    monkeypatch.setitem(sys.modules, prefill.__name__, prefill)
    decode: Any = ModuleType("sglang.srt.disaggregation.decode")
    decode.DecodePreallocQueue = DecodePreallocQueue
    monkeypatch.setitem(sys.modules, decode.__name__, decode)
    return scheduler, decode


def test_each_turn_is_noted_until_the_manager_ends(sglang: Any, agents: list[Agent]) -> None:
    scheduler = sglang[0].Scheduler()
    first, second = agents
    watch(first.note_turn)
    watch(second.note_turn)
    assert scheduler.ingest_requests(stop_at_pause=True) == [True]
    unwatch(first.note_turn)
    unwatch(first.note_turn)
    scheduler.ingest_requests()
    unwatch(second.note_turn)
    scheduler.ingest_requests()
    assert (first.turns, second.turns) == (1, 2)


def test_calls_for_the_rooms_of_a_forward_are_one_batch_of_each_agent(sglang: Any, agents: list[Agent]) -> None:
    first, second = agents
    watch(first.note_turn, first.batch)
    scheduler, queue = sglang[0].Scheduler(), sglang[1].DecodePreallocQueue()
    assert scheduler.process_batch_result_disagg_prefill(1, result=2) == (3, [True, False])
    watch(second.note_turn, second.batch)
    assert queue.pop_preallocated(rids=1) == ({"rids": 1}, [True, True])
    with pytest.raises(ValueError, match="-1"):
        scheduler.process_batch_result_disagg_prefill(1, -1)
    assert not first.open
    assert not second.open
    unwatch(first.note_turn)
    scheduler.process_batch_result_disagg_prefill(1, 1)
    assert (first.batches, second.batches) == (3, 3), "each call is wrapped once"


def test_a_process_without_a_scheduler_has_no_turns(monkeypatch: pytest.MonkeyPatch, agents: list[Agent]) -> None:
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler", raising=False)
    watch(agents[0].note_turn)
    assert "sglang.srt.managers.scheduler" not in sys.modules
