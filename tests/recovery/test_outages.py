"""Ranks that die or stop under load: who notices what, what it costs the others, and when all is as before.

Timings are short (suspect 0.8 s, lost 5 s); that a death is found out by proof and not by silence shows in the words of
the failure, so nothing here depends on how fast the machine is. `benchmarks/outages.py` measures how long it takes.

Ranks learn of each other's fate one by one: that one of them knows says nothing of the next, so whatever is asked of
several is waited for.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections import Counter
from typing import Any

import pytest

from kvctl.cli import run
from kvctl.lab.demo.room_accounting import LiveRoom
from kvctl.lab.demo.traffic import Traffic
from kvctl.lab.ranks.request import Sizes

APART, TOGETHER = Sizes(dp=2), Sizes(tp=2)  # decode ranks with rooms of their own, and two that share each room
EVERY = pytest.mark.parametrize("traffic", [("nixl", APART), ("mooncake", APART)], indirect=True, scope="module")
NIXL = pytest.mark.parametrize("traffic", [("nixl", APART)], indirect=True, scope="module")
PAIRS = pytest.mark.parametrize("traffic", [("nixl", TOGETHER)], indirect=True, scope="module")

PATIENCE_S = 60.0
FORWARD_S = 600.0


def rooms_in_flight(traffic: Traffic, victim: str) -> list[LiveRoom]:
    """Two rooms of `victim` whose first half has landed, and whose second forward takes longer than any test.

    With nothing of them under way, that they fail is told by whoever finds the victim gone, not by a write to it.
    """
    dp = traffic.fleet.ranks[victim].planned["dp"] if victim.startswith("decode") else 0
    rooms = [traffic.open(512, decode_dp=dp, gap_s=FORWARD_S) for _ in range(2)]
    wanted = Counter({str(room.number): sum(name.startswith("decode") for name in room.ranks) for room in rooms})

    def half_landed() -> bool:
        rows = [row for row in kvctl("rooms", "ls", "--state", "Transferring") if row["role"] == "decode"]
        half = [row["room"] for row in rows if 2 * row["coverage"]["landed"] == row["coverage"]["planned"]]
        return wanted <= Counter(half)

    traffic.until(half_landed, PATIENCE_S, f"the first half of two rooms of {victim} has landed")
    return rooms


def failed_since(traffic: Traffic, since_ns: int) -> list[LiveRoom]:
    return [room for room in traffic.accounting.rooms.values() if room.failed and room.ended_ns >= since_ns]


def first_room(traffic: Traffic, victim: str) -> None:
    """A room of `victim` succeeds, that was opened from now on."""
    since_ns = time.monotonic_ns()

    def some() -> bool:
        rooms = traffic.accounting.rooms.values()
        return any(room.opened_ns > since_ns and victim in room.ranks and room.succeeded for room in rooms)

    traffic.until(some, PATIENCE_S, f"a room of {victim} succeeds")


def kvctl(*arguments: str) -> list[dict[str, Any]]:
    """What the tool says of the fleet. It waits only shortly for a rank that is stopped, so some may be missing."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        run([*arguments, "--timeout", "1", "-o", "json"])
    assert out.getvalue(), err.getvalue()
    data: list[dict[str, Any]] = json.loads(out.getvalue())["data"]
    return data


def quarantined() -> dict[str, float]:
    """Bytes that each decode rank keeps because a silent writer may still write them."""
    rows = kvctl("metrics")
    return {row["agent"]: row["value"] for row in rows if row["name"] == "kvctl_quarantined_bytes" and row["value"]}


def seen_by_others(victim: str) -> dict[str, str]:
    """How the others see it."""
    return {row["agent"]: row["state"] for row in kvctl("peers") if row["peer"] == victim}


def others_see(traffic: Traffic, victim: str, state: str) -> None:
    """All who knew it come to see it in that state."""
    who = seen_by_others(victim).keys()
    assert who
    seen: dict[str, str] = {}

    def all_agree() -> bool:
        seen.update(seen_by_others(victim))
        return seen.keys() >= who and set(seen.values()) == {state}

    traffic.until(all_agree, PATIENCE_S, f"{', '.join(sorted(who))} see {victim} as {state}")


def assert_lost(rooms: list[LiveRoom], victim: str, words: str) -> None:
    """Each room failed on every other rank because `victim` is lost, with a text that starts with `words`."""
    for room in rooms:
        for name in set(room.ranks) - {victim}:
            end = room.ends[name]
            assert end["cause"] is not None, (name, end)
            assert end["cause"]["code"] == "KV_PEER_LOST", (name, end["cause"])
            assert end["cause"]["text"].startswith(words), (name, end["cause"])


def ended_everywhere(traffic: Traffic, rooms: list[LiveRoom], victim: str) -> None:
    living = [(room, name) for room in rooms for name in room.ranks if name != victim]
    words = f"rooms of {victim} end on every other rank"
    traffic.until(lambda: all(name in room.ends for room, name in living), PATIENCE_S, words)


# ---- death ---------------------------------------------------------------------------------------------------------


def kill(traffic: Traffic, victim: str) -> None:
    """Kills it under load, see what becomes of its rooms, start it again, and see it serve."""
    pid, incarnation = traffic.fleet.ranks[victim].pid, traffic.fleet.ranks[victim].incarnation
    rooms = rooms_in_flight(traffic, victim)
    since_ns = time.monotonic_ns()
    traffic.kill(victim)
    ended_everywhere(traffic, rooms, victim)
    assert_lost(rooms, victim, f"peer {victim} (incarnation {incarnation}) lost: process {pid} has ended")
    assert all(victim in room.ranks for room in failed_since(traffic, since_ns)), "no other room failed"
    others_see(traffic, victim, "lost")
    traffic.restart(victim)
    traffic.until(lambda: traffic.fleet.ranks[victim].serving, PATIENCE_S, f"{victim} serves again")
    first_room(traffic, victim)


@EVERY
def test_a_killed_decode_rank_costs_its_own_rooms_and_serves_again(traffic: Traffic) -> None:
    since_ns = time.monotonic_ns()
    kill(traffic, "decode-1")
    others = [room for room in traffic.accounting.rooms.values() if room.opened_ns > since_ns and room.decode_dp == 0]
    assert any(room.succeeded for room in others), "the other decode rank went on"


@NIXL
@pytest.mark.sample
@pytest.mark.parametrize("victim", ["prefill-1", "prefill-0"])
def test_a_killed_prefill_rank_fails_its_rooms_everywhere_and_serves_again(traffic: Traffic, victim: str) -> None:
    """`prefill-0` hosts the registry: the others register again by themselves."""
    kill(traffic, victim)


# ---- silence -------------------------------------------------------------------------------------------------------


@NIXL
@pytest.mark.sample
@pytest.mark.parametrize("victim", ["decode-1", "prefill-1"])
def test_a_short_stop_is_seen_and_fails_no_room(traffic: Traffic, victim: str) -> None:
    failed = traffic.accounting.failed
    traffic.pause(victim)
    traffic.until(lambda: "suspect" in seen_by_others(victim).values(), PATIENCE_S, f"{victim} is a suspect")
    traffic.resume(victim)
    first_room(traffic, victim)
    assert traffic.accounting.failed == failed


@EVERY
def test_a_long_stop_of_a_prefill_rank_is_a_loss_with_a_quarantine_until_it_has_drained(traffic: Traffic) -> None:
    victim = "prefill-1"
    incarnation = traffic.fleet.ranks[victim].incarnation
    rooms = rooms_in_flight(traffic, victim)
    traffic.pause(victim)
    ended_everywhere(traffic, rooms, victim)
    assert_lost(rooms, victim, f"peer {victim} (incarnation {incarnation}) lost: silent for ")
    traffic.until(lambda: bool(quarantined()), PATIENCE_S, "pages and ring regions are kept: it may be writing")
    assert set(quarantined()) <= {"decode-0", "decode-1"}

    first = rooms[0].first_cause
    assert first is not None
    wanted = [(first["rank"], first["text"])]

    def shows_the_first_cause() -> bool:
        shown = kvctl("rooms", "show", str(rooms[0].number))
        return [(row["first_failing_rank"], (row["failure"] or {}).get("text")) for row in shown] == wanted

    traffic.until(shows_the_first_cause, PATIENCE_S, f"rooms show says {wanted}")

    traffic.resume(victim)
    traffic.until(lambda: all(room.over for room in rooms), PATIENCE_S, "the pages of its rooms are free")
    traffic.until(lambda: not quarantined(), PATIENCE_S, "the quarantine is over")
    first_room(traffic, victim)


@NIXL
def test_a_long_stop_of_a_decode_rank_fails_its_rooms_and_it_serves_again_without_a_restart(traffic: Traffic) -> None:
    victim = "decode-1"
    incarnation = traffic.fleet.ranks[victim].incarnation
    rooms = rooms_in_flight(traffic, victim)
    done = traffic.accounting.done
    traffic.pause(victim)
    ended_everywhere(traffic, rooms, victim)
    assert_lost(rooms, victim, f"peer {victim} (incarnation {incarnation}) lost: silent for ")
    traffic.until(lambda: traffic.accounting.done > done, PATIENCE_S, "the other decode rank goes on")
    traffic.resume(victim)
    traffic.until(lambda: all(room.over for room in rooms), PATIENCE_S, f"{victim} has let go of its rooms")
    first_room(traffic, victim)
    for room in rooms:
        end = room.ends[victim]
        assert end["cause"] is not None, "it learns that the others gave them up"
        assert end["cause"]["code"] == "KV_PEER_LOST"


# ---- decode ranks that share rooms ---------------------------------------------------------------------------------


@PAIRS
@pytest.mark.parametrize("victim", ["decode-0", "decode-1", "prefill-1"])
def test_a_killed_rank_fails_its_rooms_also_on_ranks_that_it_exchanges_nothing_with(
    traffic: Traffic, victim: str
) -> None:
    """Each decode rank keeps about half of the rooms."""
    kill(traffic, victim)


@PAIRS
@pytest.mark.parametrize("victim", ["decode-0", "prefill-1"])
def test_a_rank_that_was_frozen_and_thaws_ends_its_rooms_as_the_others_have(traffic: Traffic, victim: str) -> None:
    rooms = rooms_in_flight(traffic, victim)
    traffic.pause(victim)
    ended_everywhere(traffic, rooms, victim)
    assert all(room.failed for room in rooms)
    traffic.resume(victim)
    traffic.until(lambda: all(room.over for room in rooms), PATIENCE_S, f"all ranks have let go of rooms of {victim}")
    first_room(traffic, victim)
