"""Starts the observation of each KV manager that SGLang creates: its region, and the link to the observer's process."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from kvctl_agent import rank_name
from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.contract.settings import load_settings
from kvctl_agent.contract.snapshots import Role
from kvctl_agent.errors import ConfigError, RequestRefused
from kvctl_agent.integrations.sglang import scheduler_turns, versions
from kvctl_agent.integrations.sglang.observe import hooks
from kvctl_agent.integrations.sglang.observe.documents import builders
from kvctl_agent.integrations.sglang.observe.event_queue import EventQueue
from kvctl_agent.integrations.sglang.observe.manager_state import config_rows, description, shape_of
from kvctl_agent.integrations.sglang.observe.tracker import Tracker
from kvctl_agent.integrations.sglang.rank_names import rank_axes
from kvctl_agent.observer.link import ObserverLink, new_region
from kvctl_agent.runtime.liveness import host_name
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.engine_calls import SilentEngine
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.region import Document

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
    "inputs": "the transfer protocol, which records no inputs",
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
        found: the class.
    """
    if kind not in _HOOKS or "_kvctl_observed" in vars(found):
        return
    found._kvctl_observed = True  # type: ignore[attr-defined]
    _HOOKS[kind](found)


def _hook_manager(manager_class: Any) -> None:
    from sglang.srt.disaggregation.common.staging_handler import DecodeStagingHandler, PrefillStagingStrategy
    from sglang.srt.disaggregation.common.utils import FastQueue

    if "_kvctl_observed" not in vars(FastQueue):
        FastQueue._kvctl_observed = True
        hooks.hook_workers(FastQueue, PrefillStagingStrategy, DecodeStagingHandler)
    hooks.hook_manager(manager_class)
    construct = manager_class.__init__

    @functools.wraps(construct)
    def constructed(manager: Any, *args: Any, **kwargs: Any) -> None:
        setattr(manager, hooks.EVENTS, EventQueue())  # before its threads run
        construct(manager, *args, **kwargs)
        try:
            manager._kvctl_observer = Observer(manager).start()
        except Exception as error:
            logger.error("kvctl: this rank is not observed: %s", error)

    manager_class.__init__ = constructed
    hooks.before(manager_class, "teardown", _stop)  # when the server changes its role


def _stop(manager: Any) -> None:
    if (observer := getattr(manager, "_kvctl_observer", None)) is not None:
        observer.close()


_HOOKS: dict[str, Callable[[Any], None]] = {
    "manager": _hook_manager,
    "sender": hooks.hook_sender,
    "receiver": hooks.hook_receiver,
}


def _refuse(command: str, _: dict[str, Any]) -> NoReturn:
    raise RequestRefused(ErrorCode.REFUSED, f"observe mode: SGLang owns {_REFUSED[command]}")


class Observer:
    """Region of one observed manager, and the link to the process that reads it.

    Attributes:
        name: name of the rank.

    Raises:
        KvctlError: the environment has an invalid setting of kvctl.
    """

    def __init__(self, manager: Any) -> None:
        from sglang.srt.runtime_context import get_serving

        role: Role = manager.disaggregation_mode.value
        settings, shape = load_settings({}), shape_of(manager)
        server = f"{manager.local_ip}:{get_serving().port}"
        self.name = rank_name(role, rank_axes(manager), manager.attn_tp_rank, server)
        self._manager = manager
        self._events = hooks.events_of(manager)
        clock = Clock()
        incarnation = clock.wall_ns(clock.now_ns()) >> 20 << 20 | secrets.randbits(20) | 1
        self.region = new_region(settings, self.name, role, incarnation, clock, logger.warning)
        self._silence = SilentEngine(self.region)
        identity = {
            **description(manager, shape),
            "version": VERSION,
            "host": host_name(settings["host"]),
            "incarnation": f"{incarnation:016x}",
            "integration": versions.integration("observe"),
            "staging": bool(getattr(manager, "enable_staging", False)),
            "calls": ["ingest_requests"],
        }
        now_ns = clock.now_ns()
        self.region.publish(Document.IDENTITY, msgspec.msgpack.encode(identity), now_ns)
        self.region.publish(Document.CONFIG, msgspec.msgpack.encode({"rows": config_rows(manager)}), now_ns)
        telemetry = Telemetry(self.name, role, self.region, clock)
        telemetry.collected = []
        directory = Path(self.region.header.directory)
        tracker = Tracker(self.name, shape, telemetry, self._events.waits, directory)
        publisher = DocumentPublisher(self.region, builders(manager, tracker))
        publisher.publish_all()
        self._open_events = partial(self._events.open, tracker, publisher)
        self._link = ObserverLink(
            self.region,
            settings,
            {command: partial(_refuse, command) for command in _REFUSED},
            endpoint=f"{manager.local_ip}:{manager.rank_port}",
            note=logger.warning,
            flush=self._events.flush,
            tick=self._tick,
        )

    def start(self) -> Observer:
        """Claims the name and starts what answers for this rank; `close` or the end of the process ends both.

        Raises:
            AdminError: another rank has the name, or the socket cannot be bound.
        """
        try:
            self._link.start()
        except BaseException:
            self.region.close()
            raise
        self._open_events()  # what is applied without a link would fill memory
        scheduler_turns.watch(self._turn)
        logger.info("kvctl: %s is observed; look at it with: kvctl status", self.name)
        return self

    def close(self) -> None:
        """Removes the admin socket and the region."""
        scheduler_turns.unwatch(self._turn)
        self._link.close()
        self.region.close()

    def _turn(self) -> None:
        """Notes that SGLang's scheduler begins a turn of its event loop."""
        self.region.note_call(0)
        self._events.publish()

    def _tick(self) -> None:
        """Publishes what SGLang's objects show, and where its scheduler is if it makes no turns."""
        self._events.publish()
        self._silence.look(time.monotonic_ns(), len(self._manager.request_status))
