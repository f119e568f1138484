"""The connector's half in a vLLM worker: one agent, and the rooms of the requests that vLLM transfers."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvctl_agent import ForwardInfo, ModelShape, Rank, Receive, Send
from kvctl_agent.contract.addresses import Address, parse_place
from kvctl_agent.contract.settings import load_settings
from kvctl_agent.contract.snapshots import Role
from kvctl_agent.contract.values import shown
from kvctl_agent.contract.vllm import LISTEN
from kvctl_agent.integrations.engine_agent import EngineAgent, attempt
from kvctl_agent.integrations.vllm import versions
from kvctl_agent.integrations.vllm.metadata import (
    LOGGER,
    Blocks,
    ComputedBlocks,
    KvctlMetadata,
    ReceiveRequest,
    SendRequest,
    Transfer,
    room_of,
)
from kvctl_agent.integrations.vllm.pools import WorkerPool
from kvctl_agent.integrations.vllm.sleep_mode import follow_sleep_mode

logger = logging.getLogger(LOGGER)

_CLOSE_S = 5.0
_RECALL_S = 30.0
_CHUNK_TOKENS = 512  # parts of a prompt are sent while vLLM computes others; it divides prompts as it likes
_NOTHING_TO_COMPUTE_S = 1e-3  # new requests wait for it, as they do for vLLM's own sleep
_SUSPEND_S = 30.0
_NOT_RECEIVED = "kvctl: request %s cannot be received: %s"
# A request whose room prefill never begins is answered within 30 s, and a room that decode never opens ends in the time
# of vLLM's own lease.
_DEFAULTS: dict[str, Any] = {"unclaimed_s": 25.0, "hold_s": 30.0, "staging_ring_mb": 1024}


def registry_of(config: VllmConfig) -> Address:
    """Returns the address of the registry of a prefill server's data-parallel rank.

    Its address is the setting `listen`, by default the loopback address; its port is vLLM's `kv_port` plus the rank.

    Raises:
        ConfigError: `listen` is not an address.
    """
    transfer = config.kv_transfer_config
    listen: str = load_settings(transfer.kv_connector_extra_config)["listen"]
    port = transfer.kv_port + config.parallel_config.data_parallel_index
    return parse_place(listen or LISTEN, default_port=0)._replace(port=port)


class ConnectorWorker:
    """Worker half of the connector.

    Attributes:
        agent: the worker's agent; None before `register`.
    """

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._role: Role = "prefill" if config.kv_transfer_config.is_kv_producer else "decode"
        speculative = config.speculative_config
        self._drafts = speculative is not None and speculative.uses_draft_kv_cache()
        self.agent: EngineAgent | None = None
        self._asleep = False  # vLLM has taken the memory of the KV cache away
        self._requests: dict[str, SendRequest] = {}
        self._sends: dict[str, Send | None] = {}  # None: the agent has refused the room, or is asleep
        self._receives: dict[str, Receive | None] = {}
        self._received_from: dict[str, ReceiveRequest] = {}
        self._step = KvctlMetadata()
        self._computes = True  # whether the step computes tokens
        self._to_pass: dict[str, range | None] = {}  # of the step: its layer groups, as in `_prefetch`
        self._ended: set[str] = set()  # requests that vLLM has finished, whose blocks it keeps for us
        self._failed: set[str] = set()  # receives that are reported as failed and not yet as finished

    # ---- the agent -------------------------------------------------------------------------------------------------

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        """Starts the agent on vLLM's KV cache.

        Raises:
            ConfigError: a setting is invalid, the registry's port is in use, or other hosts need a key.
            ValueError, MemoryLayoutError: as for `WorkerPool`.
        """
        config, parallel = self._config, self._config.parallel_config
        transfer = config.kv_transfer_config
        self._pool = WorkerPool(
            tensors,
            self._kv_cache_config,
            config.model_config.get_total_num_kv_heads(),
            config.cache_config.cache_dtype,
        )
        prefill = self._role == "prefill"
        stages = self._stages()
        pp, dcp, tp = (
            get_pp_group().rank_in_group,
            parallel.decode_context_parallel_size,
            get_tensor_model_parallel_rank(),
        )
        self._first_layer = sum(stage.num_layers for stage in stages[:pp])
        self._is_last_stage = pp == parallel.pipeline_parallel_size - 1
        dp = parallel.data_parallel_index  # each is an instance of its own, with requests of its own
        registry = registry_of(config)
        settings: dict[str, Any] = {"listen": registry.bracketed_host} if prefill else {}
        if dcp > 1:
            settings["cp_interleave"] = parallel.cp_kv_cache_interleave_size
        settings.update(transfer.kv_connector_extra_config)
        self.agent = EngineAgent(
            {
                "engine": "vllm",
                "engine_version": versions.installed() or "",
                "mode": "connector",
                "settings": {
                    "kv_role": transfer.kv_role or "",
                    "kv_load_failure_policy": transfer.kv_load_failure_policy,
                    "data_parallel_size": str(parallel.data_parallel_size),
                },
            },
            role=self._role,
            rank=Rank(
                pp=pp,
                pp_size=parallel.pipeline_parallel_size,
                cp=tp % dcp,
                cp_size=dcp,
                tp=tp // dcp,
                tp_size=parallel.tensor_parallel_size // dcp,
            ),
            pool=self._pool.pool,
            stages=stages,
            axes={"dp": (dp, max(dp + 1, parallel.data_parallel_size)), "pp": (pp, len(stages)), "cp": (tp % dcp, dcp)},
            tp=tp,
            server=registry.place if prefill else f"{socket.gethostname()}:{transfer.engine_id[:8]}",
            address=registry.host,
            registry=str(registry) if prefill else None,
            defaults={**_DEFAULTS, "chunk_tokens": self._pool.chunk_tokens(_CHUNK_TOKENS)},
            logger=logger,
            **settings,
        ).start()
        follow_sleep_mode(config.model_config, self)

    def _stages(self) -> tuple[ModelShape, ...]:
        """Returns the shape of the KV of each pipeline stage; () with one stage.

        Raises:
            ValueError: a stage other than the last ends with a layer of another KV cache group, which a server with
                other stages takes for one of the next stage.
        """
        if (size := self._config.parallel_config.pipeline_parallel_size) == 1:
            return ()
        stages: list[Any] = [None] * size
        own = self._pool.pool.shape(), self._pool.ends_with_kv
        torch.distributed.all_gather_object(stages, own, group=get_pp_group().cpu_group)
        shapes, ends = zip(*stages, strict=True)
        if not all(ends[:-1]):
            raise ValueError(
                "kvctl's connector needs a layer with full attention at the end of each pipeline stage but the last: "
                "divide the layers differently with VLLM_PP_LAYER_PARTITION, or use tensor parallelism"
            )
        return tuple(shapes)

    def close(self) -> None:
        """Closes the agent."""
        if self.agent is not None:
            self.agent.close(_CLOSE_S)
            self.agent = None

    def suspend(self) -> None:
        """Gives the memory of the KV cache back, after which nothing reads or writes it; rooms in flight are aborted.

        Raises:
            DeadlineExceeded: something may still read or write it after 30 s: it must stay.
        """
        if self.agent is None or self._asleep:
            return
        for handle in (*self._sends.values(), *self._receives.values()):
            if handle is not None:
                handle.abort("the engine goes to sleep")
        self.agent.unregister(_SUSPEND_S)
        self._asleep = True

    def resume(self) -> None:
        """Takes the memory of the KV cache again, and begins the rooms of requests that vLLM has kept."""
        if self.agent is None or not self._asleep:
            return
        self.agent.register()
        self._asleep = False
        for name in self._requests.keys() - self._ended:
            self._sends[name] = self._send(self._requests[name])

    # ---- a step ----------------------------------------------------------------------------------------------------

    def recall(self, meta: KvctlMetadata) -> None:
        """Waits until nothing is read from the blocks of preempted requests, which this step may write.

        Raises:
            RuntimeError: something is still read after 30 s.
        """
        recalled = [(name, send) for name in meta.preempted if (send := self._sends.get(name))]
        for _, send in recalled:
            send.recall()
        for name, send in recalled:
            if not send.wait_recalled(_RECALL_S):
                raise RuntimeError(
                    f"kvctl: the blocks of the preempted request {name} (room {send.room}) are still read after "
                    f"{_RECALL_S:g} s; see: kvctl rooms show {send.room}"
                )

    def begin(self, meta: KvctlMetadata) -> None:
        """Begins, opens and ends rooms, before the forward of a step."""
        if meta.receives and self._kv_cache_config.needs_kv_cache_zeroing and self._pool.pool.device is not None:
            torch.cuda.current_stream().synchronize()  # vLLM zeroes the blocks of this step there
        with self._batch():
            for request in meta.sends:
                self._requests[request.request] = request
                self._sends[request.request] = None if self._asleep else self._send(request)
            self._step, self._computes = meta, meta.computes
            self._to_pass = self._prefetch(meta.computed)
            event = self._event() if meta.cached else None  # of the earlier forwards
            for name, blocks in meta.cached:
                if send := self._sends.get(name):
                    self._attempt(send, partial(self._pass_cached, send, blocks, event))
            for receive in meta.receives:
                self._receives[receive.request] = self._receive(receive)
                self._received_from[receive.request] = receive
            for name, reason in meta.aborted:
                handle = self._sends.get(name) or self._receives.get(name)
                # What is sent has arrived: a router that has decode's answer may drop the request at prefill.
                if handle is not None and not (isinstance(handle, Send) and handle.sent):
                    handle.abort(reason)
            for transfer, prefill, reason in meta.refused:
                self._refuse(transfer, reason, prefill)
            for prefill, transfers in meta.expected.items():
                self._renew(transfers, prefill)

    def _batch(self) -> AbstractContextManager[None]:
        """Returns a context in which the agent is called for many rooms."""
        return nullcontext() if self.agent is None else self.agent.batch()

    def _prefetch(self, computed: Sequence[ComputedBlocks]) -> dict[str, range | None]:
        """Announces a forward; returns the layer groups in which its KV is sent, by the layer with which each ends.

        A forward whose layers are not divided has one group, None.
        """
        if not computed:
            return {}
        assert self.agent is not None
        forward = ForwardInfo(tuple(each.tokens for each in computed), draft=self._drafts)
        # Of several microbatches vLLM announces a layer after each: after the first it is computed in part.
        divided = not self._config.parallel_config.use_ubatching
        groups = self.agent.layer_groups(forward).groups if divided else ()
        for each in computed:
            if send := self._sends.get(each.request):
                self._attempt(send, partial(send.prefetch, groups, forward.average_tokens))
        return dict(self._pool.last_layers(groups, self._first_layer)) if groups else {"": None}

    def save_layer(self, name: str) -> None:
        """Passes the layer group that ends with a layer, which the step has computed or will have."""
        if name in self._to_pass:
            self._pass(self._to_pass.pop(name))

    def save(self) -> None:
        """Passes what the step has computed, or will have when its forward on the GPU is done."""
        with self._batch():
            while self._to_pass:  # all layer groups, if vLLM did not announce layers, as in a CUDA graph
                self._pass(self._to_pass.pop(next(iter(self._to_pass))))
            for computed in self._step.computed:
                send = self._sends.get(computed.request)
                if computed.last and send is not None and not send.state.finished:
                    self._attempt(send, partial(self._finish, send, computed))
            self._step = KvctlMetadata()

    def _pass(self, layers: range | None) -> None:
        """Passes the pages of the step in one layer group; None: in all layers."""
        event = self._event()
        with self._batch():
            for computed in self._step.computed:
                send = self._sends.get(computed.request)
                if send is not None and not send.state.finished:
                    self._attempt(send, partial(self._pass_computed, send, computed, layers, event))

    def _pass_cached(self, send: Send, blocks: Blocks, event: Any) -> None:
        pages, groups = self._pool.pages(blocks)
        send.pages(pages, False, event, groups)

    def _pass_computed(self, send: Send, computed: ComputedBlocks, layers: range | None, event: Any) -> None:
        pages, groups = self._pool.pages(computed.blocks, computed.prompt if computed.last else 0)
        if layers is None:
            send.pages(pages, computed.last, event, groups)
        else:
            send.layers(layers, pages, computed.last, event, groups)

    def _finish(self, send: Send, computed: ComputedBlocks) -> None:
        send.finish(state_indices=self._pool.states(computed.blocks))

    def _attempt(self, send: Send, call: Callable[[], None]) -> None:
        """Does something for a room that is sent; if that raises, the room fails, and vLLM goes on."""

        def fail(cause: str) -> None:
            logger.error("kvctl: room %s cannot be sent: %s", send.room, cause)
            send.abort(cause)

        attempt(call, fail, logger)

    def _event(self) -> Any:
        """Returns an event of the forwards that the worker has launched; None without a GPU."""
        if self._pool.pool.device is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def results(self, finished: set[str]) -> KVConnectorTransferResults:
        """Returns the requests whose blocks vLLM may use again, or whose KV has arrived or will not."""
        if self.agent is not None:
            self.agent.note_turn()  # vLLM asks in each step
        if not self._is_last_stage:  # with speculative decoding vLLM may call wait_for_save only on the last one
            self.save()
        if not self._computes:
            self._wait_for_receive()
        self._ended.update(name for name in finished if name in self._sends)
        sent = {name for name in self._ended if (send := self._sends[name]) is None or send.sent}
        for name in sent:
            self._ended.discard(name)
            del self._sends[name], self._requests[name]
        received, failed = set(), set()
        for name, receive in self._receives.items():
            done = receive is None or (receive.state.finished and receive.released)
            if done:
                received.add(name)
            if name not in self._failed and (
                receive is None or receive.error is not None or (done and not self._convert(name))
            ):
                failed.add(name)
        self._failed = (self._failed | failed) - received
        for name in received:
            del self._receives[name], self._received_from[name]
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def _wait_for_receive(self) -> None:
        """Waits a moment for the first receive, unless one has ended, so that vLLM hears of it at once.

        vLLM has nothing to compute then: it would sleep and make another step, once each millisecond.
        """
        receives = [receive for receive in self._receives.values() if receive is not None]
        if receives and not any(receive.state.finished and receive.released for receive in receives):
            receives[0].wait(_NOTHING_TO_COMPUTE_S)

    # ---- rooms -----------------------------------------------------------------------------------------------------

    def _convert(self, name: str) -> bool:
        """Brings the blocks that a request has received into the order of vLLM's kernels; returns whether it can."""
        request = self._received_from[name]

        def convert() -> bool:
            assert self.agent is not None
            pages, _ = self._pool.pages(request.blocks)
            return self._pool.convert(pages, self.agent.kv_dtype(request.prefill))

        return bool(attempt(convert, partial(logger.error, _NOT_RECEIVED, name), logger))

    def _send(self, request: SendRequest) -> Send | None:
        """Begins a room; returns None if the agent refuses it."""

        assert self.agent is not None
        send = partial(
            self.agent.send,
            room_of(request.transfer),
            tokens=request.tokens,
            digest=request.digest,
            request_id=request.request,
            traceparent=request.traceparent,
        )
        return attempt(send, partial(logger.error, "kvctl: request %s cannot be sent: %s", request.request), logger)

    def _receive(self, request: ReceiveRequest) -> Receive | None:
        """Opens a room; returns None if the agent refuses it."""

        def receive() -> Receive:
            assert self.agent is not None
            dcp = self._config.parallel_config.decode_context_parallel_size
            pages, groups = self._pool.pages(request.blocks, -(-request.tokens // dcp))
            return self.agent.receive(
                room_of(request.transfer),
                pages,
                prefill=request.prefill,
                prefix_tokens=request.prefix_tokens,
                tokens=request.tokens,
                digest=request.digest,
                group_pages=groups,
                state_indices=self._pool.states(request.blocks),
                request_id=request.request,
                traceparent=request.traceparent,
            )

        def fail(cause: str) -> None:
            logger.error(_NOT_RECEIVED, request.request, cause)
            self._refuse(request.transfer, cause, request.prefill)

        return attempt(receive, fail, logger)

    def _refuse(self, transfer: Transfer, reason: str, prefill: str) -> None:
        """Ends a room that is not open here, at prefill; an error is logged."""
        assert self.agent is not None
        refuse = partial(self.agent.refuse, room_of(transfer), reason, prefill=prefill)
        attempt(refuse, partial(logger.error, "kvctl: prefill instance %s: %s", shown(prefill)), logger)

    def _renew(self, transfers: Sequence[Transfer], prefill: str) -> None:
        """Asks a prefill instance to keep rooms that decode is going to open; an error is logged."""
        assert self.agent is not None
        renew = partial(self.agent.renew, [room_of(transfer) for transfer in transfers], prefill=prefill)
        attempt(renew, partial(logger.error, "kvctl: prefill instance %s: %s", shown(prefill)), logger)
