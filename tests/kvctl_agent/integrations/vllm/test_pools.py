"""The agent's pool from vLLM's tensors, and the page numbers of vLLM's blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvctl_agent.errors import MemoryLayoutError
from tests.support.vllm import stand_ins as vllm
from tests.support.vllm.modules import pools
from tests.support.vllm.server import Model


def worker_pool(model: Model, tp: int = 1) -> Any:
    return pools.WorkerPool(model.tensors(tp), model.config(tp), model.heads)


class TestPool:
    @pytest.mark.parametrize("tokens_outermost", [False, True])
    def test_keys_and_values_are_views_of_the_tensors(self, tokens_outermost: bool) -> None:
        model = Model(tokens_outermost=tokens_outermost)
        tensors = model.tensors(1)
        pool = pools.WorkerPool(tensors, model.config(1), model.heads).pool
        assert (pool.num_pages, pool.page_size) == (model.blocks, model.block)
        names = list(tensors)
        tensors[names[1]][5, 2, 3, :] = torch.arange(2 * model.dim)
        for kv in (0, 1):
            found = pool.segments[0].elements(1, kv)[5, 3, 2].view(np.float32)
            assert found.tolist() == list(range(kv * model.dim, (kv + 1) * model.dim))

    @pytest.mark.parametrize(
        ("cache_dtype", "known"),
        [("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2"), ("auto", None)],
    )
    def test_elements_stored_as_bytes_are_those_of_the_cache_dtype(self, cache_dtype: str, known: str | None) -> None:
        model = Model(groups=(((0,), None), ((1,), 40)))
        tensors = {name: tensor.to(torch.uint8) for name, tensor in model.tensors(1).items()}
        pool = pools.WorkerPool(tensors, model.config(1), model.heads, cache_dtype).pool
        assert pool.dtypes == (dict.fromkeys(("kv", "group1"), known) if known else {})

    def test_chunks_have_whole_pages_of_each_group(self) -> None:
        model = Model(groups=(((0,), None), ((1,), 40)))
        pool = worker_pool(model)
        assert pool.chunk_tokens(1) == model.block
        assert pool.chunk_tokens(model.block + 1) == 2 * model.block

    def test_layers_are_ordered_by_their_numbers(self) -> None:
        pool = worker_pool(Model(groups=(((10, 2, 9), None),)))
        last = pool.last_layers([range(4, 5), range(5, 7)], 4)
        assert {name.split(".")[2]: group for name, group in last.items()} == {"2": range(4, 5), "10": range(5, 7)}

    def test_a_layer_group_ends_with_the_last_layer_of_any_kv_group(self) -> None:
        pool = worker_pool(Model(groups=(((1, 3), None), ((0, 2, 4), 32))))
        last = pool.last_layers([range(0, 1), range(1, 2)], 0)
        assert {name.split(".")[2]: group for name, group in last.items()} == {"1": range(0, 1), "4": range(1, 2)}

    def test_two_kv_layers_of_one_number(self) -> None:
        model = Model(groups=(((0, 1, 2, 3), None),))
        names = [f"model.layers.{n // 2}.self_attn.{n % 2}.attn" for n in range(4)]
        config = model.config(1)
        config.kv_cache_groups[0].layer_names[:] = names
        pool = pools.WorkerPool(dict(zip(names, model.tensors(1).values(), strict=True)), config, model.heads)
        groups = [range(0, 1), range(1, 3), range(3, 4)]
        assert pool.last_layers(groups, 0) == dict(zip((names[0], *names[2:]), groups, strict=True))

    def test_a_pipeline_stage_without_full_attention_is_refused(self) -> None:
        model = Model(groups=(((0,), None), ((1,), 32)))
        config = model.config(1)
        config.kv_cache_groups[0].layer_names.clear()
        with pytest.raises(ValueError, match="in each pipeline stage: divide the layers differently"):
            pools.WorkerPool(model.tensors(1), config, model.heads)

    def test_latents_have_one_plane(self) -> None:
        pool = worker_pool(Model(mla=True)).pool
        assert len(pool.segments[0].shard.segment.planes) == 1

    def test_latents_of_three_dimensions(self) -> None:
        model = Model(mla=True)
        tensors = {name: tensor[:, 0] for name, tensor in model.tensors(1).items()}
        pool = pools.WorkerPool(tensors, model.config(1), 1).pool
        assert (pool.num_pages, pool.page_size) == (model.blocks, model.block)

    @pytest.mark.parametrize("first", ["full", "window"])
    def test_full_attention_is_the_kv_and_each_other_group_a_table(self, first: str) -> None:
        full, window = ((0, 2), None), ((1, 3), 32)
        pool = worker_pool(Model(groups=(full, window) if first == "full" else (window, full))).pool
        assert [memory.shard.segment.table for memory in pool.segments] == [0, 1]
        assert len(pool.segments[0].blocks) == 2

    def test_a_group_of_another_kind_is_refused(self) -> None:
        model = Model(groups=(((0,), None), ((1,), 32)))
        config = model.config(1)
        config.kv_cache_groups[1].kv_cache_spec = vllm.ChunkedLocalAttentionSpec(
            block_size=16, num_kv_heads=4, head_size=8, dtype=torch.float32, attention_chunk_size=64
        )
        with pytest.raises(ValueError, match=r"ChunkedLocalAttentionSpec of layer model\.layers\.1\.self_attn\.attn"):
            pools.WorkerPool(model.tensors(1), config, model.heads)

    def test_a_tensor_that_is_no_view_of_whole_rows_names_its_layer(self) -> None:
        model = Model()
        tensors = model.tensors(1)
        name = next(iter(tensors))
        tensors[name] = tensors[name][..., ::2]
        with pytest.raises(MemoryLayoutError):
            pools.WorkerPool(tensors, model.config(1), model.heads)


class TestPages:
    def test_a_block_is_a_page(self) -> None:
        assert worker_pool(Model()).pages(([3, 1, 2],)) == ([3, 1, 2], [])

    def test_a_divided_block_is_several_pages(self) -> None:
        divided = worker_pool(Model(divided=4))
        assert divided.pool.page_size == 4
        assert divided.pages(([3, 1],)) == ([12, 13, 14, 15, 4, 5, 6, 7], [])

    @pytest.mark.parametrize(("tokens", "pages"), [(0, 8), (32, 8), (29, 8), (28, 7), (25, 7), (17, 5)])
    def test_pages_after_the_end_of_the_prompt_are_left_out(self, tokens: int, pages: int) -> None:
        divided = worker_pool(Model(divided=4))
        assert divided.pages(([3, 1],), tokens) == ([12, 13, 14, 15, 4, 5, 6, 7][:pages], [])
        assert divided.pages(([],), tokens) == ([], [])

    def test_an_absent_block_is_as_many_absent_pages(self) -> None:
        divided = worker_pool(Model(groups=(((0,), None), ((1,), 32)), divided=2))
        assert divided.pages(([3, 1], [-1, 2])) == ([6, 7, 2, 3], [[-1, -1, 4, 5]])

    def test_the_group_with_full_attention_is_the_first_wherever_it_stands(self) -> None:
        pool = worker_pool(Model(groups=(((1,), 32), ((0,), None), ((2,), 16))))
        assert pool.pages(([1], [2], [3])) == ([2], [[1], [3]])


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model.layers.3.self_attn.attn", 3),
        ("language_model.model.layers.12.attn", 12),
        ("transformer.h.7.attn", 7),
        ("attn", 0),
    ],
)
def test_the_number_of_a_layer(name: str, number: int) -> None:
    assert pools._layer_number(name) == number
