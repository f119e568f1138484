"""The agent a worker embeds: the engine's interface in front of the parts, which it starts and ends in order."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from kvctl_agent.admin.actions import AdminActions
from kvctl_agent.admin.queries import AdminQueries
from kvctl_agent.admin.remote_endpoint import remote_endpoint
from kvctl_agent.admin.server import AdminServer
from kvctl_agent.contract.config import Value
from kvctl_agent.contract.connection_cost import ConnectionCost
from kvctl_agent.contract.settings import Settings, load_settings
from kvctl_agent.contract.snapshots import Role
from kvctl_agent.contract.values import shown
from kvctl_agent.errors import DeadlineExceeded, LayoutError, LocalProtocolError
from kvctl_agent.layout.chunks import prefix_pages
from kvctl_agent.layout.layer_grouping import ForwardInfo, Grouping
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.parts import (
    PartFactories,
    build_parts,
    check_arguments,
    check_path,
    close_all,
    copies_ended,
    instances_of,
)
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.rank import Rank
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.runtime.handles import OnState, PoolLimits, Receive, Send, check_flag, check_room, check_timeout
from kvctl_agent.runtime.page_owners import written
from kvctl_agent.security.curve import load_fleet_key
from kvctl_agent.telemetry.hub import Telemetry


class Agent:
    """One rank's agent. One per process in a worker; several per process work.

    Args:
        role: "prefill" or "decode".
        rank: where this worker stands in its instance.
        pool: its KV pool, registered as it is.
        name: unique on this host; the admin socket's name.
        bootstrap: endpoint of the registry (`ipc:///path` or `tcp://address:port`); the first prefill rank serves it.
            A decode rank may be given those of several prefill instances; `receive` may name more.
        model: the whole model's KV; needed where this rank's pool is not all of its layers.
        on_state: called on the control thread at each change of a room's state (of a fake room, by the call that makes
            it); it must only enqueue.
        factories: makers of the parts that a test or a fault injector replaces.
        config: any key of `contract.config`, with origin "argument".

    Attributes:
        parts: what the agent is built of; for tests and tools that look inside.
        admin: the admin socket.
        observe: answers of the admin commands that read.

    Raises:
        ConfigError, MemoryLayoutError, LayoutError: something given is wrong; says what.
        TransportUnavailable: the engine is not installed; says how to get it.
    """

    def __init__(
        self,
        *,
        role: Role,
        rank: Rank,
        pool: KVPool,
        name: str,
        bootstrap: str | Sequence[str],
        model: ModelShape | None = None,
        on_state: OnState | None = None,
        factories: PartFactories | None = None,
        **config: Value,
    ) -> None:
        check_arguments(role, rank, pool, name, model, on_state)
        self.name = name
        self.role = role
        self.rank = rank
        self.pool = pool
        settings = load_settings(config)
        keys = load_fleet_key(settings["fleet_key"])
        remote = remote_endpoint(settings, keys)
        self._check_endpoint: Callable[[str], None] = partial(
            control_endpoints.check_endpoint, insecure=settings["insecure"], keys=keys is not None
        )
        instances = instances_of(role, bootstrap)
        for endpoint in instances:
            self._check_endpoint(endpoint)
        make = factories or PartFactories()
        self.parts = build_parts(name, role, rank, pool, instances, model, on_state, settings, keys, make)
        self.observe = AdminQueries(self.parts)
        operator = AdminActions(self.parts, lambda: self.admin.asker)
        telemetry = self.telemetry
        self.admin = AdminServer(
            name,
            {**self.observe.handlers(), **operator.handlers()},
            self.observe.hello,
            metrics=telemetry.metrics,
            recorder=telemetry.recorder,
            clock=telemetry.clock,
            remote=remote,
        )
        # An engine that forgets to close still exits cleanly. The reference is weak, so that this keeps no agent alive
        # that was never started; the admin thread, whose handlers hold `self`, keeps one that was.
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def settings(self) -> Settings:
        """The configuration, with the origin of every value."""
        return self.parts.settings

    @property
    def incarnation(self) -> int:
        """Random id of this life of the agent."""
        return self.parts.local.incarnation

    @property
    def telemetry(self) -> Telemetry:
        """Counters, rooms, and the flight recorder."""
        return self.parts.telemetry

    @property
    def machine(self) -> PrefillMachine | DecodeMachine:
        """The protocol's state machine, which the control thread owns; to be read only, for tests and debugging."""
        return self.parts.machine

    @property
    def layers(self) -> range:
        """This rank's layers, by their global ids."""
        return self.parts.local.layers

    # ---- life -------------------------------------------------------------------------------------------------

    def start(self) -> Agent:
        """Start the threads and the admin socket; returns at once, `wait_ready` waits for the peers.

        Raises:
            ConfigError: an address is taken or must not be bound.
            AdminError: another agent of this name is alive, or the socket's path is too long.
        """
        parts = self.parts
        parts.lifecycle.start()
        try:
            self.admin.start()
            parts.exports.start(self.observe.metrics, parts.telemetry)
            parts.control.open(parts.lifecycle.instances)
            parts.crew.start()
            for thread in parts.threads:
                thread.start()
            parts.control.start()
        except BaseException:
            self.close()
            raise
        return self

    def wait_ready(self, timeout: float) -> None:
        """Prefill: until registered. Decode: until every prefill rank of the instance has said hello.

        Raises:
            DeadlineExceeded: names who is missing.
            ConfigError: the registry or a peer refuses us; names the differing factor.
        """
        self.parts.lifecycle.wait_ready(check_timeout(timeout))

    def waiting_for(self) -> str | None:
        """What keeps this agent from serving, in words; None when nothing does."""
        return self.parts.lifecycle.waiting_for()

    def serving(self) -> list[str]:
        """Decode: endpoints of the prefill instances whose ranks have all been met, so that rooms come from there."""
        return self.parts.lifecycle.serving()

    @property
    def accepting(self) -> bool:
        """Whether the engine may begin rooms."""
        return self.parts.lifecycle.accepting

    @property
    def draining(self) -> bool:
        """Whether it was told to take no new rooms."""
        return self.parts.lifecycle.draining

    def begin_drain(self) -> None:
        """Take no new rooms from now on; rooms that a decode rank has opened here already are not new.

        Raises:
            LocalProtocolError: it is not running.
        """
        self.parts.lifecycle.begin_drain()

    def resume(self) -> None:
        """Take new rooms again after `begin_drain`.

        Raises:
            LocalProtocolError: its engine has called `drain`, and is about to close it; or it is not running.
        """
        self.parts.lifecycle.resume()

    def drain(self, timeout: float) -> None:
        """Take no new rooms and wait until those in flight have ended.

        Raises:
            DeadlineExceeded: names the rooms still in flight.
        """
        deadline = time.monotonic() + check_timeout(timeout)
        self.parts.lifecycle.leave()
        while rooms := self.parts.handles.rooms:
            if time.monotonic() >= deadline:
                first = ", ".join(str(room) for room in sorted(rooms)[:8])
                raise DeadlineExceeded(f"{self.name}: rooms still in flight after {timeout:g} s: {first}")
            time.sleep(0.002)

    def close(self, timeout: float = 5.0) -> None:
        """Fail what is in flight with a cause, stop all threads, release everything; idempotent, never hangs.

        In a process that was forked off it does nothing: all of it is the parent's.
        """
        timeout = check_timeout(timeout)
        parts = self.parts
        if parts.local.pid != os.getpid():
            return
        before = parts.lifecycle.close()
        if before == "closed":
            return
        deadline = time.monotonic() + timeout

        def left_s() -> float:
            return max(0.1, deadline - time.monotonic())

        if before != "new":
            for room in parts.handles.rooms:
                parts.mailbox.put(ev.AbortRoom(room, f"agent {self.name} is closing"))
            while parts.handles.rooms and time.monotonic() < deadline - timeout / 2:
                time.sleep(0.002)
        ended = True
        for thread in parts.threads:
            ended &= thread.close(left_s())
        parts.mailbox.put(ev.Shutdown(ended and all(worker.drained for worker in parts.workers)))
        ended &= parts.control.close(left_s())
        parts.handles.close()
        try:
            self.admin.close()
        except DeadlineExceeded as error:  # it goes when it has answered
            parts.telemetry.recorder.record("admin", str(error), "warning")
        parts.exports.close()
        parts.transport.close()
        parts.mailbox.close()
        atexit.unregister(self._at_exit)
        if ended:
            copied = copies_ended(parts.copiers, parts.telemetry.recorder)
            if copied:
                parts.connections.close()
            parts.crew.close()
            parts.context.destroy(0)  # not term: it would wait for sockets of a loop that was never started
            # Memory goes last, and only when no thread can touch it any more.
            if copied:
                close_all((parts.buffers, parts.ring))

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the engine's calls -----------------------------------------------------------------------------------

    def layer_groups(self, forward: ForwardInfo) -> Grouping:
        """Prefill: how the layers of one forward are to be sent; the reason is counted.

        No groups: call `send.pages`. Else give the groups to `send.prefetch` and call `send.layers` for each of them.
        """
        if not isinstance(forward, ForwardInfo):
            raise LayoutError(f"forward is {shown(forward)}: it must be a ForwardInfo")
        return self.parts.pipelining.decide(forward)

    def send(self, room: int, *, fake: bool = False) -> Send:
        """Prefill: take part in sending `room`; may come before or after the decode side opens it.

        Args:
            fake: an engine's warm-up or health check: nothing moves, and the room has succeeded at once.

        Raises:
            LocalProtocolError: the room is no unsigned 64-bit number or in use here, or this is no running prefill
                agent.
        """
        room, fake = check_room(room), check_flag("fake", fake)
        self._check_running("prefill", begun=fake or self.parts.machine.knows(room))
        handle = Send(room, _discard if fake else self.parts.mailbox.put, self._bounds(), self.parts.forwards)
        self._begin(handle, ev.SendRoom(room), fake)
        return handle

    def receive(
        self,
        room: int,
        pages: Any,
        *,
        prefill: str | None = None,
        prefix_tokens: int = 0,
        aux_index: int | None = None,
        state_indices: Sequence[Any] = (),
        prefill_only: bool = False,
        fake: bool = False,
    ) -> Receive:
        """Decode: receive `room` into `pages`.

        Args:
            room: its bootstrap_room, an unsigned 64-bit number.
            pages: page numbers in this rank's pool for the prompt after its cached prefix, in prompt order.
            prefill: endpoint of the registry of the prefill instance that computes it; None: the agent's first one.
            prefix_tokens: tokens that this rank has cached already; whole pages.
            aux_index: row of the pool's aux tensor that receives the room's aux row; None for none.
            state_indices: for each state component, in the model's order, the items of this room in this rank's pool.
            prefill_only: the answer is complete after prefill: no KV is wanted, only what `finish` sends.
            fake: as for `send`.

        Raises:
            LocalProtocolError: the room is no unsigned 64-bit number or in use here; a page, item or aux row lies
                outside the pool, is given twice, or belongs to another room that may still be written to; or this is
                no running decode agent.
            LayoutError: the prefix is not page-aligned, or prefix and pages together are too many.
            ConfigError: `prefill` is no endpoint, or one that needs keys.
        """
        room, fake = check_room(room), check_flag("fake", fake)
        self._check_running("decode", begun=fake)
        if prefill is not None:
            self._check_endpoint(prefill)
        prefix = prefix_pages(prefix_tokens, self.pool.page_size)
        wanted = pages, prefix, aux_index, state_indices, prefill_only
        opening = self._bounds().opening(room, prefill or self.parts.lifecycle.instances[0], *wanted)
        handle = Receive(room, _discard if fake else self.parts.mailbox.put, self.pool.device)
        self._begin(handle, opening, fake, written(opening))
        return handle

    def _check_running(self, role: str, *, begun: bool) -> None:
        """`begun`: it is no new room, and may come while draining; nor is a health check."""
        if self.role != role or not (self.accepting or (self.draining and begun)):
            raise LocalProtocolError(
                f"agent {self.name} ({self.role}, {self.parts.lifecycle.state}) takes no {role} rooms"
            )

    def _begin(self, handle: Send | Receive, event: ev.Event, fake: bool, written: tuple[ev.Pages, ...] = ()) -> None:
        if fake:
            self.parts.handles.finish(handle)
        else:
            self.parts.handles.add(handle, written)
            self.parts.mailbox.put(event)

    def _bounds(self) -> PoolLimits:
        slots = tuple(memory.num_slots for memory in self.pool.segments if memory.shard.segment.state)
        return PoolLimits(self.pool.num_pages, self.pool.aux_slots, self.layers, slots)

    def set_pipeline(self, mode: str) -> None:
        """Change how forwards are cut from now on: off, on, measured, or a number of layers per group."""
        self.parts.pipelining.set(mode)

    def set_path(self, path: str) -> None:
        """Change how parts move from now on: a value of the key `path`."""
        check_path(path, self.pool)
        self.parts.chooser.path = path
        self.parts.connections.calibrate_once()

    def measure_connection(self) -> ConnectionCost:
        """Prefill: measure the connection to the first connected peer, between parts.

        Raises:
            LocalProtocolError: no peer is connected, or it offers no memory to measure with.
            DeadlineExceeded: the transfer worker was too busy.
        """
        if not (self.accepting or self.draining) or not self.parts.workers:
            raise LocalProtocolError(f"{self.name} ({self.parts.lifecycle.state}) has no connection to measure")
        return self.parts.connections.measure()


def _discard(event: ev.Event) -> None:
    """What a fake room's handle tells nobody."""


def _close_if_alive(reference: weakref.ref[Agent]) -> None:
    if (agent := reference()) is not None:
        agent.close()
