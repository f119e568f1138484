"""Servers that export metrics, with texts that were recorded from real engines."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

RECORDED = Path(__file__).parent / "metrics"


def recorded(name: str) -> str:
    """Returns the metrics of a server, as far as kvctl reads them: `ENGINE-ROLE-STATE`, recorded from real servers."""
    return (RECORDED / f"{name}.txt").read_text()


def closed_port() -> int:
    """Returns a port of 127.0.0.1 that was just closed, on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Exporter:
    """Answers GET /metrics; a context manager.

    Attributes:
        text: the answer, which tests change.
        later: the answers after the next one, if they differ.
        url: of the server.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.later: str | None = None
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = exporter.text.encode()
                exporter.text, exporter.later = exporter.later or exporter.text, None
                self.send_response(200 if self.path.partition("?")[0] == "/metrics" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.place = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.place}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
