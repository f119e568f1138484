"""HTTP server for probes and scrapes: short answers to GET, no client of which can delay another.

Each connection has a thread and a total time limit; with a limit per read, a client could send byte by byte. If too
many connections are open, the oldest one that waits for its client is closed, so that slow clients keep nobody out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NamedTuple

from kvctl_agent.contract.addresses import Address

CLIENT_S = 5.0
"""Longest time from accepting a connection to the end of its answer, without the time that a page takes."""

TEXT = "text/plain; charset=utf-8"
_CLIENTS = 32
_POLL_S = 0.1
_CLOSE_S = 10.0


class Answer(NamedTuple):
    """Answer of a page."""

    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


class Request(NamedTuple):
    """Request to a page: its query string without the question mark, and its headers, whose names ignore case."""

    query: str
    headers: Message[str, str]


Page = Callable[[Request], Answer]


def text_answer(status: HTTPStatus, text: str) -> Answer:
    """Returns an answer of plain text."""
    return Answer(status, text.encode())


class PageServer:
    """HTTP server of a few pages, bound on construction.

    Args:
        addresses: numeric addresses, on the first free one of which it listens.
        pages: by path, such as `/livez`, the function that answers; it runs on the thread of its client.
        name: name of the server's thread.

    Raises:
        OSError: no port is free.
    """

    def __init__(self, addresses: Sequence[Address], pages: Mapping[str, Page], name: str) -> None:
        self._server = _bind(addresses, pages)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name=name, daemon=True)

    @property
    def url(self) -> str:
        """URL of the server without a path, with the actual port."""
        host, port = self._server.server_address[:2]
        shown = str(host)
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"

    def start(self) -> None:
        """Starts the server's thread."""
        self._thread.start()

    def close(self) -> None:
        """Stops the server, and waits at most 10 seconds for pages that are being answered; idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.end_clients(_CLOSE_S)


class _Client:
    """A connection: its thread, when it was accepted, and whether a page is being computed for it."""

    def __init__(self, connection: socket.socket, serve: Callable[[], None]) -> None:
        self.connection = connection
        self.thread = threading.Thread(target=serve, name="kvctl-http", daemon=True)
        self.since_s = time.monotonic()
        self.answering = False

    def disconnect(self) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            self.connection.shutdown(socket.SHUT_RDWR)


class _Server(HTTPServer):
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self._clients: dict[socket.socket, _Client] = {}
        self._changing = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Binds without looking up the host name, which can take many seconds."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def client(self, connection: socket.socket) -> _Client:
        return self._clients[connection]

    def process_request(self, request: Any, client_address: Any) -> None:
        client = _Client(request, lambda: self._serve(request, client_address))
        with self._changing:
            if len(self._clients) >= _CLIENTS:
                waiting = next((each for each in self._clients.values() if not each.answering), None)
                if waiting is None:
                    self.shutdown_request(request)
                    return
                waiting.disconnect()
                del self._clients[waiting.connection]
            self._clients[request] = client
        client.thread.start()

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except (OSError, KeyError):  # the client has gone, or was disconnected
            pass
        finally:
            with self._changing:
                self._clients.pop(request, None)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Disconnects clients whose time is up; called by `serve_forever` every 0.1 s."""
        with self._changing:
            clients = list(self._clients.values())
        for client in clients:
            if not client.answering and time.monotonic() - client.since_s > CLIENT_S:
                client.disconnect()

    def end_clients(self, timeout_s: float) -> None:
        with self._changing:
            clients = list(self._clients.values())
        for client in clients:
            client.disconnect()
        deadline = time.monotonic() + timeout_s
        for client in clients:
            client.thread.join(max(0.0, deadline - time.monotonic()))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of a connection instead of printing them to standard error, which belongs to the engine."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        page = self.server.pages.get(path)
        client = self.server.client(self.connection)
        if page is None:
            known = " ".join(self.server.pages)
            answer = text_answer(HTTPStatus.NOT_FOUND, f"there is no page {path}; there are: {known}\n")
        else:
            client.answering = True
            try:
                answer = page(Request(query, self.headers))
            except Exception as error:
                answer = text_answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}\n")
            client.since_s, client.answering = time.monotonic(), False
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET

    def version_string(self) -> str:
        return "kvctl"

    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing, so that requests are not logged to standard error, which belongs to the engine."""


def _bind(addresses: Sequence[Address], pages: Mapping[str, Page]) -> _Server:
    for address in addresses:
        try:
            return (_Server6 if ":" in address.host else _Server)((address.host, address.port), pages)
        except OSError:
            if address == addresses[-1]:
                raise
    raise AssertionError("no address")
