"""The registry of a prefill instance as a source: real agents with and without keys, old agents, old registries."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvctl.client.calls import Call
from kvctl.client.discovery import open_source, registry_source
from kvctl.client.discovery.source import Found, SourceError
from kvctl.client.endpoints import endpoint_of
from kvctl.client.fanout import Fanout
from kvctl.client.fleet import Fleet
from kvctl.client.keys import NO_KEYS, KeyNames
from kvctl.lab.tcp_ports import free_port
from kvctl_agent.host.keys import read_pair
from kvctl_agent.protocol import bootstrap_registry as registry
from tests.support.polling import until
from tests.support.routers import answer_with, router

S = 1_000_000_000
ELSEWHERE = "node-7"


def find(url: str, keys: KeyNames = NO_KEYS, timeout_s: float = 60.0) -> Found:
    return open_source(url, keys).find(time.monotonic_ns() + round(timeout_s * S))


class Keys:
    """The key files of a fleet, of a client with level read, and of a stranger."""

    def __init__(self, folder: Path) -> None:
        self.fleet, self.client = (read_pair(folder / f"{name}.key") for name in ("fleet", "default"))
        self.clients = folder / "clients"
        self.clients.write_text(f"read {self.client.public.hex()} on-call\n")
        own, stranger = (str(folder / f"{name}.key") for name in ("default", "stranger"))
        self.names, self.stranger = (KeyNames(each, self.fleet.public.hex()) for each in (own, stranger))
        self.config = {"fleet_key": str(folder / "fleet.key"), "admin_clients": str(self.clients)}


@pytest.fixture
def keys(keys: Path, kvctl: Any) -> Keys:
    assert kvctl("key", "new", "stranger").code == 0
    return Keys(keys)


@pytest.fixture
def remote(make_fleet: Any, keys: Keys) -> Any:
    """A fleet with keys whose agents say that they run on another host; one setting serves its three ranks."""
    port = free_port()
    fleet = make_fleet(host=ELSEWHERE, admin_endpoint=f"tcp://0.0.0.0:{port}+", **keys.config)
    fleet.bootstrap = f"tcp://127.0.0.1:{free_port()}"
    return fleet.start()


def url_of(fleet: Any) -> str:
    return f"registry://{fleet.bootstrap.removeprefix('tcp://')}"


NAMES = {"prefill-0", "prefill-1", "decode-0"}


def listed(url: str, names: KeyNames = NO_KEYS) -> Found:
    """Returns what the registry names once it has heard from every rank of the fleet."""

    def look() -> Found | None:
        found = find(url, names)
        return found if {each.name for each in found.endpoints} == NAMES else None

    return until(look, "the registry does not list all ranks")


def test_a_context_of_a_registry_is_all_it_takes(remote: Any, keys: Keys, kvctl: Any) -> None:
    assert {each.host for each in listed(url_of(remote), keys.names).endpoints} == {ELSEWHERE}, "not the address"
    more = ("--key", keys.names.own, "--server-key", keys.names.server)
    assert kvctl("context", "add", "prod", "-e", url_of(remote), *more).code == 0
    outcome = kvctl("-c", "prod", "agents", "-o", "json", "--timeout", "60s")
    assert outcome.code == 0, outcome.err
    rows = {row["agent"]: row for row in outcome.data}
    assert {name: row["level"] for name, row in rows.items()} == dict.fromkeys(NAMES, "read")
    # One setting, three ports, and no wildcard.
    assert len({row["endpoint"] for row in rows.values()}) == 3
    assert all(row["endpoint"].startswith("tcp://127.0.0.1:") for row in rows.values())
    assert kvctl("-c", "prod", "drain", "--all", "-y", "--timeout", "60s").code == 5


def test_a_client_may_ask_for_the_list_and_nothing_else(remote: Any, keys: Keys, zmq_context: Any) -> None:
    first = remote.prefill[0]
    listed(url_of(remote), keys.names)
    socket = zmq_context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_publickey, socket.curve_secretkey = keys.client.public, keys.client.secret
    socket.curve_serverkey = keys.fleet.public
    try:
        socket.connect(remote.bootstrap)
        thief = registry.Rank("prefill-0", "tcp://127.0.0.1:1", 1 << 62, [0, 0, 0, 0], [1, 1, 1, 2])
        for request in (registry.Register(thief), registry.Lookup("decode-7")):
            socket.send(registry.encode(request))
        until(
            lambda: first.telemetry.metrics.total("kvctl_connections_refused_total") == 2, "the client is not refused"
        )
        socket.send_multipart([b"KVA1", b"1", b'{"cmd": "drain"}'])
        assert socket.poll(60_000)
        magic, number, body = socket.recv_multipart()
        assert (magic, number) == (b"KVA1", b"1")
        assert json.loads(body)["error"]["code"] == "unknown-command"
    finally:
        socket.close()
    assert not first.draining
    assert {each.name for each in find(url_of(remote), keys.names).endpoints} == NAMES
    # The control socket of the same agent does not admit the client.
    control = remote.decode[0].parts.control_channel.endpoint(first.name)
    with pytest.raises(SourceError, match="refuses this client's key"):
        find(f"registry://{control.removeprefix('tcp://')}", keys.names)


def test_strangers_and_former_clients_are_refused(remote: Any, keys: Keys) -> None:
    with pytest.raises(SourceError, match="refuses this client's key"):
        find(url_of(remote), keys.stranger)
    with pytest.raises(SourceError, match="requires a key: give --server-key"):
        find(url_of(remote))
    keys.clients.write_text("# nobody\n")
    with pytest.raises(SourceError, match="refuses this client's key"):
        find(url_of(remote), keys.names)


def test_without_keys_the_agents_of_this_host_are_found_by_their_unix_sockets(make_fleet: Any, keys: Keys) -> None:
    fleet = make_fleet()
    fleet.bootstrap = f"tcp://127.0.0.1:{free_port()}"
    fleet.start()
    found = listed(url_of(fleet))
    assert {str(each.path) for each in found.endpoints} == {
        str(each.admin.path) for each in fleet.prefill + fleet.decode
    }
    with pytest.raises(SourceError, match="omit --server-key"):
        find(url_of(fleet), keys.names)


def test_a_registry_on_a_unix_socket(make_fleet: Any) -> None:
    fleet = make_fleet().start()
    assert fleet.bootstrap.startswith("ipc:///")
    listed(f"registry://{fleet.bootstrap.removeprefix('ipc://')}")


def test_agents_of_another_host_without_an_endpoint_are_named_with_the_remedy(make_fleet: Any) -> None:
    fleet = make_fleet(host=ELSEWHERE)
    fleet.bootstrap = f"tcp://127.0.0.1:{free_port()}"
    fleet.start()
    found = until(lambda: each if len((each := find(url_of(fleet))).faults) == 3 else None, "not all are listed")
    assert found.endpoints == ()
    assert {fault.agent for fault in found.faults} == NAMES
    assert all("has only a Unix socket, on host node-7: set admin_endpoint" in fault.message for fault in found.faults)


def test_a_registry_of_before_and_other_servers_are_told_from_a_registry(zmq_context: Any, kvctl: Any) -> None:
    with zmq_context.socket(zmq.ROUTER) as old:  # drops requests of several frames
        port = old.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(SourceError, match="its agent is too old to list agents"):
            find(f"registry://127.0.0.1:{port}", timeout_s=1.0)
        outcome = kvctl("-e", f"registry://127.0.0.1:{port}", "status", "--timeout", "300ms")
        assert (outcome.code, outcome.err.count("\n")) == (4, 1)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"agents": []},
        [1],
        [{"name": "x"}],
        [dict.fromkeys(("name", "role", "host", "admin", "socket", "address"), "x") | {"heard_ns": "soon"}],
    ],
)
def test_an_answer_of_another_shape_is_refused(data: Any) -> None:
    with (
        router("tcp://127.0.0.1:*", answer=lambda frames: answer_with(frames, data)) as address,
        pytest.raises(SourceError, match="not valid: update kvctl"),
    ):
        find(address.replace("tcp", "registry"))


def test_a_row_with_a_wrong_endpoint_harms_no_other(tmp_path: Path) -> None:
    row = {"name": "a", "role": "decode", "host": ELSEWHERE, "socket": "", "address": "10.0.0.9", "heard_ns": 0}
    silent = {**row, "name": "left", "admin": "tcp://10.0.0.9:7312", "heard_ns": 90 * S}
    # libzmq refuses a host name that begins with a dash, which would end all of kvctl's queries.
    wrong = ["tcp://a b:1", "file:///etc/passwd", "tcp://*:7311", "tcp://[::]:1x", "tcp://-x:1"]
    here = {**row, "host": socket.gethostname(), "admin": ""}
    rows = [
        {**here, "socket": f"{'/x' * 512}.sock", "name": "long"},
        {**here, "socket": str(tmp_path / "docker"), "name": "no-agent"},
        *({**row, "name": f"wrong-{number}", "admin": text} for number, text in enumerate(wrong)),
        {**row, "admin": "tcp://0.0.0.0:7311"},
        silent,
    ]
    listing = router("tcp://127.0.0.1:*", answer=lambda frames: answer_with(frames, rows))
    with listing as address, socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "docker"))
        found = find(address.replace("tcp", "registry"))
    assert [each.address for each in found.endpoints] == ["tcp://10.0.0.9:7311"]
    assert {fault.agent for fault in found.faults} == {
        "long",
        "no-agent",
        *(f"wrong-{number}" for number in range(len(wrong))),
    }


def test_a_decode_rank_that_leaves_is_named_no_more_until_it_comes_back(
    remote: Any, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_source, "_SILENT_NS", 3 * S)
    url = url_of(remote)
    listed(url, keys.names)

    def survey() -> Any:
        with Fleet([url], {}, 60 * S, keys.names) as fleet:
            return fleet.survey()

    assert until(lambda: len(survey().agents) == 3, "not all agents answer")
    for _ in range(2):
        remote.decode.pop().close()
        until(lambda: not survey().faults, "the rank that has left is still named")
        assert {agent.name for agent in survey().agents} == {"prefill-0", "prefill-1"}
        remote.decode.append(remote.decode_agent(0).start())
        until(lambda: len(survey().agents) == 3, "the rank that came back is not shown")


def test_a_decode_rank_whose_engine_sleeps_is_still_named(
    remote: Any, keys: Keys, kvctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `Agent.unregister` it asks the registry no more, and its admin socket still answers."""
    monkeypatch.setattr(registry_source, "_SILENT_NS", 1 * S)
    monkeypatch.setattr(registry_source, "_HELLO_NS", 60 * S)
    url = url_of(remote)
    listed(url, keys.names)
    (decode,) = remote.decode
    decode.unregister(60)

    def silent() -> bool:
        with Fanout(keys.names) as fanout:
            (reply,) = fanout.ask([(endpoint_of(remote.bootstrap), Call("agents"))], 60 * S)
        return any(row["name"] == decode.name and row["heard_ns"] > S for row in reply.data)

    until(silent, "the registry still hears from the decode rank")
    with Fleet([url], {}, 60 * S, keys.names) as fleet:
        survey = fleet.survey()
    assert {agent.name for agent in survey.agents} == NAMES
    assert survey.faults == []
    decode.close()
    more = ("--key", keys.names.own, "--server-key", keys.names.server)
    outcome = kvctl("-e", url, *more, "status", "--timeout", "60s")
    assert outcome.code == 0, outcome.err
    assert "decode-0" not in outcome.out


def test_a_silent_rank_that_does_not_answer_is_asked_once_and_briefly(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_source, "_HELLO_NS", 3 * S)  # what a busy host needs for the one that answers
    mute, other = socket_directory / "mute.sock", socket_directory / "other.sock"
    row = {"role": "decode", "host": socket.gethostname(), "admin": "", "address": "", "heard_ns": 90 * S}
    rows = [{**row, "name": path.stem, "socket": str(path)} for path in (mute, other)]
    asked: list[bytes] = []

    def hello(frames: list[bytes]) -> list[bytes]:
        asked.append(frames[2])
        return answer_with(frames, {"name": "decode-7"})

    with (
        router("tcp://127.0.0.1:*", answer=lambda frames: answer_with(frames, rows)) as address,
        router(f"ipc://{mute}", answer=lambda frames: asked.append(frames[2])),
        router(f"ipc://{other}", answer=hello),
    ):
        source = open_source(address.replace("tcp", "registry"), NO_KEYS)
        began = time.monotonic()
        for _ in range(2):
            found = source.find(time.monotonic_ns() + 60 * S)
            assert (found.endpoints, found.faults) == ((), ())
        assert time.monotonic() - began < 30, "not the time limit of the source"
        assert [json.loads(body)["cmd"] for body in asked] == ["hello", "hello"]


def test_the_list_is_whole_while_ranks_come_and_go(remote: Any, keys: Keys) -> None:
    """Every answer is a list of known names, however the ranks end and start meanwhile."""
    url, stop = url_of(remote), threading.Event()
    seen: list[set[str]] = []

    def look() -> None:
        while not stop.is_set():
            seen.append({each.name for each in find(url, keys.names).endpoints})

    listed(url, keys.names)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(4):
            for ranks, make in ((remote.decode, remote.decode_agent), (remote.prefill, remote.prefill_agent)):
                ranks.pop().close()
                ranks.append(make(len(ranks)).start())
    finally:
        stop.set()
        thread.join()
    assert len(seen) > 4
    assert all({"prefill-0"} <= names <= NAMES for names in seen)
    listed(url, keys.names)
