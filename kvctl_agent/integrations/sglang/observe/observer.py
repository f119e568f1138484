"""Starts an observer for each KV manager that SGLang creates: its thread, its telemetry and its admin socket."""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from kvctl_agent.admin.queries import AdminQueries
from kvctl_agent.admin.server import AdminServer
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.contract.settings import load_settings
from kvctl_agent.contract.snapshots import Integration, Role
from kvctl_agent.errors import ConfigError, RequestRefused
from kvctl_agent.integrations.sglang import versions
from kvctl_agent.integrations.sglang.observe import hooks
from kvctl_agent.integrations.sglang.observe.events import Event, EventBuffer
from kvctl_agent.integrations.sglang.observe.observed_manager import OWNED_BY_SGLANG, ObservedManager
from kvctl_agent.integrations.sglang.observe.tracker import RankShape, Tracker
from kvctl_agent.integrations.sglang.rank_names import rank_axes, rank_name
from kvctl_agent.runtime.liveness import host_name
from kvctl_agent.telemetry.hub import Telemetry

logger = logging.getLogger("kvctl")

_PERIOD_S = 1.0
_EVENTS_AT_ONCE, _PAUSE_S = 64, 1e-4  # the interpreter is kept for about 0.3 ms, then left to SGLang's threads
_BACKENDS = ("nixl", "mooncake")
_WHAT = {
    "abort": "its rooms: abort the request at the router or with the server's /abort_request",
    "release": "its staging ring, which it frees when the room ends",
    "forget": "its peers: it drops those that its heartbeats do not reach",
    "drain": "admission: take the server out of the router",
    "resume": "admission: put the server back into the router",
    "probe": "the connections of its transfer engine",
    "set": "its configuration: set it in the server's environment and restart it",
}


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
        setattr(manager, hooks.BUFFER, EventBuffer())  # before its threads run
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


class Observer:
    """Telemetry, thread and admin socket of one observed manager.

    Attributes:
        handlers: handlers of the admin commands, by name.

    Raises:
        KvctlError: the environment has an invalid setting of kvctl.
    """

    def __init__(self, manager: Any) -> None:
        import sglang
        from sglang.srt.runtime_context import get_serving

        self._manager = manager
        self._buffer = hooks.buffer_of(manager)
        self._dropped = 0
        self._reading = threading.Lock()
        self._stopping = threading.Event()
        settings = load_settings({})
        role: Role = manager.disaggregation_mode.value
        self.name = rank_name(
            role, rank_axes(manager), manager.attn_tp_rank, f"{manager.local_ip}:{get_serving().port}"
        )
        telemetry = Telemetry(
            self.name,
            role,
            history=settings["history_rooms"],
            failed=settings["failed_rooms"],
            timeline_events=settings["timeline_events"],
            recorder_events=settings["recorder_events"],
        )
        self._tracker = Tracker(self.name, shape_of(manager, role), telemetry)
        integration: Integration = {
            "engine": "sglang",
            "engine_version": sglang.__version__,
            "mode": "observe",
            "settings": {},
        }
        clock = telemetry.clock
        incarnation = clock.wall_ns(clock.now_ns()) >> 20 << 20 | secrets.randbits(20) | 1
        queries = AdminQueries(
            ObservedManager(
                self.name,
                manager,
                self._buffer,
                self._tracker,
                host_name(settings["host"]),
                integration,
                incarnation,
            )
        )
        reads = {name: self._up_to_date(handler) for name, handler in queries.handlers().items()}
        self.handlers = {**reads, **_refusals()}
        self.admin = AdminServer(
            self.name,
            self.handlers,
            queries.hello,
            metrics=telemetry.metrics,
            recorder=telemetry.recorder,
            clock=clock,
            endpoint=f"{manager.local_ip}:{manager.rank_port}",
        )

    def start(self) -> Observer:
        """Claims the name, binds the admin socket and starts the thread; `close` or the process's end stops both.

        Raises:
            AdminError: another rank has the name, or the socket cannot be bound.
        """
        self.admin.start()
        threading.Thread(target=self._run, name=f"kvctl-observe-{self.name}", daemon=True).start()
        logger.info("kvctl: %s is observed; look at it with: kvctl status", self.name)
        return self

    def close(self) -> None:
        """Stops the thread, and removes the admin socket."""
        self._stopping.set()
        self.admin.close()

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            self.read()

    def _up_to_date(self, handler: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        """Returns the handler of an admin command, made to read the events before it answers."""

        def answer(arguments: dict[str, Any]) -> Any:
            self.read()
            return handler(arguments)

        return answer

    def read(self) -> None:
        """Applies the events recorded since the last call; called by the observer's thread and the admin thread."""
        with self._reading:
            events = self._buffer.events
            for number in range(1, len(events) + 1):
                self._try(self._tracker.apply, events.popleft())
                if number % _EVENTS_AT_ONCE == 0:
                    time.sleep(_PAUSE_S)
            self._try(self._note_dropped)

    def _try(self, act: Callable[..., None], *arguments: Event) -> None:
        """Calls a function of which an error costs one event, but neither the thread nor an answer."""
        try:
            act(*arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._tracker.telemetry.metrics.add("kvctl_internal_errors_total", 1)
            self._tracker.telemetry.recorder.record("observe", f"an event was lost: {text}", "error")

    def _note_dropped(self) -> None:
        """Records that events were dropped, and ends the rooms that SGLang no longer has."""
        if self._buffer.dropped == self._dropped:
            return
        lost, self._dropped = self._buffer.dropped - self._dropped, self._buffer.dropped
        text = f"{lost} events were dropped: this thread got no processor"
        self._tracker.telemetry.recorder.record("observe", text, "warning")
        live = {room for room in self._tracker.rooms if room in self._manager.request_status}
        self._tracker.forget_except(live, time.monotonic_ns())


def _refusals() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Returns handlers that refuse the commands that change something."""

    def refusal(what: str) -> Callable[[dict[str, Any]], Any]:
        def refuse(_: dict[str, Any]) -> None:
            raise RequestRefused(ErrorCode.REFUSED, f"{OWNED_BY_SGLANG} {what}")

        return refuse

    return {name: refusal(what) for name, what in _WHAT.items()}


def shape_of(manager: Any, role: Role) -> RankShape:
    """Returns the sizes of a manager's rank."""
    args = manager.kv_args
    layers = list(getattr(args, "kv_layer_ids", None) or ())
    if not layers:
        count = len(args.kv_item_lens) // (1 if manager.is_mla_backend else 2)
        layers = list(range(getattr(args, "prefill_start_layer", 0) or 0, count))
    heads = 0 if manager.is_mla_backend else int(getattr(args, "kv_head_num", 0) or 0)
    total = int(getattr(args, "total_kv_head_num", 0) or 0) or heads * manager.attn_tp_size
    bounds = (min(layers), max(layers) + 1) if layers else (0, 0)
    rank = int(manager._prefill_unique_rank())
    return RankShape(role, int(manager.kv_item_lens_sum), bounds, manager.attn_tp_size, rank, heads, total)
