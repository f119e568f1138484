"""Notes the turns of SGLang's event loop, which show that its scheduler runs: it calls a manager only for requests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kvctl_agent.integrations.observe.hooks import before

_notes: list[Callable[[], None]] = []


def watch(note: Callable[[], None]) -> None:
    """Calls `note` at the begin of each turn, until `unwatch`."""
    # The scheduler's module has been imported in a process that has a scheduler; importing it takes seconds.
    module = sys.modules.get("sglang.srt.managers.scheduler")
    if module is not None and "_kvctl_turns" not in vars(module.Scheduler):
        module.Scheduler._kvctl_turns = True
        before(module.Scheduler, "ingest_requests", _turn)
    _notes.append(note)


def unwatch(note: Callable[[], None]) -> None:
    """Ends the calls of `note`. Idempotent."""
    if note in _notes:
        _notes.remove(note)


def _turn(*_: Any, **__: Any) -> None:
    for note in _notes:
        note()
