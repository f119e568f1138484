"""The admin endpoint for other machines: a key decides who is let in and what it may do; old bytes are worthless."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import zmq
from zmq.utils import z85

from kvctl_agent.contract.admin import MAGIC
from kvctl_agent.contract.commands import COMMANDS_BY_NAME, Command, Level
from kvctl_agent.contract.settings import load_settings
from kvctl_agent.errors import AdminError, ConfigError
from kvctl_agent.host.keys import KeyPair
from kvctl_agent.observer.endpoints import RemoteEndpoint, remote_endpoint
from kvctl_agent.observer.metrics import Metrics
from tests.support.admin_server import AdminServer
from tests.support.polling import until

Serve = Callable[..., AdminServer]
WAIT_MS = 60_000
A_WHILE_MS = 300


def pair() -> KeyPair:
    return KeyPair(*(z85.decode(half) for half in zmq.curve_keypair()))


FLEET, READER, OPERATOR, ADMIN, STRANGER = (pair() for _ in range(5))
LEVELS = {Level.READ: READER, Level.OPERATE: OPERATOR, Level.ADMIN: ADMIN}


class Client:
    """A DEALER with a key (or none) at a TCP address."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, own: KeyPair | None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        if own is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = own.public, own.secret
            self.socket.curve_serverkey = FLEET.public
        self.socket.connect(address)

    def send(self, cmd: str) -> None:
        self.socket.send_multipart([MAGIC, b"1", orjson.dumps({"cmd": cmd})], zmq.NOBLOCK)

    def answer(self, wait_ms: int = WAIT_MS) -> dict[str, Any] | None:
        return orjson.loads(self.socket.recv_multipart()[2]) if self.socket.poll(wait_ms) else None

    def ask(self, cmd: str) -> dict[str, Any]:
        self.send(cmd)
        answer = self.answer()
        assert answer is not None
        return answer


@pytest.fixture
def clients_file(tmp_path: Path) -> Path:
    path = tmp_path / "clients"
    path.write_text("".join(f"{level.label} {keys.public.hex()} somebody\n" for level, keys in LEVELS.items()))
    path.chmod(0o600)
    return path


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def demanding(monkeypatch: pytest.MonkeyPatch) -> dict[Level, str]:
    """A command of each level."""
    names = dict(zip(Level, ("rooms", "slow", "history"), strict=True))
    for level, name in names.items():
        monkeypatch.setitem(COMMANDS_BY_NAME, name, Command(name, "", level))
    return names


@pytest.fixture
def server(demanding: dict[Level, str], serve: Serve, clients_file: Path, metrics: Metrics) -> AdminServer:
    return serve(remote=RemoteEndpoint("tcp://127.0.0.1:*", FLEET, str(clients_file)), metrics=metrics)


@pytest.fixture
def client(zmq_context: zmq.Context[zmq.Socket[bytes]], server: AdminServer) -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def connect(own: KeyPair | None, address: str = "") -> Client:
        made.append(Client(zmq_context, address or server.remote_address, own))
        return made[-1]

    yield connect
    for each in made:
        each.socket.close()


@pytest.mark.parametrize("level", Level)
def test_a_client_may_do_what_its_level_allows_and_no_more(
    client: Callable[..., Client], level: Level, demanding: dict[Level, str]
) -> None:
    mine = client(LEVELS[level])
    assert mine.ask("hello")["data"]["level"] == level.label
    for needs, name in demanding.items():
        answer = mine.ask(name)
        if needs <= level:
            assert answer["ok"]
        else:
            assert answer["error"] == {
                "code": "not-permitted",
                "message": f"{name} needs level {needs.label}, this client has {level.label}",
            }


def test_levels_do_not_mix_between_clients_and_the_unix_socket_stays_admin(
    client: Callable[..., Client], connect: Callable[..., Any], server: AdminServer
) -> None:
    mine = {level: client(keys) for level, keys in LEVELS.items()}
    local = connect(server)
    for _ in range(3):
        assert local.ask("hello")["data"]["level"] == "admin"
        for level, each in mine.items():
            assert each.ask("hello")["data"]["level"] == level.label


@pytest.mark.parametrize("keys", [STRANGER, None], ids=["a stranger's key", "no key"])
def test_who_is_not_known_gets_no_answer(client: Callable[..., Client], keys: KeyPair | None, metrics: Metrics) -> None:
    stranger = client(keys)
    with contextlib.suppress(zmq.Again):  # refused before it could say anything
        stranger.send("hello")
    until(lambda: not (keys and not metrics.total("kvctl_connections_refused_total")), "the stranger is not refused")
    assert stranger.answer(A_WHILE_MS) is None
    assert client(READER).ask("hello")["ok"]
    assert metrics.total("kvctl_connections_refused_total") == (1 if keys else 0)
    assert metrics.total("kvctl_admin_requests_total", "hello") == 1


def test_a_key_that_is_taken_out_is_refused_on_its_open_connection_and_on_new_ones(
    client: Callable[..., Client], clients_file: Path
) -> None:
    mine = client(READER)
    assert mine.ask("status")["ok"]
    clients_file.write_text(f"admin {ADMIN.public.hex()} somebody\n")
    error = mine.ask("status")["error"]
    assert error["code"] == "not-permitted"
    assert "removed" in error["message"]
    again = client(READER)
    with contextlib.suppress(zmq.Again):  # refused before it could say anything
        again.send("status")
    assert again.answer(A_WHILE_MS) is None
    assert client(ADMIN).ask("status")["ok"]


class Tap:
    """Passes one TCP connection on, and keeps what the client said."""

    def __init__(self, port: int) -> None:
        self.said = bytearray()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._pass_on)
        self._thread.start()

    def _pass_on(self) -> None:
        inside, _ = self._listener.accept()
        with inside, socket.create_connection(("127.0.0.1", self._port)) as outside:
            other = {inside: outside, outside: inside}
            while True:
                for ready in select.select([inside, outside], [], [], 10)[0]:
                    more = ready.recv(1 << 16)
                    if not more:
                        return
                    if ready is inside:
                        self.said += more
                    other[ready].sendall(more)

    def close(self) -> None:
        self._thread.join(60)
        self._listener.close()


def test_a_recorded_conversation_replayed_achieves_nothing(
    client: Callable[..., Client], server: AdminServer, metrics: Metrics
) -> None:
    """Byte for byte what an admin said, with the request that was carried out then; at once and piece by piece."""
    port = int(server.remote_address.rpartition(":")[2])
    tap = Tap(port)
    mine = client(ADMIN, tap.address)
    assert mine.ask("status")["ok"]
    mine.socket.close()
    tap.close()
    said = bytes(tap.said)
    assert len(said) > 500  # a greeting, HELLO, INITIATE and the request
    assert ADMIN.public not in said
    assert b"status" not in said
    for step in (len(said), 64, 7):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as replay, contextlib.suppress(OSError):
            for at in range(0, len(said), step):
                replay.sendall(said[at : at + step])
                time.sleep(0.0005)
            while replay.recv(1 << 16):
                pass  # until it hangs up
    assert client(READER).ask("hello")["ok"]
    assert metrics.total("kvctl_admin_requests_total", "status") == 1


def test_half_open_connections_and_junk_do_not_keep_others_out(
    client: Callable[..., Client], server: AdminServer
) -> None:
    port = int(server.remote_address.rpartition(":")[2])
    with contextlib.ExitStack() as held:
        for number in range(50):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.sendall((b"", b"\xff" + bytes(8) + b"\x7f", bytes(100))[number % 3])
        assert client(READER).ask("status")["ok"]


class TestConfiguration:
    def test_no_endpoint_no_door(self) -> None:
        assert remote_endpoint(load_settings({}, {}), FLEET) is None

    @pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:7", "tcp://0.0.0.0:7"])
    def test_without_keys_it_is_never_opened_whatever_insecure_says(self, endpoint: str) -> None:
        settings = load_settings({"admin_endpoint": endpoint, "admin_clients": "/c", "insecure": True}, {})
        with pytest.raises(ConfigError, match="needs fleet_key"):
            remote_endpoint(settings, None)

    def test_without_clients_it_is_never_opened(self) -> None:
        with pytest.raises(ConfigError, match="needs admin_clients"):
            remote_endpoint(load_settings({"admin_endpoint": "tcp://127.0.0.1:7"}, {}), FLEET)

    def test_it_is_tcp(self) -> None:
        with pytest.raises(ConfigError, match="write tcp://address:port"):
            remote_endpoint(load_settings({"admin_endpoint": "ipc:///x", "admin_clients": "/c"}, {}), FLEET)

    def test_with_a_plus_the_first_free_port_is_taken(
        self, serve: Serve, server: AdminServer, clients_file: Path
    ) -> None:
        taken = int(server.remote_address.rpartition(":")[2])
        other = serve("other", remote=RemoteEndpoint(f"{server.remote_address}+", FLEET, str(clients_file)))
        assert taken < int(other.remote_address.rpartition(":")[2]) < taken + 256
        other.close()

    @pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*+", "tcp://127.0.0.1+", "tcp://127.0.0.1:7++x+"])
    def test_a_plus_needs_a_port(self, endpoint: str) -> None:
        settings = load_settings({"admin_endpoint": endpoint, "admin_clients": "/c"}, {})
        with pytest.raises(ConfigError, match="for the first free port upwards"):
            remote_endpoint(settings, FLEET)

    def test_a_taken_port_and_a_missing_file_are_errors_of_the_start(
        self, serve: Serve, server: AdminServer, clients_file: Path
    ) -> None:
        with pytest.raises(AdminError, match=r"cannot bind admin_endpoint .*Address already in use"):
            serve("other", remote=RemoteEndpoint(server.remote_address, FLEET, str(clients_file)))
        with pytest.raises(AdminError, match="admin_clients: cannot read"):
            serve("other", remote=RemoteEndpoint("tcp://127.0.0.1:*", FLEET, str(clients_file.with_name("none"))))
        serve("other").close()  # the name was given back
