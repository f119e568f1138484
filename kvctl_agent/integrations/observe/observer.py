"""`Observer`: the region of one observed rank, and the link to the observer's process that reads it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.contract.settings import load_settings
from kvctl_agent.contract.snapshots import ConfigRow, Role
from kvctl_agent.errors import RequestRefused
from kvctl_agent.integrations.observe.event_queue import EventQueue
from kvctl_agent.integrations.observe.tracker import EventTracker
from kvctl_agent.observer.documents import Builder
from kvctl_agent.observer.link import ObserverLink, new_region
from kvctl_agent.runtime.liveness import host_name
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.engine_calls import SilentEngine
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.region import Document

logger = logging.getLogger("kvctl")

Watched = tuple[EventTracker, Mapping[Document, Builder]]
"""The tracker of a rank, and the builders of its documents."""


class ObservedRank(NamedTuple):
    """What is known of a rank at its start.

    Attributes:
        identity: fields of `Identity` beside version, host and incarnation; the first of its `calls` is a turn.
        config: settings of the engine that correspond to an agent's.
        refused: for each action, what the engine owns, as the reason of its refusal.
    """

    name: str
    role: Role
    endpoint: str
    engine: str
    identity: Mapping[str, Any]
    config: Sequence[ConfigRow]
    refused: Mapping[str, str]


class Observer:
    """Serves one rank whose engine transfers by itself.

    Args:
        watch: returns tracker and builders, from the telemetry and the directory of the admin sockets.

    Raises:
        KvctlError: the environment has an invalid setting of kvctl.
    """

    def __init__(
        self,
        rank: ObservedRank,
        events: EventQueue,
        watch: Callable[[Telemetry, Path], Watched],
    ) -> None:
        settings = load_settings({})
        self.name = rank.name
        self._events = events
        clock = Clock()
        incarnation = clock.wall_ns(clock.now_ns()) >> 20 << 20 | secrets.randbits(20) | 1
        self.region = new_region(settings, rank.name, rank.role, incarnation, clock, logger.warning)
        self._silence = SilentEngine(self.region)
        identity = {
            **rank.identity,
            "version": VERSION,
            "host": host_name(settings["host"]),
            "incarnation": f"{incarnation:016x}",
        }
        now_ns = clock.now_ns()
        self.region.publish(Document.IDENTITY, msgspec.msgpack.encode(identity), now_ns)
        self.region.publish(Document.CONFIG, msgspec.msgpack.encode({"rows": list(rank.config)}), now_ns)
        telemetry = Telemetry(rank.name, rank.role, self.region, clock)
        telemetry.collected = []
        self._tracker, builders = watch(telemetry, Path(self.region.header.directory))
        publisher = DocumentPublisher(self.region, builders)
        publisher.publish_all()
        self._open_events = partial(events.open, self._tracker, publisher)
        self._link = ObserverLink(
            self.region,
            settings,
            {command: partial(_refuse, f"{rank.engine} owns {what}") for command, what in rank.refused.items()},
            endpoint=rank.endpoint,
            note=logger.warning,
            flush=events.flush,
            tick=self._tick,
        )

    def start(self) -> None:
        """Claims the name and starts what answers for this rank; `close` or the end of the process ends both.

        Raises:
            AdminError: another rank has the name, or the socket cannot be bound.
        """
        try:
            self._link.start()
        except BaseException:
            self.region.close()
            raise
        self._open_events()  # not earlier: without a link nothing removes the records of events

    def close(self) -> None:
        """Removes the admin socket and the region."""
        self._link.close()
        self.region.close()

    def turn(self) -> None:
        """Notes that the engine's scheduler begins a turn, and applies the events of hooks."""
        self.region.note_call(0)
        self._events.publish()

    def _tick(self) -> None:
        """Publishes what the engine's objects show, and where its scheduler is if it makes no turns."""
        self._events.publish()
        self._silence.look(time.monotonic_ns(), len(self._tracker.rooms))


def _refuse(why: str, _: dict[str, Any]) -> NoReturn:
    raise RequestRefused(ErrorCode.REFUSED, f"observe mode: {why}")
