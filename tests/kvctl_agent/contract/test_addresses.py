"""The parser of endpoints and addresses: what it accepts libzmq accepts too, everything else is one kind of error."""

from __future__ import annotations

import pytest
import zmq

from kvctl_agent.contract.addresses import (
    Address,
    AddressError,
    host_of,
    parse_endpoint,
    parse_listening,
    parse_place,
    tcp_address,
)
from kvctl_agent.errors import ConfigError

VALID = {
    "tcp://127.0.0.1:7000": Address("tcp", "127.0.0.1", 7000),
    "tcp://[::1]:7000": Address("tcp", "::1", 7000),
    "tcp://[fe80::1%eth0.7]:65535": Address("tcp", "fe80::1%eth0.7", 65535),
    "tcp://node-1.example.test.:1": Address("tcp", "node-1.example.test.", 1),
    "tcp://prefill_0:80": Address("tcp", "prefill_0", 80),
    "ipc:///run/kv/boot": Address("ipc", path="/run/kv/boot"),
}
INVALID = [
    *("", "7000", "127.0.0.1:7000", "tcp://", "tcp://:7", "tcp://h", "tcp://h:", "tcp://h:x", "tcp://h:-1", "udp://h:1"),
    *("tcp://h:65536", "tcp://h:99999999999999999999", "tcp://h:07", "tcp://h:\u0661", "tcp://h:1 ", "tcp://h:1\n"),
    *("tcp://127.0.0.1:9000/", "tcp://h:1/x", "tcp://h:1?q", "tcp://h:1#f", "tcp://u@h:1", "tcp://a;b:1", "TCP://h:1"),
    *("tcp://[::1:14579", "tcp://::1]:1", "tcp://[host]:1", "tcp://[]:1", "tcp://[127.0.0.1]:1", "tcp://::1:1"),
    *("tcp://[::1]1:1", "tcp://[fe80::1%]:1", "tcp://[fe80::1%a/b]:1", "tcp://[:::1]:1", "tcp://[::1%é]:1"),
    *("tcp://127.1:1", "tcp://0x7f000001:1", "tcp://2130706433:1", "tcp://300.1.1.1:1", "tcp://1.2.3.4.:1", "tcp://-h:1"),
    *("tcp://h..x:1", "tcp://.h:1", "tcp://" + "a" * 64 + ":1", "tcp://" + "a." * 200 + "a:1", "tcp://\u3002.:80"),
    *("tcp://h\0:1", "tcp://\ud800:1", "tcp://127.0.0.1\uff0f:1", "ipc://", "ipc://here", "ipc:///" + "x" * 107),
    *("ipc:///a\0b", "ipc:///a\ud800", "ipc:///a\nb", "tcp://" + "h" * 10_000 + ":1", "ipc:///" + "é" * 60),
    *("ipc:/x", None, 7, True, b"tcp://h:1", ["tcp://h:1"], {}, 1e999),
]  # fmt: skip


@pytest.mark.parametrize("text", VALID)
def test_an_endpoint_is_its_parts_and_they_are_the_endpoint(text: str) -> None:
    assert parse_endpoint(text) == VALID[text]
    assert str(parse_endpoint(text)) == text


@pytest.mark.parametrize("text", INVALID, ids=lambda text: ascii(text)[:40])
def test_everything_else_is_one_error_with_a_short_text(text: object) -> None:
    for bound in (False, True):
        with pytest.raises(AddressError) as error:
            parse_endpoint(text, bound=bound)
        assert isinstance(error.value, ConfigError)
        assert len(str(error.value)) < 1200
        str(error.value).encode()
    assert host_of(text) == ""


@pytest.mark.parametrize("text", [text for text in VALID if text.startswith("tcp://")])
def test_libzmq_accepts_what_is_accepted(text: str, zmq_context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """It rejects a malformed address with ZMQError where it is connected: on the agent's control thread."""
    socket = zmq_context.socket(zmq.DEALER)
    socket.ipv6 = "[" in text
    try:
        socket.connect(text)
    finally:
        socket.close(0)


def test_only_a_bound_socket_has_any_host_or_port() -> None:
    for text in ("tcp://*:7000", "tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://*:*"):
        with pytest.raises(AddressError):
            parse_endpoint(text)
        assert str(parse_endpoint(text, bound=True)) == text.replace(":*", ":0")


def test_what_a_host_is() -> None:
    hosts = {text: parse_place(f"{text}:1") for text in ("127.9.9.9", "[::1]", "LocalHost", "10.0.0.1", "*", "[::]")}
    assert [text for text, address in hosts.items() if address.is_loopback] == ["127.9.9.9", "[::1]", "LocalHost"]
    assert [text for text, address in hosts.items() if address.is_wildcard] == ["*", "[::]"]
    assert [address.bracketed_host for address in hosts.values()] == list(hosts)


def test_a_place_has_a_port_unless_there_is_a_default() -> None:
    assert parse_place("10.0.0.5", default_port=0) == Address("tcp", "10.0.0.5", 0)
    assert parse_place("10.0.0.5:7", default_port=0).port == 7
    for text in ("10.0.0.5", "tcp://10.0.0.5:7", ":7", None):
        with pytest.raises(AddressError, match="write address:port"):
            parse_place(text)


def test_a_plus_means_the_ports_upwards() -> None:
    assert parse_listening("[::1]:9400") == (Address("tcp", "::1", 9400),)
    assert [each.port for each in parse_listening("127.0.0.1:65500+")] == list(range(65500, 65536))
    assert len(parse_listening("*:7311+")) == 256
    for text in ("127.0.0.1:7311++", "127.0.0.1+", "+", None):
        with pytest.raises(AddressError, match=r"write address:port, or address:port\+"):
            parse_listening(text)
    with pytest.raises(AddressError, match=r"write address:port, or address:port\+"):
        parse_listening("localhost:9400", numeric=True)


def test_host_and_port_that_are_told_apart() -> None:
    assert str(tcp_address("::1", 7)) == str(tcp_address("[::1]", 7)) == "tcp://[::1]:7"
    wrong = [
        ("[::1", 1),
        ("::x", 1),
        ("127.0.0.1]", 1),
        ("h:1", 1),
        ("*", 1),
        ("", 1),
        (None, 1),
        ("h", "1"),
        ("h", True),
    ]
    for host, port in [*wrong, ("h", 0), ("h", 65536), ("h", float("inf")), ("h", float("nan")), ("h", 10**5000)]:
        with pytest.raises(AddressError, match="not the address of a TCP socket"):
            tcp_address(host, port)
