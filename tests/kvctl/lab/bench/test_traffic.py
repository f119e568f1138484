"""From prompts to the requests of a plan."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from kvctl.lab.bench.traffic import Source, Traffic, planned_requests, sessions, token_bytes, with_requests
from kvctl.lab.ranks.request import Load, PlanRequest, Request, Sizes, Tokens

SHAPE: Any = {"layers": 2, "kv_heads": 4, "head_dim": 8, "v_head_dim": 8, "dtype_bytes": 2}


def request(memory_bytes: int = 1 << 30) -> PlanRequest:
    load = Load(4, Tokens(values=(64,)), rooms=9)
    return PlanRequest(
        prefill=(Sizes(),), decode=Sizes(dp=2), loads=(load,), memory_bytes=memory_bytes, seed=0, rooms=7
    )


def source(*blocks: tuple[int, ...], cache_tokens: int | None = None) -> Source:
    prompts = tuple(Request(1.5, 100 * len(each), output_tokens=5, blocks=each, kept=each) for each in blocks)
    return Source({}, Traffic(prompts, Fraction(100)), cache_tokens)


def test_requests_are_routed_with_their_hits():
    decodes = replace(request(), decode_ms=2.0)
    made = with_requests(decodes, source((1, 2), (1, 2), (1, 2)), SHAPE)
    assert [(each.decode_dp, each.prefix_tokens) for each in made.requests] == [(0, 0), (1, 0), (0, 192)]
    assert {(each.arrival_ms, each.tokens, each.output_tokens) for each in made.requests} == {(1.5, 200, 5)}
    assert made.rooms is None
    assert made.loads == (replace(request().loads[0], rooms=None),)


def test_outputs_take_no_time_where_nothing_is_decoded():
    made = with_requests(request(), source((1,)), SHAPE)
    assert made.requests[0].output_tokens == 0


def test_a_cache_holds_what_its_group_has_memory_for():
    assert token_bytes(SHAPE) == 2 * 4 * 16 * 2
    again = source((1,), (2,), (1,))

    def hit(tokens: int, source: Source = again) -> int:
        alone = replace(request(2 * tokens * 256), decode=Sizes())  # half of the memory is for caches
        return with_requests(alone, source, SHAPE).requests[-1].prefix_tokens

    assert (hit(200), hit(199)) == (96, 0)
    assert hit(200, replace(again, cache_tokens=100)) == 0


def test_turns_of_a_session_stay_together():
    chats = Source({}, sessions(3, 4, [64], 0, 16), None)
    made = with_requests(request(), chats, SHAPE)
    homes: dict[int, set[int]] = {}
    for each in made.requests:
        homes.setdefault(each.session, set()).add(each.decode_dp)
    assert sorted(homes) == [0, 1, 2]
    assert all(len(groups) == 1 for groups in homes.values())


def test_the_longest_prompt_decides_what_must_fit():
    assert source((1,), (1, 2, 3)).longest == Tokens(values=(300,))


def test_every_request_of_a_plan_is_reported():
    room = {"tokens": 9, "prefix_tokens": 3, "output_tokens": 0, "arrival_ms": None, "decode_dp": 1, "session": -1}
    plan: Any = {"loads": [{"rooms": [{**room, "bytes": 77, "instance": 0}]}]}
    assert planned_requests(plan) == [room]
