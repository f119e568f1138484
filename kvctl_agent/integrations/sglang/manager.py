"""KV manager of the backend: one agent per SGLang rank, and the states of its rooms in SGLang's tables.

SGLang polls a table of states. The agent's control thread writes there how far a room is (`on_state`); the scheduler's
thread adds a room, fails it, and removes it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel, get_serving

from kvctl_agent import KvctlError, KVPool, ModelShape, ParallelConfig, Rank, Receive, RoomState, Send
from kvctl_agent.contract.addresses import Address, parse_endpoint
from kvctl_agent.contract.choices import ALL, RANK0
from kvctl_agent.contract.sglang import mode
from kvctl_agent.contract.values import shown
from kvctl_agent.integrations.engine_agent import EngineAgent, attempt
from kvctl_agent.integrations.sglang import layer_pipelining, pools, releases, scheduler_turns, versions
from kvctl_agent.integrations.sglang.bootstrap_http import CLIENT
from kvctl_agent.integrations.sglang.rank_names import dp_rank, rank_axes
from kvctl_agent.integrations.sglang.unsupported import check_supported

logger = logging.getLogger("kvctl")

_CLOSE_S = 5.0
_RING_MB = 1024
_MIN_S, _MAX_S = 0.1, 86400.0  # limits of the settings that are durations
_MOST_MISFITS = 256
_MOST_DECLINES = 16  # at a time; each takes a thread, and seconds if the servers do not answer
_UNDECLINED = "kvctl: decode servers may wait for room %s, which was refused: %s"
_FAILED_ELSEWHERE = "failed on another rank of this server, which knows why"
_LOOK_UP_S = 2.0  # how often a prefill server that is not connected is looked up, on the scheduler's thread

_Room = TypeVar("_Room", Send, Receive)


class KvctlKVManager(CommonKVManager):
    """Manager of one prefill or decode rank: owns the rank's agent.

    Attributes:
        on_gpu: whether the rank's pool is in the memory of a GPU.
        unhooked: whether layers should be pipelined and this release of SGLang does not fit the hooks.
    """

    unhooked = False
    supports_role_switch = True
    reports_transfer_latency = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        """Starts the agent; a prefill rank registers with SGLang's bootstrap server.

        Raises:
            ValueError: SGLang runs with an option that this backend does not support; the text names it.
            ConfigError: the agent's configuration is invalid, such as a missing key for other hosts.
        """
        prefill = disaggregation_mode == DisaggregationMode.PREFILL
        check_supported(args, server_args, prefill=prefill, mla=bool(is_mla_backend or args.is_hybrid_mla_backend))
        self.supports_deferred_decode_kv_release = (
            get_parallel().attn_tp_size == 1 or releases.ranks_agree_on_held_pages()
        )
        # Rooms in SGLang's tables, whose states `on_state` writes there.
        self._open: dict[int, Send | Receive] = {}
        self._open_lock = threading.Lock()
        self._declines = threading.BoundedSemaphore(_MOST_DECLINES)
        # Ended rooms whose pages SGLang holds until nothing is in flight; a number can be used again before.
        self._draining: dict[int, list[Receive]] = {}
        self._instances: dict[tuple[str, int], str] = {}  # registry of each prefill server and dp rank
        self._looked_up: dict[tuple[str, int], float] = {}  # monotonic time of the last look-up
        self._misfits: dict[str, str] = {}  # why a prefill server does not fit, as logged
        # In all that SGLang asks bootstrap servers, their answers get limits.
        conn.requests = CLIENT
        # The base class registers a prefill rank, which starts the agent.
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.server_socket.close(linger=0)  # of SGLang's own backends, open to other hosts; agents have their own
        if not prefill:
            self.agent = self._start(self._geometry(), None)
            self._heartbeat = self._start_heartbeat_checker_thread()
        else:
            self._kv_replica_factor = 1
            # Every cp rank takes part in every room; the agent's plan decides which of them send.
            self.is_dummy_cp_rank = False
            # SGLang's sender refuses rooms by this rank, which is 0 on every replica of a server without DP attention
            # (--dp-size alone).
            self.attn_dp_rank = dp_rank(self)

    # ---- the agent -------------------------------------------------------------------------------------------------

    def register_to_bootstrap(self) -> None:
        """Starts the agent of a prefill rank, and registers with SGLang's bootstrap server.

        The first rank of each dp group serves the registry of a prefill instance, whose address is in its row there.
        The other ranks learn it by a collective call: the bootstrap server answers only when all ranks are registered.
        """
        geometry = self._geometry()
        if self.attn_tp_rank == self.attn_cp_rank == self.pp_rank == 0:
            try:
                self.agent = self._start(geometry, f"tcp://{self._address}:0")
            except KvctlError as error:
                self._gather((dp_rank(self), error))  # the other ranks wait for it
                raise
            self.local_ip, self.rank_port = self._host, parse_endpoint(self.agent.bootstrap).port
            self._gather((dp_rank(self), self.agent.bootstrap))
        else:
            registry = dict(self._gather((-1, None)))[dp_rank(self)]
            if isinstance(registry, KvctlError):
                raise registry
            self.agent = self._start(geometry, registry)
        super().register_to_bootstrap()

    def _geometry(self) -> tuple[KVPool, list[ModelShape]]:
        """Returns the rank's pool, and the shape of each pipeline stage; none if there is one stage."""
        pool, self._components = pools.pool_of(self.kv_args, self.attn_tp_size, mla=bool(self.is_mla_backend))
        self.on_gpu = pool.device is not None
        if self.pp_size == 1:
            return pool, []
        shapes = dict(self._gather((self.pp_rank, pool.shape())))
        return pool, [shapes[stage] for stage in range(self.pp_size)]

    def _start(self, geometry: tuple[KVPool, list[ModelShape]], registry: str | None) -> EngineAgent:
        """Creates and starts the agent of this rank; `registry` is that of its own prefill instance."""
        prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        pool, stages = geometry
        rank = Rank(
            dp=0 if prefill else dp_rank(self),
            dp_size=1 if prefill else max(self.attn_dp_size, self.system_dp_size),
            pp=self.pp_rank,
            pp_size=self.pp_size,
            cp=self.attn_cp_rank if prefill else self.dcp_rank,
            cp_size=self.attn_cp_size if prefill else self.dcp_size,
            tp=self.attn_tp_rank // self.dcp_size,
            tp_size=self.attn_tp_size // self.dcp_size,
        )
        defaults: dict[str, Any] = {
            "cp_mode": ALL if envs.SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.get() else RANK0,
            "bootstrap_timeout_s": _seconds(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()),
            "unclaimed_s": _seconds(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()),
            # SGLang limits this time on decode ranks alone, whose abort ends the room here as well.
            "waiting_timeout_s": _MAX_S if prefill else _seconds(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()),
            # A ring larger than the pool is never full, and SGLang leaves little memory on a GPU.
            "staging_ring_mb": min(_RING_MB, max(1, pool.nbytes >> 20)),
        }
        agent = EngineAgent(
            versions.integration(mode() or ""),
            role="prefill" if prefill else "decode",
            rank=rank,
            pool=pool,
            stages=stages,
            axes=rank_axes(self),
            tp=self.attn_tp_rank,
            # Decode ranks listen nowhere; the loopback address would be the same on every host.
            server=f"{self._host if prefill else self.local_ip}:{get_serving().port}",
            address=self._host,
            registry=registry,
            on_state=self.on_state,
            defaults=defaults,
            logger=logger,
            cp_interleave=1,  # SGLang has a token on decode rank `token % dcp_size`
        ).start()
        scheduler_turns.watch(agent.note_turn, agent.batch)
        if prefill and agent.settings["pipeline"] != "off":
            self.unhooked = not layer_pipelining.install()
        return agent

    def _gather(self, own: tuple[int, Any]) -> list[tuple[int, Any]]:
        """Returns `own` of every rank of the server, in a collective call unless each instance has one rank."""
        if self.attn_tp_size * self.attn_cp_size * self.pp_size == 1:
            return [own]
        gathered: list[tuple[int, Any]] = get_parallel().world_group.all_gather_object(own)
        return gathered

    @property
    def _host(self) -> str:
        """Address of this host that peers use: the loopback address if the server itself listens only there."""
        host = str(get_serving().host)
        multi_node = self.dist_init_addr and get_parallel().nnodes > 1
        return "127.0.0.1" if _is_loopback(host) and not multi_node else str(self.local_ip)

    @property
    def _address(self) -> str:
        """`_host` as an endpoint has it, with an IPv6 address in brackets."""
        return Address("tcp", self._host).bracketed_host

    def teardown(self) -> None:
        """Closes the agent, so that SGLang can give this rank the other role; the pool stays SGLang's."""
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self._heartbeat_shutdown.set()
            self._heartbeat.join(_CLOSE_S)
        scheduler_turns.unwatch(self.agent.note_turn)
        self.agent.close(_CLOSE_S)
        self._zmq_ctx.destroy(linger=0)

    def deregister_buffer_to_engine(self) -> None:
        """Gives the pool's memory back before SGLang releases it (sleep mode)."""
        self.agent.unregister()

    def register_buffer_to_engine(self) -> None:
        """Takes the pool's memory again, at its former addresses."""
        self.agent.register()

    # ---- rooms -----------------------------------------------------------------------------------------------------

    def on_state(self, handle: Send | Receive, state: RoomState) -> None:
        """Writes the state of a room into SGLang's table; called by the agent's control thread.

        As with SGLang's own backends a prefill rank has succeeded once all is sent: its requests do not wait for decode
        ranks to confirm it.
        """
        with self._open_lock:  # or a room that is cleared meanwhile, or one that takes its number, would get the state
            if self._open.get(handle.room) is not handle:
                return
            state = handle.state  # as it is now: the control thread and `begin` may come in any order
            if handle.error is not None:
                self.record_failure(handle.room, f"{handle.error['text']} [{handle.error['code']}]")
            elif isinstance(handle, Send) and handle.sent:
                state = RoomState.SUCCESS
            self.update_status(handle.room, int(state))

    def begin(self, room: int, open_room: Callable[[], _Room]) -> _Room | None:
        """Returns the handle that `open_room` opens; None if the agent refuses, and then the room has failed."""
        handle = attempt(open_room, partial(self.fail, room), logger)
        if handle is None:
            return None
        self._open[room] = handle
        if handle.state is not RoomState.BOOTSTRAPPING:  # from the start, or changed before it was in the table
            self.on_state(handle, handle.state)
        return handle

    def is_sending(self, room: int) -> bool:
        """Prefill: whether the number is in use by a room that has not ended, here or at a decode rank."""
        return self.agent.is_sending(room)

    def refusal(self, room: int | None) -> str | None:
        """Returns why a new request cannot have this room: another one has it; None if it can.

        Every rank of the server gets its requests in one order, and refuses the same ones. SGLang's tables have one
        entry for a room, which stays that of the first request.
        """
        if room not in self.request_status:
            return None
        return f"room {room} is used by another request of this server: give each request its own bootstrap_room"

    def check_room(self, room: int | None) -> None:
        """Fails room 0: to SGLang's decode queue a 0 in the metadata means that they have not arrived."""
        if room == 0:
            self.fail(room, "bootstrap_room 0 means no room to SGLang's decode servers: use another number")

    def decline_misrouted(self, addr: str, room: int) -> None:
        """Ends a room that SGLang has refused here because decode opens it at the dp rank that its number names."""
        if self.request_status.get(room) == KVPoll.Failed and not (
            self.attn_tp_rank or self.attn_cp_rank or self.pp_rank
        ):
            with self.failure_lock:
                cause = self.failure_records.get(room, "refused by the prefill engine")
            if not self._declines.acquire(blocking=False):
                logger.warning(_UNDECLINED, room, "many others are refused, too")
                return
            # On a thread of its own: the scheduler does not wait for the bootstrap server and the other rank.
            thread = threading.Thread(target=self._decline, args=(addr, room, cause), name="kvctl-decline", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more threads
                self._declines.release()
                logger.warning(_UNDECLINED, room, error)

    def _decline(self, addr: str, room: int, cause: str) -> None:
        try:
            group = room % releases.num_dp_ranks()
            self.agent.decline(room, cause, prefill=str(CLIENT.row(addr, group, _CLOSE_S)))
        except KvctlError as error:
            logger.warning(_UNDECLINED, room, error)
        finally:
            self._declines.release()

    def withdraw(self, room: int) -> None:
        """Removes the state and the failure of a room from SGLang's tables, so that another request can have it."""
        self.forget(room)
        self.request_status.pop(room, None)
        with self.failure_lock:
            self.failure_records.pop(room, None)

    def fail(self, room: int, cause: str) -> None:
        """Fails a room on this rank alone, unless it has failed already."""
        self.record_failure(room, cause)
        self.update_status(room, KVPoll.Failed)

    def forget(self, room: int) -> None:
        """Ignores what becomes of a room from now on."""
        with self._open_lock:
            self._open.pop(room, None)

    def end(self, room: int, handle: Send | Receive | None, state: int | None) -> None:
        """Forgets a room that SGLang has cleared; aborts it unless it has ended, or all is sent.

        Args:
            state: in which SGLang ended the request. SGLang fails a request on all ranks as soon as one rank has
                failed, perhaps before the agents of the others know why.
        """
        self.forget(room)
        if handle is None or handle.state.finished:
            return
        if not isinstance(handle, Send) or not handle.sent:
            otherwise = _FAILED_ELSEWHERE if state == KVPoll.Failed else "cleared by the scheduler"
            with self.failure_lock:
                cause = self.failure_records.get(room, otherwise)
            handle.abort(cause)

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        """Records why a room failed; the first cause stays."""
        with self.failure_lock:
            self.failure_records.setdefault(bootstrap_room, failure_reason)

    def state_lists(self, state_indices: Any, prefix_tokens: int) -> list[Any]:
        """Returns the item indices of each state component of the pool, from SGLang's list for each of its own.

        Args:
            prefix_tokens: tokens of the prompt that decode has cached; their index rows are left out.
        """
        if not state_indices:
            return []
        prefix = prefix_tokens // self.kv_args.page_size if releases.sends_index_rows_of_prefix() else 0
        kinds = self.kv_args.state_types
        return [
            () if items is None else items[prefix * (kinds[component] in pools.INDEX_ROWS) :]
            for component, items in ((component, state_indices[component]) for component in self._components)
        ]

    # ---- decode ----------------------------------------------------------------------------------------------------

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Looks up a prefill server; one that does not fit fails its requests, not this server's scheduler."""
        try:
            return bool(super().try_ensure_parallel_info(bootstrap_addr))
        except Exception as error:  # SGLang's checks raise several kinds, and others for what they do not expect
            if self._misfits.get(bootstrap_addr) != str(error):  # SGLang asks 15 times
                if len(self._misfits) >= _MOST_MISFITS:
                    self._misfits.clear()
                self._misfits[bootstrap_addr] = str(error)
                logger.error("kvctl: prefill server %s: %s", shown(bootstrap_addr), error)
            return False

    def _resolve_rank_mapping(self, info: Any) -> None:
        """Maps the ranks of a prefill server to those of this one.

        Raises:
            LayoutError: the server says that it has no ranks, or more than an instance may have.
        """
        ParallelConfig(info.dp_size, info.pp_size, info.attn_cp_size, info.attn_tp_size)
        super()._resolve_rank_mapping(info)

    def known_instance(self, bootstrap_addr: str, dp_rank: int) -> tuple[str | None, bool]:
        """Returns the registry of a prefill server's dp group, and False if it should be looked up.

        One whose ranks are not all connected is looked up again, but not for every request: the server may be frozen,
        and the look-up occupies the scheduler's thread.
        """
        key = bootstrap_addr, dp_rank
        endpoint, now = self._instances.get(key), time.monotonic()
        if endpoint in self.agent.serving() or (endpoint and now < self._looked_up.get(key, 0.0) + _LOOK_UP_S):
            return endpoint, True
        if endpoint is not None:
            self._looked_up[key] = now
        return endpoint, False

    def knows(self, endpoint: str | None) -> bool:
        """Whether an endpoint is the registry of a prefill server that has not been replaced since."""
        return endpoint in self._instances.values()

    def use_instance(self, bootstrap_addr: str, dp_rank: int, endpoint: str) -> None:
        """Connects to the registry of a prefill server's dp group, in place of that of its former process.

        Raises:
            ConfigError: the endpoint needs a key.
        """
        former = self._instances.get((bootstrap_addr, dp_rank))
        if former == endpoint:
            return
        if former is not None:
            self.agent.disconnect(former)  # first: the ranks of both have the same names
            self.prefill_info_table.pop(bootstrap_addr, None)  # the new server may be laid out otherwise
            self.try_ensure_parallel_info(bootstrap_addr)
        self.agent.connect(endpoint, keep=False)
        self._instances[bootstrap_addr, dp_rank] = endpoint

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """Forgets a prefill server that does not answer, and fails its rooms; called by SGLang's heartbeat thread."""
        super()._handle_node_failure(failed_bootstrap_addr)
        for instance in [key for key in list(self._instances) if key[0] == failed_bootstrap_addr]:
            self._looked_up.pop(instance, None)
            if (endpoint := self._instances.pop(instance, None)) is not None:
                with contextlib.suppress(KvctlError):  # the agent is being closed
                    self.agent.disconnect(endpoint)

    def refuse(self, room: int, endpoint: str | None) -> None:
        """Ends a room for which SGLang has no pages and will have none, on the prefill ranks."""
        if not self.knows(endpoint):
            return
        with self.failure_lock:
            cause = self.failure_records.get(room, "refused by the decode engine")
        with contextlib.suppress(KvctlError):  # the prefill rank's own deadline ends the room
            self.agent.refuse(room, cause, prefill=endpoint)

    def hold(self, room: int, handle: Receive) -> None:
        """Keeps the pages of an ended room from being reused until nothing writes to them (deferred release)."""
        if self.enable_deferred_decode_kv_release:
            self._draining.setdefault(room, []).append(handle)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing writes to the pages of an ended room any more."""
        return all(handle.released for handle in self._draining.get(bootstrap_room, ()))

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        for room in list(self._draining):
            if self.is_abort_release_safe(room, 0):
                self._draining.pop(room, None)

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """Whether SGLang's checksum of the prefill rank covers the bytes of this rank: only between equal TP sizes."""
        info = self.prefill_info_table.get(bootstrap_addr)
        return info is not None and info.attn_tp_size == self.attn_tp_size


def _seconds(value: float) -> float:
    """Returns a duration of SGLang's environment, within the limits of the setting that it becomes."""
    return min(max(float(value), _MIN_S), _MAX_S)


def _is_loopback(host: str) -> bool:
    return Address("tcp", host).is_loopback
