"""HTTP server for probes and scrapes: short answers to GET, no client of which can delay another, or the engine.

Each connection has a thread, and a total time limit; with a limit per read, a client could send byte by byte. Number of
connections, their rate and the size of requests are limited, and clients that ask for the same page share its answer,
so that the server uses at most a tenth of a core, however many clients come. If there are too many connections, the
oldest one that waits for its client is closed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

from kvctl_agent.contract.addresses import Address

CLIENT_S = 5.0
"""Longest time from accepting a connection to the end of its answer, without the time that a page takes."""

REQUEST_BYTES = 8192
"""Longest request: its first line and its headers."""

TEXT = "text/plain; charset=utf-8"
_CLIENTS = 32
_LEAST_S = 0.1  # that a client has before it is disconnected in favour of another
_POLL_S = 0.1
_ACCEPT_EVERY_S = 0.01
_CLOSE_S = 10.0
# A pause is this many times as long as the work before it, up to a limit.
_PAUSE_FACTOR, _LONGEST_PAUSE_S = 9, 0.5


class Answer(NamedTuple):
    """Answer of a page."""

    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


Page = Callable[[], Answer]
"""Computes the answer of a page, which may take a while."""


def text_answer(status: HTTPStatus, text: str) -> Answer:
    """Returns an answer of plain text."""
    return Answer(status, text.encode())


class _Client:
    """A connection.

    Attributes:
        since_s: when it was accepted, or when its answer had been computed.
        waits: whether its answer is being computed.
    """

    def __init__(self, connection: socket.socket, serve: Callable[[_Client], None], name: str) -> None:
        self.connection = connection
        self.since_s = time.monotonic()
        self.waits = False
        self.thread = threading.Thread(target=serve, args=(self,), name=name, daemon=True)

    def disconnect(self) -> None:
        """Makes its thread end; the thread closes the connection."""
        with contextlib.suppress(OSError):  # it has just ended
            self.connection.shutdown(socket.SHUT_RDWR)


class _SharedPage:
    """Computes a page, one answer at a time, for all clients that have asked before it begins."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._answer = text_answer(HTTPStatus.OK, "")
        self._began_s = self._not_before_s = float("-inf")

    def answer(self) -> Answer:
        asked_s = time.monotonic()
        with self._lock:
            if self._began_s <= asked_s:
                time.sleep(max(0.0, self._not_before_s - time.monotonic()))
                self._began_s = time.monotonic()
                try:
                    self._answer = self._page()
                except Exception as error:
                    text = f"{type(error).__name__}: {error}\n"
                    self._answer = text_answer(HTTPStatus.INTERNAL_SERVER_ERROR, text)
                end_s = time.monotonic()
                self._not_before_s = end_s + min(_LONGEST_PAUSE_S, _PAUSE_FACTOR * (end_s - self._began_s))
            return self._answer


class PageServer:
    """HTTP server of a few pages, bound on construction.

    Args:
        addresses: numeric addresses, on the first free one of which it listens.
        pages: the pages by path, such as `/livez`.
        name: name of the server's thread.

    Raises:
        OSError: no port is free.
    """

    def __init__(self, addresses: Sequence[Address], pages: Mapping[str, Page], name: str) -> None:
        self._pages = {path: _SharedPage(page) for path, page in pages.items()}
        self._listener = _bind(addresses)
        self._clients: set[_Client] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        """URL of the server without a path, with the actual port."""

    def start(self) -> None:
        """Starts the server's thread."""
        self._thread.start()

    def close(self) -> None:
        """Stops the server, and waits at most 10 seconds for pages that are being answered; idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        deadline = time.monotonic() + _CLOSE_S
        for client in list(self._clients):
            client.disconnect()
            client.thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while not self._closing:
            now_s = time.monotonic()
            for client in list(self._clients):
                if not client.waits and now_s - client.since_s > CLIENT_S:
                    client.disconnect()
            if len(self._clients) >= _CLIENTS and self._slowest() is None:
                time.sleep(_POLL_S)  # others stay in the listener's queue while all that are connected wait for answers
                continue
            try:
                self._listener.settimeout(_POLL_S if self._clients else None)
                connection, _ = self._listener.accept()
            except OSError:  # nobody came, or has gone, or the process has no descriptors
                time.sleep(_ACCEPT_EVERY_S)
                continue
            if len(self._clients) >= _CLIENTS and (slow := self._slowest()) is not None:
                self._clients.discard(slow)
                slow.disconnect()
            connection.settimeout(None)
            client = _Client(connection, self._serve, f"{self._thread.name}-client")
            self._clients.add(client)
            try:
                client.thread.start()
            except RuntimeError:  # the process may have no more threads
                self._clients.discard(client)
                connection.close()
            time.sleep(_ACCEPT_EVERY_S)

    def _slowest(self) -> _Client | None:
        """Returns the oldest client that the server waits for, unless it has just connected."""
        before_s = time.monotonic() - _LEAST_S
        waited_for = [each for each in list(self._clients) if not each.waits and each.since_s < before_s]
        return min(waited_for, key=lambda each: each.since_s, default=None)

    def _serve(self, client: _Client) -> None:
        try:
            with client.connection as connection, contextlib.suppress(OSError):
                received = b""
                while b"\r\n\r\n" not in received and b"\n\n" not in received and len(received) <= REQUEST_BYTES:
                    if not (more := connection.recv(REQUEST_BYTES + 1 - len(received))):
                        return
                    received += more
                connection.sendall(self._response(client, received))
                client.disconnect()
        finally:
            self._clients.discard(client)

    def _response(self, client: _Client, received: bytes) -> bytes:
        first = received.decode("latin-1").splitlines()[0]
        method, target, version = (*first.split(" ", 2), "", "")[:3]
        path = target.partition("?")[0]
        if len(received) > REQUEST_BYTES:
            text = f"the request is longer than {REQUEST_BYTES} bytes\n"
            answer = text_answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)
        elif not version.startswith("HTTP/"):
            answer = text_answer(HTTPStatus.BAD_REQUEST, "this is not an HTTP request\n")
        elif method not in ("GET", "HEAD"):
            answer = text_answer(HTTPStatus.NOT_IMPLEMENTED, "use GET or HEAD\n")
        elif (page := self._pages.get(path)) is None:
            text = f"there is no page {path}; there are: {' '.join(self._pages)}\n"
            answer = text_answer(HTTPStatus.NOT_FOUND, text)
        else:
            client.waits = True
            answer = page.answer()
            client.since_s, client.waits = time.monotonic(), False
        head = (
            f"HTTP/1.0 {answer.status.value} {answer.status.phrase}\r\nServer: kvctl\r\n"
            f"Date: {formatdate(usegmt=True)}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else answer.body)


def _bind(addresses: Sequence[Address]) -> socket.socket:
    for address in addresses:
        listener = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address.host, address.port))
            listener.listen(128)
            return listener
        except OSError:
            listener.close()
            if address == addresses[-1]:
                raise
    raise AssertionError("no address")
