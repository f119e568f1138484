"""A span per room: both ends in one trace, failures as errors, and a collector that is gone costs nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import ConfigError
from kvctl_agent.observer.fold import Fold
from kvctl_agent.observer.opentelemetry import RoomSpans, phases, trace_ids
from kvctl_agent.observer.room_records import FoldedRoom
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.hub import Telemetry
from tests.support.folded import LIMITS, folded

URL = "http://127.0.0.1:4318/v1/traces"
PATIENCE_S = 60  # for what takes milliseconds on a quiet machine
ROOM, NONCE = (1 << 64) - 1, (1 << 63) + 5


def fold_of(role: Any) -> Fold:
    return Fold(f"{role}-0", role, Clock(), **LIMITS)


def told(
    role: Any, *rooms: tuple[int, int], failure: Any = None, exporter: Any = None, parent: str = ""
) -> list[ReadableSpan]:
    """The spans of rooms that this rank has seen the end of."""
    memory = InMemorySpanExporter()
    telemetry = Telemetry(f"{role}-0", role)
    fold, clock = folded(telemetry), telemetry.clock
    spans = RoomSpans(URL, f"{role}-0", role, fold, exporter or memory)
    spans.start()
    for room, nonce in rooms:
        record = telemetry.open(room, nonce)
        record.expect(["other-0"])
        record.request_id, record.traceparent = "cmpl-1" if parent else "", parent
        record.event("open", clock.now_ns(), writer=1, peer="other-0")
        telemetry.part(record, (0, 0, (0, 4)), None, "staged", 4096, {})
        if failure:
            record.fail(failure, clock.now_ns())
        record.state(RoomState.FAILED if failure else RoomState.SUCCESS, clock.now_ns())
        telemetry.finish(record, clock.now_ns())
    folded(telemetry)
    spans.close()
    assert fold.on_finish is None
    return list(memory.get_finished_spans())


def test_both_ends_of_a_room_are_one_trace() -> None:
    (root,) = told("decode", (ROOM, NONCE))
    (child,) = told("prefill", (ROOM, NONCE))
    assert root.context is not None
    assert child.context is not None
    assert (root.context.trace_id, root.context.span_id) == trace_ids(ROOM, NONCE)
    assert root.parent is None
    assert child.parent is not None
    assert (child.context.trace_id, child.parent.span_id) == trace_ids(ROOM, NONCE)
    assert child.context.span_id != root.context.span_id


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_room_with_a_traceparent_is_a_child_of_it(role: str) -> None:
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    (span,) = told(role, (ROOM, NONCE), parent=f"00-{trace_id}-{span_id}-01")
    assert span.context is not None
    assert span.parent is not None
    assert span.context.trace_id == span.parent.trace_id == int(trace_id, 16)
    assert span.parent.span_id == int(span_id, 16)
    assert span.context.span_id != span.parent.span_id
    assert (span.attributes or {})["kvctl.request_id"] == "cmpl-1"
    assert told(role, (ROOM, NONCE), parent=f"00-{trace_id}-{span_id}-00") == []  # the client did not sample it


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_span_of_the_clients_trace_has_a_link_to_that_of_an_end_without_a_traceparent(role: str) -> None:
    (span,) = told(role, (ROOM, NONCE), parent=f"00-{1:032x}-{1:016x}-01")
    (other,) = told({"prefill": "decode", "decode": "prefill"}[role], (ROOM, NONCE))
    (link,) = span.links
    assert other.context is not None
    assert link.context.trace_id == other.context.trace_id
    assert link.context.span_id == (other.parent or other.context).span_id
    assert other.links == ()


def test_a_number_used_again_is_another_root_of_its_trace() -> None:
    one, two = told("decode", (7, 1), (7, 3))
    assert one.context is not None
    assert two.context is not None
    assert one.context.trace_id == two.context.trace_id
    assert one.context.span_id != two.context.span_id
    assert one.parent is two.parent is None


def room_of(role: Any, *events: tuple[str, int], limit: int = 64, **values: Any) -> FoldedRoom:
    record = FoldedRoom(1, 7, 1, role, 100, limit)
    for stage, at in events:
        record.event(stage, at)
    record.__dict__.update(values)
    return record


def test_phases_of_a_prefill_rank() -> None:
    events = [("ready", 250), ("gate", 260), ("wire", 300), ("ready", 310), ("gate", 320), ("wire", 400)]
    forward = {"forward_begun_at": 200, "forward_done_at": 310}
    queue, gate, wire = ("kv queue", 100, 200), ("kv gate", 250, 320), ("kv wire", 260, 400)
    assert phases(room_of("prefill", *events, **forward), "prefill") == [queue, ("kv forward", 200, 310), gate, wire]
    # The engine has not said when the forward begins: the room waits for its first part.
    assert phases(room_of("prefill", *events, forward_done_at=310), "prefill") == [("kv queue", 100, 250), gate, wire]
    # Where the latest events are missing nothing says when a stage ended.
    known = [queue, ("kv forward", 200, 310)]
    assert phases(room_of("prefill", *events, limit=5, **forward), "prefill") == known
    assert phases(room_of("prefill"), "prefill") == []


def test_phases_of_a_decode_rank() -> None:
    parts = [("arrive", 250), ("arrive", 300), ("scatter", 280), ("scatter", 330)]
    wait, arrive = ("kv wait", 100, 250), ("kv arrive", 250, 300)
    assert phases(room_of("decode", *parts), "decode") == [wait, arrive, ("kv scatter", 250, 330)]
    assert phases(room_of("decode", *parts[:2]), "decode") == [wait, arrive]
    assert phases(room_of("decode"), "decode") == []


def test_what_a_span_says() -> None:
    (span,) = told("decode", (ROOM, NONCE))
    assert span.attributes is not None
    assert dict(span.attributes) == {
        "kvctl.room": str(ROOM),
        "kvctl.state": "Success",
        "kvctl.bytes": 4096,
        "kvctl.parts": 1,
        "kvctl.peers": ("other-0",),
        "kvctl.parts.staged": 1,
    }
    assert span.status.status_code is StatusCode.OK
    assert [event.name for event in span.events] == ["open"]
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= span.events[0].timestamp <= span.end_time
    assert span.resource.attributes["service.instance.id"] == "decode-0"


def test_a_failed_room_is_an_error_with_its_first_cause() -> None:
    failure = {"rank": "prefill-1", "code": "KV_PEER_LOST", "at_ns": 5, "text": "peer decode-0 lost"}
    (span,) = told("prefill", (7, 1), failure=failure)
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "KV_PEER_LOST on prefill-1: peer decode-0 lost"


class _Gone(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.FAILURE


def test_a_collector_that_is_gone_costs_nothing() -> None:
    assert told("decode", (7, 1), exporter=_Gone()) == []


class _Silent(SpanExporter):
    """A collector that takes a batch and does not answer before it is given up."""

    def __init__(self) -> None:
        self.asked = 0
        self.given_up = threading.Event()
        self.answer = threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        if not self.given_up.is_set():
            self.asked += 1
            assert self.answer.wait(PATIENCE_S)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.given_up.set()


def test_closing_does_not_wait_for_a_collector_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl_agent.observer.opentelemetry._CLOSE_S", 0.1)
    silent = _Silent()
    closing = threading.Thread(
        target=told, args=("decode", *((room, 1) for room in range(1, 601))), kwargs={"exporter": silent}
    )
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert silent.given_up.is_set()
    assert silent.asked <= 1  # and not once for each batch
    silent.answer.set()


def test_what_does_not_fit_the_queue_is_counted() -> None:
    fold = fold_of("decode")
    spans = RoomSpans(URL, "decode-0", "decode", fold, InMemorySpanExporter())
    record = fold.rooms.open(1, 1)
    for _ in range(1025):  # nobody takes them out: it was never started
        spans.take(record)
    assert fold.metrics.total("kvctl_spans_dropped_total") == 1
    spans.close()


def ended(fold: Fold) -> FoldedRoom:
    record = fold.rooms.open(1, 1)
    for stage, at_ns in (("arrive", 250), ("arrive", 300), ("scatter", 330)):
        record.event(stage, record.opened_at + at_ns)
    return record


def test_spans_that_the_collector_does_not_take_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl_agent.observer.opentelemetry._CLOSE_S", PATIENCE_S)
    fold = fold_of("decode")
    spans = RoomSpans(URL, "decode-0", "decode", fold, _Gone())
    spans.start()
    for _ in range(700):
        spans.take(ended(fold))
    spans.close()
    assert fold.metrics.total("kvctl_spans_dropped_total") == 700 * 4


def test_spans_for_which_a_slow_collector_leaves_no_space_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl_agent.observer.opentelemetry._CLOSE_S", PATIENCE_S)
    fold, silent = fold_of("decode"), _Silent()
    spans = RoomSpans(URL, "decode-0", "decode", fold, silent)
    for _ in range(10240 // 4):
        spans._export(ended(fold))
    assert fold.metrics.total("kvctl_spans_dropped_total") == 0
    spans._export(ended(fold))
    assert fold.metrics.total("kvctl_spans_dropped_total") == 4
    silent.answer.set()
    spans.close()


def test_what_is_no_url_is_refused() -> None:
    fold = fold_of("decode")
    with pytest.raises(ConfigError, match="otel_endpoint"):
        RoomSpans("collector:4318", "decode-0", "decode", fold)
