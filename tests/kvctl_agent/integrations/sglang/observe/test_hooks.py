"""What hooks on SGLang's transfer workers see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvctl_agent.integrations.observe.hooks import add_hooks
from kvctl_agent.integrations.sglang.observe import hooks
from kvctl_agent.integrations.sglang.observe.tracker import SentPart, Tracker


class Recorded(hooks.EventQueue):
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


class Queue:
    def __init__(self, *chunks: Any) -> None:
        self.chunks = list(chunks)

    def get(self) -> Any:
        return self.chunks.pop(0)


def a_chunk() -> Any:
    return SimpleNamespace(room=7, index_slice=slice(4, 8), prefill_kv_indices=[1, 2, 3, 4])


def hooked() -> tuple[Any, Any]:
    """Own classes of manager and queue with hooks."""
    manager, queue = (type(each.__name__, (each,), {}) for each in (Manager, Queue))
    add_hooks(manager, hooks.MANAGER)
    add_hooks(queue, hooks.QUEUE)
    return manager, queue


def test_a_posted_chunk_is_sent_when_its_handles_are_done() -> None:
    managers, queues = hooked()
    manager = managers()
    queues(a_chunk()).get()
    handle = manager.send_kvcache_staged("session", [1, 2, 3, 4])
    assert manager.events.taken() == []  # posted, not done
    manager._await_handles([handle], failure_seen=False)
    manager._await_handles([handle], failure_seen=False)
    ((method, at_ns, part),) = manager.events.taken()
    assert method is Tracker.part_sent
    assert (part.room, part.first_page, part.pages, part.endpoint) == (7, 4, 4, "10.0.0.2:5")
    assert part.path == "staged"
    times = [part.dequeued_ns, part.posted_ns or 0, at_ns]
    assert times == sorted(times)


def test_a_synchronous_write_is_done_when_it_returns() -> None:
    managers, queues = hooked()
    manager = managers()
    queues(a_chunk()).get()
    manager.send_kvcache("session", [1, 2, 3, 4])
    ((_, _, part),) = manager.events.taken()
    assert isinstance(part, SentPart)
    assert (part.path, part.posted_ns) == ("bulk", None)


def test_a_write_that_failed_is_no_part() -> None:
    managers, queues = hooked()
    manager = managers()
    queues(a_chunk()).get()
    manager.send_kvcache_staged("session", [])
    manager._await_handles([], failure_seen=True)
    assert manager.events.taken() == []
