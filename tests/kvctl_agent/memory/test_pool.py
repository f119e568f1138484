"""KV pools: what shape is accepted, what is refused by name, where the bytes are said to be."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kvctl_agent.errors import MemoryLayoutError, RemoteProtocolError
from kvctl_agent.memory.addresses import K, PoolAddresses, V
from kvctl_agent.memory.pool import KVPool


def layers(count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


def wrap(k: Any, v: Any, **more: Any) -> KVPool:
    return KVPool.from_tensors(k, v, **{"page_size": 4, "total_kv_heads": 8, **more})


class TestFromTensors:
    def test_bf16_tensors_are_described_and_shared_not_copied(self) -> None:
        k, v = layers(3, (12, 2, 6)), layers(3, (12, 2, 10))
        pool = wrap(k, v, aux=torch.zeros((5, 24), dtype=torch.uint8))
        assert (pool.num_layers, pool.num_pages, pool.page_size, pool.heads) == (3, 3, 4, 2)
        assert (pool.total_kv_heads, pool.k_dim, pool.v_dim, pool.dtype_bytes) == (8, 6, 10, 2)
        assert (pool.aux_slots, pool.aux_row_bytes) == (5, 24)
        assert pool.nbytes == 3 * 12 * 2 * (6 + 10) * 2 + 5 * 24
        v[1][3, 1, 2] = 1.0
        offset = ((3 * 2 + 1) * 10 + 2) * 2
        assert pool.block(1, V)[offset : offset + 2].tobytes() == b"\x80\x3f"

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
    def test_the_element_size_follows_the_dtype(self, dtype: torch.dtype) -> None:
        pool = wrap(layers(1, (4, 1, 8), dtype), layers(1, (4, 1, 8), dtype))
        assert pool.dtype_bytes == dtype.itemsize

    def test_numpy_arrays_serve_as_well(self) -> None:
        k = [np.zeros((8, 2, 4), dtype=np.float32)]
        v = [np.zeros((8, 2, 4), dtype=np.float32)]
        pool = wrap(k, v)
        pool.block(0, K)[:4] = np.frombuffer(np.float32(2.5).tobytes(), dtype=np.uint8)
        assert k[0][0, 0, 0] == 2.5

    def test_each_tensor_that_stands_alone_is_a_region(self) -> None:
        k, v = layers(2, (4, 2, 4)), layers(2, (4, 2, 4))
        assert sorted(wrap(k, v).regions()) == sorted((t.data_ptr(), t.numel() * 2) for t in k + v)

    def test_layers_cut_from_one_tensor_are_one_region(self) -> None:
        whole = torch.zeros((2, 2, 4, 2, 4), dtype=torch.bfloat16)
        pool = wrap(list(whole[:, 0]), list(whole[:, 1]))
        assert pool.regions() == [(whole.data_ptr(), whole.numel() * 2)]

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
            pool.block(0, K)


GOOD = layers(2, (8, 2, 4))


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
            "layer 1 v: .*not contiguous", id="a slice",
        ),
        pytest.param(
            [torch.zeros(2, 8, 4).permute(1, 0, 2)], [torch.zeros(8, 2, 4)], {}, "layer 0 k: .*HND", id="HND, viewed"
        ),
        pytest.param([torch.zeros(2, 8, 4)], [torch.zeros(2, 8, 4)], {}, "layer 0 k: .*HND", id="HND, raw"),
        pytest.param(
            [torch.zeros(2, 2, 4, 8)], [torch.zeros(2, 2, 4, 8)], {}, "layer 0 k: .*4 dimensions.*NHD", id="paged"
        ),
        pytest.param(
            [torch.zeros(8, 2, 4, device="meta")], [torch.zeros(8, 2, 4)], {}, "layer 0 k: on device meta", id="device"
        ),
        pytest.param(GOOD, GOOD, {}, "layer [01] k and layer [01] v share memory", id="K is V"),
        pytest.param(
            [torch.zeros(0, 2, 4)], [torch.zeros(0, 2, 4)], {}, "layer 0 k: .*holds nothing", id="empty"
        ),
        pytest.param([[1, 2]], [[3, 4]], {}, "layer 0 k: list is neither", id="not a tensor"),
        pytest.param(
            GOOD, layers(2, (8, 2, 4)), {"total_kv_heads": 3}, "total_kv_heads is 3, not a multiple of the 2", id="H"
        ),
        pytest.param(
            GOOD, layers(2, (8, 2, 4)), {"aux": torch.zeros(4, 4)}, "aux: torch.float32.*expected uint8", id="aux dtype"
        ),
        pytest.param(
            GOOD, layers(2, (8, 2, 4)), {"aux": torch.zeros(4, dtype=torch.uint8)}, "aux: .*expected uint8", id="aux"
        ),
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


class TestAllocate:
    def test_an_allocated_pool_is_one_region_that_holds_every_block(self) -> None:
        pool = KVPool.allocate(3, 5, 4, 2, 8, 6, 10, 2, aux_slots=7, aux_row_bytes=24)
        try:
            (region,) = pool.regions()
            where = pool.addresses()
            ends = []
            for layer in range(3):
                for kv, dim in ((K, 6), (V, 10)):
                    block = pool.block(layer, kv)
                    assert block.ctypes.data == where.base(layer, kv)
                    assert block.nbytes == 5 * 4 * 2 * dim * 2
                    ends.append((where.base(layer, kv), where.base(layer, kv) + block.nbytes))
            ends.append((where.aux_base, where.aux_base + 7 * 24))
            assert ends == sorted(ends), "layer-major, K then V, aux last"
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))
            assert region.addr <= ends[0][0]
            assert ends[-1][1] <= region.addr + region.nbytes
            assert pool.aux is not None
            assert pool.aux.shape == (7, 24)
            assert not pool.block(2, V).any()
        finally:
            pool.close()
            pool.close()

    @pytest.mark.parametrize("sizes", [(0, 1, 4, 1, 1, 8, 8, 2), (1, 1, 4, 3, 8, 8, 8, 2), (1, 1, 4, 1, 1, 8, 8, 0)])
    def test_sizes_that_make_no_pool_are_refused(self, sizes: tuple[int, ...]) -> None:
        with pytest.raises(MemoryLayoutError, match="positive sizes"):
            KVPool.allocate(*sizes)


class TestAddresses:
    WHERE = PoolAddresses((1000, 9000), (5000, 13000), 4, 2, 12, 20, 3, 77, 24, 5)

    def test_a_row_is_where_page_token_and_head_say(self) -> None:
        pages = np.array([2, 0])
        for kv, base, row in ((K, 9000, 12), (V, 13000, 20)):
            assert self.WHERE.page_addrs(1, kv, pages).tolist() == [base + 2 * 4 * 2 * row, base]
            expected = [base + ((page * 4 + token) * 2 + 1) * row for page in (2, 0) for token in range(4)]
            assert self.WHERE.token_addrs(1, kv, pages, head=1).tolist() == expected
        assert self.WHERE.aux_addr(3) == 77 + 3 * 24

    def test_the_wire_form_is_plain_and_comes_back_equal(self) -> None:
        wire = self.WHERE.to_wire()
        assert all(isinstance(value, int | list) for value in wire.values())
        assert PoolAddresses.from_wire(wire) == self.WHERE

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"page_size": None}, "page_size is None"),
            ({"page_size": 0}, "page_size is 0"),
            ({"heads": True}, "heads is True"),
            ({"aux_base": -1}, "aux_base is -1"),
            ({"num_pages": 1 << 63}, "num_pages is"),
            ({"k_bases": [1.5, 2]}, "k_bases"),
            ({"k_bases": []}, "k_bases"),
            ({"v_bases": [1]}, "2 K layers but 1 V layers"),
            ({"surprise": 1}, "surprise"),
        ],
    )
    def test_a_malformed_wire_form_is_refused_by_field(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(RemoteProtocolError, match=message):
            PoolAddresses.from_wire({**self.WHERE.to_wire(), **change})

    def test_a_missing_field_is_refused_by_name(self) -> None:
        wire = self.WHERE.to_wire()
        del wire["v_row_bytes"]
        with pytest.raises(RemoteProtocolError, match="v_row_bytes"):
            PoolAddresses.from_wire(wire)


def test_the_package_never_imports_torch() -> None:
    script = (
        "import sys, pkgutil, importlib, kvctl_agent.memory as m\n"
        "names = [i.name for i in pkgutil.iter_modules(m.__path__)]\n"
        "[importlib.import_module(f'kvctl_agent.memory.{n}') for n in names]\n"
        "from kvctl_agent.memory.pool import KVPool\n"
        "KVPool.allocate(1, 1, 4, 1, 1, 8, 8, 2).close()\n"
        "assert len(names) >= 8 and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
