"""The store: agents that answer, hang, die or restart, and recordings that are moved back."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset
from kvctl.client.fleet import Survey
from kvctl.tui.feed import Question, Reading
from kvctl.tui.frame import Mode, top
from kvctl.tui.store import Store

S = 1_000_000_000
STATUS = Question("overview", (Call("status"),))
EVENTS = Question("events", (Call("events", {"limit": 4}),))


def take(store: Store, specimen: Any, beat: int, question: Question = STATUS, **more: Any) -> None:
    survey: Survey = specimen.survey(question.calls, beat)
    store.take(Reading(question, survey.at_ns, survey, **more))


def test_an_agent_that_hangs_keeps_its_last_answers_and_their_age(specimen: Any) -> None:
    store = Store()
    take(store, specimen, 0)
    before = store.agents["decode-1"].answers["status"]
    specimen.silent = {"decode-1"}
    take(store, specimen, 1)
    take(store, specimen, 4)
    assert store.agents["decode-1"].answers["status"] == before
    assert store.stale_ns("decode-1") == 4 * S
    assert store.stale_ns("decode-0") is None
    assert (store.answering, [agent.name for agent in store.silent]) == (7, ["decode-1"])
    specimen.silent = set()
    take(store, specimen, 5)
    assert store.stale_ns("decode-1") is None


def test_an_agent_that_has_ended_is_shown_with_the_time_since_and_is_no_part_of_the_fleet(specimen: Any) -> None:
    store = Store()
    take(store, specimen, 0, findings=[])
    rooms = sum(store.summary.active.values())
    survey: Survey = specimen.survey(STATUS.calls, 1)
    (ended,) = [agent for agent in survey.agents if agent.name == "decode-1"]
    ended.hello = {**ended.hello, "ended_age_ns": 90 * S}
    ended.data["status"] = {**ended.data["status"], "ended_age_ns": 90 * S}
    store.take(Reading(STATUS, survey.at_ns, survey))
    assert store.stale_ns("decode-1") == 90 * S
    assert "decode-1" in [row["name"] for row in store.statuses()]
    assert store.summary.agents == 7
    assert sum(store.summary.active.values()) < rooms
    assert (store.answering, store.silent, store.complete) == (8, [], True)
    assert "".join(text for text, _ in top(store, Mode())[0]).endswith("3 decode  1 ended  ✓ healthy")


def test_without_a_finding_the_title_calls_only_a_fleet_that_answers_healthy(specimen: Any) -> None:
    def title() -> str:
        return "".join(text for text, _ in top(store, Mode())[0])

    store = Store()
    take(store, specimen, 0, findings=[])
    assert title().endswith("✓ healthy")
    specimen.silent = {"decode-1"}
    take(store, specimen, 1, findings=[])
    assert title().endswith("1 silent  ? incomplete")


def test_a_clock_that_was_measured_through_a_pause_does_not_replace_a_better_one(specimen: Any) -> None:
    store = Store()
    take(store, specimen, 0)
    good = store.agents["decode-0"].clock
    survey: Survey = specimen.survey(STATUS.calls, 1)
    for agent in survey.agents:
        agent.clock = ClockOffset(900_000_000, 1_000_000_000)
    store.take(Reading(STATUS, survey.at_ns, survey))
    assert store.agents["decode-0"].clock.offset_ns == good.offset_ns
    assert store.agents["decode-0"].clock.error_ns < 1_000_000


def test_an_agent_that_is_gone_is_forgotten_after_ten_minutes(specimen: Any) -> None:
    store = Store()
    take(store, specimen, 0)
    specimen.gone = {"prefill-0"}
    take(store, specimen, 600)
    assert store.agents["prefill-0"].trouble == "it is gone"
    take(store, specimen, 601)
    assert "prefill-0" not in store.agents


def test_who_has_never_answered_is_named(specimen: Any) -> None:
    store = Store()
    specimen.silent = {"decode-2"}
    take(store, specimen, 0)
    assert [fault.agent for fault in store.never_heard] == ["decode-2"]
    specimen.silent = set()
    take(store, specimen, 1)
    assert not store.never_heard


def test_a_restarted_agent_has_none_of_its_old_answers(specimen: Any, canned: Any, monkeypatch: Any) -> None:
    store = Store()
    take(store, specimen, 0)
    take(store, specimen, 1, EVENTS)
    hello = canned.hello
    monkeypatch.setattr(canned, "hello", lambda name: {**hello(name), "incarnation": "another"})
    take(store, specimen, 2, EVENTS)
    assert "status" not in store.agents["decode-0"].answers


def test_when_nobody_can_be_asked_everybody_is_stale(specimen: Any) -> None:
    store = Store()
    take(store, specimen, 0)
    store.take(Reading(STATUS, specimen.survey((), 2).at_ns, None, "the directory belongs to another user"))
    assert store.answering == 0
    assert store.problem == "the directory belongs to another user"
    assert store.stale_ns("decode-0") == 2 * S


def test_events_come_once_and_what_came_too_fast_is_counted(specimen: Any) -> None:
    store = Store()
    take(store, specimen, 0, EVENTS)
    first = len(store.events)
    take(store, specimen, 1, EVENTS)
    assert len(store.events) == first + 2 * len(specimen.names)
    assert len({(row["agent"], row["sequence"]) for row in store.events}) == len(store.events)
    assert store.events_missed == 0
    take(store, specimen, 4, EVENTS)  # six more each, four of which are told
    assert store.events_missed == 2 * len(specimen.names)


def test_rates_are_differences_between_readings(specimen: Any) -> None:
    store = Store()
    take(store, specimen, 0)
    assert not store.trends.throughput
    take(store, specimen, 1)
    moved = sum(
        specimen._status(name, 1)["bytes_total"] - specimen._status(name, 0)["bytes_total"] for name in specimen.decode
    )
    assert store.trends.throughput[-1] == pytest.approx(moved / 1e9)
    specimen.silent = {"decode-0"}
    take(store, specimen, 2)
    assert store.trends.throughput[-1] is None


def test_two_readings_at_once_are_no_rate(specimen: Any) -> None:
    store = Store()
    take(store, specimen, 0)
    survey: Survey = specimen.survey(STATUS.calls, 1)
    survey.tick_ns = S // 10
    store.take(Reading(STATUS, survey.at_ns, survey))
    assert not store.trends.throughput
    take(store, specimen, 2)
    assert len(store.trends.throughput) == len(store.trends.finished) == 1


def test_a_recording_that_is_turned_back_starts_its_curves_anew(specimen: Any) -> None:
    store = Store()
    for beat in range(5):
        take(store, specimen, beat)
    take(store, specimen, 5, EVENTS)
    take(store, specimen, 2)
    assert len(store.trends.p50) == 1
    assert not store.events
    assert store.answering == 8


def test_findings_mark_the_agents_that_they_name(specimen: Any, ill: Any) -> None:
    store = Store()
    take(store, specimen, 0)
    assert {tuple(row["health"]) for row in store.statuses()} == {()}
    store.findings = ill
    codes = {row["name"]: row["health"] for row in store.statuses()}
    assert codes["decode-1"] == ["KV_RING_PINNED"]
    assert codes["decode-0"] == []


def test_findings_are_kept_with_their_moment(specimen: Any, ill: Any) -> None:
    store = Store()
    take(store, specimen, 0, findings=ill)
    take(store, specimen, 3)
    assert store.findings is ill
    assert store.now_ns - store.examined_at_ns == 3 * S


def test_the_health_codes_read_fewer_rows_than_a_panel_which_keeps_its_own(specimen: Any) -> None:
    store = Store()
    take(store, specimen, 0, Question("history", (Call("status"), Call("history", {"limit": 90}))))
    rows = store.finished_rooms()
    assert {row["ago_ns"] for row in rows[:2]} == {20_000_000, 1_720_000_000}
    for_health = Question("health", (Call("status"), Call("history", {"limit": 2}), Call("peers")))
    take(store, specimen, 3, for_health, findings=())
    assert [row["room"] for row in store.finished_rooms()] == [row["room"] for row in rows]
    assert store.rows("peers")  # which no panel has read yet
    assert store.finished_rooms()[0]["ago_ns"] == 3_020_000_000
