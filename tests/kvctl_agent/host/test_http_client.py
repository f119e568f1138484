"""HTTP exchanges with servers that refuse, are silent, send too much, or send something else."""

from __future__ import annotations

import http.client
import socket
import time

import pytest

from kvctl_agent.host import http_client
from kvctl_agent.host.http_client import AnswerTooLarge, LookupFailed, connect, exchange
from tests.support.http_answers import serving
from tests.support.names import Names

REQUEST = b"GET / HTTP/1.1\r\nHost: pod.test\r\n\r\n"
FAR_S = 60.0


def ask(place: str, most_bytes: int = 1 << 20) -> tuple[int, bytes]:
    host, _, port = place.partition(":")
    deadline_s = time.monotonic() + FAR_S
    with connect(host, int(port), deadline_s) as connection:
        status, _, body = exchange(connection, REQUEST, deadline_s, most_bytes)
    return status, body


class TestConnect:
    def test_an_address_that_refuses_is_followed_by_the_next(self, names: Names) -> None:
        names.known["pod.test"] = ["127.0.0.2", "127.0.0.1"]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with connect("pod.test", port, time.monotonic() + FAR_S) as connection:
                assert connection.getpeername() == ("127.0.0.1", port)

    def test_addresses_share_what_is_left_of_the_time(self, names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
        names.known["pod.test"] = addresses = [f"10.0.0.{number}" for number in range(4)]
        waits: list[tuple[str, float]] = []

        def silent(address: tuple[str, int], timeout: float) -> socket.socket:
            waits.append((address[0], timeout))
            time.sleep(timeout)
            raise TimeoutError

        monkeypatch.setattr(http_client.socket, "create_connection", silent)
        begun_s = time.monotonic()
        with pytest.raises(TimeoutError):
            connect("pod.test", 80, begun_s + 2.0)
        assert [address for address, _ in waits] == addresses
        assert all(0.3 < wait_s <= 0.5 for _, wait_s in waits)

    def test_addresses_are_used_again_and_a_failed_look_up_is_not(self, names: Names) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            for _ in range(2):
                with pytest.raises(LookupFailed, match=r"host pod\.test cannot be looked up"):
                    connect("pod.test", port, time.monotonic() + FAR_S)
            names.known["pod.test"] = ["127.0.0.1"]
            for _ in range(2):
                connect("pod.test", port, time.monotonic() + FAR_S).close()
        assert names.asked == ["pod.test"] * 3

    def test_a_silent_resolver_ends_at_the_deadline(self, names: Names) -> None:
        names.silent.add("pod.test")
        with pytest.raises(TimeoutError):
            connect("pod.test", 80, time.monotonic() + 0.1)


class TestExchange:
    def test_headers_count_towards_the_limit(self) -> None:
        whole = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
        with serving(whole) as place:
            assert ask(place, len(whole)) == (200, b"hello")
            with pytest.raises(AnswerTooLarge):
                ask(place, len(whole) - 1)

    @pytest.mark.parametrize(
        "answer",
        [b"SSH-2.0-OpenSSH_9.6\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort"],
        ids=["another protocol", "nothing", "cut short"],
    )
    def test_what_is_not_http_is_an_error_of_http(self, answer: bytes) -> None:
        with serving(answer) as place, pytest.raises(http.client.HTTPException):
            ask(place)

    def test_a_server_that_sends_byte_by_byte_ends_at_the_deadline(self) -> None:
        with serving([b"HTTP/1.1 200 OK\r\n\r\n", *[b"x"] * 1000], pause_s=0.05) as place:
            host, _, port = place.partition(":")
            deadline_s = time.monotonic() + 0.5
            with connect(host, int(port), deadline_s) as connection, pytest.raises(TimeoutError):
                exchange(connection, REQUEST, deadline_s, 1 << 20)
