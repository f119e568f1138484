"""`KvctlConnector`, the class that vLLM loads; it passes each hook to the half that vLLM has created.

`--kv-transfer-config '{"kv_connector": "KvctlConnector", "kv_connector_module_path":
"kvctl_agent.integrations.vllm.connector", "kv_role": "kv_producer"}'`, and `kv_consumer` at decode.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from kvctl_agent.contract.settings import load_settings
from kvctl_agent.contract.vllm import CONNECTOR, MODULE_PATH
from kvctl_agent.integrations.engine_agent import attempt
from kvctl_agent.integrations.vllm import versions
from kvctl_agent.integrations.vllm.metadata import LOGGER, KvctlMetadata
from kvctl_agent.integrations.vllm.pools import check_groups, is_state
from kvctl_agent.integrations.vllm.scheduler import ConnectorScheduler
from kvctl_agent.integrations.vllm.sleep_mode import check_sleep_mode
from kvctl_agent.integrations.vllm.worker import ConnectorWorker, registry_of

logger = logging.getLogger(LOGGER)

_ROLES = ("kv_producer", "kv_consumer")


class KvctlConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector over kvctl's agent.

    Raises:
        RuntimeError: vLLM's version is not supported.
        ValueError: vLLM runs with an option that the connector does not support; the text names it.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        versions.check_version()
        check_supported(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            dcp = vllm_config.parallel_config.decode_context_parallel_size
            # Without a prefix cache and a cache of inputs vLLM identifies inputs by the request.
            hashed = bool(vllm_config.cache_config.enable_prefix_caching)
            self._scheduler = ConnectorScheduler(str(registry_of(vllm_config)), kv_cache_config, dcp, hashed)
        else:
            self._worker = ConnectorWorker(vllm_config, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether layers are sent while later ones are computed, which a CUDA graph of the whole forward excludes."""
        return bool(load_settings(extra_config)["pipeline"] != "off")

    # ---- scheduler -------------------------------------------------------------------------------------------------

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        # vLLM does not zero the blocks of these groups. Where it has to, the rows after a prompt need it, too.
        config = self._kv_cache_config
        return () if config.needs_kv_cache_zeroing else tuple(config.transfer_group_ids)

    def on_new_request(self, request: Any) -> None:
        fail = partial(logger.error, "kvctl: request %s is not transferred: %s", request.request_id)
        attempt(partial(self._scheduler.on_new_request, request), fail, logger)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.step(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.received(connector_output.finished_recving)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.pending

    # ---- worker ----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, KvctlMetadata)
        self._worker.recall(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, KvctlMetadata)
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: rooms are opened before the forward."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: vLLM schedules a request when all of its KV has arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self.has_connector_metadata():
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.results(finished_req_ids)

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            self._worker.close()


def check_supported(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Checks that the connector supports the options of a vLLM server.

    Raises:
        ValueError: it does not; the text names the option and the reason.
    """
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if transfer.kv_role not in _ROLES:
        raise ValueError(
            f"kvctl's connector does not support kv_role {transfer.kv_role}: set kv_producer for prefill servers and "
            "kv_consumer for decode servers"
        )
    if parallel.prefill_context_parallel_size > 1:
        raise ValueError("kvctl's connector does not support --prefill-context-parallel-size: set it to 1")
    if transfer.is_kv_producer and parallel.decode_context_parallel_size > 1:
        raise ValueError("kvctl's connector does not support --decode-context-parallel-size at prefill: set it to 1")
    if config.num_prefill_lookahead_tokens > 1:
        raise ValueError(
            "kvctl's connector does not support speculative decoding with several MTP modules, whose KV at the end of "
            "a prompt prefill cannot compute: set num_speculative_tokens to 1 in --speculative-config, or leave it out"
        )
    check_sleep_mode(config.model_config)
    groups = kv_cache_config.transfer_groups
    check_groups(groups)
    if any(map(is_state, groups)):
        _check_state(config)


def _check_state(config: VllmConfig) -> None:
    """Checks that the connector supports the options of a server of a model with Mamba layers."""
    parallel = config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise ValueError(
            "kvctl's connector does not support --tensor-parallel-size and --pipeline-parallel-size for models with "
            "Mamba layers: set them to 1"
        )
    if config.speculative_config is not None:
        raise ValueError(
            "kvctl's connector does not support speculative decoding of models with Mamba layers: leave out "
            "--speculative-config"
        )


# vLLM's MultiConnector asks for the class by name to read its statistics.
with suppress(ValueError):  # the module is imported again
    KVConnectorFactory.register_connector(CONNECTOR, MODULE_PATH, CONNECTOR)
