"""Properties of all health codes: complete texts, no finding for a healthy fleet, no exception for any answer."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.client.clock import ClockOffset
from kvctl.client.faults import Fault
from kvctl.health.codes import CODES, CODES_BY_NAME
from kvctl.health.engine import examine
from kvctl.health.snapshot import Snapshot
from kvctl_agent.contract.metrics import METRICS_BY_NAME
from tests.kvctl.health.fleets import COMMANDS, MIB, MS, Fleet, S, parse

_SOURCES = Path(__file__).parents[3] / "kvctl_agent"


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_every_code_has_a_page(code):
    for text in (code.sees, code.means, code.remedy):
        assert text
        assert text == text.strip()
    assert code.means.endswith(".")
    assert re.fullmatch(r"KV_[A-Z_]+", code.name)


def test_names_are_unique():
    assert len(CODES_BY_NAME) == len(CODES)


@pytest.mark.parametrize("code", [code for code in CODES if code.alert], ids=lambda code: code.name)
def test_alerts_speak_of_metrics_that_agents_have(code):
    for name in re.findall(r"kvctl_\w+", code.alert):
        assert re.sub(r"_(sum|count|bucket)$", "", name) in METRICS_BY_NAME or name in METRICS_BY_NAME
    assert "room=" not in code.alert


def test_every_code_that_rooms_fail_with_can_be_explained():
    told = {
        code for path in _SOURCES.rglob("*.py") for code in re.findall(r'failure\(\s*"(KV_[A-Z_]+)"', path.read_text())
    }
    assert told
    # A room that is over where it is asked about: nothing is wrong with the fleet.
    assert told - {"KV_ROOM_UNKNOWN"} <= CODES_BY_NAME.keys()


def test_a_busy_fleet_that_is_well_raises_nothing():
    now, before = Fleet(), Fleet()
    assert now.examine() == []
    assert now.examine(before) == []


def test_an_empty_fleet_raises_nothing():
    assert Fleet(0, 0).examine() == []


@st.composite
def busy_fleets(draw: st.DrawFn) -> tuple[Fleet, Fleet]:
    """Two moments of an overloaded but healthy fleet: everything is slow, nothing is wrong."""
    before = Fleet(draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    prefill = [name for name in before.names if name.startswith("prefill")]
    decode = [name for name in before.names if name.startswith("decode")]
    for name in before.names:
        before.clocks[name] = ClockOffset(draw(st.integers(-5_000_000, 5_000_000)), draw(st.integers(5_000_000, 10**9)))
        for row in before.answers[name]["peers"]:
            heard = draw(st.integers(0, 2900 * MS))
            row.update(last_heard_ns=heard, control_queue=draw(st.integers(0, 90)))
            if heard > 2000 * MS:
                row["state"] = "suspect"
        for row in before.answers[name]["rooms"]:
            row["parked"] = draw(st.integers(0, 4))
            if row["state"] == "WaitingForInput":
                row["state_age_ns"] = row["age_ns"] = draw(st.integers(0, 140 * S))
    for name in prefill:
        for _ in range(draw(st.integers(0, 6))):
            reader, asked = draw(st.sampled_from(decode)), draw(st.integers(0, 9 * S))
            waits = draw(st.sampled_from(["grant", "watermark round 3 tail 8388608", "a sign of life"]))
            before.gated(
                name, reader, "1001", waiting_for=waits, asked_age_ns=asked, age_ns=draw(st.integers(0, 9 * S))
            )
    for name in decode:
        for serial in (31, 32, 33):
            before.allocation(name, serial, age_ns=draw(st.integers(0, 9 * S)), posted=draw(st.booleans()))
    now = before.copy()
    for name in now.names:
        slow = draw(st.floats(1, 4))  # beside its fellows
        for stage in ("gate", "queue", "gather", "post", "wire"):
            parts = 100
            mean = draw(st.floats(0.0001, 0.9)) if stage in ("gate", "queue") else 0.03 * slow
            now.spend(name, stage, mean * parts, parts)
        sent = before.answers[name]["metrics"]
        total = next(family for family in sent if family["name"] == "kvctl_part_bytes_total")["samples"][0]["value"]
        now.metric(name, "kvctl_part_bytes_total", total + 100 * 2 * MIB, path="staged")
        now.metric(name, "kvctl_rooms_finished_total", 1300, result="Success")
    return before, now


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(busy_fleets())
def test_an_overloaded_fleet_raises_nothing(moments):
    before, now = moments
    assert now.examine() == []
    assert now.examine(before) == []


# ---- whatever agents say ---------------------------------------------------------------------------------------

_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.lists(st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), max_size=2),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the path of every value in an answer, the answer itself included."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _places(inner, (*path, key))
    return found


def _harmed() -> Fleet:
    """A fleet with many problems, so that every code reads as much data as possible."""
    fleet = Fleet()
    fleet.peer(
        "decode-0", "prefill-1", state="lost", last_error="peer prefill-1 (incarnation 0f) lost: silent for 15 s"
    )
    fleet.peer("decode-1", "prefill-1", state="suspect", last_heard_ns=9 * S)
    fleet.peer("decode-1", "prefill-0", state="refused", differences=["page_size 64 ≠ 32"])
    fleet.peer("prefill-0", "decode-0", lane_gb_per_s=0.1, incarnation="0e", control_queue=500)
    fleet.oldest("decode-0", 7, age_ns=60 * S, writer="prefill-0", offset=0, end=2 * MIB)
    fleet.allocation("decode-0", 40, state="quarantined", age_ns=60 * S)
    fleet.oldest("decode-1", 8, age_ns=60 * S, writer="prefill-1", room="1003")
    fleet.gated("prefill-0", "decode-0", "1002", age_ns=60 * S)
    fleet.gated("prefill-0", "decode-0", "1002", waiting_for="grant", requests=40, asked_age_ns=60 * S)
    fleet.room("decode-0", "77", state_age_ns=200 * S)
    fleet.room("prefill-0", "77", forward_done_at_ns=0)
    fleet.room("decode-0", "78", state="Bootstrapping", state_age_ns=200 * S, missing=["prefill-0"])
    fleet.room("decode-0", "79", state="WaitingForInput", state_age_ns=200 * S)
    fleet.status("decode-1", waiting_for="no hello from prefill-7", process={"fds": 1000, "fds_limit": 1024})
    for code in CODES:
        fleet.failed(["decode-0", "prefill-0"], "99", code.name, "prefill-0", "peer prefill-0 (incarnation 0e) lost")
        fleet.metric("decode-0", "kvctl_room_failures_total", 1, code=code.name)
    fleet.answers["decode-0"]["staging"]["ring"].update(refused_total=4, refused_largest_bytes=128 * MIB)
    fleet.metric("decode-0", "kvctl_quarantined_bytes", MIB)
    fleet.metric("decode-0", "kvctl_internal_errors_total", 2)
    return fleet


_HARMED = _harmed()
_PLACES = {name: _places(answers) for name, answers in _HARMED.answers.items()}


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_commands_on_pages_are_there(code):
    for command in COMMANDS.findall(code.remedy + code.means):
        parse(command)


def test_the_order_does_not_hang_on_the_order_of_answers():
    """A list on screen must not depend on the order of answers or of their rows."""

    def order(seed: int) -> list[tuple[str, str, str]]:
        fleet, before = _HARMED.copy(), _HARMED.copy()
        random = Random(seed)
        survey = fleet.survey()
        random.shuffle(survey.agents)
        for name in fleet.answers:
            random.shuffle(fleet.answers[name]["peers"])
            random.shuffle(fleet.answers[name]["staging"]["gated"])
        snapshot = Snapshot(survey, 1005 * S, before.snapshot())
        return [(one.code, one.subject, one.cause) for one in examine(snapshot, CODES)]

    assert len(order(0)) > 15
    assert all(order(seed) == order(0) for seed in range(1, 12))


def test_the_harmed_fleet_is_harmed():
    """Otherwise the tests that damage its answers would prove little."""
    assert len({finding.code for finding in _HARMED.examine(_HARMED)}) > 15


@pytest.mark.parametrize(("engine", "mode"), [("sglang", "observe"), ("sglang", "backend"), ("vllm", "connector")])
def test_findings_about_the_ranks_of_each_engine_are_complete(engine: str, mode: str):
    """Advice for an engine reads the evidence of every finding of its codes; `examine` checks the texts."""
    fleet = _HARMED.copy()
    for name in fleet.answers:
        fleet.status(name, integration={"engine": engine, "engine_version": "1", "mode": mode})
    assert len({finding.code for finding in fleet.examine(fleet)}) > 14


def test_only_counters_are_called_totals():
    """Current counts may decrease; a decreasing total counts as a fault of the agent."""
    counters = {"internal_errors_total", "transport_errors_total", "refused_total", "done_rooms_total"}
    names = {name for finding in _HARMED.examine(_HARMED) for name in finding.evidence if name.endswith("_total")}
    assert names <= counters


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_answer_breaks_a_code(data):
    now, before = _HARMED.copy(), _HARMED.copy()
    for fleet in (now, before):
        for _ in range(data.draw(st.integers(1, 8))):
            name = data.draw(st.sampled_from(sorted(fleet.answers)))
            _break(fleet.answers[name], data.draw(st.sampled_from(_PLACES[name])), data)
    examine(now.snapshot(before), CODES)


def _break(answers: Any, path: tuple[Any, ...], data: st.DataObject) -> None:
    """Removes or replaces the value at a path."""
    *way, last = path or (data.draw(st.sampled_from(sorted(answers))),) if answers else (None,)
    at = answers
    for key in way:
        try:
            at = at[key]
        except (KeyError, IndexError, TypeError):
            return  # it was broken before
    if (isinstance(at, dict) and last in at) or (isinstance(at, list) and isinstance(last, int) and last < len(at)):
        if data.draw(st.booleans()):
            at[last] = data.draw(_JUNK)
        else:
            del at[last]


def test_agents_that_answer_little_break_nothing():
    fleet = _HARMED.copy()
    for name in fleet.answers:
        fleet.answers[name] = {"status": {}}
    fleet.faults.append(Fault("prefill-1", "timeout", "no answer"))
    examine(fleet.snapshot(_HARMED), CODES)
