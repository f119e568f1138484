"""The registry: who is there, who is missing, in words; whoever comes late or comes back is served."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from kvctl.lab.tcp_ports import free_port
from kvctl_agent.contract.admin import MAGIC
from kvctl_agent.errors import ConfigError, DeadlineExceeded
from kvctl_agent.host.keys import KeyPair
from kvctl_agent.protocol.bootstrap_registry import (
    MAX_REQUEST_BYTES,
    Decline,
    Lookup,
    Rank,
    Register,
    Request,
    Roster,
    Whereabouts,
    encode,
)
from kvctl_agent.runtime.bootstrap import Registries, RegistryClient, RegistryServer, decline
from kvctl_agent.runtime.control_endpoints import connect
from tests.support.users import NOBODY, listen_as, needs_root

Context = zmq.Context[zmq.Socket[bytes]]
Ask = Callable[..., RegistryClient]


@pytest.fixture
def endpoint(directory: Path) -> str:
    return f"ipc://{directory}/boot"


@pytest.fixture
def server(zmq_context: Context, endpoint: str) -> Iterator[RegistryServer]:
    server = RegistryServer(zmq_context, endpoint).serve()
    yield server
    server.close()


@pytest.fixture
def ask(zmq_context: Context, endpoint: str) -> Iterator[Ask]:
    clients: list[RegistryClient] = []

    def new(name: str, request: Request | None = None) -> RegistryClient:
        clients.append(RegistryClient(zmq_context, endpoint, request or Lookup(name)))
        return clients[-1]

    yield new
    for client in clients:
        client.close()


def rank(tp: int, size: int = 8, name: str = "", incarnation: int = 1) -> Register:
    name = name or f"prefill-{tp}"
    return Register(Rank(name, f"ipc:///{name}", incarnation, [0, 0, 0, tp], [1, 1, 1, size]))


def turns(
    server: RegistryServer | None, *clients: RegistryClient, until: Callable[[], bool], timeout_s: float = 60.0
) -> None:
    deadline = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline, [client.roster for client in clients]
        for client in clients:
            client.turn(time.monotonic_ns())
        if server is not None:
            server.turn()
        time.sleep(0.001)


@needs_root
def test_a_registry_of_another_user_is_refused_until_the_right_one_serves(
    zmq_context: Context, endpoint: str, ask: Ask
) -> None:
    path = Path(endpoint.removeprefix("ipc://"))
    reader, only = ask("decode-0"), ask("prefill-0", rank(0, 1))
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with listen_as(NOBODY, path):
        turns(None, reader, only, until=lambda: bool(reader.roster.refused and only.roster.refused))
        assert reader.roster.refused.startswith(
            f"the registry at {endpoint} is refused: uid {NOBODY} listens on {path}"
        )
        assert not reader.roster.complete
    path.unlink()
    server = RegistryServer(zmq_context, endpoint).serve()
    turns(server, reader, only, until=lambda: reader.roster.complete)
    server.close()


def test_a_registry_is_not_served_where_others_could_replace_its_socket(zmq_context: Context, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match=r"cannot bind .* lets other users write to it: chmod go-w "):
        RegistryServer(zmq_context, f"ipc://{directory}/boot").serve()
    directory.chmod(0o700)


def test_whoever_asks_before_the_registry_exists_is_answered_once_it_does(
    zmq_context: Context, endpoint: str, ask: Ask
) -> None:
    reader, only = ask("decode-0"), ask("prefill-0", rank(0, 1))
    for _ in range(50):
        reader.turn(time.monotonic_ns())
        only.turn(time.monotonic_ns())
        time.sleep(0.002)
    server = RegistryServer(zmq_context, endpoint).serve()
    turns(server, reader, only, until=lambda: reader.roster.complete)
    server.close()


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (rank(0, name="impostor"), "impostor claims tp=0, which prefill-0 holds"),
        (rank(1, size=4), "prefill-1 is of an instance of sizes"),
        (Register(Rank("odd", "ipc:///x", 1, [0, 0, 0, 9], [1, 1, 1, 8])), "odd: tp=9 is outside"),
        (Register(Rank("odd", "ipc:///x", 1, [0], [1, 1, 1, 8])), "odd: "),
        (
            Register(Rank("odd", "tcp://[::1:7", 1, [0, 0, 0, 1], [1, 1, 1, 8])),
            "odd: 'tcp://[::1:7' is not an endpoint",
        ),
        (Register(Rank("odd", "ipc:///x", 1, [0, 0, 0, 0], [0, 1, 1, 8])), "odd: "),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_in_words_and_changes_nothing(
    server: RegistryServer, ask: Ask, request_: Register, text: str
) -> None:
    first, odd = ask("prefill-0", rank(0)), ask("odd", request_)
    turns(server, first, until=lambda: bool(first.roster.ranks))
    turns(server, odd, until=lambda: bool(odd.roster.refused))
    assert odd.roster.refused.startswith(f"the registry refuses {text}")
    assert not odd.roster.complete
    assert [known.name for known in odd.roster.ranks] == ["prefill-0"]


def test_an_answer_that_says_the_same_is_no_change(server: RegistryServer, ask: Ask) -> None:
    only = ask("prefill-0", rank(0, 1))
    changes: list[bool] = []
    turns(server, until=lambda: changes.append(only.turn(time.monotonic_ns())) or any(changes))
    for _ in range(3):
        only.due_ns = 0
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            server.turn()
            assert not only.turn(time.monotonic_ns())


def test_garbage_at_either_end_is_ignored(
    zmq_context: Context, endpoint: str, server: RegistryServer, ask: Ask
) -> None:
    stranger = connect(zmq_context, endpoint, b"stranger", 1 << 20)
    for frames in ([b""], [b"garbage"], [b"a", b"b"], [bytes(MAX_REQUEST_BYTES + 1)]):
        stranger.send_multipart(frames)
    only = ask("prefill-0", rank(0, 1))
    turns(server, only, until=lambda: only.roster.complete)
    identity = only.identity
    assert isinstance(identity, bytes)
    server.socket.send_multipart([identity, b"garbage"])
    reader = ask("decode-0")
    turns(server, only, reader, until=lambda: reader.roster.complete)
    assert only.roster.complete
    stranger.close()


def test_a_roster_of_endpoints_that_nobody_can_connect_to_is_no_roster(
    zmq_context: Context, server: RegistryServer, ask: Ask
) -> None:
    """Connecting to one raised in the control loop: what else the loop had to do in that turn was lost."""
    only, reader = ask("prefill-0", rank(0, 1)), ask("decode-0")
    turns(server, only, reader, until=lambda: reader.roster.complete)
    identity = reader.identity
    assert isinstance(identity, bytes)
    roster = Roster([Rank("prefill-0", "tcp://10.0.0.5:7/", 1, [0, 0, 0, 0], [1, 1, 1, 1])], 1, "")
    server.socket.send_multipart([identity, encode(roster)])
    turns(server, reader, until=lambda: not reader.roster.complete)
    assert reader.roster.missing.startswith("the registry's answer is invalid: rank prefill-0: 'tcp://10.0.0.5:7/' is")


def test_a_second_registry_at_the_same_place_is_refused(
    zmq_context: Context, endpoint: str, server: RegistryServer
) -> None:
    with pytest.raises(ConfigError, match="is another agent using it"):
        RegistryServer(zmq_context, endpoint).serve()


class TestSeveralInstances:
    """A decode rank asks the registry of each prefill instance that it serves."""

    def test_each_is_asked_and_told_apart(self, zmq_context: Context, directory: Path) -> None:
        endpoints = [f"ipc://{directory}/boot{number}" for number in range(2)]
        servers = [RegistryServer(zmq_context, endpoint).serve() for endpoint in endpoints]
        ranks = [
            RegistryClient(zmq_context, endpoint, rank(0, size=1, name=f"p{number}"))
            for number, endpoint in enumerate(endpoints)
        ]
        registries = Registries(zmq_context, Lookup("decode-0"))
        for endpoint in [*endpoints, endpoints[0]]:
            registries.ask(endpoint)
        assert registries.changes == len(registries.sockets()) == 2
        told: set[str] = set()
        deadline = time.monotonic() + 60
        while not all(registries.roster(endpoint).complete for endpoint in endpoints):
            assert time.monotonic() < deadline
            for turner in ranks:
                turner.turn(time.monotonic_ns())
            for server in servers:
                server.turn()
            told |= set(registries.turn(set(), time.monotonic_ns()))
            registries.hurry()
            time.sleep(0.002)
        told |= set(registries.turn(set(registries.sockets()), time.monotonic_ns()))
        assert told == set(endpoints)
        assert [[each.name for each in registries.roster(endpoint).ranks] for endpoint in endpoints] == [["p0"], ["p1"]]
        registries.close()
        for closing in [*ranks, *servers]:
            closing.close()


def test_a_client_that_does_not_read_has_few_lists_waiting(zmq_context: Context) -> None:
    """A list may have megabytes, and without keys anybody can ask for it, as often as they like."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    server = RegistryServer(zmq_context, endpoint).serve()
    client = zmq_context.socket(zmq.DEALER)
    client.linger, client.rcvhwm = 0, 1
    try:
        for number in range(1000):
            request = Lookup(f"decode-{number}", at=Whereabouts(socket="/" * 1000))
            server._registry.answer(request, time.monotonic_ns())
        client.connect(endpoint)
        asked = 100
        for number in range(asked):
            client.send_multipart([MAGIC, b"%d" % number, b'{"cmd": "agents"}'])
        turns(server, until=lambda: server._registry._replies == asked)
        received = 0
        deadline = time.monotonic() + 60
        while True:
            server.turn()
            if client.poll(20):
                received += 1
                if client.recv_multipart()[1] == b"last":
                    break
            else:  # all that were waiting are read
                client.send_multipart([MAGIC, b"last", b'{"cmd": "agents"}'])
            assert time.monotonic() < deadline, "the registry answers no more"
        assert received < asked // 2
    finally:
        client.close()
        server.close()


def test_a_client_that_has_shown_no_key_is_not_permitted(zmq_context: Context) -> None:
    keys = KeyPair(*(z85.decode(half) for half in zmq.curve_keypair()))
    refused: list[str] = []
    server = RegistryServer(zmq_context, "tcp://127.0.0.1:0", keys, refused=refused.append)
    assert server._reply([encode(Lookup("decode-0"))], "127.0.0.1", b"") is None
    reply = server._reply([MAGIC, b"1", b'{"cmd": "agents"}'], "127.0.0.1", b"")
    assert reply is not None
    assert b"not-permitted" in reply[-1]
    assert len(refused) == 1
    assert server._reply([encode(Lookup("decode-0"))], "", None) is not None, "over a Unix socket"


def test_a_declined_room_is_told_once_the_registry_has_answered(server: RegistryServer, endpoint: str) -> None:
    telling = threading.Thread(target=decline, args=(endpoint, 7, "another rank has it", None, 30.0))
    telling.start()
    told: list[Decline] = []
    deadline = time.monotonic() + 30
    while telling.is_alive() and time.monotonic() < deadline:
        told += server.turn()
        time.sleep(0.001)
    telling.join(1)
    assert set(told) == {Decline(7, "another rank has it")}


def test_without_an_answer_declining_ends_and_names_the_registry(endpoint: str) -> None:
    with pytest.raises(DeadlineExceeded, match=f"room 7 was not declined within 0.1 s: no answer from .*{endpoint}"):
        decline(endpoint, 7, "another rank has it", None, 0.1)


def test_without_descriptors_a_room_is_not_declined(endpoint: str) -> None:
    """libzmq would end the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 8, hard))
    try:
        with pytest.raises(ConfigError, match="room 7 was not declined: 32 more file descriptors are needed"):
            decline(endpoint, 7, "another rank has it", None, 0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
