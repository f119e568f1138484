"""The HTTP server of probes and scrapes: where it listens, what it answers, and that no client holds up another."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import pytest

from kvctl_agent.contract import http_server
from kvctl_agent.contract.addresses import AddressError, parse_listening
from kvctl_agent.contract.http_server import Page, PageServer, Request, text_answer


def hello(request: Request) -> http_server.Answer:
    return text_answer(HTTPStatus.OK, f"hello {request.query}")


@contextmanager
def serving(address: str = "127.0.0.1:0", **pages: Page) -> Iterator[PageServer]:
    server = PageServer(
        parse_listening(address), {"/hello": hello, **{f"/{name}": page for name, page in pages.items()}}, "t"
    )
    server.start()
    try:
        yield server
    finally:
        server.close()


def get(server: PageServer, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"{server.url}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def port_of(server: PageServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def test_a_page_answers() -> None:
    with serving() as server:
        assert get(server, "/hello?you") == (200, "hello you")
        assert get(server, "/hello", "HEAD") == (200, "")
        assert get(server, "/hello", "POST")[0] == 501


def test_an_unknown_page_names_those_that_exist() -> None:
    with serving() as server:
        assert get(server, "/") == (404, "there is no page /; there are: /hello\n")


def test_a_page_that_fails_costs_one_answer(capfd: pytest.CaptureFixture[str]) -> None:
    def broken(_: Request) -> http_server.Answer:
        raise RuntimeError("no")

    with serving(broken=broken) as server:
        assert get(server, "/broken") == (500, "RuntimeError: no\n")
        assert get(server, "/hello") == (200, "hello ")
    assert capfd.readouterr() == ("", "")


def test_pages_are_answered_side_by_side() -> None:
    """The page waits for a request to itself, which one thread would never accept."""
    both = threading.Barrier(2, timeout=60)

    def meet(_: Request) -> http_server.Answer:
        both.wait()
        return text_answer(HTTPStatus.OK, "met")

    answers: list[Any] = []
    with serving(meet=meet) as server:
        clients = [threading.Thread(target=lambda: answers.append(get(server, "/meet"))) for _ in range(2)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    assert answers == [(200, "met")] * 2


@contextmanager
def dripping(server: PageServer) -> Iterator[threading.Event]:
    """A client that goes on sending, a byte at a time, and never comes to the end; the event: it was disconnected."""
    stop, ended = threading.Event(), threading.Event()

    def drip(client: socket.socket) -> None:
        try:
            while not stop.wait(0.02):
                client.send(b"G")
        except OSError:
            ended.set()

    with socket.create_connection(port_of(server)) as client:
        thread = threading.Thread(target=drip, args=(client,))
        thread.start()
        try:
            yield ended
        finally:
            stop.set()
            thread.join()


def test_slow_clients_delay_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    """With the time limit of a client, 5 s, one after another would take minutes."""
    with serving() as server, contextlib.ExitStack() as slow:
        for _ in range(3 * http_server._CLIENTS):
            slow.enter_context(socket.create_connection(port_of(server)))
        slow.enter_context(dripping(server))
        began = time.monotonic()
        assert get(server, "/hello") == (200, "hello ")
        assert time.monotonic() - began < 60
        assert len(server._server._clients) <= http_server._CLIENTS
    assert capfd.readouterr() == ("", "")


def test_a_client_is_disconnected_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CLIENT_S", 0.2)
    with serving() as server, dripping(server) as ended:
        assert ended.wait(60)


def test_a_client_that_does_not_read_is_disconnected_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CLIENT_S", 0.2)

    def large(_: Request) -> http_server.Answer:
        return text_answer(HTTPStatus.OK, "x" * (64 << 20))

    with serving(large=large) as server, socket.create_connection(port_of(server)) as client:
        client.sendall(b"GET /large HTTP/1.0\r\n\r\n")
        wait_for(lambda: server._server._clients, "the client is accepted")
        wait_for(lambda: not server._server._clients, "the client is disconnected")


def test_when_every_page_is_busy_another_client_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_CLIENTS", 2)
    busy, done = threading.Semaphore(0), threading.Event()

    def slow(_: Request) -> http_server.Answer:
        busy.release()
        assert done.wait(60)
        return text_answer(HTTPStatus.OK, "done")

    answers: list[Any] = []
    with serving(slow=slow) as server:
        clients = [threading.Thread(target=lambda: answers.append(get(server, "/slow"))) for _ in range(2)]
        for client in clients:
            client.start()
        for _ in clients:
            assert busy.acquire(timeout=60)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError, urllib.error.URLError)):
            get(server, "/hello")
        done.set()
        for client in clients:
            client.join()
        assert get(server, "/hello") == (200, "hello ")
    assert answers == [(200, "done")] * 2


def test_a_client_that_never_ends_does_not_delay_the_close() -> None:
    with serving() as server, dripping(server):
        server.close()
        server.close()


def test_no_resolver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def getfqdn(name: str = "") -> str:
        raise AssertionError(f"looked {name} up")

    monkeypatch.setattr(socket, "getfqdn", getfqdn)
    PageServer(parse_listening("127.0.0.1:0"), {}, "t").close()


@pytest.mark.parametrize("text", ["", "9400", ":9400", "localhost:9400", "127.0.0.1:x", "127.0.0.1:70000", "1.2.3.4"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError, match="write address:port"):
        parse_listening(text, numeric=True)


def test_a_plus_takes_the_next_free_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use"):
            PageServer(parse_listening(f"127.0.0.1:{port}"), {}, "t")
        server = PageServer(parse_listening(f"127.0.0.1:{port}+"), {}, "t")
        try:
            assert port_of(server)[1] > port
        finally:
            server.close()


def test_an_ipv6_address_is_in_brackets() -> None:
    with serving("[::1]:0") as server:
        assert server.url.startswith("http://[::1]:")
        assert get(server, "/hello") == (200, "hello ")


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
