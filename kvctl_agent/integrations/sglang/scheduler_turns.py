"""Follows the turns of SGLang's scheduler, which show that it runs, and makes its calls for many rooms one batch."""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from kvctl_agent.integrations.observe.hooks import before

# Methods in which the scheduler passes the pages of all requests of a forward, or opens the rooms of all that fit.
_BATCHES = (
    ("sglang.srt.disaggregation.prefill:SchedulerDisaggregationPrefillMixin", "process_batch_result_disagg_prefill"),
    ("sglang.srt.disaggregation.decode:DecodePreallocQueue", "pop_preallocated"),
)

_watched: dict[Callable[[], None], Callable[[], AbstractContextManager[None]]] = {}


def watch(note: Callable[[], None], batch: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Calls `note` at the begin of each turn, until `unwatch`.

    Args:
        batch: returns a context for the calls of the scheduler for many rooms.
    """
    # The scheduler's module has been imported in a process that has a scheduler; importing it takes seconds.
    module = sys.modules.get("sglang.srt.managers.scheduler")
    if module is not None and "_kvctl_turns" not in vars(module.Scheduler):
        module.Scheduler._kvctl_turns = True
        before(module.Scheduler, "ingest_requests", _turn)
        for name, method in _BATCHES:
            owner = pkgutil.resolve_name(name)
            setattr(owner, method, _batched(getattr(owner, method)))
    _watched[note] = batch


def unwatch(note: Callable[[], None]) -> None:
    """Ends the calls of `note`, and the batches with it. Idempotent."""
    _watched.pop(note, None)


def _turn(*_: Any, **__: Any) -> None:
    for note in _watched:
        note()


def _batched(original: Any) -> Any:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as batches:
            for batch in _watched.values():
                batches.enter_context(batch())
            return original(*args, **kwargs)

    return run
