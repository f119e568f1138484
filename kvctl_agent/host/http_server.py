"""HTTP server for probes and scrapes: short answers to GET, no client of which can delay another, or the engine.

One thread serves all connections. It limits their number and the size of their requests, and pauses after its work, so
that it uses at most a tenth of a core, however many clients come. Clients that ask for the same answer share it: it is
computed on another thread, one at a time. A connection has a total time limit; with a limit per read, a client could
send byte by byte. If there are too many connections, the oldest one that waits for its client is closed.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
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
_CLIENTS = 256
_ACCEPTED_AT_ONCE = 16
_LEAST_S = 0.1  # that a client has before it is disconnected in favour of another
_POLL_S = 0.1
_CLOSE_S = 10.0
# A pause is this many times as long as the work before it, up to a limit.
_PAUSE_FACTOR, _LONGEST_PAUSE_S = 9, 0.5


class Answer(NamedTuple):
    """Answer of a page."""

    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


Page = Callable[[str], Callable[[], Answer]]
"""Returns the function that computes the answer for a value of the header `Accept`, "" without one.

Clients whose functions are equal share an answer; a page has a fixed number of functions. A function may wait; the page
must not.
"""


def text_answer(status: HTTPStatus, text: str) -> Answer:
    """Returns an answer of plain text."""
    return Answer(status, text.encode())


class _Client:
    """A connection: what has been received of its request, and then what is left to send of its answer.

    Attributes:
        waits: whether its answer is being computed.
        since_s: when it was accepted, or when its answer had been computed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.since_s = time.monotonic()
        self.received = self.to_send = b""
        self.waits = self.head_only = False


class _SharedAnswer:
    """An answer that is computed for all clients that wait for it, again while there are any."""

    def __init__(self, compute: Callable[[], Answer]) -> None:
        self._compute = compute
        self.waiting: list[_Client] = []
        self.thread: threading.Thread | None = None
        self.not_before_s = 0.0

    def start(self, name: str, ended: Callable[[_SharedAnswer, list[_Client], Answer], None]) -> None:
        """Computes the answer on a thread for the clients that wait now; the thread calls `ended`."""
        clients, self.waiting = self.waiting, []

        def run() -> None:
            began_s = time.monotonic()
            try:
                answer = self._compute()
            except Exception as error:
                answer = _failure(error)
            end_s = time.monotonic()
            self.not_before_s = end_s + min(_LONGEST_PAUSE_S, _PAUSE_FACTOR * (end_s - began_s))
            ended(self, clients, answer)

        self.thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:  # the process may have no more threads
            self.thread = None
            ended(self, clients, _failure(error))


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
        self._pages = pages
        self._listener = _bind(addresses)
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (self._listener, self._waker, self._woken):
            each.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._clients: dict[socket.socket, _Client] = {}
        self._listens = self._closing = False
        self._answers: dict[Callable[[], Answer], _SharedAnswer] = {}
        self._computed: deque[tuple[_SharedAnswer, list[_Client], Answer]] = deque()
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
        if self._thread.is_alive():
            self._wake()
            self._thread.join()
        for client in list(self._clients.values()):
            self._disconnect(client)
        for each in (self._selector, self._listener, self._waker, self._woken):
            each.close()
        deadline = time.monotonic() + _CLOSE_S
        for shared in self._answers.values():
            if shared.thread is not None:
                shared.thread.join(max(0.0, deadline - time.monotonic()))

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, or closed
            self._waker.send(b"\0")

    def _run(self) -> None:
        while not self._closing:
            self._listen(len(self._clients) < _CLIENTS or self._slowest() is not None)
            ready = self._selector.select(self._timeout_s())
            began_s = time.thread_time()
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif (client := self._clients.get(key.data)) is not None:
                    self._advance(client)
            self._compute()
            now_s = time.monotonic()
            for client in list(self._clients.values()):
                if not client.waits and now_s - client.since_s > CLIENT_S:
                    self._disconnect(client)
            time.sleep(min(_LONGEST_PAUSE_S, _PAUSE_FACTOR * (time.thread_time() - began_s)))

    def _timeout_s(self) -> float | None:
        if not self._clients:
            return None
        due = [each.not_before_s for each in self._answers.values() if each.waiting and each.thread is None]
        return max(0.0, min([_POLL_S, *(at_s - time.monotonic() for at_s in due)]))

    def _listen(self, listens: bool) -> None:
        """Accepts clients or leaves them in the listener's queue, as while all that are connected wait for answers."""
        if listens and not self._listens:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._listens and not listens:
            self._selector.unregister(self._listener)
        self._listens = listens

    def _slowest(self) -> _Client | None:
        """Returns the oldest client that the server waits for, unless it has just connected."""
        before_s = time.monotonic() - _LEAST_S
        waited_for = (client for client in self._clients.values() if not client.waits)
        return next((client for client in waited_for if client.since_s < before_s), None)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            slow = self._slowest() if len(self._clients) >= _CLIENTS else None
            if slow is None and len(self._clients) >= _CLIENTS:
                return
            try:
                connection, _peer = self._listener.accept()
            except OSError:  # no client is left, or it has gone, or the process has no descriptors
                return
            if slow is not None:
                self._disconnect(slow)
            connection.setblocking(False)
            client = self._clients[connection] = _Client(connection)
            self._selector.register(connection, selectors.EVENT_READ, connection)
            self._advance(client)  # its request is usually there

    def _advance(self, client: _Client) -> None:
        """Receives from a client or sends to it, without waiting."""
        try:
            if client.to_send:
                client.to_send = client.to_send[client.connection.send(client.to_send) :]
                if not client.to_send:
                    self._disconnect(client)
                return
            received = client.connection.recv(REQUEST_BYTES + 1 - len(client.received))
        except BlockingIOError:
            return
        except OSError:
            self._disconnect(client)
            return
        client.received += received
        if len(client.received) > REQUEST_BYTES:
            text = f"the request is longer than {REQUEST_BYTES} bytes\n"
            self._send(client, text_answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text))
        elif b"\r\n\r\n" in client.received or b"\n\n" in client.received:
            self._read_request(client)
        elif not received:
            self._disconnect(client)

    def _read_request(self, client: _Client) -> None:
        first, *lines = client.received.decode("latin-1").splitlines()
        method, target, version = (*first.split(" ", 2), "", "")[:3]
        path = target.partition("?")[0]
        headers = (line.partition(":") for line in lines)
        accept = next((value.strip() for name, _, value in headers if name.lower() == "accept"), "")
        client.head_only = method == "HEAD"
        if not version.startswith("HTTP/"):
            self._send(client, text_answer(HTTPStatus.BAD_REQUEST, "this is not an HTTP request\n"))
        elif method not in ("GET", "HEAD"):
            self._send(client, text_answer(HTTPStatus.NOT_IMPLEMENTED, "use GET or HEAD\n"))
        elif path not in self._pages:
            known = " ".join(self._pages)
            self._send(client, text_answer(HTTPStatus.NOT_FOUND, f"there is no page {path}; there are: {known}\n"))
        else:
            try:
                compute = self._pages[path](accept)
            except Exception as error:
                self._send(client, _failure(error))
                return
            client.waits = True
            self._selector.unregister(client.connection)
            self._answers.setdefault(compute, _SharedAnswer(compute)).waiting.append(client)

    def _compute(self) -> None:
        """Sends the answers that have been computed, and begins to compute others."""
        while self._computed:
            shared, clients, answer = self._computed.popleft()
            shared.thread = None
            for client in clients:
                self._send(client, answer)
        for shared in self._answers.values():
            if shared.waiting and shared.thread is None and time.monotonic() >= shared.not_before_s:
                shared.start(f"{self._thread.name}-page", self._on_computed)

    def _on_computed(self, shared: _SharedAnswer, clients: list[_Client], answer: Answer) -> None:
        self._computed.append((shared, clients, answer))
        self._wake()

    def _send(self, client: _Client, answer: Answer) -> None:
        head = (
            f"HTTP/1.0 {answer.status.value} {answer.status.phrase}\r\nServer: kvctl\r\n"
            f"Date: {formatdate(usegmt=True)}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
        )
        client.to_send = head.encode() + (b"" if client.head_only else answer.body)
        register = self._selector.register if client.waits else self._selector.modify
        register(client.connection, selectors.EVENT_WRITE, client.connection)
        client.waits, client.since_s = False, time.monotonic()
        self._advance(client)

    def _disconnect(self, client: _Client) -> None:
        del self._clients[client.connection]
        if not client.waits:
            self._selector.unregister(client.connection)
        with contextlib.suppress(OSError):  # it has just ended
            client.connection.shutdown(socket.SHUT_RDWR)
        client.connection.close()


def _failure(error: Exception) -> Answer:
    return text_answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}\n")


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
