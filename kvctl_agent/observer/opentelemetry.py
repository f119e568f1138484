"""Exports one OpenTelemetry span per room and rank over OTLP, with a child for each phase; a room's form one trace.

The trace id is derived from the room's number, so that no ids need to be exchanged. The spans of decode ranks, whose
ids are derived from number and nonce, are roots; those of prefill ranks are children of the first one. If the engine
passed a W3C traceparent, the rank's span is a child of that one instead, with a link to the decode rank's derived one,
because the other end may know no traceparent; it is not exported if the traceparent is not sampled. The fold only
appends finished rooms to a bounded queue; a separate thread creates the spans, and OpenTelemetry sends them in batches.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvctl_agent.contract.extras import install
from kvctl_agent.contract.snapshots import Role
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import ConfigError
from kvctl_agent.observer.fold import Fold
from kvctl_agent.observer.room_records import FoldedRoom

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_QUEUE = 1024
_MOST_SPANS = 10240  # that wait for the collector: those of 2048 rooms or more, with up to four phases each
_EVENTS = 64
_CLOSE_S = 2.0


class RoomSpans:
    """Exports each finished room of an agent as an OpenTelemetry span.

    Args:
        endpoint: URL such as `http://collector:4318/v1/traces`.
        name: agent name.
        role: role of the agent.
        fold: source of the finished rooms.
        exporter: replaces the OTLP exporter, for tests.

    Raises:
        ConfigError: the endpoint is not a URL, or OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, name: str, role: Role, fold: Fold, exporter: SpanExporter | None = None) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otel_endpoint = {endpoint!r}: write http://collector:4318/v1/traces")
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint, timeout=5)
        except ImportError:
            raise ConfigError(f"otel_endpoint needs OpenTelemetry: {install('otel')}") from None
        resource = Resource.create({"service.name": f"kvctl-{role}", "service.instance.id": name})
        self._exporter = exporter
        self._ended = self._exported = 0  # spans, each counted by one thread
        self._ids = _ids()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        counting: Any = _Counting(exporter, self._count)
        self._provider.add_span_processor(BatchSpanProcessor(counting, max_queue_size=_MOST_SPANS))
        self._tracer = self._provider.get_tracer("kvctl")
        self._role = role
        self._fold = fold
        self._rooms: queue.Queue[FoldedRoom | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._run, name=f"kvctl-spans-{name}", daemon=True)

    def start(self) -> None:
        """Starts the export of rooms that finish from now on."""
        self._fold.on_finish = self.take
        self._thread.start()

    def close(self) -> None:
        """Sends the spans of queued rooms for at most two seconds, then stops; drops the rest."""
        self._fold.on_finish = None
        # On a separate thread: OpenTelemetry waits for a collector that does not answer, for each batch again.
        ending = threading.Thread(target=self._end, name=f"{self._thread.name}-end", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
        if ending.is_alive():
            self._exporter.shutdown()  # drops all batches after the current one

    def _end(self) -> None:
        if self._thread.is_alive():
            self._rooms.put(None)
            self._thread.join()
        self._provider.shutdown()

    def take(self, record: FoldedRoom) -> None:
        """Queues a finished room without waiting; drops and counts it if the queue is full."""
        try:
            self._rooms.put_nowait(record)
        except queue.Full:
            self._fold.metrics.add("kvctl_spans_dropped_total", 1)

    def _count(self, spans: int, sent: bool) -> None:
        self._exported += spans
        if not sent:
            self._fold.metrics.add("kvctl_spans_dropped_total", spans)

    def _run(self) -> None:
        while (record := self._rooms.get()) is not None:
            self._export(record)

    def _export(self, record: FoldedRoom) -> None:
        from opentelemetry import trace

        clock = self._fold.clock
        trace_id, span_id = trace_ids(record.room, record.nonce)
        flags, links = trace.TraceFlags.SAMPLED, []
        if record.traceparent:
            linked = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
            links = [trace.Link(linked)]
            trace_id, span_id, flags = (int(number, 16) for number in record.traceparent.split("-")[1:])
        if not flags & trace.TraceFlags.SAMPLED:
            return
        children = phases(record, self._role)
        if self._ended - self._exported + 1 + len(children) > _MOST_SPANS:  # OpenTelemetry would not count them
            self._fold.metrics.add("kvctl_spans_dropped_total", 1 + len(children))
            return
        context = None
        if self._role == "prefill" or record.traceparent:
            parent = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        else:
            self._ids.next = (trace_id, span_id)
        span = self._tracer.start_span(
            f"kv {self._role}",
            context,
            attributes=attributes(record),
            links=links,
            start_time=clock.wall_ns(record.opened_at),
        )
        for name, begin, end in children:
            child = self._tracer.start_span(name, trace.set_span_in_context(span), start_time=clock.wall_ns(begin))
            child.end(clock.wall_ns(end))
        for event in record.events[:_EVENTS]:
            about = {"writer": event.writer, "chunk": event.chunk, "peer": event.peer, "path": event.path or None}
            known = {key: value for key, value in about.items() if value is not None}
            span.add_event(event.stage, known, clock.wall_ns(event.at_ns))
        if (failure := record.failure) is not None:
            text = f"{failure['code']} on {failure['rank']}: {failure['text']}"
            span.set_status(trace.Status(trace.StatusCode.ERROR, text))
        elif record.state_now is RoomState.SUCCESS:
            span.set_status(trace.Status(trace.StatusCode.OK))
        if span.is_recording():  # OpenTelemetry's own settings may turn spans off
            self._ended += 1 + len(children)
        span.end(clock.wall_ns(record.finished_at or clock.now_ns()))


def attributes(record: FoldedRoom) -> dict[str, Any]:
    """Returns the attributes of a room's span; the room number is a string because integer attributes are signed."""
    return {
        "kvctl.room": str(record.room),
        **({"kvctl.request_id": record.request_id} if record.request_id else {}),
        "kvctl.state": record.state_now.label,
        "kvctl.bytes": record.bytes,
        "kvctl.parts": record.parts,
        "kvctl.peers": list(record.peers),
        **{f"kvctl.parts.{path}": parts for path, parts in record.paths.items()},
        **({} if record.pages is None else {"kvctl.pages": record.pages}),
        **({} if record.tokens is None else {"kvctl.tokens": record.tokens}),
    }


def phases(record: FoldedRoom, role: Role) -> list[tuple[str, int, int]]:
    """Returns the phases of a room on this rank that are known: name, monotonic begin and end; they may overlap.

    On a prefill rank: the wait for the forward (`kv queue`), the forward, from the first computed part until the last
    one may be written (`kv gate`), and from the first part that may be written until the last one is (`kv wire`). On a
    decode rank: the wait for the first part, and from its arrival until the last one has arrived (`kv arrive`) and
    until the last one is in its pages (`kv scatter`).
    """
    times: dict[str, list[int]] = {}
    # A full timeline lacks its latest events, so the ends of the stages are unknown.
    for event in record.events if not record.events_dropped else ():
        times.setdefault(event.stage, []).append(event.at_ns)
    first = {stage: min(each) for stage, each in times.items()}
    last = {stage: max(each) for stage, each in times.items()}
    if role == "prefill":
        forward = record.forward_begun_at
        found = [
            ("kv queue", record.opened_at, record.first_ready_at if forward is None else forward),
            ("kv forward", forward, record.forward_done_at),
            ("kv gate", first.get("ready"), last.get("gate")),
            ("kv wire", first.get("gate", first.get("queue")), last.get("wire")),
        ]
    else:
        arrived = first.get("arrive")
        found = [
            ("kv wait", record.opened_at, arrived),
            ("kv arrive", arrived, last.get("arrive")),
            ("kv scatter", arrived, last.get("scatter")),
        ]
    return [(name, begin, end) for name, begin, end in found if begin is not None and end is not None and begin <= end]


def trace_ids(room: int, nonce: int) -> tuple[int, int]:
    """Returns the trace id of a room (128 bits), and the span id of the decode rank that has this nonce (64 bits)."""
    trace_id = hashlib.blake2b(str(room).encode(), digest_size=16).digest()
    span_id = hashlib.blake2b(f"{room}/{nonce}".encode(), digest_size=8).digest()
    return int.from_bytes(trace_id) or 1, int.from_bytes(span_id) or 1


class _Counting:
    """Exporter that calls `count` with the number of spans of each batch, and whether it was sent."""

    def __init__(self, exporter: SpanExporter, count: Callable[[int, bool], None]) -> None:
        self._exporter, self._count = exporter, count
        self.shutdown, self.force_flush = exporter.shutdown, exporter.force_flush

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        sent = False
        try:
            result = self._exporter.export(spans)
            sent = result.name == "SUCCESS"
            return result
        finally:
            self._count(len(spans), sent)


def _ids() -> Any:
    """Returns a generator of random ids; setting its attribute `next` fixes (trace id, span id) of the next span."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        next: tuple[int, int] | None = None

        def generate_span_id(self) -> int:
            preset, self.next = self.next, None
            return super().generate_span_id() if preset is None else preset[1]

        def generate_trace_id(self) -> int:
            return super().generate_trace_id() if self.next is None else self.next[0]

    return Ids()
