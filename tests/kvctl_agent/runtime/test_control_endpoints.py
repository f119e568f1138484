"""Where control sockets may bind, and how a refusal reads."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket as socketlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvctl_agent.errors import ConfigError
from kvctl_agent.protocol.bootstrap_registry import Lookup
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.runtime.bootstrap import RegistryClient
from kvctl_agent.runtime.control_endpoints import (
    NamedDealer,
    address,
    bind,
    check_endpoint,
    close,
    connect,
    connect_to_peer,
    control_address,
    own_address,
)
from tests.support.names import Names

Context = zmq.Context[zmq.Socket[bytes]]
BINDER = """
import sys, zmq
from kvctl_agent.runtime.control_endpoints import bind
socket = bind(zmq.Context(), sys.argv[1], 1 << 20)
print(flush=True)
sys.stdin.read()
"""


class TestNames:
    """Sockets connect to the addresses that a host name has at the time."""

    def test_a_name_is_connected_to_once_it_is_known_and_again_where_it_has_moved(
        self, zmq_context: Context, names: Names, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(control_endpoints, "_LOOK_UP_NS", 20_000_000)
        names.silent.add("pod.test")
        first = bind(zmq_context, "tcp://127.0.0.1:*", 1 << 20)
        port = address(first).rpartition(":")[2]
        endpoint = f"tcp://pod.test:{port}"
        dealer = connect_to_peer(zmq_context, endpoint, b"reader", 1 << 20)
        assert isinstance(dealer, NamedDealer)
        with pytest.raises(zmq.Again):
            dealer.send(b"early")
        names.known["pod.test"] = ["127.0.0.1"]
        names.answer_all()
        assert self.frame(dealer, first) == b"0"
        close(first)
        names.known["pod.test"] = ["127.0.0.2", "127.0.0.3"]  # the first is not listened on
        second = bind(zmq_context, f"tcp://127.0.0.3:{port}", 1 << 20)
        self.frame(dealer, second)
        asked = len(names.asked)
        for _ in range(20):
            dealer.turn(time.monotonic_ns())
            time.sleep(0.005)
        assert len(names.asked) == asked  # nobody asks while there is a connection
        dealer.close()
        close(second)

    def test_a_name_without_an_address_is_told_with_the_host_and_looked_up_again(
        self, zmq_context: Context, names: Names, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(control_endpoints, "_LOOK_UP_NS", 20_000_000)
        router = bind(zmq_context, "tcp://127.0.0.1:*", 1 << 20)
        endpoint = f"tcp://pod.test:{address(router).rpartition(':')[2]}"
        registry = RegistryClient(zmq_context, endpoint, Lookup("decode-0"))
        silent = f"no answer from the registry at {endpoint}"
        deadline = time.monotonic() + 60
        while registry.roster.missing == silent:
            assert time.monotonic() < deadline
            registry.turn(time.monotonic_ns())
        assert registry.roster.missing.startswith(f"{silent}: host pod.test cannot be looked up: ")
        names.known["pod.test"] = ["127.0.0.1"]
        while registry.roster.missing != silent or not router.poll(1):
            assert time.monotonic() < deadline
            registry.turn(time.monotonic_ns())
        registry.close()
        close(router)

    def frame(self, dealer: NamedDealer, router: Any) -> bytes:
        """Sends numbers until one arrives; returns it."""
        deadline = time.monotonic() + 60
        while not router.poll(5):
            assert time.monotonic() < deadline
            dealer.turn(time.monotonic_ns())
            with contextlib.suppress(zmq.Again):
                dealer.send(b"0")
        return bytes(router.recv_multipart()[-1])


class TestCheck:
    @pytest.mark.parametrize(
        "endpoint",
        ["ipc:///tmp/x", "tcp://127.0.0.1:7000", "tcp://127.9.9.9:*", "tcp://localhost:0", "tcp://[::1]:7000"],
    )
    def test_ipc_and_loopback_addresses_are_fine(self, endpoint: str) -> None:
        check_endpoint(endpoint, insecure=False, bound=True)

    @pytest.mark.parametrize("endpoint", ["tcp://localhost:0", "tcp://127.0.0.1:*", "tcp://[::1]:0"])
    def test_a_free_port_is_for_the_rank_that_binds_it(self, endpoint: str) -> None:
        with pytest.raises(ConfigError, match=r"give the other ranks its Agent\.bootstrap"):
            check_endpoint(endpoint, insecure=False)

    @pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:7000", "tcp://10.1.2.3:7000", "tcp://*:7", "tcp://[::]:7000"])
    def test_an_address_that_others_reach_needs_insecure(self, endpoint: str) -> None:
        host = endpoint.removeprefix("tcp://").rpartition(":")[0]
        with pytest.raises(ConfigError, match=re.escape(f"{host} is not a loopback address")) as refused:
            check_endpoint(endpoint, insecure=False, bound=True)
        assert "set insecure = true" in str(refused.value)
        check_endpoint(endpoint, insecure=True, bound=True)

    @pytest.mark.parametrize("endpoint", ["", "7000", "http://127.0.0.1:7", "tcp://127.0.0.1", "tcp://:7", "udp://x:1"])
    def test_other_text_is_told_what_to_write(self, endpoint: str) -> None:
        with pytest.raises(ConfigError, match=r"write ipc:///path or tcp://address:port"):
            check_endpoint(endpoint, insecure=True)

    def test_an_ipc_path_is_absolute_and_within_the_kernels_limit(self) -> None:
        with pytest.raises(ConfigError, match="needs an absolute path"):
            check_endpoint("ipc://here", insecure=False)
        check_endpoint("ipc:///" + "x" * 106, insecure=False)
        with pytest.raises(ConfigError, match="exceeds 107 bytes"):
            check_endpoint("ipc:///" + "x" * 107, insecure=False)
        with pytest.raises(ConfigError, match="exceeds 107 bytes"):
            check_endpoint("ipc:///" + "é" * 60, insecure=False)


class TestControlAddress:
    def test_ipc_sockets_lie_next_to_the_registry_under_short_distinct_names(self) -> None:
        addresses = {control_address("ipc:///run/kv/boot", name) for name in ("a", "b", "x" * 500, "a/../b")}
        assert len(addresses) == 4
        for each in addresses:
            assert re.fullmatch(r"ipc:///run/kv/c-[0-9a-f]{12}", each)
        assert control_address("ipc:///run/kv/boot", "a") == control_address("ipc:///run/kv/boot", "a")

    def test_tcp_takes_any_free_port_of_the_same_address(self) -> None:
        assert control_address("tcp://127.0.0.1:7000", "a") == "tcp://127.0.0.1:0"
        assert control_address("tcp://[::1]:7000", "a") == "tcp://[::1]:0"

    @pytest.mark.parametrize("bootstrap", ["tcp://10.0.0.1:7000", "ipc:///run/kv/boot"])
    @pytest.mark.parametrize(
        ("listen", "endpoint"),
        [
            ("10.0.0.5", "tcp://10.0.0.5:0"),
            ("10.0.0.5:7001", "tcp://10.0.0.5:7001"),
            ("10.0.0.5:0", "tcp://10.0.0.5:0"),
            ("[fd00::5]", "tcp://[fd00::5]:0"),
            ("[fd00::5]:7001", "tcp://[fd00::5]:7001"),
        ],
    )
    def test_listen_names_host_and_port(self, bootstrap: str, listen: str, endpoint: str) -> None:
        assert control_address(bootstrap, "a", listen) == endpoint

    @pytest.mark.parametrize("listen", ["0.0.0.0", "*", "[::]", "0.0.0.0:7"])
    def test_listen_is_an_address_that_peers_can_connect_to(self, listen: str) -> None:
        with pytest.raises(ConfigError, match=r"peers cannot connect to .*; name an address of this host"):
            control_address("ipc:///run/kv/boot", "a", listen)

    @pytest.mark.parametrize("listen", [":7000", "10.0.0.5:", "10.0.0.5:x", "10.0.0.5:70000", "tcp://10.0.0.5:7"])
    def test_listen_is_no_other_text(self, listen: str) -> None:
        with pytest.raises(ConfigError, match=r"listen = .*write address or address:port"):
            control_address("ipc:///run/kv/boot", "a", listen)


class TestBind:
    def test_an_ipc_socket_and_its_directory_are_ours_alone(self, zmq_context: Context, directory: Path) -> None:
        socket = bind(zmq_context, f"ipc://{directory}/s", 1 << 20)
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (directory / "s").stat().st_mode & 0o777 == 0o600
        socket.close()

    def test_closing_removes_the_path_and_may_be_repeated(self, zmq_context: Context, directory: Path) -> None:
        for endpoint in (f"ipc://{directory}/s", "tcp://127.0.0.1:*"):
            socket = bind(zmq_context, endpoint, 1 << 20)
            close(socket)
            close(socket)
            assert socket.closed
        assert list(directory.iterdir()) == []

    def test_a_taken_port_is_refused(self, zmq_context: Context) -> None:
        first = bind(zmq_context, "tcp://127.0.0.1:*", 1 << 20)
        endpoint = address(first)
        with pytest.raises(ConfigError, match=re.escape(f"cannot bind {endpoint}") + ".*another agent using it"):
            bind(zmq_context, endpoint, 1 << 20)
        first.close()

    def test_a_taken_ipc_path_is_refused_and_its_holder_keeps_it(self, zmq_context: Context, directory: Path) -> None:
        """libzmq alone would take the path from a living holder without a word."""
        endpoint = f"ipc://{directory}/s"
        first = bind(zmq_context, endpoint, 1 << 20)
        with pytest.raises(ConfigError, match="another agent using it"):
            bind(zmq_context, endpoint, 1 << 20)
        assert not first.poll(50)
        client = connect(zmq_context, endpoint, b"client", 1 << 20)
        client.send(b"still yours?")
        assert first.poll(60_000)
        first.close()
        client.close()

    def test_a_killed_holders_path_is_taken_over_a_stopped_holders_is_not(
        self, zmq_context: Context, directory: Path
    ) -> None:
        endpoint = f"ipc://{directory}/s"
        command = [sys.executable, "-c", BINDER, endpoint]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            os.kill(holder.pid, signal.SIGSTOP)
            with pytest.raises(ConfigError, match="another agent using it"):
                bind(zmq_context, endpoint, 1 << 20)
            holder.kill()
            holder.wait()
        bind(zmq_context, endpoint, 1 << 20).close()

    def test_a_directory_that_cannot_be_made_is_a_config_error(self, zmq_context: Context, socket_dir: Path) -> None:
        (socket_dir / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot bind"):
            bind(zmq_context, f"ipc://{socket_dir}/file/s", 1 << 20)


class TestOtherHosts:
    def test_an_ipv6_address_can_be_bound_and_connected_to(self, zmq_context: Context) -> None:
        """`zmq_context` fails the test if a socket stays open."""
        server = bind(zmq_context, "tcp://[::1]:*", 1 << 20)
        client = connect(zmq_context, address(server), b"decode-0", 1 << 20)
        try:
            client.send(b"hello")
            assert server.poll(60_000)  # type: ignore[union-attr]
            assert server.recv_multipart() == [b"decode-0", b"hello"]
        finally:
            client.close(0)
            close(server)

    @pytest.mark.parametrize(
        "endpoint", ["ipc:///tmp/boot", "tcp://127.0.0.1:7000", "tcp://[::1]:7000", "tcp://localhost:0"]
    )
    def test_what_only_this_host_reaches_needs_no_address(self, endpoint: str) -> None:
        assert own_address(endpoint) == ""

    def test_the_address_of_this_host_depends_on_the_way_to_the_other(self) -> None:
        with socketlib.socket(socketlib.AF_INET, socketlib.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 7000))  # for documentation: nobody has it; sends nothing
            except OSError:
                assert own_address("tcp://192.0.2.1:7000") == ""  # there is no route
            else:
                assert own_address("tcp://192.0.2.1:7000") == probe.getsockname()[0]

    def test_a_host_that_cannot_be_looked_up_has_no_way(self) -> None:
        assert own_address("tcp://name.invalid:7000") == ""
