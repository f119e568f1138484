"""Follows the turns of SGLang's scheduler, which show that it runs, and makes its calls for many rooms one batch."""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack
from typing import Any

from kvctl_agent.integrations.engine_agent import EngineAgent
from kvctl_agent.integrations.observe.hooks import before

# Methods in which the scheduler passes the pages of all requests of a forward, or opens the rooms of all that fit.
_BATCHES = (
    ("sglang.srt.managers.scheduler", "Scheduler", "process_batch_result_disagg_prefill"),
    ("sglang.srt.disaggregation.decode", "DecodePreallocQueue", "pop_preallocated"),
)

_agents: list[EngineAgent] = []


def watch(agent: EngineAgent) -> None:
    """Notes the turns of the scheduler for an agent, and handles its calls in batches, until `unwatch`."""
    # The scheduler's module has been imported in a process that has a scheduler; importing it takes seconds.
    module = sys.modules.get("sglang.srt.managers.scheduler")
    if module is not None and "_kvctl_turns" not in vars(module.Scheduler):
        module.Scheduler._kvctl_turns = True
        before(module.Scheduler, "ingest_requests", _note_turn)
        for name, owner, method in _BATCHES:
            target = getattr(sys.modules.get(name), owner, None)
            if (original := getattr(target, method, None)) is not None:
                setattr(target, method, _batched(original))
    _agents.append(agent)


def unwatch(agent: EngineAgent) -> None:
    """Ends that. Idempotent."""
    if agent in _agents:
        _agents.remove(agent)


def _note_turn(*_: Any, **__: Any) -> None:
    for agent in _agents:
        agent.note_turn()


def _batched(original: Any) -> Any:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as batches:
            for agent in _agents:
                batches.enter_context(agent.batch())
            return original(*args, **kwargs)

    return run
