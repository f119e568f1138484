"""Scales, latents, drafts and state as engines pass them: accepted shapes, and errors that name the tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvctl_agent.errors import LayoutError, MemoryLayoutError
from kvctl_agent.layout.shape import ModelShape, Plane, StateShape
from kvctl_agent.memory.pool import DraftKV, KVPool, StateTensors

V = 1


def layers(count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


def wrap(k: Any, v: Any, **more: Any) -> KVPool:
    return KVPool.from_tensors(k, v, **{"page_size": 4, "total_kv_heads": 8, **more})


GOOD = layers(2, (8, 2, 4))


class TestScales:
    def test_scales_are_planes_of_one_row_a_page(self) -> None:
        k_scale = [torch.zeros((3, 2), dtype=torch.float32)]
        v_scale = [torch.zeros((3, 2, 3), dtype=torch.float16)]
        pool = wrap(layers(1, (12, 2, 8), torch.float8_e4m3fn), layers(1, (12, 2, 8), torch.float8_e4m3fn),
                    k_scale=k_scale, v_scale=v_scale)  # fmt: skip
        assert pool.shape() == ModelShape(1, 8, 8, 8, 1, k_scale_bytes=4, v_scale_bytes=6)
        assert pool.segments[0].shard.segment.planes[2:] == (Plane("k_scale", 1, 4), Plane("v_scale", 1, 6))
        k_scale[0][2, 1] = 1.0
        assert pool.segments[0].block(0, 2).view(np.float32).tolist() == [0, 0, 0, 0, 0, 1]

    def test_one_of_both_may_have_scales(self) -> None:
        pool = wrap(layers(1, (12, 2, 8)), layers(1, (12, 2, 8)), v_scale=layers(1, (3, 2)))
        assert [plane.name for plane in pool.segments[0].shard.segment.planes] == ["k", "v", "v_scale"]

    @pytest.mark.parametrize(
        ("k_scale", "message"),
        [
            (layers(2, (3, 2)), "2 k_scale tensors for 1 layers"),
            (layers(1, (12, 2)), r"layer 0 k_scale: shape \(12, 2\); .*one row per page.*\(3, 2\)"),
            (layers(1, (3, 1)), r"layer 0 k_scale: shape \(3, 1\)"),
            (layers(1, (3,)), r"layer 0 k_scale: shape \(3,\)"),
            ([torch.zeros(3, 2, device="meta")], "layer 0 k_scale: on device meta"),
        ],
    )
    def test_others_are_refused_by_name(self, k_scale: Any, message: str) -> None:
        with pytest.raises(MemoryLayoutError, match=message):
            wrap(layers(1, (12, 2, 8)), layers(1, (12, 2, 8)), k_scale=k_scale)


class TestLatent:
    @pytest.mark.parametrize("shape", [(12, 18), (12, 1, 18)])
    def test_latent_rows_are_one_plane_of_one_head(self, shape: tuple[int, ...]) -> None:
        latent = layers(2, shape)
        pool = KVPool.from_tensors(latent, None, page_size=4, k_scale=layers(2, (3, 5)))
        assert pool.shape() == ModelShape(2, 1, 18, 0, 2, kind="mla", k_scale_bytes=10)
        assert pool.segments[0].shard.segment.planes == (Plane("latent", 4, 36), Plane("scale", 1, 10))
        assert (pool.num_pages, pool.segments[0].shard.heads) == (3, 1)
        latent[1].view(-1)[5 * 18] = 1.0
        assert pool.segments[0].block(1, 0)[5 * 36 : 5 * 36 + 2].tobytes() == b"\x80\x3f"

    @pytest.mark.parametrize(
        ("latent", "more", "message"),
        [
            ([], {}, "0 latent layers"),
            (layers(1, (12, 2, 18)), {}, r"layer 0 latent: shape \(12, 2, 18\); a latent is \[tokens, dim\]"),
            (layers(1, (10, 18)), {}, "layer 0 latent: 10 tokens are not whole pages of 4"),
            ([*layers(1, (12, 18)), *layers(1, (8, 18))], {}, r"layer 1 latent: shape \(8, 18\), expected \(12, 18\)"),
            (layers(1, (12, 18)), {"k_scale": layers(1, (4, 5))}, r"layer 0 scale: shape \(4, 5\).*begin with \(3,\)"),
        ],
    )
    def test_others_are_refused_by_name(self, latent: Any, more: Any, message: str) -> None:
        with pytest.raises(MemoryLayoutError, match=message):
            KVPool.from_tensors(latent, None, page_size=4, **more)


class TestDraft:
    def test_a_draft_has_pages_with_the_numbers_of_its_target(self) -> None:
        pool = wrap(
            layers(3, (12, 2, 6)), layers(3, (12, 2, 6)), draft=DraftKV(layers(1, (12, 1, 8)), layers(1, (12, 1, 4)), 4)
        )
        assert pool.shape() == ModelShape(3, 8, 6, 6, 2, draft=ModelShape(1, 4, 8, 4, 2))
        draft = pool.segments[1]
        assert (draft.name, draft.shard.layer_lo, draft.shard.layer_hi, draft.num_slots) == ("draft", 3, 4, 3)
        assert draft.block(3, V).nbytes == 12 * 4 * 2

    def test_a_latent_model_may_have_a_latent_draft(self) -> None:
        pool = KVPool.from_tensors(layers(2, (8, 18)), None, page_size=4, draft=DraftKV(layers(1, (8, 18))))
        assert pool.shape().draft == ModelShape(1, 1, 18, 0, 2, kind="mla")

    @pytest.mark.parametrize(
        ("draft", "message"),
        [
            (DraftKV(layers(1, (16, 1, 8)), layers(1, (16, 1, 8)), 4), "draft: 4 pages, but the target has 3"),
            (DraftKV(layers(1, (12, 2, 8)), layers(1, (12, 2, 8)), 3), "draft total_kv_heads is 3"),
            (DraftKV(layers(1, (12, 1, 8)), []), "draft 1 K and 0 V layers"),
            (DraftKV(layers(1, (12, 1, 8)), layers(1, (12, 2, 8)), 2), r"draft layer 0 v: shape \(12, 2, 8\)"),
            (DraftKV(layers(1, (12, 18)), total_kv_heads=4), "draft latent: it has no V and one head"),
            (DraftKV(GOOD, layers(2, (8, 2, 4)), 2), "draft: 2 pages"),
        ],
    )
    def test_others_are_refused_by_name(self, draft: DraftKV, message: str) -> None:
        with pytest.raises(MemoryLayoutError, match=message):
            wrap(layers(3, (12, 2, 6)), layers(3, (12, 2, 6)), draft=draft)

    def test_a_draft_cannot_be_its_targets_memory(self) -> None:
        k, v = layers(1, (8, 2, 4)), layers(1, (8, 2, 4))
        with pytest.raises(MemoryLayoutError, match="draft layer 0 k and layer 0 v share memory"):
            wrap(k, v, draft=DraftKV(v, layers(1, (8, 2, 4)), 8))


class TestState:
    def component(self, **given: Any) -> Any:
        pool = wrap(layers(4, (8, 2, 4)), layers(4, (8, 2, 4)), state=[StateTensors("ssm", **given)])
        return pool.segments[1], pool.shape().states[0]

    def test_a_component_that_is_not_cut_is_one_row_of_one_head(self) -> None:
        memory, shape = self.component(tensors=layers(2, (5, 3, 7)), layers=(1, 3))
        assert shape == StateShape("ssm", (1, 3), 1, 1, 3 * 7 * 2)
        assert (memory.num_slots, memory.shard.heads, memory.shard.num_layers) == (5, 1, 2)

    @pytest.mark.parametrize(
        ("axis", "expected", "local"),
        [(1, (1, 12, 7 * 2 * 2), 3), (2, (3, 28, 2 * 2), 7), (3, (3 * 7, 8, 2), 2)],
    )
    def test_the_axis_that_is_cut_is_its_heads(self, axis: int, expected: tuple[int, ...], local: int) -> None:
        memory, shape = self.component(tensors=layers(1, (5, 3, 7, 2)), heads=expected[1], axis=axis)
        assert (shape.rows, shape.heads, shape.head_bytes) == expected
        assert shape.layers == (0,)
        assert memory.shard.heads == local
        assert memory.block(0, 0).nbytes == 5 * 3 * 7 * 2 * 2

    def test_components_keep_their_order_and_a_stage_may_have_none_of_one(self) -> None:
        state = [StateTensors(name, layers(count, (5, 3))) for name, count in (("b", 1), ("a", 0), ("c", 2))]
        pool = wrap(layers(4, (8, 2, 4)), layers(4, (8, 2, 4)), state=state)
        assert [segment.name for segment in pool.segments] == ["kv", "b", "c"]

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"tensors": layers(2, (5, 3)), "layers": (1,)}, "ssm: 2 tensors, but 1 KV layers"),
            ({"tensors": layers(1, (5, 3)), "heads": 6}, "ssm: 6 heads over the whole model, but no axis"),
            ({"tensors": layers(1, (5, 3)), "heads": 6, "axis": 0}, "ssm: axis 0 is not a dimension of an item"),
            ({"tensors": layers(1, (5, 3)), "heads": 6, "axis": 2}, "ssm: axis 2 is not a dimension"),
            ({"tensors": layers(1, (5, 3)), "heads": 5, "axis": 1}, "ssm: heads is 5, not a multiple of the 3"),
            ({"tensors": [*layers(1, (5, 3)), *layers(1, (6, 3))]}, r"ssm layer 1: shape \(6, 3\), expected \(5, 3\)"),
            ({"tensors": [torch.zeros(5, 3).T]}, "ssm layer 0: .*not contiguous"),
        ],
    )
    def test_others_are_refused_by_name(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(MemoryLayoutError, match=message):
            self.component(**given)

    def test_layers_that_are_not_here_make_no_model(self) -> None:
        """On a later pipeline stage, whose agent is therefore given the model."""
        with pytest.raises(LayoutError, match="layer 9 is beyond the 4 layers"):
            self.component(tensors=layers(1, (5, 3)), layers=(9,))
