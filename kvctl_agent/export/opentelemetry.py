"""A span per room and rank for OpenTelemetry, over OTLP: both ends of a room are one trace without talking about it.

The trace's and the root's numbers are made of the room's number and nonce, which both ends know. The decode rank that
opened the room has the root; the prefill ranks' spans are its children. The control thread only appends the finished
room to a bounded queue; a thread of its own makes the spans, and OpenTelemetry's batches send them.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from typing import TYPE_CHECKING, Any

from kvctl_agent.contract.snapshots import Role
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import ConfigError
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.room_records import RoomRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_QUEUE = 1024
_EVENTS = 64
_CLOSE_S = 2.0


class RoomSpans:
    """Turns finished rooms into spans.

    Args:
        endpoint: `http://collector:4318/v1/traces`.
        exporter: in place of the one for that endpoint.

    Raises:
        ConfigError: the endpoint is no URL, or OpenTelemetry is not installed.
    """

    def __init__(
        self, endpoint: str, name: str, role: Role, telemetry: Telemetry, exporter: SpanExporter | None = None
    ) -> None:
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
            raise ConfigError("otel_endpoint needs OpenTelemetry: pip install 'kvctl[otel]'") from None
        resource = Resource.create({"service.name": f"kvctl-{role}", "service.instance.id": name})
        self._exporter = exporter
        self._ids = _ids()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvctl")
        self._role = role
        self._telemetry = telemetry
        self._rooms: queue.Queue[RoomRecord | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._run, name=f"kvctl-spans-{name}", daemon=True)

    def start(self) -> None:
        self._telemetry.on_finish = self.take
        self._thread.start()

    def close(self) -> None:
        """Sends what is there, as far as two seconds reach."""
        self._telemetry.on_finish = None
        # On a thread of its own, since OpenTelemetry waits for a collector that does not answer, batch by batch.
        ending = threading.Thread(target=self._end, name=f"{self._thread.name}-end", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
        if ending.is_alive():
            self._exporter.shutdown()  # which drops the batches behind the one that is on its way

    def _end(self) -> None:
        if self._thread.is_alive():
            self._rooms.put(None)
            self._thread.join()
        self._provider.shutdown()

    def take(self, record: RoomRecord) -> None:
        """A room has ended; on the control thread, so nothing here waits."""
        try:
            self._rooms.put_nowait(record)
        except queue.Full:
            self._telemetry.metrics.add("kvctl_spans_dropped_total", 1)

    def _run(self) -> None:
        while (record := self._rooms.get()) is not None:
            self._tell(record)

    def _tell(self, record: RoomRecord) -> None:
        from opentelemetry import trace

        clock = self._telemetry.clock
        trace_id, root = numbers(record.room, record.nonce)
        context = None
        if self._role == "prefill":
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
            parent = trace.NonRecordingSpan(trace.SpanContext(trace_id, root, is_remote=True, trace_flags=flags))
            context = trace.set_span_in_context(parent)
        else:
            self._ids.next = (trace_id, root)
        span = self._tracer.start_span(
            f"kv {self._role}", context, start_time=clock.wall_ns(record.opened_at), attributes=attributes(record)
        )
        for event in record.events[:_EVENTS]:
            about = {"writer": event.writer, "chunk": event.chunk, "peer": event.peer, "path": event.path or None}
            known = {key: value for key, value in about.items() if value is not None}
            span.add_event(event.stage, known, clock.wall_ns(event.at_ns))
        if (failure := record.failure) is not None:
            text = f"{failure['code']} on {failure['rank']}: {failure['text']}"
            span.set_status(trace.Status(trace.StatusCode.ERROR, text))
        elif record.state_now is RoomState.SUCCESS:
            span.set_status(trace.Status(trace.StatusCode.OK))
        span.end(clock.wall_ns(record.finished_at or clock.now_ns()))


def attributes(record: RoomRecord) -> dict[str, Any]:
    """What a span says of its room. The number is text: it has 64 bits, attributes have a sign."""
    return {
        "kvctl.room": str(record.room),
        "kvctl.state": record.state_now.label,
        "kvctl.bytes": record.bytes,
        "kvctl.parts": record.parts,
        "kvctl.peers": list(record.peers),
        **{f"kvctl.parts.{path}": parts for path, parts in record.paths.items()},
        **({} if record.pages is None else {"kvctl.pages": record.pages}),
        **({} if record.tokens is None else {"kvctl.tokens": record.tokens}),
    }


def numbers(room: int, nonce: int) -> tuple[int, int]:
    """The trace's number (128 bits) and the root span's (64 bits)."""
    checksum = hashlib.blake2b(f"{room}/{nonce}".encode(), digest_size=24).digest()
    return int.from_bytes(checksum[:16]) or 1, int.from_bytes(checksum[16:]) or 1


def _ids() -> Any:
    """Numbers at random, but for the next span where they are given."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        next: tuple[int, int] | None = None

        def generate_span_id(self) -> int:
            given, self.next = self.next, None
            return super().generate_span_id() if given is None else given[1]

        def generate_trace_id(self) -> int:
            return super().generate_trace_id() if self.next is None else self.next[0]

    return Ids()
