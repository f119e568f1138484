"""The registry: registered and missing ranks, and refused registrations."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import bootstrap_registry as registry
from kvctl_agent.protocol.bootstrap_registry import Lookup, Rank, Register, Registry


def rank(tp: int, *, tp_size: int = 4, dp: int = 0, dp_size: int = 1, name: str = "", life: int = 1) -> Rank:
    name = name or f"prefill-{dp}-{tp}"
    return Rank(name, "ipc:///tmp/x", life, [dp, 0, 0, tp], [dp_size, 1, 1, tp_size])


def test_nobody_has_registered() -> None:
    answer = Registry().answer(Lookup("decode-0"), 0)
    assert (answer.ranks, answer.size, answer.missing) == ([], 0, "no prefill rank has registered")


def test_what_is_missing_is_said_in_words() -> None:
    registry = Registry()
    registry.answer(Register(rank(0)), 0)
    assert registry.answer(Register(rank(1)), 0).missing == "2 of 4 prefill ranks registered, missing tp=2,3"


def test_ranks_come_in_the_order_of_their_numbers() -> None:
    registry = Registry()
    for tp in (3, 1, 0, 2):
        registry.answer(Register(rank(tp)), 0)
    answer = registry.answer(Lookup("decode-0"), 0)
    assert answer.missing == ""
    assert [found.coord[3] for found in answer.ranks] == [0, 1, 2, 3]


def test_missing_ranks_of_several_axes_are_named_by_label() -> None:
    registry = Registry()
    answer = registry.answer(Register(rank(0, tp_size=2, dp_size=2)), 0)
    assert answer.missing == "1 of 4 prefill ranks registered, missing dp=0,tp=1; dp=1,tp=0; dp=1,tp=1"


def test_a_very_large_instance_is_not_listed_in_full() -> None:
    answer = Registry().answer(Register(rank(0, tp_size=65536)), 0)
    assert len(answer.missing) < 300
    assert answer.missing.endswith("and 65503 more")


def test_a_restarted_rank_takes_its_place_again() -> None:
    registry = Registry()
    registry.answer(Register(rank(0, tp_size=1, life=1)), 0)
    answer = registry.answer(Register(rank(0, tp_size=1, life=2)), 0)
    assert answer.refused == ""
    assert [found.incarnation for found in answer.ranks] == [2]


def test_a_rank_of_another_instance_is_refused_with_both_sizes() -> None:
    registry = Registry()
    registry.answer(Register(rank(0)), 0)
    refused = registry.answer(Register(rank(0, tp_size=2, name="other")), 0).refused
    assert "other is of an instance of sizes [1, 1, 1, 2]" in refused


def test_two_names_for_one_place_are_refused() -> None:
    registry = Registry()
    registry.answer(Register(rank(0)), 0)
    refused = registry.answer(Register(rank(0, name="other")), 0).refused
    assert refused == "other claims tp=0, which prefill-0-0 holds"


@pytest.mark.parametrize(
    ("coord", "sizes"),
    [([0] * 4, [1] * 3), ([0] * 3, [1] * 4), ([0] * 4, [0] * 4), ([9, 0, 0, 0], [1] * 4), ([0] * 4, [2**31] * 4)],
)
def test_places_that_cannot_be_are_refused_and_change_nothing(coord: list[int], sizes: list[int]) -> None:
    registry = Registry()
    answer = registry.answer(Register(Rank("odd", "", 1, coord, sizes)), 0)
    assert answer.refused.startswith("odd: ")
    assert answer.size == 0


@given(st.binary(max_size=80))
def test_random_bytes_raise_nothing_but_remote_protocol_error(data: bytes) -> None:
    for decode in (registry.decode_request, registry.decode_roster):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)


SECOND = 1_000_000_000


def listen(registry: Registry, since_s: int, until_s: int) -> None:
    for now_s in range(since_s, until_s + 1):
        registry.answer(Lookup("decode-0"), now_s * SECOND)


def test_a_process_that_was_replaced_does_not_take_its_place_back() -> None:
    """It was frozen, its replacement serves, and it goes on: else the two would hold the place in turns."""
    registry = Registry()
    registry.answer(Register(rank(0, tp_size=1, life=9)), 0)
    listen(registry, 1, 20)
    registry.answer(Register(rank(0, tp_size=1, life=5)), 20 * SECOND)  # on a host whose clock is behind
    answer = registry.answer(Register(rank(0, tp_size=1, life=9)), 21 * SECOND)
    assert answer.refused.startswith(
        "prefill-0-0 (incarnation 0000000000000009) was replaced by incarnation 00000000000"
    )
    assert [found.incarnation for found in answer.ranks] == [5]
    assert not registry.answer(Register(rank(0, tp_size=1, life=5)), 22 * SECOND).refused


def test_a_process_that_was_replaced_may_serve_when_its_replacement_has_gone() -> None:
    registry = Registry()
    registry.answer(Register(rank(0, tp_size=1, life=5)), 0)
    registry.answer(Register(rank(0, tp_size=1, life=9)), SECOND)
    listen(registry, 2, 20)
    answer = registry.answer(Register(rank(0, tp_size=1, life=5)), 20 * SECOND)
    assert not answer.refused
    assert [found.incarnation for found in answer.ranks] == [5]
    assert registry.answer(Register(rank(0, tp_size=1, life=9)), 21 * SECOND).refused


def test_after_a_stall_of_the_host_a_process_that_was_replaced_does_not_take_its_place_back() -> None:
    """Its request may be read before that of its replacement, which could not register during the stall either."""
    registry = Registry()
    registry.answer(Register(rank(0, tp_size=1, life=5)), 0)
    registry.answer(Register(rank(0, tp_size=1, life=9)), SECOND)
    listen(registry, 2, 20)
    registry.answer(Register(rank(0, tp_size=1, life=9)), 20 * SECOND)
    assert registry.answer(Register(rank(0, tp_size=1, life=5)), 60 * SECOND).refused
    assert [found.incarnation for found in registry.answer(Lookup("decode-0"), 60 * SECOND).ranks] == [9]


def test_a_registry_that_has_just_started_prefers_the_later_of_two_processes() -> None:
    """It remembers nobody, and the one that was replaced registers as soon as the other."""
    for first, second in ((5, 9), (9, 5)):
        registry = Registry()
        registry.answer(Register(rank(0, tp_size=1, life=first)), 100 * SECOND)
        registry.answer(Register(rank(0, tp_size=1, life=second)), 100 * SECOND)
        for now in (101, 102, 106, 107):
            answers = {life: registry.answer(Register(rank(0, tp_size=1, life=life)), now * SECOND) for life in (5, 9)}
            assert answers[5].refused
            assert not answers[9].refused


def test_two_ranks_of_one_name_are_refused_with_both_places() -> None:
    registry = Registry()
    registry.answer(Register(rank(0, name="worker")), 0)
    answer = registry.answer(Register(rank(1, name="worker", life=2)), SECOND)
    assert answer.refused == (
        "worker as tp=1, because tp=0 has the same name: give every agent its own name, or set name_suffix"
    )
    assert [found.coord[3] for found in answer.ranks] == [0]
    assert registry.answer(Register(rank(0, name="worker")), 2 * SECOND).refused == ""
    assert registry.answer(Register(rank(1, name="worker@b", life=2)), 2 * SECOND).refused == ""


def test_a_process_that_comes_back_with_other_coordinates_leaves_its_old_place() -> None:
    registry = Registry()
    registry.answer(Register(rank(0, name="worker")), 0)
    listen(registry, 1, 6)
    answer = registry.answer(Register(rank(1, name="worker", life=2)), 6 * SECOND)
    assert answer.refused == ""
    assert [found.coord[3] for found in answer.ranks] == [1]
    assert registry.answer(Register(rank(0, name="other")), 7 * SECOND).refused == ""


AT = registry.Whereabouts("tcp://0.0.0.0:7311", "/run/kvctl/x.sock", "node-1")


def ask(known: Registry, *frames: bytes, now_ns: int = 0, refusal: str = "") -> Any:
    """Returns the body of the reply to a request on the admin wire."""
    magic, _, body = known.reply([b"KVA1", *frames], now_ns, 1_000, refusal)
    assert magic == b"KVA1"
    return json.loads(body)


def test_the_list_has_prefill_and_decode_ranks_with_the_time_since_each_was_heard() -> None:
    known = Registry()
    known.answer(Register(Rank("prefill-0", "tcp://10.0.0.1:1", 255, [0, 0, 0, 0], [1, 1, 1, 2], AT)), 0, "10.0.0.1")
    known.answer(Lookup("decode-1", 2, AT), 5, "10.0.0.2")
    known.answer(Lookup("decode-0"), 7)
    reply = ask(known, b"1", b'{"cmd": "agents"}', now_ns=10)
    assert (reply["ok"], reply["generated_at_ns"], reply["sequence"]) == (True, 1_000, 1)
    assert [(row["name"], row["role"], row["heard_ns"], row["address"]) for row in reply["data"]] == [
        ("prefill-0", "prefill", 10, "10.0.0.1"),
        ("decode-0", "decode", 3, ""),
        ("decode-1", "decode", 5, "10.0.0.2"),
    ]
    first, old, _ = reply["data"]
    assert (first["incarnation"], first["admin"], first["socket"]) == (f"{255:016x}", AT.admin, AT.socket)
    assert (old["admin"], old["socket"], old["host"]) == ("", "", "")


def test_decode_ranks_are_told_apart_by_host_and_forgotten_after_a_day() -> None:
    known, day = Registry(), 24 * 3600 * 10**9
    for host in ("a", "b", "a"):
        known.answer(Lookup("decode-0", 1, registry.Whereabouts(host=host)), 0)
    assert [row["host"] for row in known.agents(0)] == ["a", "b"]
    known.answer(Lookup("decode-0", 1, registry.Whereabouts(host="a")), day)
    assert [row["host"] for row in known.agents(day)] == ["a"]


def test_strangers_cannot_make_the_registry_grow() -> None:
    known = Registry()
    for number in range(registry.MAX_DECODE_RANKS + 100):
        known.answer(Lookup(f"decode-{number}", 1, AT), number)
    rows = known.agents(0)
    assert len(rows) == registry.MAX_DECODE_RANKS
    assert rows[-1]["name"] == "decode-100"  # the least recently heard went first
    huge = registry.Whereabouts("x" * 60_000)
    known.answer(Lookup("long", 1, huge), 0)
    known.answer(Lookup("y" * 60_000), 0)
    assert known.answer(Register(Rank("p", "z" * 60_000, 1, [0] * 4, [1] * 4, huge)), 0).refused.endswith("characters")
    assert len(known.agents(0)) == registry.MAX_DECODE_RANKS
    assert all(len(row["name"]) < 100 for row in known.agents(0))
    assert len(known.reply([b"KVA1", b"1", b'{"cmd": "agents"}'], 0, 0)[2]) < 2 << 20


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ((), "bad-request"),
        ((b"1",), "bad-request"),
        ((b"1", b"{}", b""), "bad-request"),
        ((b"1" * 65, b'{"cmd": "agents"}'), "bad-request"),
        ((b"1", b"not JSON"), "bad-request"),
        ((b"1", b'{"cmd": 7}'), "bad-request"),
        ((b"1", b"[" * 60_000), "bad-request"),
        ((b"1", b'{"cmd": "drain"}'), "unknown-command"),
        ((b"1", b'{"cmd": "agents", "args": {"limit": 1}}'), "bad-argument"),
    ],
)
def test_wrong_requests_are_refused_with_a_code(frames: tuple[bytes, ...], code: str) -> None:
    assert ask(Registry(), *frames)["error"]["code"] == code


def test_a_client_that_is_not_permitted_learns_nothing() -> None:
    known = Registry()
    known.answer(Lookup("decode-0", 1, AT), 0)
    reply = ask(known, b"1", b'{"cmd": "agents"}', refusal="removed")
    assert reply["error"] == {"code": "not-permitted", "message": "removed"}


@given(st.lists(st.binary(max_size=80), max_size=5))
def test_any_frames_get_a_reply_of_three_frames(frames: list[bytes]) -> None:
    known = Registry()
    magic, number, body = known.reply([b"KVA1", *frames], 0, 0)
    assert (magic, len(number) <= 64, json.loads(body)["ok"]) == (b"KVA1", True, False)
    assert known.agents(0) == []


def test_the_list_is_built_at_most_four_times_a_second() -> None:
    known = Registry()
    for now_ns, names in ((0, 0), (100_000_000, 0), (250_000_000, 1)):
        assert len(ask(known, b"1", b'{"cmd": "agents"}', now_ns=now_ns)["data"]) == names
        known.answer(Lookup("decode-0"), now_ns)
