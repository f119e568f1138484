"""The spans of a room at an OTLP receiver: one trace for a request, on both ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.observer.opentelemetry import trace_ids
from tests.support.trace_receiver import Receiver, receiving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def receiver(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms between exports, by default 5 s
    with receiving() as receiver:
        yield receiver


def transfer(fleet: Any, number: int, traceparent: str = "") -> None:
    """Transfers a room of three pages from all prefill to all decode ranks."""
    sends = [agent.send(number, traceparent=traceparent) for agent in fleet.prefill]
    receives = [agent.receive(number, [0, 1, 2], traceparent=traceparent) for agent in fleet.decode]
    for send in sends:
        send.pages([0, 1, 2], last=True)
        send.finish()
    assert {handle.wait(60) for handle in (*sends, *receives)} == {RoomState.SUCCESS}


def test_a_request_with_a_trace_context_is_one_trace_below_it(make_fleet: Any, receiver: Receiver) -> None:
    fleet = make_fleet("loopback", prefill=(1, 1), decode=(1, 1), otel_endpoint=receiver.url).start()
    transfer(fleet, 7, f"00-{TRACE}-{PARENT}-01")
    spans = receiver.wait("kv prefill", "kv decode", "kv queue", "kv gate", "kv wire", "kv wait", "kv scatter")
    assert {span.trace for span in spans} == {TRACE}
    ends = {span.service: span for span in spans if span.parent == PARENT}
    assert {service: span.name for service, span in ends.items()} == {
        "kvctl-prefill": "kv prefill",
        "kvctl-decode": "kv decode",
    }
    phases = [span for span in spans if span.parent != PARENT]
    assert {(span.service, span.parent) for span in phases} == {(name, span.span) for name, span in ends.items()}
    assert all(ends[span.service].begin_ns <= span.begin_ns <= span.end_ns for span in phases)
    assert all(span.end_ns <= ends[span.service].end_ns for span in phases)
    fleet.settle()


def test_all_ranks_of_a_request_without_one_share_the_trace_of_its_room(make_fleet: Any, receiver: Receiver) -> None:
    fleet = make_fleet("loopback", prefill=(1, 2), decode=(1, 2), otel_endpoint=receiver.url).start()
    transfer(fleet, 9)
    spans = receiver.wait(*["kv prefill", "kv decode"] * 2)
    assert {span.trace for span in spans} == {f"{trace_ids(9, 0)[0]:032x}"}
    roots = {span.span for span in spans if span.name == "kv decode"}
    assert len(roots) == 2
    assert {span.parent for span in spans if span.name == "kv decode"} == {""}
    assert {span.parent for span in spans if span.name == "kv prefill"} <= roots
    fleet.settle()
