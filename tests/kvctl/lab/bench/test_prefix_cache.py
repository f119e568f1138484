"""Prefix hits against an independent computation, routing, and sessions."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from kvctl.lab.bench.traffic import Traffic, hit_tokens, route, sessions
from kvctl.lab.ranks.request import Request

EVER = 1 << 40


def prompt(tokens: int, *blocks: int) -> Request:
    return Request(None, tokens, blocks=blocks, kept=blocks)


def traffic(*prompts: Request, block_tokens: Fraction = Fraction(512)) -> Traffic:
    return Traffic(prompts, block_tokens)


@pytest.mark.parametrize(
    ("blocks", "block_tokens", "tokens", "page_size", "hit"),
    [
        (2, 512, 2000, 16, 1024),
        (2, 512, 2000, 64, 1024),
        (2, 512, 2000, 1000, 1000),
        (0, 512, 2000, 16, 0),
        (1, Fraction("25.6"), 65, 16, 16),
        (5, Fraction("25.6"), 1000, 16, 128),
        (2, 512, 1024, 16, 1008),  # the last page always moves
        (2, 512, 1000, 16, 992),  # also where it is partly filled
        (1, 512, 10, 16, 0),
        (1, 512, 1, 1, 0),
    ],
)
def test_a_hit_is_whole_pages_and_never_the_last(blocks: int, block_tokens: int, tokens: int, page_size: int, hit: int):
    assert hit_tokens(blocks, Fraction(block_tokens), tokens, page_size) == hit


class TestRouting:
    def test_every_rank_gets_work_though_all_prompts_begin_alike(self):
        routed = route(traffic(*(prompt(4096, 0, *range(8 * n, 8 * n + 7)) for n in range(1, 9))), 4, 16, EVER)
        assert [dp for dp, _ in routed[:4]] == [0, 1, 2, 3]
        assert {dp for dp, _ in routed[4:]} == {0, 1, 2, 3}
        assert {hit for _, hit in routed[4:]} == {512}

    def test_a_long_hit_draws_a_prompt_to_its_prefix(self):
        long = prompt(5000, *range(9))
        routed = route(traffic(long, prompt(1000, 90), long, long), 2, 16, EVER)
        assert [dp for dp, _ in routed] == [0, 1, 0, 0]
        assert [hit for _, hit in routed] == [0, 0, 4608, 4608]


@pytest.mark.parametrize("capacity", [0, 2, 25])
def test_hits_are_those_of_a_plain_simulation_over_lists(capacity: int):
    """Nothing shared with the code under test: a list per rank, searched and shifted."""
    source = random.Random(7)
    chains: list[tuple[int, ...]] = [()]
    for block in range(200):
        chains.append((*source.choice(chains)[: source.randint(0, 9)], block))
    prompts = []
    for _ in range(300):
        blocks = source.choice(chains)
        prompts.append(prompt(max(1, 40 * len(blocks) - source.randint(0, 39)), *blocks))
    page, dps = 16, 3

    cached: list[list[int]] = [[] for _ in range(dps)]
    moved = [0] * dps
    expected = []
    for each in prompts:
        options = []
        for dp in range(dps):
            count = 0
            while count < len(each.blocks) and each.blocks[count] in cached[dp]:
                count += 1
            tokens = min(count * 40, each.tokens - 1)
            options.append((moved[dp] + each.tokens - tokens // page * page, dp, tokens // page * page))
        total, dp, hit = min(options)
        moved[dp] = total
        for block in each.blocks[::-1]:
            if block in cached[dp]:
                cached[dp].remove(block)
            cached[dp].append(block)
        del cached[dp][: max(0, len(cached[dp]) - capacity)]
        expected.append((dp, hit))

    routed = route(traffic(*prompts, block_tokens=Fraction(40)), dps, page, capacity * 40)
    assert routed == expected
    assert any(hit for _, hit in expected) == (capacity > 0)


class TestSessions:
    def test_each_turn_is_everything_said_before_and_something_new(self):
        made = sessions(2, 3, [100], 30, 16).prompts
        assert [each.tokens for each in made] == [100, 100, 230, 230, 360, 360]
        assert [each.session for each in made] == [0, 1, 0, 1, 0, 1]

    def test_later_turns_hit_all_whole_pages_of_what_was_said(self):
        made = sessions(2, 3, [100], 30, 16)
        hits = [hit for _, hit in route(made, 2, 16, EVER)]
        assert hits == [0, 0, 128, 128, 256, 256]  # of 130 and 260 tokens said before

    def test_sessions_stay_where_their_prefix_is(self):
        routed = route(sessions(4, 5, [200], 0, 16), 2, 16, EVER)
        homes = [dp for dp, _ in routed[:4]]
        assert [dp for dp, _ in routed] == homes * 5

    def test_sessions_share_nothing(self):
        first, second = sessions(2, 1, [64], 0, 16).prompts
        assert set(first.blocks).isdisjoint(second.blocks)

    def test_new_tokens_can_differ(self):
        assert [each.tokens for each in sessions(2, 2, [10, 20], 0, 16).prompts] == [10, 20, 20, 40]
