"""Output of peers diff, bootstrap, stacks, config explain and events from the agents' answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvctl.client.clock import ClockOffset
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


def test_diff_with_nobody(fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("peers", "diff", "prefill-0", "decode-7")
    assert (outcome.code, outcome.out) == (1, "")
    assert "no agent named decode-7 answers; there are: decode-0, decode-1, prefill-0, prefill-1" in outcome.err


def test_bootstrap_names_who_is_missing(fleet: Any, kvctl: Any) -> None:
    (row,) = kvctl("bootstrap", "-o", "json").data
    assert (row["state"], row["expected"], row["registered"], row["missing"]) == ("waiting", 3, 2, ["tp=2"])
    assert (row["decode_ranks"], row["decode_connected"], row["unanswered"]) == (2, 2, [])
    assert [rank["state"] for rank in row["ranks"]] == ["registered", "registered", "missing"]


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


def test_a_key_that_is_not_there_is_nearly_another(kvctl: Any) -> None:
    outcome = kvctl("config", "explain", "copy_thread")
    assert (outcome.code, "did you mean copy_threads" in outcome.err) == (2, True)


def test_events_of_a_severity_and_worse(fleet: Any, kvctl: Any) -> None:
    assert {row["severity"] for row in kvctl("events", "--severity", "warning", "-o", "json").data} == {"warning"}
    assert kvctl("events", "--severity", "error", "-o", "json").data == []


class Recorder:
    """A bounded ring of numbered events, like an agent's flight recorder."""

    def __init__(self, capacity: int = 1000) -> None:
        self.first = self.end = 0
        self.capacity = capacity

    def record(self, count: int) -> None:
        self.end += count
        self.first = max(self.first, self.end - self.capacity)

    def answer(self, args: dict[str, Any]) -> dict[str, Any]:
        since, limit = args.get("since"), args["limit"]
        begin = max(self.first, self.end - limit) if since is None else max(since, self.first)
        chosen = range(begin, min(self.end, begin + limit))
        follow = chosen[-1] + 1 if chosen else (self.end if since is None or since >= self.end else begin)
        dropped = 0 if since is None else max(0, self.first - since)
        return {"events": [_event(number) for number in chosen], "next": follow, "dropped": dropped}


def _event(number: int) -> dict[str, Any]:
    return {"sequence": number, "at_ns": number, "severity": "info"}


class Printed:
    """Output that records the numbers of events and the notes."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.notes: list[str] = []

    def stream(self, view: Any, rows: Any) -> None:
        self.numbers += [row["sequence"] for row in rows]

    def note(self, text: str) -> None:
        self.notes.append(text)


def reading(follower: Follower, printed: Printed, /, **recorders: tuple[str, Recorder]) -> None:
    (call,) = follower.calls()
    answers = [
        (
            SimpleNamespace(name=name, hello={"incarnation": life}, clock=ClockOffset(0, 0)),
            recorder.answer(dict(call.args)),
        )
        for name, (life, recorder) in recorders.items()
    ]
    follower(printed, SimpleNamespace(at_ns=10**9, tick_ns=10**9, hosts={}, answers=lambda _: answers))  # type: ignore[arg-type]


def everything(_: Any) -> bool:
    return True


def test_each_event_is_printed_once() -> None:
    follower, printed, recorder = Follower(everything, None, 100), Printed(), Recorder()
    for count in (3, 0, 2, 0, 250, 0, 0, 0):
        recorder.record(count)
        reading(follower, printed, a=("1", recorder))
    assert printed.numbers == list(range(255))
    assert printed.notes == []


def test_a_new_life_is_followed_from_its_beginning() -> None:
    follower, printed, recorder = Follower(everything, None, 100), Printed(), Recorder()
    recorder.record(50)
    reading(follower, printed, a=("1", recorder))
    printed.numbers.clear()
    anew = Recorder()
    anew.record(4)
    reading(follower, printed, a=("2", anew))
    reading(follower, printed, a=("2", anew))
    anew.record(1)
    reading(follower, printed, a=("2", anew))
    assert printed.numbers == [0, 1, 2, 3, 4]
    assert printed.notes == ["a: restarted"]


def test_one_that_has_ended_and_one_with_its_name_are_two() -> None:
    follower, printed, before, anew = Follower(everything, None, 10), Printed(), Recorder(), Recorder()
    before.record(50)
    reading(follower, printed, a=("1", before))
    before.record(2)
    anew.record(3)
    printed.numbers.clear()
    for _ in range(3):
        reading(follower, printed, **{"a": ("2", anew), "a.ended-4711": ("1", before)})
    assert sorted(printed.numbers) == [0, 1, 2, 50, 51]
    assert printed.notes == ["a: restarted"]


def test_a_restart_beside_one_that_runs_for_long_repeats_and_loses_nothing() -> None:
    follower, printed, long, short = Follower(everything, None, 10), Printed(), Recorder(), Recorder()
    long.record(5000)
    reading(follower, printed, a=("1", long), b=("1", short))
    reading(follower, printed, a=("1", long), b=("2", short))
    printed.numbers.clear()
    for _ in range(4):
        long.record(3)
        short.record(1)
        reading(follower, printed, a=("1", long), b=("2", short))
    assert sorted(printed.numbers) == [0, 1, 2, 3, *range(5000, 5012)]
    long.record(14)
    reading(follower, printed, a=("1", long), b=("2", short))
    assert printed.notes == ["b: restarted", "a: 4 events were lost between two readings: read more often, -w 0.5"]


def test_one_that_was_silent_is_caught_up_with() -> None:
    follower, printed = Follower(everything, None, 100), Printed()
    quiet, busy = Recorder(), Recorder()
    quiet.record(2)
    reading(follower, printed, quiet=("1", quiet), busy=("1", busy))
    for _ in range(3):
        quiet.record(1)
        busy.record(20)
        reading(follower, printed, busy=("1", busy))
    printed.numbers.clear()
    for _ in range(2):
        reading(follower, printed, quiet=("1", quiet), busy=("1", busy))
    assert printed.numbers == [2, 3, 4]
    assert printed.notes == []


def test_what_was_lost_is_said_for_the_one_that_lost_it() -> None:
    follower, printed = Follower(everything, None, 100), Printed()
    small, large = Recorder(capacity=5), Recorder()
    for _ in range(2):
        small.record(3)
        large.record(3)
        reading(follower, printed, small=("1", small), large=("1", large))
    assert printed.notes == []
    small.record(12)
    large.record(12)
    reading(follower, printed, small=("1", small), large=("1", large))
    assert printed.notes == ["small: 7 events were lost between two readings: read more often, -w 0.5"]


def test_only_the_first_reading_looks_back_a_while() -> None:
    follower, printed, recorder = Follower(everything, 10**9 - 7, 100), Printed(), Recorder()
    recorder.record(10)
    reading(follower, printed, a=("1", recorder))
    assert printed.numbers == [7, 8, 9]
