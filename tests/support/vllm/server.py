"""A vLLM server with the connector and without a model: it calls the hooks in vLLM's order, and its forward writes
known KV into the blocks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.support.vllm import stand_ins as vllm
from tests.support.vllm.modules import connector, pools

_NULL_BLOCK = 0
_DEADLINE_S = 60.0
_ALL = range(1 << 20)
_QUICK: dict[str, Any] = {"heartbeat_s": 0.2, "staging_ring_mb": 4, "staging_buffer_mb": 1, "chunk_tokens": 32}


@dataclass(frozen=True)
class Model:
    """Geometry of a model: for each KV cache group its layers, and its window; None for full attention.

    Attributes:
        divided: blocks of vLLM's kernels in a block of its scheduler.
        tokens_outermost: whether the tokens of a block are outside of its heads in memory.
    """

    groups: tuple[tuple[tuple[int, ...], int | None], ...] = (((0, 1), None),)
    heads: int = 4
    dim: int = 8
    block: int = 16
    blocks: int = 64
    divided: int = 1
    mla: bool = False
    tokens_outermost: bool = False

    def truth(self, layer: int, prompt: int, tokens: int) -> torch.Tensor:
        """Returns the KV of a prompt in a layer: [tokens, heads, K|V]."""
        return _random(layer, prompt, (tokens, 1 if self.mla else self.heads, self.dim if self.mla else 2 * self.dim))

    def stages(self, pp: int) -> list[range]:
        """Returns the layers of each of `pp` pipeline stages."""
        count = 1 + max(layer for layers, _ in self.groups for layer in layers)
        return [range(count * stage // pp, count * (stage + 1) // pp) for stage in range(pp)]

    def config(self, tp: int, stage: range = _ALL) -> vllm.KVCacheConfig:
        """Returns the configuration of a worker with one of `tp` shares of the heads, and the layers of a stage."""
        common: dict[str, Any] = {"block_size": self.block, "head_size": self.dim, "dtype": torch.float32}
        common["num_kv_heads"] = 1 if self.mla else self.heads // tp
        groups = []
        for layers, window in self.groups:
            if window is not None:
                spec: vllm.KVCacheSpec = vllm.SlidingWindowSpec(sliding_window=window, **common)
            else:
                spec = (vllm.MLAAttentionSpec if self.mla else vllm.FullAttentionSpec)(**common)
            groups.append(vllm.KVCacheGroupSpec([_name(layer) for layer in layers if layer in stage], spec))
        return vllm.KVCacheConfig(self.blocks, [], groups)

    def tensors(self, tp: int, stage: range = _ALL) -> dict[str, torch.Tensor]:
        """Returns such a worker's tensors, [blocks, heads, tokens, K|V]; groups share their memory."""
        heads, dim = (1, self.dim) if self.mla else (self.heads // tp, 2 * self.dim)
        pages, tokens = self.blocks * self.divided, self.block // self.divided
        made = []
        for _ in range(max(len(layers) for layers, _ in self.groups)):
            if self.tokens_outermost:
                made.append(torch.zeros(pages, tokens, heads, dim).transpose(1, 2))
            else:
                made.append(torch.zeros(pages, heads, tokens, dim))
        held = ([layer for layer in layers if layer in stage] for layers, _ in self.groups)
        return {_name(layer): made[place] for layers in held for place, layer in enumerate(layers)}


def _gather(objects: Sequence[Any], found: list[Any], own: Any, group: Any) -> None:
    found[:] = objects


def _name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


@lru_cache(maxsize=256)
def _random(layer: int, prompt: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([layer, prompt]).random(shape, np.float32))


@dataclass
class Job:
    """A request on a server: its prompt, its blocks in each group, and how many tokens of it are computed."""

    request: vllm.Request
    prompt: int
    table: tuple[list[int], ...]
    computed: int = 0
    scheduled: bool = False


@dataclass
class Server:
    """A server of `pp` pipeline stages of `tp` workers.

    Attributes:
        dcp: workers of a stage that have every `dcp`-th token of the same heads; decode only.
        sent, received, failed: requests that all workers have reported.
        metas: metadata of each step.
    """

    role: str
    model: Model
    port: int
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    metas: list[Any] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        transfer = vllm.KVTransferConfig(
            kv_connector="KvctlConnector",
            engine_id=f"{self.port}-engine",
            kv_role="kv_producer" if self.role == "prefill" else "kv_consumer",
            kv_port=self.port,
            kv_connector_extra_config={**_QUICK, **self.extra},
        )
        sizes = {"tensor_parallel_size": self.tp, "pipeline_parallel_size": self.pp}
        parallel = vllm.ParallelConfig(**sizes, decode_context_parallel_size=self.dcp)
        config = vllm.VllmConfig(vllm.ModelConfig(self.model.heads), parallel, None, transfer)
        shares = self.tp // self.dcp
        self.scheduler = connector.KvctlConnector(config, vllm.KVConnectorRole.SCHEDULER, self.model.config(shares))
        self.stages = [stage for stage in self.model.stages(self.pp) for _ in range(self.tp)]  # of each worker
        configs = [self.model.config(shares, stage) for stage in self.stages]
        self.workers = [connector.KvctlConnector(config, vllm.KVConnectorRole.WORKER, kv) for kv in configs]
        self.tensors = [self.model.tensors(shares, stage) for stage in self.stages]
        held = [
            pools.WorkerPool(tensors, kv, self.model.heads)
            for tensors, kv in list(zip(self.tensors, configs, strict=True))[:: self.tp]
        ]
        shapes = [(each.pool.shape(), each.ends_with_kv) for each in held]
        try:
            with patch.object(torch.distributed, "all_gather_object", partial(_gather, shapes)):
                for number, (worker, tensors) in enumerate(zip(self.workers, self.tensors, strict=True)):
                    vllm.Ranks.pp, vllm.Ranks.tp = divmod(number, self.tp)
                    worker.register_kv_caches(tensors)
        except BaseException:
            self.close()
            raise
        finally:
            vllm.Ranks.pp = vllm.Ranks.tp = 0
        self._free = list(range(self.model.blocks - 1, _NULL_BLOCK, -1))
        self._finished: set[str] = set()
        self._reports: dict[str, int] = {}

    @property
    def agents(self) -> list[Any]:
        return [worker._worker.agent for worker in self.workers]

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, name: str, tokens: int, params: dict[str, Any] | None, prompt: int = 0) -> Job:
        """Takes a request in, which waits from then on."""
        ids = [prompt % (1 << 32) + place for place in range(tokens)]
        request = vllm.Request(name, tokens, params, prompt_token_ids=ids)
        self.jobs[name] = job = Job(request, prompt, tuple([] for _ in self.model.groups))
        self.scheduler.on_new_request(request)
        return job

    def receive(self, name: str, cached: int = 0) -> bool:
        """Allocates the blocks of a waiting request and has its KV received; returns whether anything is.

        Args:
            cached: tokens of the prompt that the prefix cache has.
        """
        job = self.jobs[name]
        count, later = self.scheduler.get_num_new_matched_tokens(job.request, cached)
        assert count is not None
        self._allocate(job, cached + count)
        for layers, _ in self.model.groups:
            for layer in layers:
                self._write(layer, job, 0, cached)
        self.scheduler.update_state_after_alloc(job.request, vllm.KVCacheBlocks(job.table), count)
        job.request.status = vllm.RequestStatus.WAITING_FOR_REMOTE_KVS if later else vllm.RequestStatus.RUNNING
        return later

    def cached(self, name: str, tokens: int) -> None:
        """Gives a waiting request blocks with the first tokens of its prompt, as those in the prefix cache."""
        job = self.jobs[name]
        self._allocate(job, tokens)
        for layers, _ in self.model.groups:
            for layer in layers:
                self._write(layer, job, 0, tokens)
        job.computed = tokens

    def finish(
        self, name: str, status: vllm.RequestStatus = vllm.RequestStatus.FINISHED_LENGTH_CAPPED
    ) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request; its blocks are free again unless the connector keeps them."""
        job = self.jobs[name]
        waits = job.request.status == vllm.RequestStatus.WAITING_FOR_REMOTE_KVS
        job.request.status = status
        held, params = self.scheduler.request_finished_all_groups(job.request, job.table)
        self._finished.add(name)
        if not (held or waits):
            self._release(name)
        return held, params

    def step(self, tokens: Mapping[str, int] | None = None, preempted: Iterable[str] = ()) -> Any:
        """Makes a step that computes the next tokens of requests, at most to their ends; returns its metadata."""
        lengths = {name: job.request.num_prompt_tokens - job.computed for name, job in self.jobs.items()}
        tokens, preempted = {name: min(count, lengths[name]) for name, count in (tokens or {}).items()}, set(preempted)
        for name in preempted:
            job = self.jobs[name]
            self._give_back(job)
            job.computed = 0
        new, cached = [], []
        for name, count in tokens.items():
            job = self.jobs[name]
            self._allocate(job, job.computed + count)
            (cached if job.scheduled else new).append(name)
            job.scheduled = True
        output = self._output(tokens, new, cached, preempted)
        meta = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        self.metas.append(meta)
        for worker in self.workers:
            worker.handle_preemptions(meta)
            worker.bind_connector_metadata(meta)
            worker.start_load_kv(None)
        for worker, stage, tensors in zip(self.workers, self.stages, self.tensors, strict=True):
            for layer in sorted(layer for layers, _ in self.model.groups for layer in layers if layer in stage):
                for name, count in tokens.items():
                    self._write(layer, self.jobs[name], self.jobs[name].computed, count)
                worker.save_kv_layer(_name(layer), tensors[_name(layer)], None)
        for name, count in tokens.items():
            self.jobs[name].computed += count
        results = []
        for worker in self.workers:
            worker.wait_for_save()
            results.append(worker.get_transfer_results(output.finished_req_ids))
            worker.clear_connector_metadata()
        self._update(results)
        return meta

    def wait(self, condition: Callable[[], Any], what: str, *others: Server) -> None:
        """Makes steps, of other servers too, until a condition is true."""
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not after {_DEADLINE_S:g} s"
            for server in (self, *others):
                server.step()
            time.sleep(0.001)

    def check(self, name: str, cached: int = 0) -> None:
        """Asserts that the blocks of a request have the KV of its prompt, in the windows of groups with one."""
        job = self.jobs[name]
        tokens = job.request.num_prompt_tokens - any(window for _, window in self.model.groups)
        for number, (layers, window) in enumerate(self.model.groups):
            first = 0 if window is None else max(0, tokens - window + 1)
            for layer, (worker, tensors) in product(layers, enumerate(self.tensors)):
                if layer in self.stages[worker]:
                    own = self._tokens(worker, first, tokens)
                    wanted = self._share(layer, worker, job)[own]
                    found = tensors[_name(layer)][self._places(job.table[number], own)]
                    assert torch.equal(found, wanted), f"{name}: layer {layer} of worker {worker} has other KV"

    # ---- blocks ----------------------------------------------------------------------------------------------------

    def _allocate(self, job: Job, tokens: int) -> None:
        """Gives a request the blocks of `tokens` tokens; in a window, those of the next one to be computed."""
        for (_, window), blocks in zip(self.model.groups, job.table, strict=True):
            needed = -(-tokens // (self.model.block * self.dcp))
            if window is not None:
                computed = tokens if job.request.status == vllm.RequestStatus.WAITING and not blocks else job.computed
                gone = min(max(0, computed - window + 1) // self.model.block, needed)
                for place in range(min(gone, len(blocks))):
                    if blocks[place] != _NULL_BLOCK:
                        self._free.insert(0, blocks[place])
                        blocks[place] = _NULL_BLOCK
                blocks.extend([_NULL_BLOCK] * (gone - len(blocks)))
            blocks.extend(self._free.pop() for _ in range(needed - len(blocks)))

    def _give_back(self, job: Job) -> None:
        for blocks in job.table:
            self._free.extend(block for block in blocks if block != _NULL_BLOCK)
            blocks.clear()

    def _release(self, name: str) -> None:
        self._give_back(self.jobs.pop(name))

    def _tokens(self, worker: int, first: int, last: int) -> torch.Tensor:
        """Returns those of the tokens [first, last) that a worker has."""
        tokens = torch.arange(first, last)
        return tokens[tokens % self.dcp == worker % self.tp % self.dcp]

    def _places(self, blocks: Sequence[int], tokens: torch.Tensor) -> tuple[Any, ...]:
        """Returns the index of tokens in a worker's tensor."""
        per_page, own = self.model.block // self.model.divided, tokens // self.dcp
        block = torch.tensor(blocks, dtype=torch.int64)[own // self.model.block]
        return block * self.model.divided + own % self.model.block // per_page, slice(None), own % per_page

    def _share(self, layer: int, worker: int, job: Job) -> torch.Tensor:
        """Returns the KV of a prompt in the heads of a worker."""
        truth = self.model.truth(layer, job.prompt, job.request.num_prompt_tokens)
        share, own = worker % self.tp // self.dcp, truth.shape[1] * self.dcp // self.tp
        return truth if self.model.mla else truth[:, share * own : (share + 1) * own]

    def _write(self, layer: int, job: Job, first: int, count: int) -> None:
        """Writes tokens [first, first + count) of a layer on all workers that have it."""
        number = next(number for number, (layers, _) in enumerate(self.model.groups) if layer in layers)
        for worker, (stage, tensors) in enumerate(zip(self.stages, self.tensors, strict=True)):
            if layer in stage:
                own = self._tokens(worker, first, first + count)
                tensors[_name(layer)][self._places(job.table[number], own)] = self._share(layer, worker, job)[own]

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _output(
        self, tokens: Mapping[str, int], new: list[str], cached: list[str], preempted: set[str]
    ) -> vllm.SchedulerOutput:
        finished, self._finished = self._finished, set()
        return vllm.SchedulerOutput(
            scheduled_new_reqs=[
                vllm.NewRequestData(name, None, [], None, None, self.jobs[name].table, self.jobs[name].computed, None)
                for name in new
            ],
            scheduled_cached_reqs=vllm.CachedRequestData(
                cached, set(), [], {}, [None] * len(cached), [self.jobs[name].computed for name in cached], []
            ),
            num_scheduled_tokens=dict(tokens),
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            preempted_req_ids=preempted,
            kv_connector_block_state=vllm.KVConnectorBlockState(
                set(tokens), lambda name: tuple(list(blocks) for blocks in self.jobs[name].table), {}
            ),
        )

    def _update(self, results: Sequence[vllm.KVConnectorTransferResults]) -> None:
        """Takes the reports of a step; a request is sent or received when all workers have said so."""
        done: dict[str, set[str]] = {"sent": set(), "received": set()}
        for result in results:
            self.failed |= result.failed_recving
            for kind, names in (("sent", result.finished_sending), ("received", result.finished_recving)):
                for name in names:
                    self._reports[name] = self._reports.get(name, 0) + 1
                    if self._reports[name] == len(self.workers):
                        del self._reports[name]
                        done[kind].add(name)
        self.sent |= done["sent"]
        self.received |= done["received"]
        self.scheduler.update_connector_output(vllm.KVConnectorOutput(done["sent"], done["received"]))
        for name in done["sent"] | done["received"]:
            status = self.jobs[name].request.status
            if status >= vllm.RequestStatus.FINISHED_STOPPED:
                self._release(name)
            else:
                assert status == vllm.RequestStatus.WAITING_FOR_REMOTE_KVS, f"{name} is {status.name}"
                self.jobs[name].request.status = vllm.RequestStatus.RUNNING
