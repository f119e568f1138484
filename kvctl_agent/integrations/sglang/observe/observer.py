"""Starts the observation of each KV manager that SGLang creates."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvctl_agent import rank_name
from kvctl_agent.contract.snapshots import Role
from kvctl_agent.errors import ConfigError
from kvctl_agent.integrations.observe.hooks import add_hooks, before
from kvctl_agent.integrations.observe.observer import ObservedRank, Observer, Watched
from kvctl_agent.integrations.sglang import scheduler_turns, versions
from kvctl_agent.integrations.sglang.observe import hooks
from kvctl_agent.integrations.sglang.observe.documents import builders
from kvctl_agent.integrations.sglang.observe.event_queue import EventQueue
from kvctl_agent.integrations.sglang.observe.manager_state import config_rows, description, shape_of
from kvctl_agent.integrations.sglang.observe.tracker import Tracker
from kvctl_agent.integrations.sglang.rank_names import rank_axes
from kvctl_agent.telemetry.hub import Telemetry

logger = logging.getLogger("kvctl")

_BACKENDS = ("nixl", "mooncake")
_REFUSED = {
    "abort": "its rooms: abort the request at the router or with the server's /abort_request",
    "release": "its staging ring, which it frees when the room ends",
    "forget": "its peers: it drops those that its heartbeats do not reach",
    "drain": "admission: take the server out of the router",
    "resume": "admission: put the server back into the router",
    "probe": "the connections of its transfer engine",
    "set": "its configuration: set it in the server's environment and restart it",
}
"""Why an action is refused: what SGLang owns."""


def install() -> None:
    """Hooks SGLang's NIXL and Mooncake classes as soon as SGLang chooses them; called by the plugin.

    Raises:
        ConfigError: something that is to be hooked differs from the supported versions of SGLang.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if (difference := versions.mismatch(versions.OBSERVED_INTERFACES)) is not None:
        raise ConfigError(difference)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _on_class, HookType.AFTER)


def _on_class(found: Any, transfer_backend: Any, class_type: Any) -> None:
    if transfer_backend.value in _BACKENDS:
        observe(class_type.value, found)


def observe(kind: str, found: type) -> None:
    """Hooks one of a backend's classes, once.

    Args:
        kind: value of SGLang's KVClassType: manager, sender or receiver; nothing is done for others.
    """
    if kind not in _HOOKS or "_kvctl_observed" in vars(found):
        return
    found._kvctl_observed = True  # type: ignore[attr-defined]
    _HOOKS[kind](found)


def _hook_manager(manager_class: Any) -> None:
    from sglang.srt.disaggregation.common.staging_handler import DecodeStagingHandler, PrefillStagingStrategy
    from sglang.srt.disaggregation.common.utils import FastQueue

    add_hooks(FastQueue, hooks.QUEUE)
    add_hooks(PrefillStagingStrategy, hooks.STRATEGY)
    add_hooks(DecodeStagingHandler, hooks.HANDLER)
    add_hooks(manager_class, hooks.MANAGER)
    construct = manager_class.__init__

    @functools.wraps(construct)
    def constructed(manager: Any, *args: Any, **kwargs: Any) -> None:
        setattr(manager, hooks.EVENTS, EventQueue())  # before its threads run
        construct(manager, *args, **kwargs)
        try:
            observer = _observer_of(manager)
            observer.start()
            manager._kvctl_observer = observer
            scheduler_turns.watch(observer.turn)
            logger.info("kvctl: %s is observed; look at it with: kvctl status", observer.name)
        except Exception as error:
            logger.error("kvctl: this rank is not observed: %s", error)

    manager_class.__init__ = constructed
    before(manager_class, "teardown", _stop)  # when the server changes its role


def _stop(manager: Any) -> None:
    if (observer := getattr(manager, "_kvctl_observer", None)) is not None:
        scheduler_turns.unwatch(observer.turn)
        observer.close()


_HOOKS: dict[str, Callable[[Any], object]] = {
    "manager": _hook_manager,
    "sender": partial(add_hooks, hooks=hooks.SENDER),
    "receiver": partial(add_hooks, hooks=hooks.RECEIVER),
}


def _observer_of(manager: Any) -> Observer:
    """Returns the observer of one manager.

    Raises:
        KvctlError: the environment has an invalid setting of kvctl.
    """
    from sglang.srt.runtime_context import get_serving

    role: Role = manager.disaggregation_mode.value
    shape, events = shape_of(manager), hooks.events_of(manager)
    rank = ObservedRank(
        name=rank_name(role, rank_axes(manager), manager.attn_tp_rank, f"{manager.local_ip}:{get_serving().port}"),
        role=role,
        endpoint=f"{manager.local_ip}:{manager.rank_port}",
        engine="SGLang",
        identity={
            **description(manager, shape),
            "integration": versions.integration("observe"),
            "staging": bool(getattr(manager, "enable_staging", False)),
            "calls": ["ingest_requests"],
        },
        config=config_rows(manager),
        refused=_REFUSED,
    )

    def watch(telemetry: Telemetry, directory: Path) -> Watched:
        tracker = Tracker(rank.name, shape, telemetry, events.waits, directory)
        return tracker, builders(manager, tracker)

    return Observer(rank, events, watch)
