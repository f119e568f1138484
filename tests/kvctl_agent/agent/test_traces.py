"""The spans of a room at an OTLP receiver: one trace for a request, on both ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.observer.opentelemetry import trace_ids

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Span(NamedTuple):
    """A span as the receiver got it; ids are hexadecimal, `parent` is "" at a root."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    begin_ns: int
    end_ns: int


class Receiver:
    """An OTLP receiver over HTTP."""

    def __init__(self, server: HTTPServer, spans: list[Span]) -> None:
        self.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        self._spans = spans

    def wait(self, *names: str) -> list[Span]:
        """Returns the spans once there is one of each of these names; a name may be given several times."""
        deadline = time.monotonic() + 60
        while missing := [name for name in set(names) if self._count(name) < names.count(name)]:
            assert time.monotonic() < deadline, f"no span {missing} within 60 s; there are {self._spans}"
            time.sleep(0.01)
        return list(self._spans)

    def _count(self, name: str) -> int:
        return sum(span.name == name for span in list(self._spans))


@pytest.fixture
def receiver(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms between exports, by default 5 s
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in sent.resource_spans:
                attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
                for each in (span for scope in resource.scope_spans for span in scope.spans):
                    ids = each.trace_id.hex(), each.span_id.hex(), each.parent_span_id.hex()
                    times = each.start_time_unix_nano, each.end_time_unix_nano
                    spans.append(Span(attributes["service.name"], each.name, *ids, *times))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Receiver(server, spans)
        server.shutdown()
        thread.join()


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
