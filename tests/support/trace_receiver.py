"""Receives spans over OTLP, as a collector does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


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

    def wait(self, *names: str, trace: str = "") -> list[Span]:
        """Returns the spans, of a trace if it is given, once there is one of each of these names.

        A name may be given several times.
        """
        deadline = time.monotonic() + 60
        while True:
            spans = [span for span in list(self._spans) if trace in ("", span.trace)]
            found = [span.name for span in spans]
            missing = [name for name in set(names) if found.count(name) < names.count(name)]
            if not missing:
                return spans
            assert time.monotonic() < deadline, f"no span {missing} within 60 s; there are {spans}"
            time.sleep(0.01)


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Runs a receiver on a free port of this host."""
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
        try:
            yield Receiver(server, spans)
        finally:
            server.shutdown()
            thread.join()
