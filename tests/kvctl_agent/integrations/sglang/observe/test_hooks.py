"""What hooks on SGLang's transfer workers see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvctl_agent.integrations.observe.hooks import add_hooks
from kvctl_agent.integrations.sglang.observe import hooks
from kvctl_agent.integrations.sglang.observe.event_queue import EventQueue
from kvctl_agent.integrations.sglang.observe.tracker import SentPart, Tracker


class Recorded(EventQueue):
    """Keeps the events for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[tuple[Any, ...]] = []

    def add(self, method: Any, *arguments: Any) -> None:
        self.added.append((method, *arguments))

    def taken(self) -> list[tuple[Any, ...]]:
        """Returns the events since the last call."""
        found, self.added = self.added, []
        return found


class Manager:
    """A stand-in with the methods of NixlKVManager that a worker calls."""

    def __init__(self) -> None:
        self.events = Recorded()
        setattr(self, hooks.EVENTS, self.events)
        info = SimpleNamespace(endpoint="10.0.0.2", dst_port=5, decode_tp_size=1)
        self.decode_kv_args_table = {"session": info}

    def send_kvcache_staged(self, session: str, pages: list[int]) -> object:
        return object()

    def send_kvcache(self, session: str, pages: list[int]) -> int:
        return 0

    def _await_handles(self, handles: list[Any], *, failure_seen: bool) -> tuple[bool, bool]:
        return True, bool(failure_seen)


class Strategy:
    def __init__(self, manager: Manager) -> None:
        self.kv_manager = manager
        self.result = (True, 0, 0, 0, 0)

    def check_ready(self, req: Any, start: int, pages: int, session_id: str | None = None) -> Any:
        return self.result


class Queue:
    def __init__(self, *chunks: Any) -> None:
        self.chunks = list(chunks)

    def get(self) -> Any:
        return self.chunks.pop(0)


def a_chunk() -> Any:
    return SimpleNamespace(room=7, index_slice=slice(4, 8), prefill_kv_indices=[1, 2, 3, 4])


REQUEST = SimpleNamespace(room=7, endpoint="10.0.0.2", dst_port=5)


def hooked() -> tuple[Any, Any, Any]:
    """Own classes of manager, strategy and queue with hooks."""
    manager, strategy, queue = (type(each.__name__, (each,), {}) for each in (Manager, Strategy, Queue))
    add_hooks(manager, hooks.MANAGER)
    add_hooks(queue, hooks.QUEUE)
    add_hooks(strategy, hooks.STRATEGY)
    return manager, strategy, queue


def test_a_staged_chunk_waits_for_a_grant_and_the_watermark_and_is_sent() -> None:
    managers, strategies, queues = hooked()
    manager = managers()
    strategy, queue = strategies(manager), queues(*[a_chunk()] * 4)
    waits = []
    for result in ((False, 1, -1, 0, -1), (False, 1, 0, 3, 64), (False, 1, 0, 3, 64), (True, 1, 0, 3, 64)):
        queue.get()
        strategy.result = result
        strategy.check_ready(REQUEST, 4, 4, "session")
        waits.append((len(manager.events.taken()), dict(manager.events.waits)))
    key = (7, 1, "10.0.0.2:5")
    assert [number for number, _ in waits] == [1, 1, 0, 1]  # only changes are events
    assert (waits[0][1][key].pages, waits[0][1][key].end) == (4, -1)
    assert (waits[1][1][key].round, waits[1][1][key].end) == (3, 64)
    assert waits[3][1] == {}
    handle = manager.send_kvcache_staged("session", [1, 2, 3, 4])
    assert manager.events.taken() == []  # posted, not done
    manager._await_handles([handle], failure_seen=False)
    manager._await_handles([handle], failure_seen=False)
    ((method, at_ns, part),) = manager.events.taken()
    assert method is Tracker.part_sent
    assert (part.room, part.first_page, part.pages, part.endpoint) == (7, 4, 4, "10.0.0.2:5")
    assert (part.path, part.gated) == ("staged", True)
    times = [part.dequeued_ns, part.passed_ns, part.posted_ns or 0, at_ns]
    assert times == sorted(times)


def test_a_synchronous_write_is_done_when_it_returns() -> None:
    managers, _, queues = hooked()
    manager = managers()
    queues(a_chunk()).get()
    manager.send_kvcache("session", [1, 2, 3, 4])
    ((_, _, part),) = manager.events.taken()
    assert isinstance(part, SentPart)
    assert (part.path, part.posted_ns, part.gated) == ("bulk", None, False)


def test_a_write_that_failed_is_no_part() -> None:
    managers, _, queues = hooked()
    manager = managers()
    queues(a_chunk()).get()
    manager.send_kvcache_staged("session", [])
    manager._await_handles([], failure_seen=True)
    assert manager.events.taken() == []


def test_a_chunk_that_can_never_fit_is_the_cause_of_the_failure() -> None:
    managers, strategies, _ = hooked()
    manager = managers()
    strategy = strategies(manager)
    strategy.result = (False, 1, -2, 0, -1)
    strategy.check_ready(REQUEST, 4, 4, "session")
    ((method, _, room, reason),) = manager.events.taken()
    assert (method, room) == (Tracker.failed, 7)
    assert reason == "chunk 1 of 4 pages exceeds the ring buffer of decode rank 10.0.0.2:5"
