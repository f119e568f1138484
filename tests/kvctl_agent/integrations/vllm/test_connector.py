"""`KvctlConnector`: the options that it refuses, and the hooks that it passes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.vllm import stand_ins as vllm
from tests.support.vllm.compare import foreign_hooks
from tests.support.vllm.modules import connector, versions
from tests.support.vllm.server import Model

COMMON: dict[str, Any] = {"block_size": 16, "num_kv_heads": 4, "head_size": 8, "dtype": torch.float32}
FULL = vllm.FullAttentionSpec(**COMMON)


def config(role: str = "kv_producer", **options: Any) -> vllm.VllmConfig:
    speculative = options.pop("speculative_config", None)
    transfer = vllm.KVTransferConfig(kv_connector="KvctlConnector", kv_role=role, engine_id="12345678-9")
    return vllm.VllmConfig(vllm.ModelConfig(4), vllm.ParallelConfig(**options), speculative, transfer)


def groups(*specs: vllm.KVCacheSpec) -> vllm.KVCacheConfig:
    return vllm.KVCacheConfig(
        8, [], [vllm.KVCacheGroupSpec([f"model.layers.{n}.attn"], spec) for n, spec in enumerate(specs)]
    )


def refusal(given: vllm.VllmConfig, kv: vllm.KVCacheConfig) -> str:
    with pytest.raises(ValueError, match="kvctl's connector") as caught:
        connector.KvctlConnector(given, vllm.KVConnectorRole.SCHEDULER, kv)
    return str(caught.value)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "role", "reason"),
        [
            ({}, "kv_both", "does not support kv_role kv_both: set kv_producer for prefill servers and kv_consumer"),
            ({"prefill_context_parallel_size": 2}, "kv_producer", "--prefill-context-parallel-size: set it to 1"),
            ({"decode_context_parallel_size": 2}, "kv_producer", "--decode-context-parallel-size at prefill"),
        ],
    )
    def test_options(self, options: dict[str, Any], role: str, reason: str) -> None:
        assert reason in refusal(config(role, **options), groups(FULL))

    @pytest.mark.parametrize(
        ("specs", "reason"),
        [
            ((FULL, vllm.ChunkedLocalAttentionSpec(attention_chunk_size=8, **COMMON)), "ChunkedLocalAttentionSpec of"),
            ((vllm.SlidingWindowSpec(sliding_window=32, **COMMON),), "needs a layer with full attention"),
        ],
    )
    def test_kv_caches(self, specs: tuple[vllm.KVCacheSpec, ...], reason: str) -> None:
        assert reason in refusal(config(), groups(*specs))

    def test_another_backend_of_sleep_mode(self) -> None:
        given = config()
        given.model_config.enable_sleep_mode, given.model_config.sleep_mode_backend = True, "criu"
        assert "sleep mode with the backend criu: set sleep_mode_backend to cumem" in refusal(given, groups(FULL))

    def test_the_layer_of_a_group_that_is_refused_is_named(self) -> None:
        local = vllm.ChunkedLocalAttentionSpec(attention_chunk_size=8, **COMMON)
        assert "of layer model.layers.1.attn: use one of vLLM's own" in refusal(config(), groups(FULL, local))

    def test_another_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(versions, "version", lambda name: "0.31.0")
        with pytest.raises(RuntimeError, match=r"not 0\.31\.0"):
            connector.KvctlConnector(config(), vllm.KVConnectorRole.SCHEDULER, groups(FULL))

    @pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
    @pytest.mark.parametrize(
        "specs",
        [
            (FULL,),
            (vllm.MLAAttentionSpec(**COMMON),),
            (vllm.SlidingWindowSpec(sliding_window=32, **COMMON), FULL),
            (vllm.UniformTypeKVCacheSpecs(16, {"a": FULL, "b": FULL}),),
        ],
        ids=["full attention", "MLA", "a window", "uniform"],
    )
    def test_the_rest_is_supported(self, role: str, specs: tuple[vllm.KVCacheSpec, ...]) -> None:
        connector.KvctlConnector(config(role), vllm.KVConnectorRole.SCHEDULER, groups(*specs))

    def test_decode_context_parallel_ranks_of_a_decode_server(self) -> None:
        given = config("kv_consumer", tensor_parallel_size=2, decode_context_parallel_size=2)
        connector.KvctlConnector(given, vllm.KVConnectorRole.SCHEDULER, groups(FULL))

    def test_groups_that_are_not_transferred_are_not_looked_at(self) -> None:
        kv = groups(FULL, vllm.ChunkedLocalAttentionSpec(attention_chunk_size=8, **COMMON))
        kv.kv_cache_groups[1].enable_kv_transfer = False
        made = connector.KvctlConnector(config(), vllm.KVConnectorRole.SCHEDULER, kv)
        assert made.get_loaded_kv_cache_group_ids(None) == (0,)


class TestHooks:
    def test_each_is_one_of_vllm(self) -> None:
        assert foreign_hooks(connector.KvctlConnector, vllm.KVConnectorBase_V1, vllm.SupportsHMA) == []

    def test_another_is_found(self) -> None:
        class Other(connector.KvctlConnector):
            def on_request(self, request: Any) -> None: ...

            def on_new_request(self, wanted: Any) -> None: ...

        found = foreign_hooks(Other, vllm.KVConnectorBase_V1, vllm.SupportsHMA)
        assert found[0] == "vLLM has no on_request"
        assert found[1].startswith("on_new_request(self, wanted")
        assert len(found) == 2

    def test_hits_are_counted_as_those_of_a_peer(self) -> None:
        assert connector.KvctlConnector._cache_hit_source == vllm.CacheHitSource.P2P

    def test_both_ways_to_finish_a_request_are_one(self) -> None:
        made: Any = connector.KvctlConnector(config(), vllm.KVConnectorRole.SCHEDULER, Model().config(1))
        for number, finish in enumerate((made.request_finished, made.request_finished_all_groups)):
            request = vllm.Request(str(number), 8, {"do_remote_decode": True})
            made.on_new_request(request)
            request.status = vllm.RequestStatus.FINISHED_ABORTED
            assert finish(request, ([],)) == (True, None)

    @pytest.mark.parametrize(("pipeline", "needed"), [("off", False), ("on", True), ("auto", True)])
    def test_layers_that_are_sent_apart_exclude_whole_graphs(self, pipeline: str, needed: bool) -> None:
        assert connector.KvctlConnector.requires_piecewise_for_cudagraph({"pipeline": pipeline}) is needed

    def test_a_scheduler_has_nothing_to_shut_down(self) -> None:
        connector.KvctlConnector(config(), vllm.KVConnectorRole.SCHEDULER, Model().config(1)).shutdown()

    def test_multi_connector_finds_it_by_its_name(self) -> None:
        assert vllm.KVConnectorFactory.get_connector_class_by_name("KvctlConnector").__name__ == "KvctlConnector"
