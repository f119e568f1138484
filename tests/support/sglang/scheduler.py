"""SGLang's prefill and decode queues with what they need of a scheduler: requests, pools, and no engine.

The queues, senders and receivers, and the code between them (`send_kv_chunk`, `pop_preallocated`, `pop_transferred`,
...) are SGLang's own: what its scheduler would raise in a server is raised here.
"""

import inspect
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

from tests.support.sglang.cases import Case, Ended, Role, Room
from tests.support.sglang.pools import Pools
from tests.support.sglang.runtime import HOST, Runtime
from tests.support.sglang.stand_ins import StandIn

Say = Callable[..., None]


class PagedTokenToKVPoolAllocator(Pools):
    """The pools by the name of SGLang's class that they stand for."""


class ChunkCache(StandIn):
    """A cache by the name of SGLang's that has no prefixes."""


class Backend:
    """SGLang's attention backend, without attention."""

    def __init__(self) -> None:
        self.write: Callable[[int], None] = lambda layer: None

    def forward(
        self, q: None, k: None, v: None, layer: Any, forward_batch: None, save_kv_cache: bool = True, **kwargs: Any
    ) -> None:
        self.write(layer.layer_id)


class Request:
    """The fields of SGLang's Req that its disaggregation code reads."""

    def __init__(self, room: Room, port: int, routed_dp: int | None, hidden: int) -> None:
        self.plan = room
        self.tokens = room.tokens
        self.rid = f"request-{room.room}"
        self.bootstrap_host = HOST
        self.bootstrap_port = port
        self.bootstrap_room = room.room
        self.disagg_prefill_dp_rank = routed_dp
        self.origin_input_ids = array("q", range(room.first_id, room.first_id + room.tokens))
        self.output_ids = array("q")
        self.pages: list[int] = []
        self.kv = SimpleNamespace(
            req_pool_idx=None, holds_kv=False, holds_mamba=False, cache_protected_len=0, retraction_backup=None
        )
        self.sampling_params = SimpleNamespace(max_new_tokens=1)
        self.time_stats: Any = StandIn()
        self.logprob: Any = StandIn()
        self.metadata_buffer_index = -1
        self.pending_bootstrap = False
        self.is_retracted = False
        self.prefill_attempt_count = 0
        self.to_finish = None
        self.finished_reason: Any = None
        self.return_logprob = self.return_sampling_mask = self.return_routed_experts = False
        self.lora_id = self.priority = self.extra_key = self.cache_salt = None
        self.arrival_processed_tokens = 0
        self.start_send_idx = self.prefix_len = self.extend_end = self.disagg_decode_prefix_len = 0
        self.cache_request_handle: Any = StandIn()
        self.disagg_kv_sender: Any = None
        self.cached_tokens = self.cached_tokens_device = self.cached_tokens_host = self.cached_tokens_storage = 0
        self.hidden_states_tensor: torch.Tensor | None = None
        self.output_topk_p = torch.zeros(0)
        self.output_topk_index = torch.zeros(0, dtype=torch.int64)
        self.output_dsa_topk_indices = None
        self.multimodal_inputs = None
        self.hidden = hidden
        self.sent = 0  # chunks
        self.started = time.monotonic()

    def get_mm_token_counts(self) -> tuple[int, int, int]:
        return (self.bootstrap_room % 5, 0, 0)

    @property
    def extend_range(self) -> SimpleNamespace:
        """`extend_end` before 0.5.22."""
        return SimpleNamespace(end=self.extend_end)

    def finish_prefill(self) -> None:
        """The first token and what speculative decoding adds to it: a function of the room."""
        self.output_ids = array("q", [self.bootstrap_room % 30011])
        self.cached_tokens = self.tokens
        self.output_topk_p = torch.arange(4, dtype=torch.float32) + self.bootstrap_room % 97
        self.output_topk_index = torch.arange(4, dtype=torch.int64) * 3 + self.bootstrap_room
        self.hidden_states_tensor = torch.arange(self.hidden, dtype=torch.bfloat16) + self.bootstrap_room % 101

    def wrong_metadata(self) -> tuple[str, ...]:
        expected = Request(self.plan, 0, None, self.hidden)
        expected.finish_prefill()
        wrong = []
        if list(self.output_ids) != list(expected.output_ids):
            wrong.append("output_ids")
        if self.cached_tokens != expected.tokens:
            wrong.append("cached_tokens")
        if not torch.equal(self.output_topk_p[:4], expected.output_topk_p):
            wrong.append("output_topk_p")
        if not torch.equal(self.output_topk_index[:4], expected.output_topk_index):
            wrong.append("output_topk_index")
        if self.hidden_states_tensor is None or not torch.equal(
            self.hidden_states_tensor, expected.hidden_states_tensor
        ):
            wrong.append("output_hidden_states")
        return tuple(wrong)

    @property
    def failure(self) -> str:
        """The reason that the request was aborted with, or nothing."""
        reason = self.finished_reason
        return str(reason.arguments[0]) if type(reason).__name__ == "FINISH_ABORT" else ""


def create(kind: Any, **arguments: Any) -> Any:
    """Returns an object of a class of SGLang, made with those of the arguments that its release takes."""
    known = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in arguments.items() if name in known})


class _Scheduler:
    """What SGLang's queues read of their scheduler, on either side."""

    def __init__(self, runtime: Runtime, deadline_s: float, say: Say) -> None:
        from sglang.srt.disaggregation.utils import MetadataBuffers, ReqToMetadataIdxAllocator, TransferBackend

        self.runtime, self.case, self.place = runtime, runtime.case, runtime.place
        self.deadline_s, self.say = deadline_s, say
        case: Case = self.case
        role: Role = runtime.role
        self.pools = PagedTokenToKVPoolAllocator(case, role, runtime.place, runtime.device)
        self.backend = TransferBackend(case.backend)
        self.disagg_metadata_buffers = MetadataBuffers(case.rows, case.model.hidden, torch.bfloat16, 8)
        self.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(case.rows)
        self.token_to_kv_pool_allocator = self.req_to_token_pool = self.pools
        self.attn_tp_cpu_group = runtime.attn_tp.cpu_group
        self.attn_cp_cpu_group = runtime.attn_cp.cpu_group
        self.pp_group = runtime.pp
        self.rust_server = None
        self.server_args = SimpleNamespace(
            enable_pd_role_switch=False,
            disaggregation_mode=role,
            disaggregation_transfer_backend=case.backend,
            host=HOST,
            port=30000,
        )
        self.model_config = SimpleNamespace(
            num_hidden_layers=case.model.layers,
            get_total_num_kv_heads=lambda: case.model.heads,
            hf_text_config=SimpleNamespace(full_attention_layer_ids=list(range(0, case.model.layers, 2))),
        )
        self.tp_worker = SimpleNamespace(
            is_hybrid_swa=False,
            model_runner=SimpleNamespace(
                effective_logical_max_total_num_tokens=self.pools.size,
                kv_cache_dtype_str="bfloat16",
                attn_backend=Backend(),
            ),
        )
        self.sliding_window_size = case.model.window
        self.kv_shard_widening = 1
        self.random_seed = 0
        self.processed_tokens_counter = 0
        self.waiting_queue: list[Any] = []
        self.running_batch = SimpleNamespace(reqs=[])
        self.last_batch = None
        self.tree_cache: Any = ChunkCache()
        self.output_streamer: Any = StandIn()
        self.metrics_reporter = SimpleNamespace(
            enable_metrics=False, kv_transfer_latency_ms=0, kv_transfer_speed_gb_s=0
        )
        self.batch_result_processor: Any = StandIn()
        self.scheduler_stage_metrics = None
        self.spec_algorithm = SimpleNamespace(is_none=lambda: role == "prefill" and case.layers_in_groups > 0)
        self.enable_overlap = self.enable_hisparse = self.enable_lora = self.enable_decode_hicache = False
        self.enable_priority_scheduling = False
        self.enable_staging = case.staging
        self.ended: list[Ended] = []

    def end(self, req: Request, wrong: tuple[str, ...] = (), moved: int | None = None) -> None:
        reason = req.failure
        self.ended.append(
            Ended(
                req.bootstrap_room,
                "failed" if reason else "success",
                reason,
                wrong,
                req.started,
                time.monotonic(),
                moved,
            )
        )

    def loop(
        self, rooms: list[Room], window: int, step: Callable[[], bool], admit: Callable[[Room], None]
    ) -> list[Ended]:
        """Runs `step` until each room ended; at most `window` are open. `step` says whether it had something to do."""
        self.ended = []
        deadline = time.monotonic() + self.deadline_s
        admitted = 0
        while len(self.ended) < len(rooms):
            while admitted < len(rooms) and admitted - len(self.ended) < window:
                admit(rooms[admitted])
                admitted += 1
            if not step():
                time.sleep(0.0002)
            if time.monotonic() > deadline:
                done = {ended.room for ended in self.ended}
                late = [room.room for room in rooms[:admitted] if room.room not in done]
                raise TimeoutError(f"rooms {late} did not end in {self.deadline_s:.0f} s: {self.describe()}")
        return self.ended

    def stages_see(self, rids: Sequence[str], polls: Sequence[int], *states: int, of_any: bool = False) -> list[str]:
        """Requests that all pipeline stages (or any) have seen in one of the states; `polls` are this stage's."""
        mine = {rid for rid, poll in zip(rids, polls, strict=True) if poll in states}
        stages = self.runtime.pp.all_gather_object(mine)
        return sorted(set.union(*stages) if of_any else set.intersection(*stages))

    def describe(self) -> str:
        raise NotImplementedError


def prefill_scheduler(runtime: Runtime, deadline_s: float, say: Say) -> Any:
    from sglang.srt.disaggregation import prefill
    from sglang.srt.disaggregation.base import KVPoll

    prefill.release_kv_cache = lambda req, *args, **kwargs: req.kv.holds_kv and release(req)

    def release(req: Request) -> None:
        scheduler.pools.free(req)
        req.kv.holds_kv = False

    class Prefill(_Scheduler, prefill.SchedulerDisaggregationPrefillMixin):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(runtime, deadline_s, say)
            self.kv_checksum_computer = None
            self.disagg_prefill_inflight_queue: list[Request] = []
            self.disagg_prefill_pending_chunk_rids: set[str] = set()
            self.requests: list[Request] = []
            self.disagg_prefill_bootstrap_queue = create(
                prefill.PrefillBootstrapQueue,
                gloo_group=runtime.attn_tp.cpu_group,
                token_to_kv_pool=self.pools.kv,
                draft_token_to_kv_pool=self.pools.draft,
                req_to_metadata_buffer_idx_allocator=self.req_to_metadata_buffer_idx_allocator,
                metadata_buffers=self.disagg_metadata_buffers,
                gpu_id=runtime.gpu,
                bootstrap_port=runtime.bootstrap_port,
                max_total_num_tokens=self.pools.size,
                scheduler=self,
                scheduler_stage_metrics=None,
                transfer_backend=self.backend,
            )
            self.kv_manager = self.disagg_prefill_bootstrap_queue.kv_manager

        def describe(self) -> str:
            states = [(r.rid, r.sent, r.disagg_kv_sender.poll()) for r in self.requests]
            return f"bootstrapping {len(self.disagg_prefill_bootstrap_queue.queue)}, (request, chunks, poll): {states}"

        def _release_aborted_request(self, req: Request) -> None:
            pass

        def run(self, rooms: list[Room], window: int) -> list[Ended]:
            return self.loop(rooms, window, self.step, self.admit)

        def admit(self, room: Room) -> None:
            dp = room.prefill_dp if room.routed else None
            req = Request(room, runtime.bootstrap_port, dp, self.case.model.hidden)
            self.requests.append(req)
            self.disagg_prefill_bootstrap_queue.add(req, self.pools.heads)
            if room.abort_prefill == "bootstrapping":
                req.disagg_kv_sender.abort()

        def step(self) -> bool:
            busy = False
            self.waiting_queue.extend(self.pop_bootstrapped())
            self.resolve_waiting_queue_bootstrap()
            for req in list(self.requests):
                if req.failure:  # given up before its last chunk
                    self.requests.remove(req)
                    self.end(req)
                    busy = True
            for req in list(self.waiting_queue):
                if req.pages == [] and not self.pools.fits(req.tokens):
                    break
                busy = busy or not req.plan.held
                self.advance(req)
            done = self.finished_inflight()
            for req in done:
                self.requests.remove(req)
                metric = req.disagg_kv_sender.get_transfer_metric()
                self.end(req, moved=None if req.failure else metric.transfer_total_bytes)
            return busy or bool(done)

        def pop_bootstrapped(self) -> list[Request]:
            queue = self.disagg_prefill_bootstrap_queue
            if runtime.pp.world_size == 1 or "pp_good_rids" not in inspect.signature(queue.pop_bootstrapped).parameters:
                return list(queue.pop_bootstrapped())
            # Before 0.5.22 its scheduler asks all pipeline stages.
            polls = prefill.poll_and_all_reduce_attn_cp_tp_group(
                [req.disagg_kv_sender for req in queue.queue], self.attn_cp_cpu_group, self.attn_tp_cpu_group
            )
            rids = [req.rid for req in queue.queue]
            good = self.stages_see(rids, polls, KVPoll.WaitingForInput)
            bad = self.stages_see(rids, polls, KVPoll.Failed, of_any=True)
            return list(queue.pop_bootstrapped(pp_good_rids=good, pp_bad_rids=bad))

        def advance(self, req: Request) -> None:
            """One forward: the next chunk of the request, whose KV is then sent."""
            room: Room = req.plan
            if not req.pages:
                self.pools.allocate(req, req.tokens)
                req.kv.holds_kv = True
                if room.abort_prefill == "waiting":
                    self.abort_waiting(req)
                    return
            ends = [*room.chunks, req.tokens]
            if room.held and req.sent == len(ends) - 1:
                return
            start, req.extend_end = req.extend_end, ends[req.sent]
            req.prefix_len = start
            if self.enable_staging:
                self.maybe_prefetch_staging_for_batch(SimpleNamespace(reqs=[req]))
            if self.case.layers_in_groups:
                self.forward_in_groups(req, start)
            if room.content:
                self.pools.write(req, start, req.extend_end)
                if runtime.device != "cpu":
                    torch.cuda.synchronize()  # SGLang sends when a forward has ended
            req.sent += 1
            if req.sent == len(ends):
                self.waiting_queue.remove(req)
                req.finish_prefill()
                self.disagg_prefill_inflight_queue.append(req)
                self.send_kv_chunk(req, last_chunk=True)
                self.say("sent", req.bootstrap_room)
                if room.abort_prefill == "transferring":
                    req.disagg_kv_sender.abort()
                return
            self.send_kv_chunk(req)
            self.say("chunk", req.bootstrap_room)
            if room.abort_prefill == "chunk":
                self.abort_waiting(req)

        def forward_in_groups(self, req: Request, start: int) -> None:
            """Writes the KV layer by layer, as the plugin's hooks on SGLang's scheduler and attention see it."""
            from kvctl_agent.integrations.sglang.layer_pipelining import forward_of

            backend = self.tp_worker.model_runner.attn_backend
            backend.write = lambda layer: self.pools.write(req, start, req.extend_end, layer)
            batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True), reqs=[req])
            forward = forward_of(self, batch)
            if forward is None:  # decode has these pages
                assert req.disagg_kv_sender.groups, "no layer groups"
                return
            with forward.watched():
                for layer in self.pools.layers:
                    backend.forward(None, None, None, SimpleNamespace(layer_id=layer), None)
            forward.end(None)
            assert req.disagg_kv_sender.passed, "nothing was passed in groups"

        def abort_waiting(self, req: Request) -> None:
            """The client's abort of a request that waits for its next forward."""
            self.waiting_queue.remove(req)
            self.release_aborted_prefill_waiting_req(req)
            prefill.prepare_abort(req, "aborted by the client")

        def finished_inflight(self) -> list[Request]:
            rids, queue = None, self.disagg_prefill_inflight_queue
            if runtime.pp.world_size > 1 and queue:
                polls = prefill.poll_and_all_reduce_attn_cp_tp_group(
                    [req.disagg_kv_sender for req in queue], self.attn_cp_cpu_group, self.attn_tp_cpu_group
                )
                rids = self.stages_see([req.rid for req in queue], polls, KVPoll.Success, KVPoll.Failed)
            return list(self.process_disagg_prefill_inflight_queue(rids))

    scheduler = Prefill()
    return scheduler


def decode_scheduler(runtime: Runtime, deadline_s: float, say: Say) -> Any:
    from sglang.srt.disaggregation import decode
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.decode_hicache_mixin import DecodePrefixMatch

    class PreallocQueue(decode.DecodePreallocQueue):  # type: ignore[misc]
        """Takes prefixes and pages from this process's pools; the radix tree is the test's word."""

        def _match_prefix_and_lock(self, req: Request) -> Any:
            req.prefix_pages = -(-req.plan.prefix // scheduler.pools.page_size)  # type: ignore[attr-defined]
            return DecodePrefixMatch(
                prefix_indices=torch.arange(req.plan.prefix, dtype=torch.int32),
                l2_host_hit_length=0,
                l3_storage_hit_length=0,
                last_device_node=None,
            )

        def _radix_full_evictable(self) -> int:
            return 0

        def _pre_alloc(self, req: Request, *args: Any, **kwargs: Any) -> torch.Tensor:
            scheduler.pools.allocate(req, req.tokens)
            req.kv.holds_kv = True
            req.extend_end = req.tokens
            indices: torch.Tensor = scheduler.pools.req_to_token[req.kv.req_pool_idx, : req.tokens]
            return indices

    def release(req: Request, *args: Any, **kwargs: Any) -> None:
        # Of failed requests only. Their pages stay out of use until settle() has looked for late writes.
        scheduler.released.append((req, scheduler.pools.snapshot(req)))

    decode.release_kv_cache = release

    class Decode(_Scheduler):
        def __init__(self) -> None:
            super().__init__(runtime, deadline_s, say)
            self.released: list[tuple[Request, list[torch.Tensor]]] = []
            self.requests: list[Request] = []
            self.disagg_decode_prealloc_queue: Any = None
            self.transfers = create(
                decode.DecodeTransferQueue,
                gloo_group=runtime.attn_tp.cpu_group,
                req_to_metadata_buffer_idx_allocator=self.req_to_metadata_buffer_idx_allocator,
                tp_rank=runtime.place.tp,
                metadata_buffers=self.disagg_metadata_buffers,
                scheduler=self,
                tree_cache=self.tree_cache,
            )
            self.disagg_decode_transfer_queue = self.transfers
            self.disagg_decode_prealloc_queue = create(
                PreallocQueue,
                gloo_group=runtime.attn_tp.cpu_group,
                req_to_token_pool=self.pools,
                token_to_kv_pool_allocator=self.pools,
                draft_token_to_kv_pool=self.pools.draft,
                req_to_metadata_buffer_idx_allocator=self.req_to_metadata_buffer_idx_allocator,
                metadata_buffers=self.disagg_metadata_buffers,
                scheduler=self,
                transfer_queue=self.transfers,
                tree_cache=self.tree_cache,
                gpu_id=runtime.gpu,
                bootstrap_port=runtime.bootstrap_port,
                max_total_num_tokens=self.pools.size,
                num_reserved_decode_tokens=0,
                transfer_backend=self.backend,
            )
            self.disagg_decode_prealloc_queue._ensure_retry_interval = 0.05
            self.kv_manager = self.disagg_decode_prealloc_queue.kv_manager

        def describe(self) -> str:
            def states(queue: Iterable[Any]) -> list[tuple[str, int]]:
                return [(r.req.rid, r.kv_receiver.poll()) for r in queue]

            return (
                f"prealloc queue {states(self.disagg_decode_prealloc_queue.queue)}, "
                f"transfer queue {states(self.transfers.queue)}"
            )

        def run(self, rooms: list[Room], window: int) -> list[Ended]:
            return self.loop(rooms, window, self.step, self.admit)

        def admit(self, room: Room) -> None:
            dp = room.prefill_dp if room.routed else None
            req = Request(room.of_decode, runtime.bootstrap_port, dp, self.case.model.hidden)
            self.requests.append(req)
            queue = self.disagg_decode_prealloc_queue
            queue.add(req)
            if room.abort_decode == "bootstrapping":
                queue.queue[-1].kv_receiver.abort()

        def step(self) -> bool:
            self.transfers.resolve_deferred_releases()
            opened, given_up = self.pop_preallocated()
            self.transfers.extend(opened)
            for decode_req in opened:
                self.say("opened", decode_req.req.bootstrap_room)
            for decode_req in self.transfers.queue:
                decode_req.req.sent += 1  # steps since it was opened
                plan = decode_req.req.plan.abort_decode
                if (plan == "waiting" and decode_req.req.sent == 1) or (
                    plan == "transferring" and decode_req.req.sent == 3
                ):
                    decode_req.kv_receiver.abort()
            before = [decode_req.req for decode_req in self.transfers.queue]
            received = self.pop_transferred()
            left = {id(decode_req.req) for decode_req in self.transfers.queue}
            ended = [req for req in before if id(req) not in left] + [decode_req.req for decode_req in given_up]
            for req in ended:
                wrong: tuple[str, ...] = ()
                if req in received and req.plan.content:
                    wrong = self.pools.wrong(req, req.plan.prefix) + req.wrong_metadata()
                    self.pools.forget(req)
                if req in received:
                    self.pools.free(req)
                self.requests.remove(req)
                self.end(req, wrong)
            return bool(opened or ended)

        def pop_preallocated(self) -> tuple[list[Any], list[Any]]:
            queue = self.disagg_decode_prealloc_queue
            if runtime.pp.world_size == 1:
                return tuple(queue.pop_preallocated())
            rids = [decode_req.req.rid for decode_req in queue.queue]
            polls = decode.poll_and_all_reduce([r.kv_receiver for r in queue.queue], queue.gloo_group) if rids else []
            good = self.stages_see(rids, polls, KVPoll.WaitingForInput)
            bad = self.stages_see(rids, polls, KVPoll.Failed, of_any=True)
            return tuple(queue.pop_preallocated(pp_good_rids=good, pp_bad_rids=bad))

        def pop_transferred(self) -> list[Any]:
            queue = self.transfers.queue
            if runtime.pp.world_size == 1 or not queue:
                return list(self.transfers.pop_transferred())
            polls = self.transfers._poll_with_metadata_gate()
            rids = [decode_req.req.rid for decode_req in queue]
            return list(self.transfers.pop_transferred(self.stages_see(rids, polls, KVPoll.Success, KVPoll.Failed)))

        def settle(self) -> tuple[str, ...]:
            """What was written where nothing should be: to pages that SGLang had released, and outside all requests."""
            deadline = time.monotonic() + self.deadline_s
            while self.transfers.has_pending_deferred_releases():
                self.transfers.resolve_deferred_releases()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"held pages were not released in {self.deadline_s:.0f} s")
                time.sleep(0.001)
            found = []
            for req, before in self.released:
                for region, old, new in zip(self.pools.regions, before, self.pools.snapshot(req), strict=True):
                    if not torch.equal(old, new):
                        found.append(f"{region.name} of {req.rid} after its release")
                self.pools.forget(req)
                self.pools.free(req)
            self.released = []
            return (*found, *(f"{name} outside requests" for name in self.pools.touched()))

    scheduler = Decode()
    return scheduler
