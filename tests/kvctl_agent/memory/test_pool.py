"""KV pools: accepted shapes, errors that name the tensor, and the assignment of shards."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import KvctlError, MemoryLayoutError
from kvctl_agent.layout.parallel import LocalShard, ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.shape import KVGroup, ModelShape, StateShape, segments
from kvctl_agent.memory.pool import Buffer, DraftKV, GroupTensors, KVPool, StateTensors
from kvctl_agent.memory.pool_layouts import POOL_LAYOUTS

K, V = 0, 1


def layers(count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


def wrap(k: Any, v: Any, **more: Any) -> KVPool:
    return KVPool.from_tensors(k, v, **{"page_size": 4, "total_kv_heads": 8, **more})


class TestAuxBuffers:
    def test_a_row_is_one_row_of_each_buffer_by_tensor_or_address(self) -> None:
        ids, logits = torch.arange(4, dtype=torch.int32), np.arange(4 * 2 * 3, dtype=np.float64).reshape(4, 2, 3)
        raw = np.arange(4 * 5, dtype=np.uint8)
        pool = wrap(layers(2, (8, 2, 4)), layers(2, (8, 2, 4)), aux=[ids, logits, (raw.ctypes.data, 20, 5)])
        assert [buffer.shape for buffer in pool.aux] == [(4, 4), (4, 48), (4, 5)]
        assert (pool.aux_slots, pool.addresses().aux_row_bytes) == (4, (4, 48, 5))
        assert pool.addresses().aux_bases == (ids.data_ptr(), logits.ctypes.data, raw.ctypes.data)
        assert pool.nbytes == 2 * 2 * 8 * 2 * 4 * 2 + 4 * (4 + 48 + 5)
        wanted = ids[2].numpy().tobytes() + logits[2].tobytes() + raw[10:15].tobytes()
        assert pool.aux_row(2) == wanted
        pool.store_aux_row(0, wanted)
        assert pool.aux_row(0) == wanted
        assert (int(ids[0]), logits[0].tolist(), raw[:5].tolist()) == (2, logits[2].tolist(), [10, 11, 12, 13, 14])
        assert (int(ids[1]), raw[5]) == (1, 5)
        covered = [(region.addr, region.addr + region.nbytes) for region in pool.regions()]
        for buffer in pool.aux:
            assert any(lo <= buffer.ctypes.data and buffer.ctypes.data + buffer.nbytes <= hi for lo, hi in covered)
        pool.close()
        assert pool.aux == ()

    @pytest.mark.parametrize("aux", [None, [], ()])
    def test_a_pool_may_have_none(self, aux: Any) -> None:
        pool = wrap(layers(2, (8, 2, 4)), layers(2, (8, 2, 4)), aux=aux)
        assert (pool.aux, pool.aux_slots) == ((), 0)
        assert (pool.addresses().aux_bases, pool.addresses().aux_row_bytes) == ((), ())


class TestFromTensors:
    def test_bf16_tensors_are_described_and_shared_not_copied(self) -> None:
        k, v = layers(3, (12, 2, 6)), layers(3, (12, 2, 10))
        pool = wrap(k, v, aux=torch.zeros((5, 24), dtype=torch.uint8))
        assert pool.shape() == ModelShape(3, 8, 6, 10, 2)
        (kv,) = pool.segments
        assert (kv.shard.num_layers, kv.shard.heads, pool.num_pages, pool.page_size) == (3, 2, 3, 4)
        assert (pool.aux_slots, pool.addresses().aux_row_bytes) == (5, (24,))
        assert pool.nbytes == 3 * 12 * 2 * (6 + 10) * 2 + 5 * 24
        v[1][3, 1, 2] = 1.0
        offset = ((3 * 2 + 1) * 10 + 2) * 2
        assert pool.segments[0].block(1, V)[offset : offset + 2].tobytes() == b"\x80\x3f"

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
    def test_the_element_size_follows_the_dtype(self, dtype: torch.dtype) -> None:
        pool = wrap(layers(1, (4, 1, 8), dtype), layers(1, (4, 1, 8), dtype))
        assert pool.shape().dtype_bytes == dtype.itemsize

    @pytest.mark.parametrize(
        ("tensor", "told", "known"),
        [
            (torch.zeros((4, 1, 8), dtype=torch.bfloat16), "", "bfloat16"),
            (torch.zeros((4, 1, 8), dtype=torch.float8_e4m3fn), "", "float8_e4m3fn"),
            (torch.zeros((4, 1, 8), dtype=torch.float16), "", "float16"),
            (np.zeros((4, 1, 8), np.float16), "", "float16"),
            (np.zeros((4, 1, 8), np.int16), "", "int16"),
            *((np.zeros((4, 1, 8), storage), "", None) for storage in (np.uint8, np.uint16, "V2")),
            (torch.zeros((4, 1, 8), dtype=torch.uint8), "", None),
            (torch.zeros((4, 1, 8), dtype=torch.uint8), "float8_e5m2", "float8_e5m2"),
        ],
    )
    def test_torch_and_numpy_name_elements_alike_and_storage_names_none(
        self, tensor: Any, told: str, known: str | None
    ) -> None:
        def copy() -> Any:
            return tensor.clone() if isinstance(tensor, torch.Tensor) else tensor.copy()

        state, draft = StateTensors("conv", [copy()], dtype=told), DraftKV([copy()], [copy()], 8, dtype=told)
        pool = wrap([copy()], [copy()], state=[state], draft=draft, dtype=told)
        assert pool.dtypes == (dict.fromkeys(("kv", "draft", "conv"), known) if known else {})

    def test_scales_have_a_dtype_of_their_own(self) -> None:
        scales = [torch.zeros((3, 2), dtype=torch.float16)]
        pool = wrap(layers(1, (12, 2, 8)), layers(1, (12, 2, 8)), k_scale=scales, v_scale=[scales[0].float()])
        assert pool.dtypes == {"kv": "bfloat16", "kv k_scale": "float16", "kv v_scale": "float32"}

    @pytest.mark.parametrize("dtype", [torch.bfloat16, None, "b" * 257])
    def test_a_dtype_is_a_name(self, dtype: Any) -> None:
        with pytest.raises(MemoryLayoutError, match=r"kv: dtype is .*: it must be a name"):
            wrap(layers(1, (4, 1, 8)), layers(1, (4, 1, 8)), dtype=dtype)

    def test_numpy_arrays_serve_as_well(self) -> None:
        k = [np.zeros((8, 2, 4), dtype=np.float32)]
        v = [np.zeros((8, 2, 4), dtype=np.float32)]
        pool = wrap(k, v)
        pool.segments[0].block(0, K)[:4] = np.frombuffer(np.float32(2.5).tobytes(), dtype=np.uint8)
        assert k[0][0, 0, 0] == 2.5

    def test_groups_are_segments_with_pages_of_their_own(self) -> None:
        k, v = layers(3, (12, 2, 6)), layers(3, (12, 2, 10))
        window = GroupTensors("swa", DraftKV(layers(2, (16, 1, 4)), layers(2, (16, 1, 4)), 4), 8, layers=(0, 2))
        index = GroupTensors("index", DraftKV(layers(1, (5, 2, 6)), axes="pages tokens dim"), 2, layers=(1,))
        pool = wrap(k, v, groups=[window, index], state=[StateTensors("conv", layers(1, (3, 7)))])
        groups = (
            KVGroup("swa", ModelShape(2, 4, 4, 4, 2), (0, 2), 8),
            KVGroup("index", ModelShape(1, 1, 6, 0, 2, kind="mla"), (1,), 2),
        )
        assert pool.shape().groups == groups
        assert [(each.name, each.shard.segment.table, each.num_slots) for each in pool.segments] == [
            ("kv", 0, 3),
            ("swa", 1, 2),
            ("index", 2, 5),
            ("conv", None, 3),
        ]
        assert [each.segment for each in (memory.shard for memory in pool.segments)] == list(segments(pool.shape(), 4))
        assert [each.num_slots for each in pool.segments_at(2)] == [6, 2, 5, 3], "only KV is divided"

    @pytest.mark.parametrize(
        ("group", "text"),
        [
            (GroupTensors("swa", None, 8), "group 'swa': it must have a name and its tensors as a DraftKV"),  # type: ignore[arg-type]
            (GroupTensors("swa", DraftKV(layers(1, (4, 2, 6)), layers(1, (4, 2, 6)), 2), 0), "swa: page_size is 0"),
            (GroupTensors("swa", DraftKV(layers(1, (5, 2, 6)), layers(1, (5, 2, 6)), 2), 2), "swa layer 0 k"),
            (
                GroupTensors("swa", DraftKV(layers(1, (4, 2, 6)), layers(1, (4, 2, 6)), 2), 2, (0, 1)),
                "swa: 1 layers, but 2",
            ),
        ],
    )
    def test_a_group_that_cannot_be_used_is_refused_by_name(self, group: GroupTensors, text: str) -> None:
        with pytest.raises(KvctlError, match=text):
            wrap(layers(3, (12, 2, 6)), layers(3, (12, 2, 6)), groups=[group])

    def test_each_tensor_that_stands_alone_is_a_region(self) -> None:
        k, v = layers(2, (4, 2, 4)), layers(2, (4, 2, 4))
        assert sorted(wrap(k, v).regions()) == sorted((t.data_ptr(), t.numel() * 2, HOST) for t in k + v)

    def test_layers_cut_from_one_tensor_are_one_region(self) -> None:
        whole = torch.zeros((2, 2, 4, 2, 4), dtype=torch.bfloat16)
        pool = wrap(list(whole[:, 0]), list(whole[:, 1]))
        assert pool.regions() == [(whole.data_ptr(), whole.numel() * 2, HOST)]

    def test_the_pool_keeps_the_tensors_alive_until_it_is_closed(self) -> None:
        k, v = layers(1, (4, 2, 4)), layers(1, (4, 2, 4))
        gone = weakref.ref(k[0])
        pool = wrap(k, v)
        del k
        gc.collect()
        assert gone() is not None
        pool.close()
        pool.close()
        gc.collect()
        assert gone() is None
        with pytest.raises(MemoryLayoutError, match="closed"):
            pool.segments[0].block(0, K)


GOOD, WHOLE = layers(2, (8, 2, 4)), torch.zeros(14, 2, 4)


@pytest.mark.parametrize(
    ("k", "v", "more", "message"),
    [
        pytest.param([], [], {}, "0 K and 0 V layers", id="no layers"),
        pytest.param(GOOD, GOOD[:1], {}, "2 K and 1 V layers", id="K without V"),
        pytest.param(GOOD, layers(2, (8, 2, 4)), {"page_size": 0}, "page_size is 0", id="page size"),
        pytest.param(
            GOOD, layers(2, (8, 2, 4)), {"page_size": 3}, "layer 0 k: 8 tokens are not whole pages of 3", id="pages"
        ),
        pytest.param(
            GOOD, [GOOD[0].clone(), torch.zeros(8, 2, 5, dtype=torch.bfloat16)], {},
            r"layer 1 v: shape \(8, 2, 5\), expected \(8, 2, 4\)", id="one layer's shape",
        ),
        pytest.param(
            GOOD, layers(2, (12, 2, 4)), {}, r"layer 0 v: shape \(12, 2, 4\), expected \(8, 2, 4\)", id="V tokens"
        ),
        pytest.param(
            GOOD, layers(2, (8, 1, 4)), {}, r"layer 0 v: shape \(8, 1, 4\), expected \(8, 2, 4\)", id="V heads"
        ),
        pytest.param(GOOD, layers(2, (8, 2, 4), torch.float16), {}, "layer 0 v: dtype torch.float16", id="dtype"),
        pytest.param(
            GOOD, [GOOD[0].clone(), torch.zeros(8, 2, 8, dtype=torch.bfloat16)[..., :4]], {},
            r"layer 1 v: strides of \(32, 16, 2\) bytes, but layer 0 v has \(16, 8, 2\)", id="a slice",
        ),
        pytest.param(
            [torch.zeros(8, 4, 2).permute(0, 2, 1)], [torch.zeros(8, 2, 4)], {},
            "layer 0 k: the last dimension of shape .* is not contiguous", id="dim is not innermost",
        ),
        pytest.param(
            [torch.zeros(8, 1, 4).expand(8, 2, 4)], [torch.zeros(8, 2, 4)], {},
            "layer 0 k: elements of shape .* overlap", id="expanded",
        ),
        pytest.param(GOOD, layers(2, (8, 2, 4)), {"axes": "tokens heads"}, "axes is 'tokens heads'", id="axes"),
        pytest.param(
            [torch.zeros(2, 8, 2, 4)], [torch.zeros(2, 8, 2, 4)], {"axes": "pages tokens heads dim"},
            "layer 0 k: pages of 8 tokens, but page_size is 4", id="other pages",
        ),
        pytest.param([torch.zeros(2, 8, 4)], [torch.zeros(2, 8, 4)], {}, "layer 0 k: .*HND", id="HND, raw"),
        pytest.param(
            [torch.zeros(2, 2, 4, 8)], [torch.zeros(2, 2, 4, 8)], {}, "layer 0 k: .*4 dimensions, but axes", id="paged"
        ),
        pytest.param(
            [torch.zeros(8, 2, 4, device="meta")], [torch.zeros(8, 2, 4)], {}, "layer 0 k: on device meta", id="device"
        ),
        pytest.param(GOOD, GOOD, {}, "layer [01] k and layer [01] v share memory", id="K is V"),
        pytest.param([WHOLE[:8]], [WHOLE[6:14]], {}, "layer 0 k and layer 0 v share memory", id="K ends in V"),
        pytest.param(
            [torch.zeros(0, 2, 4)], [torch.zeros(0, 2, 4)], {}, "layer 0 k: .*is empty", id="empty"
        ),
        pytest.param([[1, 2]], [[3, 4]], {}, "layer 0 k: list is neither", id="not a tensor"),
        pytest.param(
            GOOD, layers(2, (8, 2, 4)), {"total_kv_heads": 3}, "total_kv_heads is 3, not a multiple of the 2", id="H"
        ),
        pytest.param(
            GOOD, layers(2, (8, 2, 4)), {"aux": torch.zeros(())}, r"aux: shape \(\) is empty", id="aux number"
        ),
        pytest.param(
            GOOD, layers(2, (8, 2, 4)), {"aux": torch.zeros(4, 6)[:, :3]}, "aux: .*not contiguous", id="aux slice"
        ),
        pytest.param(
            GOOD, layers(2, (8, 2, 4)), {"aux": [torch.zeros(4), torch.zeros(3, 2)]},
            "aux 1: 3 rows, but aux 0 has 4", id="aux rows"
        ),
        pytest.param(GOOD, layers(2, (8, 2, 4)), {"aux": [GOOD[0]]}, "aux 0 and layer 0 k share memory", id="aux is K"),
        pytest.param(
            GOOD, layers(2, (8, 2, 4)), {"aux": [(1 << 20, 25, 8)]}, "aux 0: 25 bytes at address 1048576 are not rows",
            id="aux bytes"
        ),
        pytest.param(GOOD, layers(2, (8, 2, 4)), {"aux": [(0, 24, 8)]}, "aux 0: 24 bytes at address 0", id="aux null"),
        pytest.param(GOOD, layers(2, (8, 2, 4)), {"aux": (64, 24, 8)}, "aux 0: int is neither", id="aux numbers"),
        pytest.param(GOOD, layers(2, (8, 2, 4)), {"aux": [(64, 24)]}, r"aux 0 is \(64, 24\): it", id="aux pair"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(k: Any, v: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(MemoryLayoutError, match=message):
        wrap(k, v, **more)


def test_a_read_only_array_is_refused() -> None:
    frozen = np.zeros((4, 2, 4), dtype=np.float32)
    frozen.flags.writeable = False
    with pytest.raises(MemoryLayoutError, match="layer 0 k: the array is read-only"):
        wrap([frozen], [np.zeros((4, 2, 4), dtype=np.float32)])


FULL = ModelShape(
    num_layers=5,
    num_kv_heads=8,
    k_dim=6,
    v_dim=10,
    dtype_bytes=2,
    k_scale_bytes=4,
    v_scale_bytes=2,
    draft=ModelShape(1, 4, 8, 4, 2),
    states=(StateShape("conv", (0, 3, 4), 3, 8, 4), StateShape("index", (1,), 1, 1, 40)),
)
STAGES = ParallelConfig(pp=2, tp=2, stages=(2, 3))


def of_rank(pp: int, tp: int) -> tuple[LocalShard, ...]:
    return local_shards(FULL, 4, STAGES, RankCoord(0, pp, 0, tp))


PAGES, TOKENS, HEADS, DIM = 3, 4, 2, 8


class TestLayouts:
    """Tensors as engines have them: 3 pages of 4 tokens, 2 heads of 8 dims."""

    @pytest.mark.parametrize(
        ("shape", "axes", "strides"),
        [
            ((12, 2, 8), "tokens heads dim", (128, 32, 16)),
            ((3, 4, 2, 8), "pages tokens heads dim", (128, 32, 16)),
            ((3, 2, 4, 8), "pages heads tokens dim", (128, 16, 64)),
            ((2, 3, 4, 8), "heads pages tokens dim", (64, 16, 192)),
        ],
    )
    def test_axes_name_the_dimensions(self, shape: tuple[int, ...], axes: str, strides: tuple[int, ...]) -> None:
        pool = wrap(layers(2, shape), layers(2, shape), axes=axes)
        assert pool.shape() == ModelShape(2, 8, 8, 8, 2)
        assert (pool.num_pages, pool.segments[0].shard.heads) == (3, 2)
        assert pool.segments[0].addresses.strides == (strides,) * 2

    def test_fused_rows_are_one_region_and_share_no_byte(self) -> None:
        fused = [torch.zeros(PAGES, HEADS, TOKENS, 8 + 6, dtype=torch.bfloat16) for _ in range(2)]
        pool = wrap([each[..., :8] for each in fused], [each[..., 8:] for each in fused], axes="pages heads tokens dim")
        assert pool.shape() == ModelShape(2, 8, 8, 6, 2)
        assert pool.regions() == sorted((each.data_ptr(), each.numel() * 2, HOST) for each in fused)
        pool.segments[0].elements(1, V)[2, 3, 1] = 7
        assert (fused[1][2, 1, 3, 8:].contiguous().view(torch.uint8) == 7).all()
        assert fused[1].view(torch.uint8).count_nonzero() == 6 * 2

    @pytest.mark.parametrize("first", [0, 1])
    def test_one_tensor_of_k_and_v(self, first: int) -> None:
        """vLLM's `[2, blocks, ...]` and `[blocks, 2, ...]`."""
        kv = torch.zeros(*((2, 3) if first == 0 else (3, 2)), TOKENS, HEADS, DIM, dtype=torch.float16)
        pool = wrap([kv.select(first, 0)], [kv.select(first, 1)], axes="pages tokens heads dim")
        assert pool.regions() == [(kv.data_ptr(), kv.numel() * 2, HOST)]

    def test_one_tensor_of_all_layers_with_pages_outermost(self) -> None:
        kv = torch.zeros(PAGES, 5, 2, TOKENS, HEADS, DIM, dtype=torch.float16)
        k, v = ([kv[:, layer, plane] for layer in range(5)] for plane in (K, V))
        pool = wrap(k, v, axes="pages tokens heads dim")
        assert pool.regions() == [(kv.data_ptr(), kv.numel() * 2, HOST)]
        assert pool.nbytes == kv.numel() * 2
        v[3][2, 1, 0] = 1.0
        assert pool.segments[0].elements(3, V)[2, 1, 0].any()

    def test_memory_that_is_shared_is_refused_unless_the_engine_vouches_for_it(self) -> None:
        kv = torch.zeros(PAGES, TOKENS, HEADS, DIM + 4, dtype=torch.float16)
        k, v = [kv[..., :DIM]], [kv[..., 4:]]
        with pytest.raises(MemoryLayoutError, match=r"layer 0 k and layer 0 v share memory.*pass overlaid=True"):
            wrap(k, v, axes="pages tokens heads dim")
        assert wrap(k, v, axes="pages tokens heads dim", overlaid=True).nbytes == 2 * PAGES * TOKENS * HEADS * DIM * 2

    def test_memory_is_shared_if_it_takes_long_to_find_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def hard(*_: object) -> bool:
            raise np.exceptions.TooHardError

        monkeypatch.setattr(np, "shares_memory", hard)
        kv = torch.zeros(PAGES, TOKENS, HEADS, DIM + 4, dtype=torch.float16)
        with pytest.raises(MemoryLayoutError, match="share memory"):
            wrap([kv[..., :DIM]], [kv[..., DIM:]], axes="pages tokens heads dim")

    def test_state_and_scales_may_be_strided_by_page(self) -> None:
        """vLLM's groups of hybrid models are views of one buffer of blocks."""
        blocks = torch.zeros(PAGES, 4096, dtype=torch.uint8)
        k, v = (blocks[:, start : start + 64].view(PAGES, TOKENS, HEADS, 8) for start in (0, 64))
        conv = blocks[:, 200:248].view(PAGES, 3, 4, 4)
        scales = [blocks[:, 300 + 8 * plane : 308 + 8 * plane].view(PAGES, HEADS, 4) for plane in (0, 1)]
        pool = wrap(
            [k], [v], axes="pages tokens heads dim", k_scale=scales[:1], v_scale=scales[1:],
            state=[StateTensors("conv", [conv], heads=8, axis=2)],
        )  # fmt: skip
        kv, state = pool.segments
        assert [strides.page for strides in (*kv.addresses.strides, *state.addresses.strides)] == [4096] * 5
        state.elements(0, 0)[1, 2, 3] = 9
        assert blocks.nonzero().tolist() == [[1, 200 + 2 * 16 + 3 * 4 + byte] for byte in range(4)]
        kv.elements(0, 3)[2, 0, 1] = 9
        assert blocks[2].nonzero().flatten().tolist() == [308 + 4 + byte for byte in range(4)]

    def test_blocks_of_a_row_of_state_are_components_of_their_own(self) -> None:
        conv = torch.zeros(3, 2, 1, 4, 8, dtype=torch.uint8)
        q, k = conv[..., :6], conv[..., 6:]
        pool = wrap(
            layers(1, (12, 2, 8)), layers(1, (12, 2, 8)),
            state=[StateTensors("q", [q], heads=12, axis=4), StateTensors("k", [k], heads=2, axis=4)],
        )  # fmt: skip
        assert pool.shape().states == (StateShape("q", (0,), 8, 12, 1), StateShape("k", (0,), 8, 2, 1))
        pool.segments[2].elements(0, 0)[1, 6, 1] = 5
        assert conv.nonzero().tolist() == [[1, 1, 0, 2, 7]]

    @pytest.mark.parametrize(
        ("tensor", "more", "message"),
        [
            (torch.zeros(3, 4, 8)[:, :, :4], {}, r"shape .* is not contiguous from dimension 1 on"),
            (torch.zeros(3, 4, 2, 8)[..., :4], {"axis": 1}, r"shape .* is not contiguous from dimension 2 on"),
            (
                torch.zeros(3, 2, 4, 8)[:, :, :3],
                {"axis": 3},
                "the rows before dimension 3 of shape .* have unlike gaps",
            ),
            (torch.zeros(3, 4, 2, 8).transpose(1, 2), {"axis": 3}, "the rows before dimension 3 of shape"),
        ],
    )
    def test_items_whose_rows_are_not_evenly_spaced_are_refused(
        self, tensor: torch.Tensor, more: dict[str, Any], message: str
    ) -> None:
        state = StateTensors("conv", [tensor], heads=8 if more else 1, **more)
        with pytest.raises(MemoryLayoutError, match=f"conv layer 0: {message}"):
            wrap(layers(1, (12, 2, 8)), layers(1, (12, 2, 8)), state=[state])


def pages_at(address: int, nbytes: Any, item_bytes: Any, **more: Any) -> list[Buffer]:
    return [Buffer(address, nbytes, item_bytes, (TOKENS, HEADS, DIM), 2, **more)]


def wrap_pages(k: list[Buffer], v: list[Buffer] | None, **more: Any) -> KVPool:
    return wrap(k, v, axes="pages tokens heads dim", **more)


class TestAddresses:
    def test_buffers_of_items_are_pools_like_tensors(self) -> None:
        buffer = np.zeros(2 * PAGES * 200, np.uint8)
        k, v = (
            [Buffer(buffer.ctypes.data + start, PAGES * 200, 200, (HEADS, TOKENS, dim), 2)]
            for start, dim in ((0, DIM), (PAGES * 200, 4))
        )
        pool = wrap(k, v, axes="pages heads tokens dim")
        assert pool.shape() == ModelShape(1, 8, 8, 4, 2)
        assert pool.segments[0].addresses.strides == ((200, 16, 64), (200, 8, 32))
        assert (pool.num_pages, pool.dtypes) == (PAGES, {})
        pool.segments[0].elements(0, V)[2, 3, 1] = 1
        assert buffer.nonzero()[0].tolist() == [PAGES * 200 + 2 * 200 + 32 + 3 * 8 + byte for byte in range(8)]

    def test_latents(self) -> None:
        latents = [Buffer(4096, 3 * 64, 64, (TOKENS, 1, DIM), 2)]
        pool = wrap_pages(latents, None, total_kv_heads=1)
        assert pool.shape() == ModelShape(1, 1, 8, 0, 2, kind="mla")
        assert pool.regions() == [(4096, 192, HOST)]

    @pytest.mark.parametrize(
        ("buffer", "more", "message"),
        [
            ((4096, 384, "128"), {}, "layer 0 k: item_bytes is '128'"),
            ((0, 384, 128), {}, "layer 0 k: address is 0"),
            ((4096, 381, 127), {}, r"layer 0 k: an item of 127 bytes cannot have \(4, 2, 8\) elements of 2 bytes"),
            ((1 << 62, 1 << 62, 128), {}, "layer 0 k: .* bytes at address .* are not whole items of 128 bytes"),
            ((4096, 385, 128), {}, "layer 0 k: 385 bytes at address 4096 are not whole items of 128 bytes"),
            ((4096, 384, 128), {"gpu": -1}, "layer 0 k: gpu is -1"),
            ((4096, 384, 128), {}, "layer 0 k and layer 0 v share memory"),
        ],
    )
    def test_others_are_refused(self, buffer: Any, more: dict[str, Any], message: str) -> None:
        with pytest.raises(MemoryLayoutError, match=message):
            wrap_pages(pages_at(*buffer, **more), pages_at(*buffer, **more))

    def test_a_draft_model_and_state_of_buffers(self) -> None:
        raw = np.zeros(4096, np.uint8)
        at = raw.ctypes.data
        draft = DraftKV(
            [Buffer(at + 768, 3 * 64, 64, (TOKENS, 2, 4), 2)],
            [Buffer(at + 960, 3 * 40, 40, (TOKENS, 2, 2), 2, offset=8)],
            4,
            axes="pages tokens heads dim",
        )
        rows = {"nbytes": 5 * 90, "item_bytes": 90, "shape": (3, 2, 5), "strides": (30, 5, 1)}
        state = [
            StateTensors("whole", [Buffer(at + 2000, 5 * 20, 20, (20,))]),
            StateTensors("k", [Buffer(at + 3000, **rows)], heads=4, axis=2),  # type: ignore[arg-type]
            StateTensors("v", [Buffer(at + 3000, **rows, offset=10)], heads=4, axis=2),  # type: ignore[arg-type]
        ]
        k, v = pages_at(at, 3 * 128, 128), pages_at(at + 384, 3 * 128, 128)
        pool = wrap_pages(k, v, draft=draft, state=state)
        whole, k_state, v_state = pool.shape().states
        assert pool.shape().draft == ModelShape(1, 4, 4, 2, 2)
        assert whole == StateShape("whole", (0,), 1, 1, 20)
        assert (k_state, v_state) == (StateShape("k", (0,), 3, 4, 5), StateShape("v", (0,), 3, 4, 5))
        assert [each.num_slots for each in pool.segments] == [3, 3, 5, 5, 5]
        pool.segments[1].elements(1, V)[2, 3, 1] = 1
        assert raw.nonzero()[0].tolist() == [960 + 2 * 40 + 8 + 3 * 8 + 4 + byte for byte in range(4)]
        raw[:] = 0
        pool.segments[4].elements(0, 0)[4, 2, 1] = 1
        assert raw.nonzero()[0].tolist() == [3000 + 4 * 90 + 10 + 2 * 30 + 5 + byte for byte in range(5)]

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ({"offset": 21}, r"an item of 90 bytes cannot have \(3, 2, 5\) elements of 1 bytes .* from offset 21 on"),
            ({"strides": (30, 4, 1)}, r"at strides of \(30, 4, 1\) bytes"),
            ({"strides": (30, 10, 2), "item_bytes": 150}, "with the last dimension contiguous"),
            ({"strides": (30, 1)}, r"strides \(30, 1\) for items of shape \(3, 2, 5\)"),
            ({"shape": ()}, "for items of shape"),
            ({"shape": (3, 0, 5)}, "shape is 0"),
            ({"dtype_bytes": 0}, "dtype_bytes is 0"),
            ({"offset": -1}, "offset is -1"),
            ({"gpu": 1}, "conv layer 0 on cuda:1"),
        ],
    )
    def test_buffers_that_cannot_be_used_are_refused(self, more: dict[str, Any], message: str) -> None:
        fields: dict[str, Any] = {"nbytes": 450, "item_bytes": 90, "shape": (3, 2, 5), "strides": (30, 5, 1), **more}
        state = StateTensors("conv", [Buffer(8192, offset=fields.pop("offset", 20), **fields)], heads=4, axis=2)
        with pytest.raises(MemoryLayoutError, match=message):
            wrap_pages(pages_at(4096, 384, 128), pages_at(4480, 384, 128), state=[state])


class TestAllocate:
    def test_an_allocated_pool_is_one_region_that_holds_every_block(self) -> None:
        pool = KVPool.allocate(of_rank(1, 1), 4, 5, {"conv": 6}, aux_slots=7, aux_row_bytes=24)
        try:
            (region,) = pool.regions()
            ends = []
            for segment in pool.segments:
                held = segment.shard
                for layer in range(held.layer_lo, held.layer_hi):
                    for number, plane in enumerate(held.segment.planes):
                        block = segment.block(layer, number)
                        assert block.nbytes == segment.num_slots * plane.rows * held.heads * plane.head_bytes
                        assert block.ctypes.data == segment.addresses.bases[layer - held.layer_lo][number]
                        ends.append((block.ctypes.data, block.ctypes.data + block.nbytes))
                        assert not block.any()
            assert len(ends) == 3 * 4 + 1 * 2 + 2, "three layers, the draft, two layers of conv"
            where = pool.addresses()
            ends.append((where.aux_bases[0], where.aux_bases[0] + 7 * 24))
            assert ends == sorted(ends), "segments, layers and planes in order, aux last"
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))
            assert region.addr <= ends[0][0]
            assert ends[-1][1] <= region.addr + region.nbytes
            assert [buffer.shape for buffer in pool.aux] == [(7, 24)]
            assert [segment.num_slots for segment in pool.segments] == [5, 5, 6, 0]
            assert pool.nbytes == sum(end - start for start, end in ends)
        finally:
            pool.close()
            pool.close()

    @pytest.mark.parametrize(
        ("pages", "items", "aux", "message"),
        [
            (0, {"conv": 6}, (0, 0), "none for kv, draft"),
            (5, {}, (0, 0), "none for conv"),
            (5, {"conv": -1}, (0, 0), "none for conv"),
            (5, {"conv": 6}, (1, 0), "aux slots with a row size"),
        ],
    )
    def test_sizes_that_make_no_pool_are_refused(
        self, pages: int, items: dict[str, int], aux: tuple[int, int], message: str
    ) -> None:
        with pytest.raises(MemoryLayoutError, match=message):
            KVPool.allocate(of_rank(1, 1), 4, pages, items, *aux)

    @pytest.mark.parametrize("layout", POOL_LAYOUTS)
    def test_every_layout_has_every_element_once(self, layout: str) -> None:
        model = ModelShape(2, 3, 4, 6, 1, k_scale_bytes=2, v_scale_bytes=2, states=(StateShape("conv", (1,), 3, 3, 4),))
        shards = local_shards(model, 4, ParallelConfig(), RankCoord(0, 0, 0, 0))
        with closing(KVPool.allocate(shards, 4, 5, {"conv": 4}, 2, 16, layout=layout)) as pool:
            (region,) = pool.regions()
            whole = region.array()
            for segment in pool.segments:
                for layer in range(segment.shard.num_layers):
                    for plane in range(len(segment.shard.segment.planes)):
                        elements = segment.elements(layer, plane)
                        assert not elements.any(), "no element belongs to two planes"
                        elements[:] = 1
            pool.aux[0][:] = 1
            assert whole.sum(dtype=int) == pool.nbytes
            row, head = pool.segments[0].addresses.strides[K][1:]
            assert (head > row) == (layout in ("hnd", "kv-inner-hnd", "block-outer-hnd", "fused"))

    def test_an_unknown_layout_is_refused(self) -> None:
        shards = local_shards(ModelShape(1, 1, 4, 4, 1), 4, ParallelConfig(), RankCoord(0, 0, 0, 0))
        with pytest.raises(MemoryLayoutError, match="pool layout 'dhn' is unknown: it must be one of nhd, hnd"):
            KVPool.allocate(shards, 4, 5, layout="dhn")

    def test_segments_in_transfer_pages_are_the_same_memory(self) -> None:
        model = ModelShape(2, 2, 3, 5, 2, states=(StateShape("conv", (1,), 3, 2, 4),))
        shards = local_shards(model, 8, ParallelConfig(), RankCoord(0, 0, 0, 0))
        pool = KVPool.allocate(shards, 8, 5, {"conv": 4})
        kv, conv = pool.segments_at(4)
        assert [segment.shard for segment in (kv, conv)] == [
            *local_shards(model, 2, ParallelConfig(), RankCoord(0, 0, 0, 0))
        ]
        assert (kv.num_slots, conv.num_slots) == (20, 4)
        assert pool.addresses(4).segments == (kv.addresses, conv.addresses)
        assert (kv.nbytes, kv.blocks) == (pool.segments[0].nbytes, pool.segments[0].blocks)
        assert pool.segments_at(4)[0] is kv
        assert pool.segments_at(1) is pool.segments
        with pytest.raises(MemoryLayoutError, match="a page of k has 8 rows, which are not 3 transfer pages of 2"):
            pool.segments_at(3)
        pool.close()
        with pytest.raises(MemoryLayoutError, match="the pool is closed"):
            kv.block(0, K)

    def test_its_model_is_not_known(self) -> None:
        pool = KVPool.allocate(of_rank(0, 0), 4, 5, {"conv": 6, "index": 2})
        with pytest.raises(MemoryLayoutError, match="pass model= to the agent"):
            pool.shape()
        pool.close()


class TestPlace:
    def tensors(self, pp: int) -> KVPool:
        """The tensors of an engine on a rank of `STAGES`."""
        count = STAGES.stages[pp]
        items = 1 if pp == 0 else 2
        return KVPool.from_tensors(
            layers(count, (20, 4, 6)),
            layers(count, (20, 4, 10)),
            page_size=4,
            total_kv_heads=8,
            k_scale=layers(count, (5, 4, 2)),
            v_scale=layers(count, (5, 4)),
            draft=DraftKV(layers(1, (20, 2, 8)), layers(1, (20, 2, 4)), 4) if pp else None,
            state=[
                StateTensors("conv", layers(items, (6, 3, 4, 2)), heads=8, axis=2),
                StateTensors("index", layers(1 - pp, (7, 20))),
            ],
        )

    @pytest.mark.parametrize("pp", [0, 1])
    @pytest.mark.parametrize("tp", [0, 1])
    def test_a_ranks_memory_takes_the_plans_numbers(self, pp: int, tp: int) -> None:
        pool = self.tensors(pp)
        before = {segment.name: segment.blocks for segment in pool.segments}
        pool.assign_shards(of_rank(pp, tp))
        assert tuple(segment.shard for segment in pool.segments) == of_rank(pp, tp)
        assert [segment.name for segment in pool.segments] == ["kv", "draft", "conv", "index"]
        for segment in pool.segments:
            assert segment.blocks == before.get(segment.name, ()), "the same memory"
        assert [segment.num_slots for segment in pool.segments] == ([5, 0, 6, 7] if pp == 0 else [5, 5, 6, 0])
        first = 2 if pp else 0
        pool.segments[0].block(first, 0)
        with pytest.raises(MemoryLayoutError, match=f"kv: layers {2 - first} requested, but this rank has"):
            pool.segments[0].block(2 - first, 0)
        pool.assign_shards(of_rank(pp, tp))  # again changes nothing

    def test_one_rank_that_is_all_of_it_is_where_it_was_taken_to_be(self) -> None:
        state = [StateTensors("conv", layers(1, (6, 3)), layers=(1,))]
        pool = wrap(
            layers(2, (8, 8, 4)), layers(2, (8, 8, 4)), draft=DraftKV(GOOD, layers(2, (8, 2, 4)), 2), state=state
        )
        whole = local_shards(pool.shape(), 4, ParallelConfig(), RankCoord(0, 0, 0, 0))
        assert tuple(segment.shard for segment in pool.segments) == whole
        pool.assign_shards(whole)

    def test_an_allocated_pool_is_placed_by_what_it_was_allocated_for(self) -> None:
        pool = KVPool.allocate(of_rank(1, 1), 4, 5, {"conv": 6})
        pool.assign_shards(of_rank(1, 1))
        with pytest.raises(MemoryLayoutError, match="kv: the pool has 3 layers, but the plan requires 2"):
            pool.assign_shards(of_rank(0, 0))
        pool.close()

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (replace(FULL, num_kv_heads=4), "kv: the pool has 4 heads on this rank, but the plan requires 2"),
            (replace(FULL, num_layers=6), "kv: the pool has 3 layers, but the plan requires 4"),
            (
                replace(FULL, v_dim=6),
                r"kv: the pool has k 4 x 12 bytes, v 4 x 20 bytes.* planes, but the plan requires k 4 x",
            ),
            (replace(FULL, v_scale_bytes=0), "kv: the pool has .*v_scale 1 x 2 bytes planes, but the plan requires"),
            (replace(FULL, draft=None), "the pool holds draft, which the model does not have"),
            (replace(FULL, draft=ModelShape(2, 4, 8, 4, 2)), "draft: the pool has 1 layers, but the plan requires 2"),
            (replace(FULL, states=FULL.states[1:]), "the pool holds conv, which"),
            (
                replace(FULL, states=(*FULL.states, StateShape("swa", (4,), 1, 1, 8))),
                "swa: the pool has no memory",
            ),
            (
                replace(FULL, states=(StateShape("conv", (2,), 3, 8, 4),)),
                "conv: the pool has 2 layers, but the plan requires 1",
            ),
            (
                replace(FULL, states=(StateShape("conv", (0,), 3, 8, 4),)),
                "conv: the pool has 2 layers, but the plan requires 0",
            ),
        ],
    )
    def test_a_pool_that_is_something_else_is_refused_with_the_numbers(self, model: ModelShape, message: str) -> None:
        stages = (2, 4) if model.num_layers == 6 else (2, 3)
        with pytest.raises(MemoryLayoutError, match=message):
            self.tensors(1).assign_shards(
                local_shards(model, 4, ParallelConfig(pp=2, tp=2, stages=stages), RankCoord(0, 1, 0, 0))
            )


def test_the_package_never_imports_torch() -> None:
    script = (
        "import sys, pkgutil, importlib, kvctl_agent.memory as m\n"
        "names = [i.name for i in pkgutil.iter_modules(m.__path__)]\n"
        "[importlib.import_module(f'kvctl_agent.memory.{n}') for n in names]\n"
        "from kvctl_agent.layout.parallel import local_shards\n"
        "from kvctl_agent.layout.shape import ModelShape\n"
        "from kvctl_agent.layout.parallel import ParallelConfig, RankCoord\n"
        "from kvctl_agent.memory.pool import KVPool\n"
        "here = local_shards(ModelShape(1, 1, 8, 8, 2), 4, ParallelConfig(), RankCoord(0, 0, 0, 0))\n"
        "KVPool.allocate(here, 4, 1).close()\n"
        "assert len(names) >= 8 and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=250)
