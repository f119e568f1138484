"""Models with Mamba layers: the state of a request after all tokens of its prompt but the last, beside its KV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvctl.lab.tcp_ports import free_port
from tests.support.vllm import stand_ins as vllm
from tests.support.vllm.modules import connector, pools, scheduler

BLOCKS, BLOCK, HEADS, DIM = 32, 16, 2, 8
STATE = ((3, 8), (2, 4))
FULL = vllm.FullAttentionSpec(BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
MAMBA = vllm.MambaSpec(1024, STATE, (torch.float32, torch.float32))
KV, MIXER = "model.layers.1.attn", "model.layers.0.mixer"


def cache_config(*specs: vllm.KVCacheSpec) -> vllm.KVCacheConfig:
    named = zip((MIXER, KV, "model.layers.2.mixer"), specs or (MAMBA, FULL), strict=False)
    return vllm.KVCacheConfig(BLOCKS, [], [vllm.KVCacheGroupSpec([name], spec) for name, spec in named])


def tensors() -> dict[str, torch.Tensor]:
    """Returns K and V, and the state, which share their memory."""
    memory = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM)
    return {KV: memory, MIXER: memory.flatten(1)[:, : 3 * 8 + 2 * 4]}


def options(role: str, port: int = 0, speculative: Any = None, **parallel: int) -> vllm.VllmConfig:
    transfer = vllm.KVTransferConfig(
        kv_connector="KvctlConnector",
        engine_id="12345678-9",
        kv_role=role,
        kv_port=port,
        kv_connector_extra_config={"staging_ring_mb": 4, "staging_buffer_mb": 1, "heartbeat_s": 0.2},
    )
    return vllm.VllmConfig(vllm.ModelConfig(HEADS), vllm.ParallelConfig(**parallel), speculative, transfer)


class Server:
    """A server of one worker, without a model."""

    def __init__(self, role: str, port: int) -> None:
        config, cache = options(role, port), cache_config()
        self.scheduler = connector.KvctlConnector(config, vllm.KVConnectorRole.SCHEDULER, cache)
        self.worker = connector.KvctlConnector(config, vllm.KVConnectorRole.WORKER, cache)
        self.tensors = tensors()
        self.worker.register_kv_caches(self.tensors)

    @property
    def half(self) -> Any:
        return self.worker._worker

    def step(self, name: str = "", tokens: int = 0, table: tuple[list[int], ...] = ()) -> None:
        """Makes a step that computes the next tokens of a new request."""
        new = [vllm.NewRequestData(name, None, [], None, None, table, 0, None)] if name else []
        output = vllm.SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=vllm.CachedRequestData([], set(), [], {}, [], [], []),
            num_scheduled_tokens={name: tokens} if name else {},
            total_num_scheduled_tokens=tokens,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
            preempted_req_ids=set(),
            kv_connector_block_state=vllm.KVConnectorBlockState({name}, lambda _: table, {}),
        )
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.worker.wait_for_save()


@pytest.fixture
def pair() -> Iterator[tuple[Server, Server]]:
    port = free_port()
    prefill, decode = Server("kv_producer", port), Server("kv_consumer", port)
    yield prefill, decode
    prefill.worker.shutdown()
    decode.worker.shutdown()


@pytest.mark.parametrize("tokens", [2, 16, 17, 40])
def test_decode_has_the_state_before_the_last_token(pair: tuple[Server, Server], tokens: int) -> None:
    prefill, decode = pair
    port = prefill.half._config.kv_transfer_config.kv_port
    params = {"do_remote_prefill": True, "transfer_id": "t", "kvctl_prefill": f"tcp://127.0.0.1:{port}"}
    received = vllm.Request("request", tokens, params)
    decode.scheduler.on_new_request(received)
    assert decode.scheduler.get_num_new_matched_tokens(received, 0) == (tokens - 1, True)
    blocks = -(-(tokens - 1) // BLOCK)
    there = ([9], list(range(20, 20 + blocks)))
    decode.scheduler.update_state_after_alloc(received, vllm.KVCacheBlocks(there), tokens - 1)
    decode.step()
    sent = vllm.Request("request", tokens, {"do_remote_decode": True, "transfer_id": "t"})
    prefill.scheduler.on_new_request(sent)
    assert (sent.num_prompt_tokens, len(sent.prompt_token_ids or ()), sent.max_tokens) == (tokens - 1, tokens - 1, 1)
    here = ([4], list(range(10, 10 + blocks)))
    for name, numbers in zip((MIXER, KV), here, strict=True):
        prefill.tensors[name][numbers] = torch.rand(prefill.tensors[name][numbers].shape)
    prefill.step("request", tokens - 1, here)
    handle = decode.half._receives["request"]
    assert handle.wait(30).name == "SUCCESS", handle.error
    assert torch.equal(decode.tensors[MIXER][9], prefill.tensors[MIXER][4])
    found = decode.tensors[KV][there[1]].transpose(1, 2).flatten(0, 1)[: tokens - 1]
    assert torch.equal(found, prefill.tensors[KV][here[1]].transpose(1, 2).flatten(0, 1)[: tokens - 1])


def test_nothing_of_a_prompt_of_one_token_is_received() -> None:
    half = scheduler.ConnectorScheduler("tcp://127.0.0.1:1", cache_config(), 1)
    request = vllm.Request("request", 1, {"do_remote_prefill": True, "transfer_id": "t", "kvctl_prefill": "tcp://x:1"})
    half.on_new_request(request)
    assert half.matched_tokens(request, 0) == (0, False)
    half.allocated(request, vllm.KVCacheBlocks(([], [])), 0)
    assert [each[0] for each in half._next.refused] == ["t"]


@pytest.mark.parametrize(("specs", "groups"), [((MAMBA, FULL), ()), ((FULL,), (0,))])
def test_vllm_zeroes_all_blocks_where_it_has_to(specs: tuple[vllm.KVCacheSpec, ...], groups: tuple[int, ...]) -> None:
    made = connector.KvctlConnector(options("kv_consumer"), vllm.KVConnectorRole.SCHEDULER, cache_config(*specs))
    assert made.get_loaded_kv_cache_group_ids(None) == groups


WINDOW = vllm.SlidingWindowSpec(BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32, sliding_window=32)


@pytest.mark.parametrize(
    ("specs", "tokens"),
    [
        ((FULL,), 40),
        ((FULL, WINDOW), 39),
        ((MAMBA, FULL), 39),
        ((FULL, vllm.UniformTypeKVCacheSpecs(BLOCK, {"a": WINDOW, "b": WINDOW})), 39),
        ((vllm.UniformTypeKVCacheSpecs(1024, {"a": MAMBA}), FULL), 39),
    ],
)
def test_only_prompts_of_models_with_full_attention_alone_are_whole(
    specs: tuple[vllm.KVCacheSpec, ...], tokens: int
) -> None:
    half = scheduler.ConnectorScheduler("tcp://127.0.0.1:1", cache_config(*specs), 1)
    request = vllm.Request("request", 40, {"do_remote_decode": True})
    half.on_new_request(request)
    assert request.num_prompt_tokens == tokens
    received = vllm.Request("other", 40, {"do_remote_prefill": True, "transfer_id": "t", "kvctl_prefill": "tcp://x:1"})
    half.on_new_request(received)
    assert half.matched_tokens(received, 0) == (tokens, True)


def test_states_with_other_contents_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*specs: vllm.KVCacheSpec) -> list[str]:
        pool = pools.WorkerPool(tensors(), cache_config(*specs), HEADS).pool
        return [memory.shard.segment.name for memory in pool.segments]

    first = names()
    assert len(first) == 2
    assert first == names()
    assert first != names(vllm.MambaSpec(1024, STATE[::-1], (torch.float32, torch.float32)), FULL)
    assert first != names(vllm.MambaSpec(1024, STATE, (torch.float32, torch.int32)), FULL)
    monkeypatch.setattr(pools, "is_conv_state_dim_first", lambda: True)
    assert first != names()


@pytest.mark.parametrize(
    ("parallel", "speculative", "specs", "reason"),
    [
        ({"tensor_parallel_size": 2}, None, (), "--pipeline-parallel-size for models with Mamba layers"),
        ({"pipeline_parallel_size": 2}, None, (), "--pipeline-parallel-size for models with Mamba layers"),
        ({}, vllm.SpeculativeConfig(), (), "speculative decoding of models with Mamba layers"),
        ({}, None, (vllm.MambaSpec(16, STATE, MAMBA.dtypes, "align"), FULL), "set --no-enable-prefix-caching"),
        (
            {},
            vllm.SpeculativeConfig(),
            (vllm.UniformTypeKVCacheSpecs(1024, {"a": MAMBA}), FULL),
            "speculative decoding of models with Mamba layers",
        ),
        ({}, None, (MAMBA,), "needs a layer with full attention"),
        ({}, vllm.SpeculativeConfig(True, 2), (FULL,), "speculative decoding with several MTP modules"),
    ],
)
def test_refusals(parallel: dict[str, int], speculative: Any, specs: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        connector.KvctlConnector(
            options("kv_producer", 0, speculative, **parallel), vllm.KVConnectorRole.SCHEDULER, cache_config(*specs)
        )


@pytest.mark.parametrize("drafts", [False, True])
def test_speculative_decoding_of_other_models_is_supported(drafts: bool) -> None:
    given = options("kv_consumer", 0, vllm.SpeculativeConfig(drafts, int(drafts)))
    connector.KvctlConnector(given, vllm.KVConnectorRole.SCHEDULER, cache_config(FULL))
