"""Output of peers diff, bootstrap, stacks, config explain and events from the agents' answers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Endpoint
from kvctl.client.fleet import AgentAnswer
from kvctl.commands.events import Follower

pytestmark = pytest.mark.usefixtures("patience")


def test_diff_names_the_factor_and_fails(fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("peers", "diff", "decode-1", "prefill-1", "-o", "json")
    assert outcome.code == 1
    assert "decode-1 and prefill-1 do not fit: page_size 64 ≠ 32" in outcome.err
    first, *others = outcome.data
    assert (first["factor"], first["a"], first["b"], first["verdict"]) == ("page_size", "32", "64", "incompatible")
    assert [(row["factor"], row["a"], row["b"]) for row in others] == [("copy_threads", 1, 4)]


def test_diff_of_two_that_fit(fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("peers", "diff", "prefill-0", "decode-0", "-o", "table")
    assert (outcome.code, outcome.err) == (0, "")
    assert "compatible" in outcome.out
    everything = kvctl("peers", "diff", "prefill-0", "decode-0", "--all", "-o", "json").data
    assert {"pool.page_size", "transport.engine", "staging_ring_mb"} <= {row["factor"] for row in everything}


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"missing": [], "text": ""}, "complete"),
        ({"missing": [], "text": "decode-0 is of another size"}, "refused"),
        ({"expected": None, "registered": [], "missing": [], "text": "no answer from the registry at x"}, "silent"),
        ({"expected": None, "registered": [], "missing": [], "text": "no prefill rank has registered"}, "waiting"),
    ],
)
def test_states_of_an_instance(changes: dict[str, Any], state: str, start: Any, kvctl: Any, canned: Any) -> None:
    start("decode-0", {"bootstrap": lambda _: [{**canned.bootstrap("decode-0")[0], **changes}]})
    (row,) = kvctl("bootstrap", "-o", "json").data
    assert row["state"] == state
    assert row["unanswered"] == ["prefill-0", "prefill-1"][: row["registered"]]


def test_the_fullest_answer_counts(start: Any, kvctl: Any, canned: Any) -> None:
    empty = {"expected": None, "registered": [], "missing": [], "sizes": None, "text": "no answer"}
    start("decode-0", {"bootstrap": lambda _: [{**canned.bootstrap("decode-0")[0], **empty}]})
    start("decode-1")
    (row,) = kvctl("bootstrap", "-o", "json").data
    assert (row["registered"], row["asked_by"]) == (2, ["decode-0", "decode-1"])


def test_stacks_show_the_thread_that_answers(start: Any, kvctl: Any) -> None:
    start("decode-0")
    rows = kvctl("stacks", "-o", "json").data
    admin = next(row for row in rows if row["name"] == "kvctl-admin-decode-0")
    assert (admin["agent"], admin["daemon"]) == ("decode-0", True)
    assert "stacks" in admin["frames"][-1]
    text = kvctl("stacks", "-o", "table").out
    assert text.count("kvctl-admin-decode-0") == 1
    assert "File" not in text
    assert "extract_stack" in text


@pytest.mark.parametrize("spelled", ["copy_threads", "COPY_THREADS", "KVCTL_COPY_THREADS"])
def test_a_key_is_explained_by_any_of_its_names(spelled: str, fleet: Any, kvctl: Any) -> None:
    rows = kvctl("config", "explain", spelled, "-o", "json").data
    assert {row["value"]: row["agents"] for row in rows} == {1: ["decode-0", "decode-1", "prefill-0"], 4: ["prefill-1"]}
    assert {(row["key"], row["minimum"], row["maximum"], row["environment"]) for row in rows} == {
        ("copy_threads", 0, 64, "KVCTL_COPY_THREADS")
    }


def test_a_key_is_explained_without_agents(kvctl: Any) -> None:
    outcome = kvctl("config", "explain", "lost_s", "-o", "table")
    assert outcome.code == 0
    assert "a number from 0.2 to 3600 s" in outcome.out
    assert "only the declaration: no agent found" in outcome.err


def test_events_of_a_severity_and_worse(fleet: Any, kvctl: Any) -> None:
    assert {row["severity"] for row in kvctl("events", "--severity", "warning", "-o", "json").data} == {"warning"}
    assert kvctl("events", "--severity", "error", "-o", "json").data == []


class Life:
    """A process of an agent with a bounded ring of numbered events, like its flight recorder."""

    def __init__(self, name: str, incarnation: str, capacity: int) -> None:
        self.name, self.incarnation, self.capacity = name, incarnation, capacity
        self.end = 0

    def answer(self, args: dict[str, Any]) -> tuple[AgentAnswer, dict[str, Any]]:
        since, limit = args.get("since"), args["limit"]
        first = max(0, self.end - self.capacity)
        begin = max(first, self.end - limit) if since is None else max(since, first)
        chosen = range(begin, min(self.end, begin + limit))
        follow = chosen[-1] + 1 if chosen else (self.end if since is None or since >= self.end else begin)
        rows = [{"sequence": number, "at_ns": number, "life": self} for number in chosen]
        hello: Any = {"name": self.name, "incarnation": self.incarnation}
        data = {"events": rows, "next": follow, "dropped": 0}
        return AgentAnswer(Endpoint(self.name, None), hello, 0, ClockOffset(0, 0)), data


class Printed:
    """Output that records the events of each process, and the notes."""

    def __init__(self) -> None:
        self.numbers: dict[Life, list[int]] = {}
        self.notes: list[str] = []

    def stream(self, view: Any, rows: Any) -> None:
        for row in rows:
            self.numbers.setdefault(row["life"], []).append(row["sequence"])

    def note(self, text: str) -> None:
        self.notes.append(text)


def read(follower: Follower, printed: Printed, *lives: Life) -> None:
    (call,) = follower.calls()
    answers = [life.answer(dict(call.args)) for life in lives]
    follower(printed, SimpleNamespace(at_ns=10**9, tick_ns=10**9, hosts={}, answers=lambda _: answers))  # type: ignore[arg-type]


STEP = st.tuples(
    st.integers(0, 2), st.sampled_from(["record", "record", "restart", "die", "silent"]), st.integers(1, 40)
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=12), st.integers(5, 30), st.lists(st.integers(5, 200), min_size=3, max_size=3))
def test_each_event_is_printed_once_or_said_to_be_lost(steps: list[Any], limit: int, capacities: list[int]) -> None:
    """However processes are restarted, die beside their successors, or do not answer for a while."""
    follower, printed = Follower(lambda _: True, None, limit), Printed()
    lives = [Life(f"a{number}", "0", capacity) for number, capacity in enumerate(capacities)]
    ended: list[Life] = []
    read(follower, printed, *lives)
    for which, what, count in steps:
        life, silent = lives[which], None
        if what == "silent":
            silent = life
        elif what != "record":
            if what == "die":  # its observer answers for it from now on
                life.name += ".ended-4711"
                ended.append(life)
            lives[which] = Life(f"a{which}", f"{int(life.incarnation) + 1}", life.capacity)
        lives[which].end += count
        read(follower, printed, *(each for each in (*lives, *ended) if each is not silent))
    for _ in range(60):
        read(follower, printed, *lives, *ended)
    missed = 0
    for numbers in printed.numbers.values():
        assert numbers == sorted(set(numbers))
        missed += numbers[-1] - numbers[0] + 1 - len(numbers)
    assert all(printed.numbers.get(life, [-1])[-1] == life.end - 1 for life in (*lives, *ended) if life.end)
    lost = [int(found[1]) for note in printed.notes if (found := re.search(r": (\d+) events were lost", note))]
    assert sum(lost) == missed
    restarts = sum(what in ("restart", "die") for _, what, _ in steps)
    assert sum("restarted" in note for note in printed.notes) == restarts


def test_only_the_first_reading_looks_back_a_while() -> None:
    follower, printed, life = Follower(lambda _: True, 10**9 - 7, 100), Printed(), Life("a", "1", 100)
    life.end = 10
    read(follower, printed, life)
    assert printed.numbers == {life: [7, 8, 9]}
