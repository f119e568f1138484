"""`Agent`, the facade through which an engine's worker sends and receives KV cache.

It builds, starts and closes the components in `kvctl_agent.parts`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from kvctl_agent.admin.actions import AdminActions
from kvctl_agent.admin.documents import builders, versions
from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.contract.config import Value
from kvctl_agent.contract.settings import Settings, load_settings
from kvctl_agent.contract.snapshots import Integration, Role
from kvctl_agent.contract.states import UNREGISTERED
from kvctl_agent.contract.values import shown
from kvctl_agent.errors import DeadlineExceeded, LayoutError, LocalProtocolError
from kvctl_agent.gil import SwitchInterval
from kvctl_agent.layout.layer_grouping import ForwardInfo, Grouping
from kvctl_agent.layout.plan import check_dp_group
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.layout.sizes import as_list
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.observer.documents import Builder, RegionDocuments
from kvctl_agent.observer.endpoints import remote_endpoint
from kvctl_agent.observer.link import ObserverLink
from kvctl_agent.parts import (
    AgentParts,
    AgentSpec,
    PartFactories,
    check_arguments,
    check_path,
    check_same_geometry,
    instances_of,
    with_suffix,
)
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.messages import MAX_RENEWED
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.rank import Rank
from kvctl_agent.request_id import check_request_id, valid_traceparent
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.runtime.bootstrap import decline
from kvctl_agent.runtime.handles import (
    OnState,
    Receive,
    Send,
    check_flag,
    check_prompt,
    check_reason,
    check_room,
    check_timeout,
)
from kvctl_agent.runtime.page_owners import written
from kvctl_agent.security.curve import load_fleet_key
from kvctl_agent.telemetry import engine_calls as calls
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.region import Document, MemoryReader
from kvctl_agent.transport.cost_probe import ConnectionCost

H = TypeVar("H", Send, Receive)

_CLOSE_S = 5.0
_SHORTEST_STOP_S = 0.1  # time that each thread has to stop, even if the deadline has passed


class Agent:
    """KV transfer agent of one rank. A worker process usually has one agent, and may have several.

    Args:
        role: "prefill" or "decode".
        rank: coordinates of this worker in its instance.
        pool: the worker's KV pool; it is registered in place.
        name: name of the agent and of its admin socket, unique on this host and among all connected agents; the
            setting `name_suffix` is appended after an @.
        bootstrap: endpoint of the bootstrap registry (`ipc:///path` or `tcp://address:port`), which rank 0 of the
            prefill instance serves; there with port 0 on a free port, which `Agent.bootstrap` has. A decode rank may
            pass a list with one endpoint for each prefill instance, or None; `connect` and `receive` name further ones.
        model: shape of the whole model's KV; required if this rank's pool does not have all layers.
        on_state: called with the handle and the new state at each state change of a room, and with the unchanged state
            when a prefill engine may reuse pages: all of a room's are sent (`Send.sent`), or those that it recalled
            are not read any more (`Send.recalled`). It runs on the control thread (for a fake room, on the thread that
            calls `send` or `receive`) and must only enqueue.
        factories: constructors of the components that tests and fault injection replace.
        integration: the engine that the agent is part of, as `kvctl status` shows it and as peers compare it; None if
            it is embedded otherwise.
        defaults: defaults of this engine for configuration keys; files, environment and `config` override them.
        config: values of configuration keys declared in `contract.config`; `kvctl config` shows the origin "argument".

    Attributes:
        name: the agent's whole name.
        parts: the agent's components, for tests and debugging.
        admin: the link to the observer, which serves the admin socket.
        observe: the reading admin commands, as methods.

    Raises:
        ConfigError, MemoryLayoutError, LayoutError: an argument is invalid.
        DeviceError: memory of the device cannot be allocated.
        TransportUnavailable: the transfer engine is not installed.
    """

    def __init__(
        self,
        *,
        role: Role,
        rank: Rank,
        pool: KVPool,
        name: str,
        bootstrap: str | Sequence[str] | None = None,
        model: ModelShape | None = None,
        on_state: OnState | None = None,
        factories: PartFactories | None = None,
        integration: Integration | None = None,
        defaults: Mapping[str, Value] | None = None,
        **config: Value,
    ) -> None:
        check_arguments(role, rank, pool, name, model, on_state)
        settings = load_settings(config, defaults=defaults)
        name = with_suffix(name, settings["name_suffix"])
        self.name = name
        self.role = role
        self.rank = rank
        self.pool = pool
        keys = load_fleet_key(settings["fleet_key"])
        remote = remote_endpoint(settings, keys)
        self._check_endpoint: Callable[..., None] = partial(
            control_endpoints.check_endpoint, insecure=settings["insecure"], keys=keys is not None
        )
        instances = instances_of(role, bootstrap)
        for endpoint in instances:
            self._check_endpoint(endpoint, bound=role == "prefill" and not any(rank.coord))
        if role == "prefill":
            control = control_endpoints.control_address(instances[0], name, settings["listen"])
            self._check_endpoint(control, bound=True)
        factories = factories or PartFactories()
        self._spec = AgentSpec(name, role, rank, model, on_state, settings, keys, factories, integration)
        self.parts = AgentParts(self._spec, pool, instances)
        try:
            telemetry = self.telemetry
            self._documents: dict[Document, Builder] = {}
            self._publish(self.parts)
            self.admin = ObserverLink(
                telemetry.region,
                settings,
                self._actions(),
                documents=RegionDocuments(MemoryReader(telemetry.region), builders=self._documents),
                flush=partial(telemetry.flush, wait=True),
                remote=remote,
                wake=self.parts.mailbox.fileno(),
                note=partial(telemetry.recorder.record, "observer", severity="warning"),
            )
            self.observe = self.admin.queries
        except BaseException:
            self.parts.release(ended=self.parts.stop(_SHORTEST_STOP_S))
            self.telemetry.region.close()
            raise
        self._released = False  # the components, so that nothing accesses the pool any more
        self._switch_interval = SwitchInterval()
        # An engine that does not close its agent still exits cleanly. The reference is weak so that an agent that was
        # never started can be collected; one that was is referenced by the handlers of its admin thread.
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    def _actions(self) -> Mapping[str, Callable[[dict[str, Any]], Any]]:
        return AdminActions(self.parts, lambda: self.admin.client).handlers()

    def _publish(self, parts: AgentParts) -> None:
        """Has the control loop publish the documents of new components."""
        self._documents.update(builders(parts, self._spec.integration))
        self._publisher = DocumentPublisher(self.telemetry.region, self._documents, versions(parts))
        parts.control.add_task(self._publisher)

    @property
    def settings(self) -> Settings:
        """The agent's configuration, with the origin of every value."""
        return self.parts.settings

    @property
    def incarnation(self) -> int:
        """Id under which peers know this agent; a restarted one of the same name has a different, higher id.

        `register` changes it, too.
        """
        return self.parts.local.incarnation

    @property
    def bootstrap(self) -> str | None:
        """Endpoint of the agent's registry, or of its first one, for the other ranks and for `receive(prefill=...)`.

        None on a decode rank without a registry, and before `start` if the registry has port 0, which `start` binds.
        """
        first, *_ = self.parts.lifecycle.all_instances or (None,)
        return None if first is None or control_endpoints.any_port(first) else first

    @property
    def telemetry(self) -> Telemetry:
        """The agent's telemetry: counters, records of the active rooms and the flight recorder."""
        return self.parts.telemetry

    @property
    def machine(self) -> PrefillMachine | DecodeMachine:
        """The protocol's state machine, owned by the control thread; read-only, for tests and debugging."""
        return self.parts.machine

    @property
    def layers(self) -> range:
        """Global ids of the layers in this rank's pool."""
        return self.parts.local.layers

    # ---- lifecycle -------------------------------------------------------------------------------------------------

    def start(self) -> Agent:
        """Starts the threads and the admin socket, and returns the agent without waiting for peers (see `wait_ready`).

        If it raises, the agent is closed.

        Raises:
            ConfigError: a configured endpoint is in use or cannot be bound, or the package of an exporter is missing.
            AdminError: another agent with this name is running, or the path of the socket is too long.
            LocalProtocolError: the agent was started before, or another thread has closed it meanwhile.
        """
        parts = self.parts
        with self._change("start"):
            parts.lifecycle.check_new()
            try:
                self._start()
                parts.lifecycle.started()
            except BaseException:
                parts.lifecycle.close(time.monotonic() + _CLOSE_S)  # the end of the change shuts the agent down
                raise
        return self

    def _start(self) -> None:
        parts = self.parts
        self._publisher.publish_all()
        self.admin.start()
        self._switch_interval.set(parts.settings["switch_interval_ms"])
        parts.start(self.admin.remote_address, str(self.admin.path))

    def connect(self, prefill: str, *, keep: bool = True) -> None:
        """Decode: connects to a further prefill instance; returns without waiting for it (see `serving`).

        Args:
            prefill: endpoint of the instance's registry.
            keep: whether to stay connected until `disconnect`. Otherwise the instance is forgotten, as one that only
                `receive` has named: when no room needs it and its ranks have closed, were replaced, or have been gone
                for some time. A room that names it again connects anew.

        Raises:
            ConfigError: `prefill` is not an endpoint, or needs keys.
            LocalProtocolError: this is not a decode agent, or it is closed.
        """
        self._check_connects()
        self._check_endpoint(prefill)
        self.parts.lifecycle.add_instance(prefill, keep=keep)

    def disconnect(self, prefill: str) -> None:
        """Decode: forgets a prefill instance that has ended or was replaced; returns without waiting.

        Rooms that are open there fail with code KV_PEER_LOST. Memory that a rank of the instance may still write stays
        quarantined until the rank has drained or is proven to have ended. Does nothing if the instance is unknown. A
        later `connect`, or `receive` with this endpoint, connects again.

        Args:
            prefill: endpoint of the instance's registry.

        Raises:
            LocalProtocolError: this is not a decode agent, or it is closed.
        """
        self._check_connects()
        self.parts.lifecycle.remove_instance(prefill)

    def _check_connects(self) -> None:
        if self.role != "decode":
            raise LocalProtocolError(f"agent {self.name} ({self.role}) connects to no prefill instance")

    def wait_ready(self, timeout: float) -> None:
        """Waits until the rank is registered (prefill) or connected to every rank of its prefill instances (decode).

        A decode rank whose engine names the prefill instances with its rooms waits for none.

        Args:
            timeout: longest time to wait, in seconds.

        Raises:
            DeadlineExceeded: the message names the missing ranks.
            ConfigError: the registry or a peer refuses this agent; the message names the differing factor.
        """
        self.parts.lifecycle.wait_ready(check_timeout(timeout))

    def waiting_for(self) -> str | None:
        """Returns a text that names what this agent waits for; None if it waits for nothing."""
        return self.parts.lifecycle.waiting_for()

    def serving(self) -> list[str]:
        """Decode: returns the endpoints of the prefill instances whose ranks are all connected."""
        return self.parts.lifecycle.serving()

    def kv_dtype(self, prefill: str) -> str | None:
        """Decode: returns the dtype of the KV of a prefill instance, as `KVPool.from_tensors` has it; "" if unknown.

        Args:
            prefill: endpoint of its registry.

        Returns:
            The dtype; None if the instance is not connected.
        """
        return self.parts.lifecycle.kv_dtype(prefill)

    @property
    def accepting(self) -> bool:
        """Whether the agent accepts new rooms: it is running and not draining."""
        return self.parts.lifecycle.accepting

    @property
    def draining(self) -> bool:
        """Whether the agent accepts no new rooms because the engine or an operator is draining it."""
        return self.parts.lifecycle.draining

    def begin_drain(self) -> None:
        """Stops accepting new rooms; a prefill agent still accepts `send` for rooms that a decode rank has opened here.

        Raises:
            LocalProtocolError: the agent is not running.
        """
        self.parts.lifecycle.begin_drain()

    def resume(self) -> None:
        """Accepts new rooms again after `begin_drain`.

        Raises:
            LocalProtocolError: the engine has called `drain` and is about to close the agent, or it is not running.
        """
        self.parts.lifecycle.resume()

    def drain(self, timeout: float) -> None:
        """Stops accepting new rooms and waits until those in flight have ended and peers know it; `resume` fails then.

        Args:
            timeout: longest time to wait, in seconds.

        If another thread closes or unregisters the agent meanwhile, their rooms end by that.

        Raises:
            DeadlineExceeded: the message names the rooms still in flight.
        """
        timeout = check_timeout(timeout)
        with self.telemetry.region.call(calls.DRAIN):
            self.parts.lifecycle.drain(timeout)

    def unregister(self, timeout: float = 30.0) -> None:
        """Gives the pool's memory back to the engine, which may then free or unmap it, as in vLLM's sleep mode.

        The agent stops accepting rooms, waits for those in flight, tells its peers that it is gone, and releases the
        transport and its staging memory. The admin socket stays. `register` ends this state.

        Args:
            timeout: longest time to wait for the rooms in flight, in seconds.

        Raises:
            DeadlineExceeded: something of the named rooms may still be in flight, and the agent accepts rooms again,
                unless it was draining before; or a thread or copy has not ended, and the agent can only be closed. The
                pool must not be freed.
            LocalProtocolError: the agent is not running, an operator has resumed it meanwhile, or another thread
                starts, unregisters, registers or closes it.
        """
        deadline = time.monotonic() + check_timeout(timeout)
        with self._change("unregister"):
            parts = self.parts
            parts.lifecycle.unregister_when_idle(deadline, timeout)
            self.admin.replace({}, None)
            ended = parts.stop(max(_SHORTEST_STOP_S, deadline - time.monotonic()))
            self._released = parts.release(ended=ended)
            if not self._released:
                raise DeadlineExceeded(f"{self.name}: its control thread or a copy has not ended: its memory must stay")
            parts.machine.peers.clear()  # shown by the admin socket
            parts.telemetry.recorder.record("memory", UNREGISTERED)
            self._publisher.publish_all()  # the loop that did so has ended

    def register(self, pool: KVPool | None = None) -> None:
        """Takes memory for the KV pool again after `unregister`; returns without waiting for peers (see `wait_ready`).

        Args:
            pool: a pool of the same geometry, at any addresses; None: the same pool, whose memory is at its old
                addresses again.

        Raises:
            MemoryLayoutError: the pool's geometry differs; the text names how.
            LocalProtocolError: the agent is not unregistered, has not given its memory back, or another thread
                registers or closes it.
            ConfigError, DeviceError, TransportUnavailable: as `Agent` and `start`. The agent stays unregistered.
        """
        with self._change("register"):
            former, former_pool, lifecycle = self.parts, self.pool, self.parts.lifecycle
            if lifecycle.state != "unregistered":
                raise LocalProtocolError(f"agent {self.name} is {lifecycle.state}, not unregistered")
            if not self._released:
                text = "has not given its memory back: close it and create another"
                raise LocalProtocolError(f"agent {self.name} {text}")
            pool = self.pool if pool is None else pool
            check_arguments(self.role, self.rank, pool, self.name, self._spec.model, self._spec.on_state)
            check_same_geometry(former, pool, self._spec.model)
            parts = AgentParts(self._spec, pool, lifecycle.instances, former)
            try:
                if lifecycle.drains_again:
                    parts.mailbox.put(ev.Drain(True))
                opened = parts.start(self.admin.remote_address, str(self.admin.path))
                self.pool, self.parts = pool, parts
                lifecycle.register(opened, parts.registries, parts.machine, parts.mailbox, parts.handles)
                self._released = False
            except BaseException:
                self.pool, self.parts = former_pool, former
                parts.release(ended=parts.stop(_SHORTEST_STOP_S))
                raise
            self._publish(parts)
            self.admin.replace(self._actions(), parts.mailbox.fileno())

    @contextlib.contextmanager
    def _change(self, call: str) -> Iterator[None]:
        """Runs `start`, `unregister` or `register`, one at a time; then shuts the agent down if it has been closed."""
        lifecycle = self.parts.lifecycle
        lifecycle.begin(call)
        try:
            with self.telemetry.region.call(calls.CALLS.index(call)):
                yield
        finally:
            if lifecycle.end():
                self._shut_down()

    def close(self, timeout: float = _CLOSE_S) -> None:
        """Fails the rooms in flight, stops all threads and releases all resources, within about `timeout` seconds.

        From its start no room is begun any more: `send` and `receive` raise LocalProtocolError. Any thread may call it,
        also if another one is in `start`, `unregister`, `register` or `close`. It then waits for that call, which gives
        up as soon as it can, raises LocalProtocolError unless it has just been completed, and releases everything
        before it returns: even if that is later than `timeout`, nothing is left.

        Idempotent; if a thread or a copy has not ended in time, a further call continues. In a forked child it does
        nothing, because threads and memory belong to the parent.
        """
        timeout = check_timeout(timeout)
        if self.parts.local.pid != os.getpid():
            return
        lifecycle = self.parts.lifecycle
        with self.telemetry.region.call(calls.CLOSE):
            if lifecycle.close(time.monotonic() + timeout):
                self._shut_down()
            elif not lifecycle.wait_closed(timeout):
                text = f"another thread has not closed the agent within {timeout:g} s, and will do it later"
                self.telemetry.recorder.record("close", text, "warning")

    def _shut_down(self) -> None:
        """Releases everything; the agent is closed, and no other thread changes it."""
        lifecycle = self.parts.lifecycle
        try:
            self._release(lifecycle.closed_from in ("running", "draining"), lifecycle.deadline_s)
        finally:
            lifecycle.closed(complete=self._released)

    def _release(self, running: bool, deadline_s: float) -> None:
        """Releases everything; may be repeated.

        Args:
            running: rooms may be open, whose peers are told.
            deadline_s: monotonic time at which it should have ended.
        """
        parts = self.parts
        if running:
            parts.lifecycle.abort_rooms((time.monotonic() + deadline_s) / 2)
        ended = self._released or parts.stop(max(_SHORTEST_STOP_S, deadline_s - time.monotonic()))
        self._switch_interval.restore()
        try:
            self.admin.close()
        except DeadlineExceeded as error:  # a handler is still running; the thread ends after it
            parts.telemetry.recorder.record("admin", str(error), "warning")
        atexit.unregister(self._at_exit)
        self.telemetry.region.close()
        if not self._released:
            self._released = parts.release(ended=ended)

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the engine's calls -----------------------------------------------------------------------------------

    def layer_groups(self, forward: ForwardInfo) -> Grouping:
        """Prefill: returns the layer groups in which to send the KV of one forward, and counts the reason for them.

        If the result has no groups, call `Send.pages`. Otherwise pass the groups to `Send.prefetch` and call
        `Send.layers` for each group.
        """
        self.telemetry.region.note_call(calls.LAYER_GROUPS)
        if not isinstance(forward, ForwardInfo):
            raise LayoutError(f"forward is {shown(forward)}: it must be a ForwardInfo")
        return self.parts.pipelining.decide(forward)

    def send(
        self,
        room: int,
        *,
        tokens: int | None = None,
        digest: int | None = None,
        fake: bool = False,
        request_id: str = "",
        traceparent: str = "",
    ) -> Send:
        """Prefill: starts to send `room`; decode ranks may open the room before or after this call.

        If a decode rank has passed another length or digest, the room fails with KV_PLAN_MISMATCH on every rank. What
        one side does not pass is not compared.

        Args:
            room: the request's bootstrap_room, an unsigned 64-bit number.
            tokens: length of the prompt whose KV is sent, with all that is cached on either side.
            digest: `prompt_digest` of it.
            fake: whether the room is a dummy for a warm-up or health check: nothing is transferred, and the room
                succeeds at once.
            request_id: the engine's id of the request, cut to 256 characters; shown beside the room, on this rank only.
            traceparent: W3C trace context of the request, the parent of the room's OpenTelemetry span; ignored if it
                is invalid.

        Raises:
            LocalProtocolError: the room or digest is not an unsigned 64-bit number, the room is in use here, another dp
                group computes it, `tokens` is not a length, `request_id` is not a string, or this is not a prefill
                agent that accepts the room.
        """
        parts = self.parts
        region = parts.telemetry.region
        region.note_call(calls.SEND)
        room, fake = check_room(room), check_flag("fake", fake)
        request_id, traceparent = check_request_id(room, request_id), valid_traceparent(traceparent)
        prompt = check_prompt(room, tokens, digest)
        begun = fake or parts.machine.knows(room)
        self._check_takes("prefill", begun=begun)
        if not fake:
            check_dp_group(parts.local.side, parts.local.coord, room, self.name)
        # An engine that asks for the state once per forward would otherwise learn only after the next one that the room
        # is opened already.
        prefix = None if fake else parts.machine.opened_prefix(room)
        event = ev.SendRoom(room, request_id, traceparent, prefix, *prompt)
        post = _discard if fake else parts.mailbox.put
        handle = Send(room, post, region, parts.limits, parts.event_poller, prefix)
        return self._begin(parts, handle, event, fake, begun)

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
        tokens: int | None = None,
        digest: int | None = None,
        group_pages: Sequence[Any] = (),
        fake: bool = False,
        request_id: str = "",
        traceparent: str = "",
    ) -> Receive:
        """Decode: starts to receive the KV of `room` into `pages`.

        Args:
            room: the request's bootstrap_room, an unsigned 64-bit number.
            pages: page numbers in this rank's pool for the prompt after its cached prefix, in prompt order. On cp ranks
                that share a prompt, a page has this rank's tokens of `page_size * cp` consecutive ones, and every rank
                passes as many pages.
            prefill: registry endpoint of the prefill instance that computes the room, to which the agent connects if
                necessary, and which it forgets as `connect` says; None: the agent's first one.
            prefix_tokens: tokens of the prompt that are cached here; a multiple of the page size times cp.
            aux_index: row of the pool's aux tensor that receives the room's aux row; None without one.
            state_indices: for each state component, in the model's order, the room's items in this rank's pool.
            prefill_only: whether the request ends with its prefill, so that only aux row and state are transferred.
            tokens: length of the prompt with its cached prefix; the room fails if prefill computes another one. Needed
                if the prefill side has smaller pages or the decode side has several cp ranks, since the last page may
                then be filled in part; and with KV groups.
            digest: `prompt_digest` of the prompt, as for `send`.
            group_pages: for each KV group, in the model's order, the pages in its pool that receive the last pages of
                the prompt: those in the group's window that are not cached here.
            fake, request_id, traceparent: as for `send`.

        Raises:
            LocalProtocolError: the room is not an unsigned 64-bit number or is in use here; a page, item or aux row is
                outside the pool, given twice, or belongs to another room that may still be written to; `request_id` is
                not a string; this is not a decode agent that accepts new rooms; or it knows no prefill instance.
            LayoutError: the prefix is not page-aligned, or prefix and pages together are too many, or not as many as
                `tokens` need.
            ConfigError: `prefill` is not an endpoint, or needs keys.
        """
        parts = self.parts
        region = parts.telemetry.region
        region.note_call(calls.RECEIVE)
        room, fake = check_room(room), check_flag("fake", fake)
        request_id, traceparent = check_request_id(room, request_id), valid_traceparent(traceparent)
        self._check_takes("decode", begun=fake)
        instance = self.bootstrap or "" if fake and prefill is None else self._instance(prefill, f"room {room}: ")
        wanted = pages, prefix_tokens, aux_index, state_indices, prefill_only, tokens, group_pages, digest
        opening = parts.limits.opening(room, instance, *wanted)
        if request_id or traceparent:
            opening = msgspec.structs.replace(opening, request_id=request_id, traceparent=traceparent)
        handle = Receive(room, _discard if fake else parts.mailbox.put, region, parts.pool.device)
        return self._begin(parts, handle, opening, fake, fake, written(opening))

    def batch(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for calls of one thread for many rooms, which are handled together at its end.

        The control loop then makes one turn for all of them, and peers get one message. It is meant for the
        milliseconds in which a scheduler passes the rooms of one forward: do not wait for a room inside.
        """
        return self.parts.mailbox.batch()

    def is_open(self, room: int) -> bool:
        """Whether a room of this number has not ended here, or its pages may not be reused yet: it is in use."""
        return self.parts.handles.is_open(room)

    def refuse(self, room: int, reason: str, *, prefill: str | None = None) -> None:
        """Decode: ends a room for which this engine has no pages and will have none; returns without waiting.

        The room fails with code ABORTED on every prefill rank that computes it, also if the prefill engine calls `send`
        later, and on the decode ranks that share it. A room that is open here is ended by `Receive.abort` instead.

        Args:
            room: the request's bootstrap_room, an unsigned 64-bit number.
            reason: text, cut to 4096 characters.
            prefill: registry endpoint of the prefill instance, to which the agent connects if necessary; None: the
                agent's first one.

        Raises:
            LocalProtocolError: the room is not an unsigned 64-bit number or is open here, `reason` is not a string,
                this is not a running decode agent, or it knows no prefill instance.
            ConfigError: `prefill` is not an endpoint, or needs keys.
        """
        parts = self.parts
        parts.telemetry.region.note_call(calls.REFUSE)
        room = check_room(room)
        parts.lifecycle.check_takes("decode", begun=True)
        reason = check_reason(room, reason)
        if self.is_open(room):
            raise LocalProtocolError(f"room {room} is open on {self.name}: abort it")
        opening = parts.limits.opening(room, self._instance(prefill, f"room {room}: "), (), 0, None, (), True, None, ())
        parts.lifecycle.post(msgspec.structs.replace(opening, refusal=reason))

    def decline(self, room: int, reason: str, *, prefill: str, timeout_s: float = 5.0) -> None:
        """Prefill: tells another prefill instance that its engine will not send a room; waits for the answer.

        The room fails with code DECLINED on the decode ranks that have opened it there, or do so later. Arguments and
        errors are those of `refuse`.

        Raises:
            ConfigError: also if file descriptors are short.
            DeadlineExceeded: the instance has not answered; the text names it.
        """
        room = check_room(room)
        self.parts.lifecycle.check_takes("prefill", begun=True)
        self._check_endpoint(prefill)
        with self.telemetry.region.call(calls.DECLINE):
            decline(prefill, room, check_reason(room, reason), self._spec.keys, check_timeout(timeout_s))

    def renew(self, rooms: Sequence[int], *, prefill: str | None = None) -> None:
        """Decode: asks a prefill instance to keep rooms that this engine is going to open.

        Restarts the deadlines of rooms that wait there to be opened: `hold_s`, if it is set, of computed rooms, and
        `bootstrap_timeout_s` of others. To be repeated several times within the shorter of the two: the message is not
        acknowledged, and a prefill rank that does not know a room ignores it. Does nothing for rooms that are open.

        Args:
            rooms: room numbers, at most 65536.
            prefill: registry endpoint of the prefill instance; None: the agent's first one.

        Raises:
            LocalProtocolError: a room is not an unsigned 64-bit number, there are too many, or this is not a running
                decode agent.
            ConfigError: `prefill` is not an endpoint, or needs keys.
        """
        self.telemetry.region.note_call(calls.RENEW)
        self.parts.lifecycle.check_takes("decode", begun=True)
        listed = as_list(rooms)
        if listed is None:
            raise LocalProtocolError(f"rooms is {shown(rooms)}: it must be a list of room numbers")
        numbers = tuple(map(check_room, listed))
        if len(numbers) > MAX_RENEWED:
            raise LocalProtocolError(f"{len(numbers)} rooms to renew: at most {MAX_RENEWED} at once")
        self.parts.lifecycle.post(ev.RenewRooms(self._instance(prefill), numbers))

    def _instance(self, prefill: str | None, where: str = "") -> str:
        """Returns the endpoint of a prefill instance; None: that of the agent's first one.

        Args:
            where: prefix of an error text.

        Raises:
            LocalProtocolError: the agent knows no instance.
            ConfigError: `prefill` is not an endpoint, or needs keys.
        """
        if prefill is not None:
            self._check_endpoint(prefill)
        if (instance := prefill or self.bootstrap) is None:
            text = f"{where}no prefill instance is known to {self.name}: pass prefill=, or call connect"
            raise LocalProtocolError(text)
        return instance

    def _check_takes(self, role: str, *, begun: bool) -> None:
        """As `Lifecycle.check_takes`, for a room; counts and records a refusal."""
        try:
            self.parts.lifecycle.check_takes(role, begun=begun)
        except LocalProtocolError as error:
            self.telemetry.metrics.add("kvctl_rooms_refused_total", 1, "state" if self.role == role else "role")
            self.telemetry.recorder.record("room", str(error), "warning")
            raise

    def _begin(
        self,
        parts: AgentParts,
        handle: H,
        event: ev.Event,
        fake: bool,
        begun: bool,
        written: tuple[ev.Pages, ...] = (),
    ) -> H:
        """Begins a room, and returns its handle.

        Args:
            parts: the components for which the handle was made: `register` in another thread replaces them.
            begun: whether the room may begin although the agent is draining.
            written: the memory that the room receives into.
        """
        if fake:
            parts.handles.finish(handle)
        else:
            parts.lifecycle.open_room(parts.handles, handle, event, written, begun)
        return handle

    def set_pipeline(self, mode: str) -> None:
        """Changes the layer grouping of later forwards: `mode` is off, on, auto, or the layers per group."""
        self.parts.pipelining.set(mode)

    def set_path(self, path: str) -> None:
        """Changes the path of later parts; `path` is a value of the configuration key `path`."""
        check_path(path, self.pool)
        self.parts.chooser.path = path
        self.parts.connections.calibrate_once()

    def measure_connection(self) -> ConnectionCost:
        """Prefill: measures the cost of writes to the first connected peer, between parts.

        Raises:
            LocalProtocolError: no peer is connected, or the peer offers no scratch memory.
            DeadlineExceeded: the rank was too busy.
        """
        if not (self.accepting or self.draining) or self.parts.transfers is None:
            raise LocalProtocolError(f"{self.name} ({self.parts.lifecycle.state}) has no connection to measure")
        return self.parts.connections.measure()


def _discard(event: ev.Event) -> None:
    """Ignores an event of a fake room."""


def _close_if_alive(reference: weakref.ref[Agent]) -> None:
    if (agent := reference()) is not None:
        agent.close()
