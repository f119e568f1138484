"""What a bench's request becomes: fleet, lots, ring, paths — or the arithmetic of why not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvctl.lab.ranks.request import KV_LAYOUTS, Group, Load, PlanRequest, Sizes, State, Tokens
from kvctl.lab.ranks.resolve import make_plan
from kvctl_agent.errors import ConfigError, LayoutError
from kvctl_agent.memory.pool_layouts import POOL_LAYOUTS

MIB = 1 << 20
GIB = 1 << 30


def request(**changes: Any) -> PlanRequest:
    wanted: dict[str, Any] = {
        "prefill": (Sizes(tp=4),),
        "decode": Sizes(dp=4),
        "loads": (Load(4, Tokens(values=(1024,))),),
        "memory_bytes": 8 * GIB,
        "seed": 1,
        **changes,
    }
    return PlanRequest(**wanted)


def test_the_plain_bench_is_a_llama_over_the_three_sensible_paths():
    plan = make_plan(request())
    assert plan["shape"]["model"] == "llama-3.1-8b"
    assert plan["paths"] == ["slice", "staged", "auto"]
    assert [(rank["role"], rank["unique"], rank["heads"]) for rank in plan["ranks"]] == [
        *(("prefill", tp, [2 * tp, 2 * tp + 2]) for tp in range(4)),
        *(("decode", dp, [0, 8]) for dp in range(4)),
    ]
    (load,) = plan["loads"]
    assert load["in_flight"] == 4
    assert load["windows"] == [1, 1, 1, 1]
    assert {room["bytes"] for room in load["rooms"]} == {128 * MIB}
    assert plan["ring_bytes"] == 256 * MIB  # a room in flight at each decode rank, and the next one
    assert plan["config"] == {"transport": "nixl", "chunk_tokens": 8192, "staging_ring_mb": 256}
    assert plan["notes"] == []


def test_the_shares_say_who_owes_what_on_every_path():
    plan = make_plan(request())
    assert len(plan["shares"]) == 16
    assert plan["shares"][1] == {
        "instance": 0,
        "writer": 1,
        "reader": 0,
        "segment": "kv",
        "heads": [2, 4],
        "layers": [0, 32],
        "bytes": 32 * MIB,
        "parts": 1,
        "pages": 64,
        "transfer_page": 16,
        "splits": [1, 1],
        "stripe": None,
        "descriptors": {"bulk": None, "slice": 65536, "staged": 1, "direct": None},
    }


def test_pools_hold_every_lot_and_page_zero():
    plan = make_plan(request(decode=Sizes(dp=3), loads=(Load(2, Tokens(low=1, high=300)), Load(5, Tokens((64, 16))))))
    for rank in plan["ranks"]:
        for load in plan["loads"]:
            for first, end in load["batches"]:
                mine = [
                    -(-room["tokens"] // 16)
                    for room in load["rooms"][first:end]
                    if rank["role"] == "prefill" or room["decode_dp"] == rank["dp"]
                ]
                assert sum(mine) < rank["pool_pages"]


def test_room_numbers_leave_space_for_every_prefill_group():
    plan = make_plan(request(prefill=(Sizes(tp=2, dp=3),), rooms=10))
    assert plan["room_stride"] % 3 == 0
    assert plan["room_stride"] >= max(end - first for first, end in plan["loads"][0]["batches"])


def test_more_rooms_in_flight_than_memory_holds_are_limited_and_said():
    plan = make_plan(request(loads=(Load(256, Tokens(values=(1024,))),)))
    (load,) = plan["loads"]
    pools = sum(rank["pool_bytes"] for rank in plan["ranks"])
    assert load["in_flight"] < 256
    assert plan["notes"] == [f"concurrency 256: rooms in flight limited to {load['in_flight']} by memory"]
    assert pools + 4 * plan["ring_bytes"] < 8.5 * GIB


def test_a_path_that_stages_nothing_needs_next_to_no_ring():
    plan = make_plan(request(paths=("slice",)))
    assert plan["ring_bytes"] == MIB


def test_the_ring_holds_at_least_one_part_however_little_memory_there_is():
    plan = make_plan(request(memory_bytes=300 * MIB, loads=(Load(1, Tokens(values=(1024,))),)))
    assert plan["ring_bytes"] >= 32 * MIB


def test_a_cached_prefix_is_not_moved():
    plan = make_plan(request(prefix_hit=0.5))
    assert {(room["prefix_tokens"], room["bytes"]) for room in plan["loads"][0]["rooms"]} == {(512, 64 * MIB)}
    assert plan["shares"][0]["bytes"] == 16 * MIB


SMALL = {"layers": 4, "kv_heads": 4, "head_dim": 8}


def test_instances_of_different_layouts_take_turns_and_each_holds_only_its_own_rooms():
    plan = make_plan(request(**SMALL, prefill=(Sizes(tp=4), Sizes(tp=2, pp=2), Sizes(cp=2)), decode=Sizes(dp=2)))
    (load,) = plan["loads"]
    assert {room["instance"] for room in load["rooms"]} == {0, 1, 2}
    ranks = [(rank["instance"], rank["unique"]) for rank in plan["ranks"] if rank["role"] == "prefill"]
    assert ranks == [*((0, at) for at in range(4)), *((1, at) for at in range(4)), (2, 0), (2, 1)]
    assert {rank["instance"] for rank in plan["ranks"] if rank["role"] == "decode"} == {-1}
    for rank in plan["ranks"]:
        for first, end in load["batches"]:
            mine = [
                room
                for room in load["rooms"][first:end]
                if (rank["instance"] < 0 and room["decode_dp"] == rank["dp"]) or room["instance"] == rank["instance"]
            ]
            assert sum(-(-room["tokens"] // 16) for room in mine) < rank["pool_pages"]
    assert {share["instance"] for share in plan["shares"]} == {0, 1, 2}
    assert plan["config"]["cp_mode"] == "rank0"


def test_stages_hold_their_layers_and_may_be_uneven():
    plan = make_plan(request(**SMALL, prefill=(Sizes(pp=2, layers=(3, 1)),), decode=Sizes(pp=2)))
    layers = {(rank["role"], rank["pp"]): rank["layers"] for rank in plan["ranks"]}
    assert layers == {("prefill", 0): [0, 3], ("prefill", 1): [3, 4], ("decode", 0): [0, 2], ("decode", 1): [2, 4]}
    assert [(share["writer"], share["reader"], share["layers"]) for share in plan["shares"]] == [
        (0, 0, [0, 2]),
        (0, 1, [2, 3]),
        (1, 1, [3, 4]),
    ]


@pytest.mark.parametrize("mode", ["rank0", "all", "all-chunk", "room-hash"])
def test_context_parallel_modes_move_the_same_bytes(mode: str):
    plan = make_plan(request(**SMALL, prefill=(Sizes(cp=2),), decode=Sizes(), cp_mode=mode, chunk_tokens=256))
    assert sum(share["bytes"] for share in plan["shares"]) == plan["loads"][0]["rooms"][0]["bytes"]
    writers = {share["writer"] for share in plan["shares"]}
    assert len(writers) == (2 if mode.startswith("all") else 1)
    # The ranks that share a room split it in two halves, or each of its four chunks.
    parts = {"all": 2, "all-chunk": 4}.get(mode, 4)
    assert {share["parts"] for share in plan["shares"]} == {parts}


def test_a_latent_has_one_writer_for_each_reader_and_no_v():
    plan = make_plan(request(model="deepseek-r1", decode=Sizes(dp=2)))
    assert (plan["shape"]["model"], plan["shape"]["kind"], plan["shape"]["v_head_dim"]) == ("deepseek-r1", "mla", 0)
    assert plan["paths"] == ["bulk", "staged", "auto"]
    assert len(plan["shares"]) == 2
    assert {room["bytes"] for room in plan["loads"][0]["rooms"]} == {1024 * 61 * 576 * 2}


def test_scales_are_a_row_per_page_and_head():
    plain, scaled = (make_plan(request(**SMALL, dtype=dtype)) for dtype in ("fp8", "fp8-scaled"))
    assert (scaled["shape"]["k_scale_bytes"], scaled["shape"]["v_scale_bytes"]) == (4, 4)
    more = scaled["loads"][0]["rooms"][0]["bytes"] - plain["loads"][0]["rooms"][0]["bytes"]
    assert more == 64 * 4 * 4 * (4 + 4)


def test_draft_layers_lie_on_the_last_stage_and_move_with_the_rest():
    plan = make_plan(request(**SMALL, draft_layers=2, draft_dim=4, prefill=(Sizes(pp=2),), decode=Sizes()))
    drafts = [share for share in plan["shares"] if share["segment"] == "draft"]
    assert [(share["writer"], share["layers"]) for share in drafts] == [(1, [4, 6])]
    assert sum(share["bytes"] for share in plan["shares"]) == plan["loads"][0]["rooms"][0]["bytes"]


def test_state_has_items_of_its_own_and_moves_whole():
    states = (
        State("conv", rows=3, heads=4, head_bytes=8),
        State("index", rows=1, heads=1, head_bytes=12, kind="pages"),
    )
    plan = make_plan(request(**SMALL, states=states, prefix_hit=0.5, prefill=(Sizes(tp=2),), decode=Sizes(), rooms=5))
    for rank in plan["ranks"]:
        assert rank["state_slots"] == {"conv": 5 + 1, "index": 5 * 64 + 1}
    by_name = {name: [each for each in plan["shares"] if each["segment"] == name] for name in ("conv", "index")}
    assert [(share["heads"], share["bytes"]) for share in by_name["conv"]] == [([0, 2], 192), ([2, 4], 192)]
    assert [share["bytes"] for share in by_name["index"]] == [4 * 64 * 16 * 12]  # the cached half too, one writer
    assert sum(share["bytes"] for share in plan["shares"]) == plan["loads"][0]["rooms"][0]["bytes"]


def test_a_window_s_items_are_the_pages_of_its_last_tokens():
    plan = make_plan(request(model="gpt-oss-120b", prefill=(Sizes(),), decode=Sizes(), rooms=1))
    assert [rank["state_slots"]["window"] for rank in plan["ranks"]] == [128 // 16 + 1] * 2
    assert plan["shares"][1]["bytes"] == 18 * 128 * 8 * 2 * 128


def test_a_group_has_pages_of_its_own_of_which_those_in_the_window_move():
    groups = (Group("swa", layers=2, page_size=8, window=100), Group("index", 3, 32, heads=2, head_dim=5))
    changes = {**SMALL, "groups": groups, "prefill": (Sizes(tp=2),), "decode": Sizes(), "rooms": 5}
    plan = make_plan(request(**changes, prefix_hit=0.5))
    swa, index = plan["shape"]["groups"]
    assert (swa["layers"], swa["kv_heads"], swa["head_dim"], swa["v_head_dim"]) == ([0, 2], 4, 8, 8)
    assert (index["layers"], index["kv_heads"], index["head_dim"], index["v_head_dim"]) == ([0, 1, 2], 2, 5, 5)
    # Tokens 924 to 1024 lie in pages 115 to 127; of the other group all pages are kept and the cached half stays.
    for rank in plan["ranks"]:
        assert rank["state_slots"] == {"swa": 5 * 13 + 1, "index": 5 * 32 + 1}
    by_name = {name: [each for each in plan["shares"] if each["segment"] == name] for name in ("swa", "index")}
    for name, pages, tokens, layers, row_bytes in (("swa", 13, 8, [4, 6], 2 * 32), ("index", 16, 32, [6, 9], 2 * 10)):
        assert len(by_name[name]) == 2
        for share in by_name[name]:
            assert (share["pages"], share["transfer_page"], share["splits"]) == (pages, tokens, [1, 1])
            assert share["layers"] == layers
            assert share["bytes"] == (layers[1] - layers[0]) * pages * tokens * row_bytes
    assert sum(share["bytes"] for share in plan["shares"]) == plan["loads"][0]["rooms"][0]["bytes"]


def test_a_model_made_shorter_keeps_the_state_beside_its_layers():
    shape = make_plan(request(model="qwen3-next-80b-a3b", layers=2, prefill=(Sizes(tp=2),)))["shape"]
    assert shape["model"] == ""
    assert [state["layers"] for state in shape["states"]] == [[0, 0, 0, 1, 1, 1]] * 2


def test_rooms_at_a_rate_arrive_and_each_lot_starts_anew():
    plan = make_plan(request(rate=50.0, rooms=40))
    (load,) = plan["loads"]
    assert len(load["batches"]) > 1
    for first, end in load["batches"]:
        arrivals = [room["arrival_ms"] or 0.0 for room in load["rooms"][first:end]]
        assert arrivals[0] == 0
        assert arrivals == sorted(arrivals)
    assert plan["config"]["bootstrap_timeout_s"] == 3600
    assert {room["arrival_ms"] for room in make_plan(request())["loads"][0]["rooms"]} == {None}


ONE = {"prefill": (Sizes(),), "decode": Sizes(), "layers": 2, "loads": (Load(1, Tokens(values=(200,))),)}


def test_cp_ranks_of_decode_share_a_prompt_by_transfer_pages():
    plan = make_plan(request(**{**ONE, "decode": Sizes(cp=2)}, cp_interleave=8, decode_page_size=64))
    assert (plan["page_size"], plan["decode_page_size"], plan["transfer_page"]) == (16, 64, 8)
    assert (plan["cp_interleave"], plan["config"]["cp_interleave"]) == (8, 8)
    wanted = [([0, 8, 16], 13), ([8, 16, 16], 12)]
    assert [(share["stripe"], share["pages"]) for share in plan["shares"]] == wanted
    assert {tuple(share["splits"]) for share in plan["shares"]} == {(2, 8)}
    assert sum(share["bytes"] for share in plan["shares"]) == plan["loads"][0]["rooms"][0]["bytes"]
    prefill, *decode = plan["ranks"]
    rooms = max(end - first for first, end in plan["loads"][0]["batches"])
    assert prefill["pool_pages"] == 1 + 13 * rooms
    assert {rank["pool_pages"] for rank in decode} == {1 + 2 * rooms}  # 200 tokens in pages of 64 on each of 2 ranks
    assert decode[0]["pool_bytes"] == (1 + 2 * rooms) * 64 * 2 * 2 * 8 * 256


@pytest.mark.parametrize(
    ("pages", "layouts", "descriptors", "paths"),
    [
        ((16, 64), ("nhd", "nhd"), (52, 52), ["bulk", "staged", "auto"]),
        ((64, 16), ("hnd", "nhd"), (None, 13 * 4 * 16 * 8), ["slice", "staged", "auto"]),
        ((16, 16), ("hnd", "fused"), (None, 13 * 4 * 16 * 8), ["slice", "staged", "auto"]),
        ((16, 16), ("hnd", "kv-inner-hnd"), (52, 52), ["bulk", "staged", "auto"]),
        ((16, 64), ("hnd", "hnd"), (None, 13 * 4 * 8), ["slice", "staged", "auto"]),
    ],
)
def test_descriptors_are_the_runs_that_are_contiguous_in_both_pools(
    pages: tuple[int, int], layouts: tuple[str, str], descriptors: tuple[int | None, int], paths: list[str]
):
    plan = make_plan(request(**ONE, prefill_page_size=pages[0], decode_page_size=pages[1], kv_layouts=layouts))
    (share,) = plan["shares"]
    assert (share["descriptors"]["bulk"], share["descriptors"]["slice"]) == descriptors
    assert plan["paths"] == paths


def test_a_cached_prefix_is_whole_pages_of_all_decode_cp_ranks():
    plan = make_plan(request(**{**ONE, "decode": Sizes(cp=2)}, decode_page_size=32, prefix_hit=0.5))
    assert {room["prefix_tokens"] for room in plan["loads"][0]["rooms"]} == {128}


def test_layouts_of_requests_are_those_of_pools():
    assert tuple(POOL_LAYOUTS) == KV_LAYOUTS


def test_ways_of_grouping_layers_are_compared_and_a_threshold_that_none_reaches_is_said():
    plan = make_plan(request(**SMALL, pipelines=("off", "on", "2", "off")))
    assert plan["pipelines"] == ["off", "on", "2"]
    assert "shorter than pipeline_min_tokens = 3072" in plan["notes"][0]
    assert make_plan(request(**SMALL, pipelines=("off", "2")))["notes"] == []


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"prefill": (Sizes(tp=4), Sizes(tp=3))}, LayoutError, r"prefill instance 1: prefill tp=3: .* 8 % 3 = 2"),
        (
            {"decode_page_size": 40},
            LayoutError,
            "--prefill-page-size 16 and --decode-page-size 40: .* 40 % 16 = 8; give --decode-page-size 32",
        ),
        ({"prefill_page_size": 50, "decode_page_size": 20}, LayoutError, "give --prefill-page-size 40"),
        ({"decode": Sizes(cp=2), "cp_interleave": 3}, LayoutError, "--cp-interleave 3: .* give --cp-interleave 1"),
        (
            {"decode": Sizes(cp=2), "cp_interleave": 24, "page_size": 16, "decode_page_size": 48},
            LayoutError,
            "a decode page of 48 tokens.* a prefill page of 16 tokens .* give --cp-interleave 8",
        ),
        ({"page_size": 1, "decode_page_size": 8192}, LayoutError, "at most 4096 .* give --decode-page-size 4096"),
        (
            {"dtype": "fp8-scaled", "decode_page_size": 64},
            LayoutError,
            "give --prefill-page-size 64 --decode-page-size 64, or --scale-bytes 0,0",
        ),
        ({"dtype": "fp8-scaled", "decode": Sizes(cp=2)}, LayoutError, "give --cp-interleave 16, or --scale-bytes"),
        ({"kv_layouts": ("nhd", "hdn")}, ConfigError, "did you mean nhd"),
        (
            {"decode": Sizes(tp=4), "kv_layouts": ("hnd", "nhd"), "paths": ("bulk",)},
            LayoutError,
            "--path bulk .* pages are hnd and nhd, of 16 and 16 tokens: use slice, staged or auto",
        ),
        ({"decode": Sizes(tp=0)}, LayoutError, "tp is 0"),
        ({"page_size": 0}, LayoutError, "--page-size is 0"),
        ({"groups": (Group("swa", 2, 16, heads=3),)}, LayoutError, r"prefill tp=4 \(swa\): 3 KV heads .* 3 % 4"),
        ({"model": "lama-3.1-8b"}, ConfigError, "did you mean llama-3.1-8b"),
        ({"dtype": "bf61"}, ConfigError, "did you mean bf16"),
        ({"layers": 0}, LayoutError, "--layers is 0"),
        (
            {"ring_mb": 16},
            LayoutError,
            r"--ring-mb 16 .* need 33554432 bytes, the ring has 16777216; give --ring-mb 32",
        ),
        ({"paths": ("bulk",)}, LayoutError, "--path bulk .* a prefill rank holds 2 and a decode rank 8"),
        ({"paths": ("stagged",)}, ConfigError, "did you mean staged"),
        ({"transport": "nxl"}, ConfigError, "did you mean nixl"),
        ({"page_order": "sorted"}, ConfigError, "--page-order 'sorted'"),
        ({"cp_mode": "al"}, ConfigError, "did you mean all"),
        ({"pipelines": ("of",)}, ConfigError, "did you mean off"),
        ({"pipelines": ("0",)}, ConfigError, "--pipeline '0' is unknown"),
        ({"kind": "mlha"}, ConfigError, "did you mean m"),
        ({"prefill": ()}, LayoutError, "no prefill instance"),
        ({"states": (State("w", 1, 1, 1, kind="window"),)}, LayoutError, "window of state w is 0"),
        (
            {"groups": (Group("swa", 2, 48),)},
            LayoutError,
            "--kv-group swa: .* 8192 % 48 = 32; give page=16, or --chunk-tokens 8160",
        ),
        (
            {"groups": (Group("swa", 2, 16),), "decode": Sizes(cp=2)},
            LayoutError,
            "--kv-group swa: decode cp ranks cannot share its pages; give --decode-cp 1",
        ),
        (
            {"groups": (Group("swa", 2, 16, heads=2),), "kind": "mla"},
            LayoutError,
            "--kv-group swa: a latent has 1 head, not 2; leave out heads=2",
        ),
        ({"layer_ms": -1.0}, ConfigError, "--layer-ms -1.0"),
        ({"prefix_hit": 1.0}, ConfigError, "--prefix-hit 1.0"),
        ({"rooms": 0}, LayoutError, "--rooms is 0"),
        ({"chunk_tokens": 0}, LayoutError, "--chunk-tokens is 0"),
        ({"loads": (Load(0, Tokens(values=(1,))),)}, LayoutError, "--concurrency is 0"),
        ({"loads": (Load(1, Tokens(low=9, high=2)),)}, ConfigError, "ends before it begins"),
        (
            {"loads": (Load(1, Tokens(values=(1 << 20,))),)},
            LayoutError,
            "one room of 1048576 tokens needs 274877906944",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_arithmetic(changes: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        make_plan(request(**changes))


def test_planning_loads_neither_torch_nor_an_engine():
    code = (
        "import sys; from kvctl.lab.ranks import plan;"
        "print([name for name in ('torch', 'nixl', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=250)
    assert done.stdout.decode().strip() == "[]"
