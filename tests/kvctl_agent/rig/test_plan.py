"""What a bench's request becomes: fleet, lots, ring, paths — or the arithmetic of why not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import orjson
import pytest

from kvctl_agent.contract.rig import Load, PlanRequest, Sizes, Tokens
from kvctl_agent.errors import ConfigError, LayoutError
from kvctl_agent.rig.__main__ import answer
from kvctl_agent.rig.plan import make_plan

MIB = 1 << 20
GIB = 1 << 30


def request(**changes: Any) -> PlanRequest:
    wanted: dict[str, Any] = {
        "prefill": Sizes(tp=4),
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


def test_equal_layouts_compare_bulk():
    assert make_plan(request(decode=Sizes(tp=4)))["paths"] == ["bulk", "staged", "auto"]


def test_the_shares_say_who_owes_what_on_every_path():
    plan = make_plan(request())
    assert len(plan["shares"]) == 16
    assert plan["shares"][1] == {
        "writer": 1,
        "reader": 0,
        "heads": [2, 4],
        "layers": [0, 32],
        "bytes": 32 * MIB,
        "parts": 1,
        "descriptors": {"bulk": None, "slice": 65536, "staged": 1},
    }


def test_pools_hold_every_lot_and_page_zero():
    plan = make_plan(request(decode=Sizes(dp=3), loads=(Load(2, Tokens(low=1, high=300)), Load(5, Tokens((64, 16))))))
    for rank in plan["ranks"]:
        for load in plan["loads"]:
            for first, end in load["lots"]:
                mine = [
                    -(-room["tokens"] // 16)
                    for room in load["rooms"][first:end]
                    if rank["role"] == "prefill" or room["decode_dp"] == rank["dp"]
                ]
                assert sum(mine) < rank["pool_pages"]


def test_numbers_replace_the_presets_and_drop_its_name():
    shape = make_plan(request(model="qwen3-8b", layers=2))["shape"]
    assert (shape["model"], shape["layers"], shape["kv_heads"]) == ("", 2, 8)


def test_room_numbers_leave_space_for_every_prefill_group():
    plan = make_plan(request(prefill=Sizes(tp=2, dp=3), rooms=10))
    assert plan["room_stride"] % 3 == 0
    assert plan["room_stride"] >= max(end - first for first, end in plan["loads"][0]["lots"])


def test_more_rooms_in_flight_than_memory_holds_are_limited_and_said():
    plan = make_plan(request(loads=(Load(256, Tokens(values=(1024,))),)))
    (load,) = plan["loads"]
    pools = sum(rank["pool_bytes"] for rank in plan["ranks"])
    assert load["in_flight"] < 256
    assert plan["notes"] == [f"concurrency 256: rooms in flight limited to {load['in_flight']} by memory"]
    assert pools + 4 * plan["ring_bytes"] < 8.5 * GIB


def test_fewer_rooms_than_concurrency_are_said_too():
    assert make_plan(request(rooms=2))["notes"] == ["concurrency 4: only 2 rooms to run"]


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


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"prefill": Sizes(tp=3)}, LayoutError, r"prefill tp=3: 8 KV heads .* 8 % 3 = 2"),
        ({"decode": Sizes(cp=2)}, LayoutError, "decode cp=2"),
        ({"decode": Sizes(tp=0)}, LayoutError, "tp is 0"),
        ({"page_size": 0}, LayoutError, "page_size is 0"),
        ({"model": "lama-3.1-8b"}, ConfigError, "did you mean llama-3.1-8b"),
        ({"dtype": "bf61"}, ConfigError, "--dtype 'bf61' is unknown; did you mean bf16"),
        ({"layers": 0}, LayoutError, "--layers is 0"),
        (
            {"ring_mb": 16},
            LayoutError,
            r"--ring-mb 16 .* need 33554432 bytes, the ring has 16777216; give --ring-mb 32",
        ),
        ({"paths": ("bulk",)}, LayoutError, "--path bulk .* a prefill rank holds 2 and a decode rank 8"),
        ({"paths": ("stagged",)}, ConfigError, "did you mean staged"),
        ({"transport": "nxl"}, ConfigError, "--transport 'nxl' is unknown; did you mean nixl"),
        ({"page_order": "sorted"}, ConfigError, "--page-order 'sorted'"),
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


def test_the_planner_process_needs_neither_torch_nor_an_engine():
    code = (
        "import sys; from kvctl_agent.rig.__main__ import answer; reply = answer(sys.stdin.buffer.read());"
        "print('plan' in reply, [name for name in ('torch', 'nixl', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=orjson.dumps(request()), capture_output=True, check=True, timeout=30
    )
    assert done.stdout.decode().strip() == "True []"


def test_a_refusal_is_an_answer():
    reply = answer(msgspec.json.encode(request(prefill=Sizes(tp=3))))
    assert reply["error"]["code"] == "usage"
    assert "8 % 3 = 2" in reply["error"]["message"]


def test_without_the_agents_packages_the_extra_is_named():
    code = (
        "import sys; sys.modules['msgspec'] = sys.modules['numpy'] = None;"
        "from kvctl_agent.rig.__main__ import main; sys.exit(main(['plan']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=orjson.dumps(request()), capture_output=True, check=True, timeout=30
    )
    error = orjson.loads(done.stdout)["error"]
    assert error["code"] == "unavailable"
    assert "pip install 'kvctl[agent]'" in error["message"]


def test_a_missing_engine_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvctl_agent.rig.__main__.find_spec", lambda name: None)
    reply = answer(msgspec.json.encode(request()))
    assert reply["error"]["code"] == "unavailable"
    assert "pip install 'kvctl[nixl]'" in reply["error"]["message"]
    assert "--transport loopback" in reply["error"]["message"]
    assert "plan" in answer(msgspec.json.encode(request(transport="loopback")))
