"""Turns of SGLang's event loop are noted where its scheduler runs."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from kvctl_agent.integrations.sglang.scheduler_turns import unwatch, watch


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in of SGLang's scheduler, in its module."""

    class Scheduler:
        def ingest_requests(self, stop_at_pause: bool = False) -> list[bool]:
            return [stop_at_pause]

    module: Any = ModuleType("sglang.srt.managers.scheduler")
    module.Scheduler = Scheduler
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", module)
    return Scheduler()


def test_each_turn_is_noted_until_the_manager_ends(scheduler: Any) -> None:
    first, second = [], []
    note_first, note_second = (lambda: first.append(1)), (lambda: second.append(1))
    watch(note_first)
    watch(note_second)
    assert scheduler.ingest_requests(stop_at_pause=True) == [True]
    unwatch(note_first)
    unwatch(note_first)
    scheduler.ingest_requests()
    unwatch(note_second)
    scheduler.ingest_requests()
    assert (len(first), len(second)) == (1, 2)


def test_a_process_without_a_scheduler_has_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler", raising=False)
    watch(print)
    unwatch(print)
    assert "sglang.srt.managers.scheduler" not in sys.modules
