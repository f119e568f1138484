"""The HTTP server of probes and scrapes: where it listens, what it answers, and that no client holds up another."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus

import pytest

from kvctl_agent.contract.addresses import parse_listening
from kvctl_agent.host import http_server
from kvctl_agent.host.http_server import Answer, PageServer, text_answer
from tests.support.polling import until


def hello() -> Answer:
    return text_answer(HTTPStatus.OK, "hello")


@contextmanager
def serving(address: str = "127.0.0.1:0", **pages: Callable[[], Answer]) -> Iterator[PageServer]:
    answers = {"/hello": hello, **{f"/{name}": answer for name, answer in pages.items()}}
    server = PageServer(parse_listening(address), answers, "t")
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
        assert get(server, "/hello?you") == (200, "hello")
        with socket.create_connection(port_of(server)) as client, client.makefile("rb") as answer:
            client.sendall(b"HEAD /hello HTTP/1.1\r\n\r\n")
            assert answer.read().partition(b"\r\n\r\n")[2] == b""
        assert get(server, "/hello", "POST")[0] == 501


def test_an_unknown_page_names_those_that_exist() -> None:
    with serving() as server:
        assert get(server, "/") == (404, "there is no page /; there are: /hello\n")


def test_a_page_that_fails_costs_one_answer(capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> Answer:
        raise RuntimeError("no")

    with serving(broken=broken) as server:
        assert get(server, "/broken") == (500, "RuntimeError: no\n")
        assert get(server, "/hello") == (200, "hello")
    assert capfd.readouterr() == ("", "")


def test_pages_are_answered_side_by_side() -> None:
    both = threading.Barrier(2, timeout=60)

    def meet() -> Answer:
        both.wait()
        return text_answer(HTTPStatus.OK, "met")

    with serving(meet=meet, other=lambda: meet()) as server, ThreadPoolExecutor() as clients:
        assert list(clients.map(lambda path: get(server, path), ("/meet", "/other"))) == [(200, "met")] * 2


def test_clients_of_one_page_share_its_answer_and_a_slow_page_keeps_nobody_out() -> None:
    """Clients wait for a slow page, beside others that send nothing."""
    asked, done, answers = threading.Event(), threading.Event(), itertools.count()

    def slow() -> Answer:
        asked.set()
        assert done.wait(60)
        return text_answer(HTTPStatus.OK, str(next(answers)))

    with serving(slow=slow) as server, contextlib.ExitStack() as idle, ThreadPoolExecutor(17) as clients:
        first = clients.submit(get, server, "/slow")
        assert asked.wait(60)
        others = [clients.submit(get, server, "/slow") for _ in range(16)]
        for _ in range(8):
            idle.enter_context(socket.create_connection(port_of(server)))
        assert get(server, "/hello") == (200, "hello")
        until(lambda: sum(client.waits for client in list(server._clients)) == 17, "all wait")
        done.set()
        assert first.result() == (200, "0")
        assert {each.result() for each in others} == {(200, "1")}


def test_clients_beyond_the_limit_wait_in_the_queue_while_all_others_wait_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_CLIENTS", 4)
    done = threading.Event()

    def slow() -> Answer:
        assert done.wait(60)
        return text_answer(HTTPStatus.OK, "done")

    with serving(slow=slow) as server, ThreadPoolExecutor(12) as clients:
        answers = [clients.submit(get, server, "/slow") for _ in range(12)]
        until(lambda: sum(client.waits for client in list(server._clients)) == 4, "four wait")
        time.sleep(0.2)
        assert len(server._clients) == 4
        done.set()
        assert [each.result() for each in answers] == [(200, "done")] * 12


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /hello HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * 9000, b"431"),
        (b"GET /hello HTTP/1.1\r\n" + b"a: b\r\n" * 2000, b"431"),
        (b"GET /hello\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"\xff\x00 \n\n", b"400"),
        (b"GET /hello?a=b HTTP/1.1\n\n", b"200"),
    ],
)
def test_requests_that_are_too_long_or_malformed(sent: bytes, status: bytes) -> None:
    with serving() as server, socket.create_connection(port_of(server)) as client:
        client.settimeout(60)
        client.sendall(sent)
        assert client.recv(100).startswith(b"HTTP/1.0 " + status)
        until(lambda: not server._clients, "the connection is closed")


def test_a_flood_of_large_requests_shuts_nobody_out() -> None:
    head = b"GET /hello HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 60000) for i in range(50))
    ended = threading.Event()

    def flood(server: PageServer) -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError), socket.create_connection(port_of(server)) as client:
                client.sendall(head)

    with serving() as server, ThreadPoolExecutor() as clients:
        for _ in range(3):
            clients.submit(flood, server)
        assert [get(server, "/hello") for _ in range(10)] == [(200, "hello")] * 10
        ended.set()


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


def test_slow_clients_delay_nobody(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time limit of a client, 5 s, one after another would take minutes."""
    monkeypatch.setattr(http_server, "_CLIENTS", 32)
    with serving() as server, contextlib.ExitStack() as slow:
        for _ in range(3 * http_server._CLIENTS):
            slow.enter_context(socket.create_connection(port_of(server)))
        slow.enter_context(dripping(server))
        began = time.monotonic()
        assert get(server, "/hello") == (200, "hello")
        assert time.monotonic() - began < 60
        assert len(server._clients) <= http_server._CLIENTS
    assert capfd.readouterr() == ("", "")


def test_a_client_is_disconnected_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CLIENT_S", 0.2)
    with serving() as server, dripping(server) as ended:
        assert ended.wait(60)


def test_a_client_that_does_not_read_is_disconnected_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CLIENT_S", 0.2)

    def large() -> Answer:
        return text_answer(HTTPStatus.OK, "x" * (64 << 20))

    with serving(large=large) as server, socket.create_connection(port_of(server)) as client:
        client.sendall(b"GET /large HTTP/1.0\r\n\r\n")
        until(lambda: server._clients, "the client is accepted")
        until(lambda: not server._clients, "the client is disconnected")


def test_a_client_that_never_ends_does_not_delay_the_close() -> None:
    with serving() as server, dripping(server):
        server.close()
        server.close()


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
        assert get(server, "/hello") == (200, "hello")
