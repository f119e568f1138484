"""Stand-ins for the classes of vLLM that the connector uses, with vLLM's signatures, fields and defaults.

MODULES has them under the names of vLLM's modules. Each has what the connector and its tests use; `compare` checks
that vLLM has the same.
"""

from __future__ import annotations

import enum
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch

# ---- configuration -------------------------------------------------------------------------------------------------


@dataclass
class KVTransferConfig:
    kv_connector: str | None = None
    engine_id: str | None = None
    kv_role: str | None = None
    kv_port: int = 14579
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    kv_load_failure_policy: str = "fail"

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_connector is not None and self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_connector is not None and self.kv_role in ("kv_consumer", "kv_both")


@dataclass
class ParallelConfig:
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    data_parallel_index: int = field(init=False, default=0)
    enable_dbo: bool = False
    ubatch_size: int = 0

    @property
    def use_ubatching(self) -> bool:
        return self.enable_dbo or self.ubatch_size > 1


@dataclass
class CacheConfig:
    cache_dtype: str = "auto"
    enable_prefix_caching: bool = True


class ModelConfig:
    enable_sleep_mode = False
    sleep_mode_backend = "cumem"

    def __init__(self, kv_heads: int) -> None:
        self._kv_heads = kv_heads

    def get_total_num_kv_heads(self) -> int:
        return self._kv_heads


@dataclass
class VllmConfig:
    model_config: Any = None
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    speculative_config: Any = None
    kv_transfer_config: KVTransferConfig | None = None
    cache_config: CacheConfig = field(default_factory=CacheConfig)

    @property
    def num_prefill_lookahead_tokens(self) -> int:
        return getattr(self.speculative_config, "num_prefill_lookahead_tokens", 0)


class SpeculativeConfig:
    def __init__(self, draft_kv_cache: bool = False, num_prefill_lookahead_tokens: int = 0) -> None:
        self.num_prefill_lookahead_tokens = num_prefill_lookahead_tokens
        self._draft_kv_cache = draft_kv_cache

    def uses_draft_kv_cache(self) -> bool:
        return self._draft_kv_cache


# ---- KV cache ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KVCacheSpec:
    block_size: int


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: int | None = None


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    head_size_v: int | None = 0


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    attention_chunk_size: int


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mamba_cache_mode: str = "none"


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    kv_cache_specs: dict[str, KVCacheSpec]


@dataclass
class KVCacheTensor:
    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


@dataclass
class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    enable_kv_transfer: bool = True


@dataclass
class KVCacheConfig:
    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]

    @cached_property
    def transfer_group_ids(self) -> tuple[int, ...]:
        return tuple(number for number, group in enumerate(self.kv_cache_groups) if group.enable_kv_transfer)

    @cached_property
    def transfer_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        return tuple(self.kv_cache_groups[number] for number in self.transfer_group_ids)

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return any(isinstance(group.kv_cache_spec, MambaSpec) for group in self.kv_cache_groups)

    def select_transfer_block_ids(self, block_ids: Sequence[list[int]]) -> tuple[list[int], ...]:
        return tuple(block_ids[number] for number in self.transfer_group_ids)


class KVCacheBlocks:
    def __init__(self, blocks: tuple[list[int], ...]) -> None:
        self.blocks = blocks

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        return tuple(list(each) for each in self.blocks)


# ---- scheduler -----------------------------------------------------------------------------------------------------


class RequestStatus(enum.IntEnum):
    WAITING = 1
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 2
    WAITING_FOR_REMOTE_KVS = 3
    WAITING_FOR_STREAMING_REQ = 4
    RUNNING = 5
    PREEMPTED = 6
    FINISHED_STOPPED = 7
    FINISHED_LENGTH_CAPPED = 8
    FINISHED_ABORTED = 9
    FINISHED_IGNORED = 10
    FINISHED_ERROR = 11
    FINISHED_REPETITION = 12


@dataclass
class Request:
    """A request with the attributes that the connector reads; vLLM's takes other arguments."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    status: RequestStatus = RequestStatus.WAITING
    max_tokens: int = 16
    prompt_embeds: Any = None
    prompt_token_ids: list[int] | None = None
    _all_token_ids: list[int] = field(default_factory=list)
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        self.prompt_token_ids = self.prompt_token_ids or list(range(self.num_prompt_tokens))
        self._all_token_ids = list(self.prompt_token_ids)


@dataclass
class NewRequestData:
    req_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[Any]
    sampling_params: Any
    pooling_params: Any
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    lora_request: Any


@dataclass
class CachedRequestData:
    req_ids: list[str]
    resumed_req_ids: set[str]
    new_token_ids: list[list[int]]
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]


@dataclass
class KVConnectorBlockState:
    req_ids: set[str]
    resolve_block_ids: Callable[[str], tuple[list[int], ...]]
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]]


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_encoder_inputs: dict[str, list[int]]
    finished_req_ids: set[str]
    free_encoder_mm_hashes: list[str]
    preempted_req_ids: set[str] | None = None
    kv_connector_metadata: Any = None
    kv_cache_block_copies: Any = None
    kv_connector_block_state: KVConnectorBlockState | None = None


@dataclass
class KVConnectorOutput:
    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: Any = None
    invalid_block_ids: set[int] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class CacheHitSource(str, enum.Enum):  # noqa: UP042
    DEVICE = "device"
    HOST = "host"
    P2P = "p2p"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


# ---- connector -----------------------------------------------------------------------------------------------------


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class KVConnectorMetadata(ABC):  # noqa: B024
    pass


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]: ...


class KVConnectorBase_V1(ABC):
    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self._connector_metadata: KVConnectorMetadata | None = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    @property
    def requires_kv_delivery(self) -> bool:
        return self._kv_transfer_config.is_kv_producer

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None
        return self._connector_metadata

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None: ...  # noqa: B027

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None: ...  # noqa: B027

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self) -> None: ...

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults()

    def shutdown(self) -> None: ...  # noqa: B027

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return ()

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata: ...

    def on_new_request(self, request: Any) -> None: ...  # noqa: B027

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None: ...  # noqa: B027

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def take_events(self) -> Iterable[Any]:
        return ()

    def has_pending_block_frees(self) -> bool:
        return False

    def has_pending_push_work(self) -> bool:
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False

    def get_finished_count(self) -> int | None:
        return None


# ---- sleep mode, ranks ---------------------------------------------------------------------------------------------


class Ranks:
    """Coordinates of the worker that is being created."""

    pp = tp = 0


class Kernels:
    """What reads the blocks: "" for kernels that have K and V of a token in one row, as on GPUs."""

    isa = ""


def _get_attn_isa(
    dtype: torch.dtype, block_size: int, head_size: int | None = None, kv_cache_dtype: str | None = None
) -> str:
    return Kernels.isa


class GroupCoordinator:
    def __init__(self, rank: int) -> None:
        self.rank_in_group = rank
        self.cpu_group = None


def is_conv_state_dim_first() -> bool:
    return False


def get_pp_group() -> GroupCoordinator:
    return GroupCoordinator(Ranks.pp)


def get_tensor_model_parallel_rank() -> int:
    return Ranks.tp


class CuMemBackend:
    """Has no memory; `state` is that of a real one."""

    def __init__(self) -> None:
        self._state = "RUNNING"

    def suspend(self, level: int = 1) -> None:
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        self._state = "RUNNING"

    def state(self) -> str:
        return self._state

    def discard(self, tags: tuple[str, ...]) -> None:
        self._state = "SUSPENDED"


class SleepModeBackendFactory:
    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
        cls._registry[name] = module_path, class_name

    @classmethod
    def create_backend(cls, model_config: ModelConfig) -> CuMemBackend:
        module, name = cls._registry[model_config.sleep_mode_backend]
        made: CuMemBackend = getattr(importlib.import_module(module), name)()
        return made


class KVConnectorFactory:
    _registry: ClassVar[dict[str, Callable[[], type]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)

    @classmethod
    def get_connector_class_by_name(cls, connector_name: str) -> type:
        if connector_name not in cls._registry:
            raise ValueError(f"Connector '{connector_name}' is not registered.")
        return cls._registry[connector_name]()


_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"

MODULES: dict[str, tuple[Any, ...]] = {
    "vllm.config": (VllmConfig, CacheConfig, ParallelConfig, ModelConfig, KVTransferConfig, SpeculativeConfig),
    f"{_CONNECTOR}.base": (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        SupportsHMA,
    ),
    "vllm.distributed.kv_transfer.kv_connector.factory": (KVConnectorFactory,),
    "vllm.device_allocator.sleep_mode_backend": (CuMemBackend, SleepModeBackendFactory),
    "vllm.distributed.parallel_state": (get_pp_group, get_tensor_model_parallel_rank),
    "vllm.model_executor.layers.mamba.mamba_utils": (is_conv_state_dim_first,),
    "vllm.v1.attention.backends.cpu_attn": (_get_attn_isa,),
    "vllm.v1.core.kv_cache_manager": (KVCacheBlocks,),
    "vllm.v1.core.sched.output": (CachedRequestData, KVConnectorBlockState, NewRequestData, SchedulerOutput),
    "vllm.v1.kv_cache_interface": (
        AttentionSpec,
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        KVCacheTensor,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    ),
    "vllm.v1.metrics.cache_hit_source": (CacheHitSource,),
    "vllm.v1.outputs": (KVConnectorOutput,),
    "vllm.v1.request": (Request, RequestStatus),
}
