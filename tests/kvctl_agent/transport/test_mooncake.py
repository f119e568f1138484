"""Mooncake's known defects, each with a test that fails if its workaround is lost."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import struct
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import ConfigError, PeerDisconnected, TransportError, TransportUnavailable
from kvctl_agent.transport import Arrival, Region, open_transport
from kvctl_agent.transport.mooncake import engine as mooncake_engine
from kvctl_agent.transport.mooncake import transport as transport_module
from kvctl_agent.transport.mooncake.engine import Engine, Use
from kvctl_agent.transport.mooncake.writes import PEER_WINDOW
from tests.support.engines import run_with_engines

pytestmark = pytest.mark.usefixtures("mooncake_started")

HEAD_BYTES = len(b"kvctl-mooncake-1") + 4
ESTABLISHED = 1  # state of a TCP connection


def sizes(nbytes: int, count: int = 1) -> np.ndarray:
    return np.full(count, nbytes, np.uint64)


def told(metadata: bytes) -> dict[str, Any]:
    """The fields of a peer's metadata."""
    body: dict[str, Any] = json.loads(metadata[HEAD_BYTES:])
    return body


def retold(metadata: bytes, **changes: Any) -> bytes:
    """The metadata with changed fields, as a faulty or hostile peer might send it."""
    body = json.dumps({**told(metadata), **changes}).encode()
    return metadata[: HEAD_BYTES - 4] + zlib.crc32(body).to_bytes(4, "little") + body


def test_a_write_of_65536_small_descriptors_arrives_whole(crew: Any) -> None:
    rows, row_bytes = 65536, 512
    agent, peer = crew.agent("mooncake"), crew.peer("mooncake", PEER_POOL_BYTES=str(rows * row_bytes))
    source = np.frombuffer(secrets.token_bytes(rows * row_bytes), np.uint8)
    agent.transport.register([Region(source.ctypes.data, source.nbytes)])
    agent.transport.connect("peer", peer.metadata)
    order = np.random.default_rng(6).permutation(rows).astype(np.uint64) * np.uint64(row_bytes)
    here = np.arange(rows, dtype=np.uint64) * np.uint64(row_bytes) + np.uint64(source.ctypes.data)
    write = agent.transport.write("peer", here, order + np.uint64(peer.addr), sizes(row_bytes, rows), b"all")
    assert (write.bytes, write.descriptors) == (rows * row_bytes, rows)
    agent.finish(write, timeout_s=60)
    assert [arrival["tag"] for arrival in peer.collect(1)] == [b"all".hex()]
    for row in (0, 1, 255, 256, 1023, 1024, 4095, 40000, rows - 1):
        at = row * row_bytes
        assert peer.read(int(order[row]), row_bytes) == source[at : at + row_bytes].tobytes()
    there = np.frombuffer(b"".join(peer.read(at, 1 << 20) for at in range(0, rows * row_bytes, 1 << 20)), np.uint8)
    assert (there.reshape(rows, row_bytes)[order // row_bytes] == source.reshape(rows, row_bytes)).all()


def test_a_small_write_is_not_held_up_by_a_large_one_to_the_same_peer(crew: Any) -> None:
    agent, peer = crew.agent("mooncake"), crew.peer("mooncake")
    agent.transport.connect("peer", peer.metadata)
    offsets = range(0, 4 << 20, 128)
    large = agent.transport.write("peer", agent.at(*offsets), peer.at(*offsets), sizes(64, len(offsets)), b"large")
    small = agent.transport.write("peer", agent.at(0), peer.at(0), sizes(64), b"small")
    agent.finish(small)
    assert not large.poll()
    agent.finish(large, timeout_s=60)
    assert [arrival["tag"] for arrival in peer.collect(2)] == [b"small".hex(), b"large".hex()]


def test_a_peer_that_dies_in_the_middle_of_a_write_is_noticed(crew: Any) -> None:
    agent, peer = crew.agent("mooncake"), crew.peer("mooncake")
    agent.transport.connect("peer", peer.metadata)
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"warm"))
    offsets = range(0, 4 << 20, 128)
    write = agent.transport.write("peer", agent.at(*offsets), peer.at(*offsets), sizes(64, len(offsets)), b"t")
    assert not write.poll()
    peer.kill()
    with pytest.raises(PeerDisconnected, match="'peer' is gone"):
        agent.finish(write)  # entries in the engine's queue end after 1 s
    assert not write.entries
    with pytest.raises(PeerDisconnected):
        write.poll()


def connections(agent: Any, session: str) -> list[int]:
    """TCP states of the connections to a peer's engine."""
    states: list[int] = agent.transport._engine._connections(session)
    return states


@pytest.mark.parametrize("how", ["kill", "close", "restart"])
def test_connections_to_peers_that_have_ended_are_closed(crew: Any, how: str) -> None:
    agent = crew.agent("mooncake")
    for _ in range(2):
        peer = crew.peer("mooncake")
        agent.transport.connect("peer", peer.metadata)
        offsets = range(0, 4 << 20, 1 << 12)
        agent.finish(agent.transport.write("peer", agent.at(*offsets), peer.at(*offsets), sizes(64, 1024), b"t"))
        session = told(peer.metadata)["session"]
        assert connections(agent, session)
        if how == "close":
            agent.transport.disconnect("peer")
            agent.wait()  # looks at the connections while they are open
            peer.close()
            agent.transport._next_close = 0.0
        else:
            peer.kill()
            if how == "restart":
                agent.transport.connect("peer", crew.peer("mooncake").metadata)
            else:
                agent.transport.disconnect("peer")
        until = time.monotonic() + 60
        while agent.transport._disconnected:
            assert time.monotonic() < until, connections(agent, session)
            agent.wait()
        assert not connections(agent, session)
        agent.transport.disconnect("peer")


def test_connections_to_a_disconnected_peer_that_lives_are_not_touched(crew: Any) -> None:
    agent, peer = crew.agent("mooncake"), crew.peer("mooncake")
    agent.transport.connect("peer", peer.metadata)
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"one"))
    before = connections(agent, told(peer.metadata)["session"])
    agent.transport.disconnect("peer")
    assert not agent.transport._engine.close_ended(told(peer.metadata)["session"])
    agent.wait()
    after = connections(agent, told(peer.metadata)["session"])
    assert len(after) >= len(before)  # the engine may still be opening some
    assert set(after) == {ESTABLISHED}
    agent.transport.connect("peer", peer.metadata)
    assert not agent.transport._disconnected
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"two"))
    assert {arrival["tag"] for arrival in peer.collect(2)} == {b"one".hex(), b"two".hex()}  # over two connections


def test_a_stopped_peer_holds_up_nobody_else(crew: Any) -> None:
    agent, stopped, other = crew.agent("mooncake"), crew.peer("mooncake"), crew.peer("mooncake")
    agent.transport.connect("stopped", stopped.metadata)
    agent.finish(agent.transport.write("stopped", agent.at(0), stopped.at(0), sizes(4096), b"warm"))
    os.kill(stopped.process.pid, signal.SIGSTOP)
    offsets = range(0, 1 << 20, 128)
    held = agent.transport.write("stopped", agent.at(*offsets), stopped.at(*offsets), sizes(64, len(offsets)), b"held")
    while not held.poll() and len(held.entries) < PEER_WINDOW // 4:
        time.sleep(0.001)
    agent.transport.connect("other", other.metadata)
    for _ in range(20):
        agent.finish(agent.transport.write("other", agent.at(0), other.at(0), sizes(4096), b"t"))
    assert not held.poll()
    os.kill(stopped.process.pid, signal.SIGCONT)
    agent.finish(held, timeout_s=60)
    assert [arrival["tag"] for arrival in stopped.collect(2)] == [b"warm".hex(), b"held".hex()]


def test_connecting_to_a_stopped_peer_returns_at_once_and_its_writes_leave_when_it_goes_on(crew: Any) -> None:
    agent, peer, other = crew.agent("mooncake"), crew.peer("mooncake"), crew.peer("mooncake")
    os.kill(peer.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    agent.transport.connect("peer", peer.metadata)
    write = agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"late")
    assert not write.poll()
    agent.transport.connect("other", other.metadata)
    agent.finish(agent.transport.write("other", agent.at(0), other.at(0), sizes(4096), b"t"))
    assert time.monotonic() - started < 20
    os.kill(peer.process.pid, signal.SIGCONT)
    agent.finish(write)
    assert [arrival["tag"] for arrival in peer.collect(1)] == [b"late".hex()]


def test_closing_is_bounded_with_writes_in_flight_to_a_stopped_peer(crew: Any) -> None:
    agent, peer = crew.agent("mooncake"), crew.peer("mooncake")
    agent.transport.connect("peer", peer.metadata)
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"warm"))
    os.kill(peer.process.pid, signal.SIGSTOP)
    offsets = range(0, 4 << 20, 128)
    writes = [
        agent.transport.write("peer", agent.at(*offsets), peer.at(*offsets), sizes(64, len(offsets)), b"t"),
        agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4 << 20), b"t"),
    ]
    for _ in range(3000):
        agent.transport.tell("peer", b"t" * 4000)
    started = time.monotonic()
    agent.transport.close()
    assert time.monotonic() - started < 20  # half a second on a machine of its own
    for write in writes:
        with pytest.raises(TransportError, match="in flight when the transport was closed"):
            write.poll()
        assert write.release()
    crew.forget(agent)
    peer.kill()


def test_an_idle_agent_takes_less_than_three_percent_of_a_core(crew: Any, at_best: Any) -> None:
    agent, peer = crew.agent("mooncake"), crew.peer("mooncake")
    agent.transport.connect("peer", peer.metadata)
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"warm"))
    assert len(peer.collect(1)) == 1
    at_best(lambda: peer.ask("idle", seconds=0.5, poll_s=0.005)["share"], 0.03)


def test_it_is_reachable_from_this_host_alone_unless_told_otherwise(crew: Any) -> None:
    def listening() -> set[int]:
        names = [one.getsockname() for _, one in mooncake_engine._sockets() if mooncake_engine._listens(one)]
        return {name[1] for name in names if name[0] in ("0.0.0.0", "::")}

    before = listening()  # engines of earlier tests, which have not ended yet
    agent = crew.agent("mooncake")
    assert agent.transport.describe()["reachable"] == "from this host"
    ports = listening() - before
    assert len(ports) >= 2  # the engine asks for all interfaces, for data and for handshakes
    address = outside_address()
    for port in ports:
        with socket.socket() as stranger, pytest.raises(OSError, match="refused"):
            stranger.connect((address, port))


def test_sockets_that_other_threads_close_meanwhile_are_passed_over() -> None:
    opened = [socket.socket() for _ in range(3)]
    met = []
    for number, _ in mooncake_engine._sockets():
        if any(one.fileno() == number for one in opened):
            met.append(number)
            for other in opened:
                if other.fileno() != number:
                    other.close()
    assert len(met) == 1
    for one in opened:
        one.close()


def outside_address() -> str:
    """An address of this machine other than the loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has a loopback only")
        return str(probe.getsockname()[0])


def test_strangers_at_the_tag_port_are_dropped_and_disturb_nobody(crew: Any) -> None:
    agent, friend = crew.agent("mooncake"), crew.agent("mooncake", "friend")
    friend.transport.connect("agent", agent.transport.metadata())
    known = told(agent.transport.metadata())
    address, secret = tuple(known["tags"]), bytes.fromhex(known["secret"])
    ident = b"0" * 16
    junk = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"kvctltag" + bytes(16) + ident + b"\x01\x00x" + b"\x01\0\0\0t",
        b"kvctltag" + secret + ident + b"\xff\xff",
        b"kvctltag" + secret + ident + b"\x02\x00\xff\xfe" + b"\x01\0\0\0t",
        b"kvctltag" + secret + ident + b"\x01\x00x" + b"\xff\xff\xff\xff" + bytes(100),
        b"kvctltag" + secret + ident + b"\x01\x00x" + bytes(4),
        secrets.token_bytes(1 << 20),
    ]
    with contextlib.ExitStack() as stack:
        for _ in range(100):  # who connect and say nothing
            stack.enter_context(socket.create_connection(address))
        for one in junk:
            stranger = stack.enter_context(socket.create_connection(address))
            with contextlib.suppress(ConnectionError):  # thrown out before it has said everything
                say_and_wait_for_the_end(stranger, one, agent)
        friend.transport.tell("agent", b"hello")
        assert agent.collect(1) == [Arrival("friend", b"hello")]


def say_and_wait_for_the_end(stranger: socket.socket, what: bytes, agent: Any) -> None:
    stranger.setblocking(False)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            what = what[stranger.send(what) :] if what else what
            if not stranger.recv(1):
                return
        agent.wait()
    raise AssertionError("the connection lives on")


@pytest.mark.parametrize(
    "changes",
    [
        {"tags": ["127.0.0.1", 0]},
        {"tags": ["localhost", 80]},
        {"tags": []},
        {"secret": "zz"},
        {"secret": "00"},
        {"ident": "short"},
        {"regions": [[1]]},
        {"regions": [[-1, 5]]},
        {"regions": [[0, 1 << 70]]},
        {"session": None, "regions": 7},
    ],
)
def test_malformed_metadata_is_refused_by_name(crew: Any, changes: dict[str, Any]) -> None:
    agent = crew.agent("mooncake")
    with pytest.raises(TransportError, match="metadata of peer 'odd' is malformed"):
        agent.transport.connect("odd", retold(agent.transport.metadata(), **changes))


def test_a_peer_of_another_protocol_is_refused(crew: Any) -> None:
    agent = crew.agent("mooncake")
    with pytest.raises(TransportError, match="'fast' uses protocol rdma, this agent tcp"):
        agent.transport.connect("fast", retold(agent.transport.metadata(), protocol="rdma"))


def test_an_incarnation_with_the_port_of_a_dead_one_is_refused_with_words(crew: Any) -> None:
    one, two = crew.agent("mooncake"), crew.agent("mooncake")
    one.transport.connect("two", two.transport.metadata())
    with pytest.raises(TransportError, match=r"the port of an earlier agent .* restart that peer"):
        one.transport.connect("two", retold(two.transport.metadata(), ident="f" * 16))


def test_connecting_again_with_equal_metadata_mends_a_broken_link(crew: Any) -> None:
    one, two = crew.agent("mooncake"), crew.agent("mooncake")
    one.transport.connect("two", two.transport.metadata())
    one.transport.tell("two", b"before")
    assert len(two.collect(1)) == 1
    one.transport._peers["two"].link._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerDisconnected, match="'two' is gone"):
        one.transport.tell("two", b"into the void")
    one.transport.connect("two", two.transport.metadata())
    one.transport.tell("two", b"after")
    assert [arrival.tag for arrival in two.collect(1)] == [b"after"]


def test_connecting_again_opens_a_session_that_nobody_answered_at(crew: Any) -> None:
    one, two = crew.agent("mooncake"), crew.agent("mooncake")
    one.transport.connect("two", retold(two.transport.metadata(), session="127.0.0.1:1"))
    write = one.transport.write("two", one.at(0), two.at(0), sizes(8), b"t")
    with pytest.raises(PeerDisconnected, match=r"no engine answers at 127\.0\.0\.1:1"):
        one.finish(write)
    one.transport.connect("two", two.transport.metadata())
    one.finish(one.transport.write("two", one.at(0), two.at(0), sizes(8), b"t"))


def test_memory_of_a_gpu_needs_a_wheel_with_cuda(crew: Any) -> None:
    transport = crew.agent("mooncake").transport
    with pytest.raises(TransportUnavailable, match=r"cannot reach memory of GPU 1: .*transfer-engine-cuda13"):
        transport.register([Region(1 << 40, 4096, 1)])
    assert transport.describe()["lanes"] == ["tcp for bytes", "tcp for tags"]


def test_a_running_engine_tells_its_protocol_and_devices(crew: Any) -> None:
    agent = crew.agent("mooncake")
    described = agent.transport.describe()
    assert (described["protocol"], described["devices"]) == ("tcp", [])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'{"protocol": "rdma", "devices": [{"name": "mlx5_3", "lid": 0, "gid": "x"}]}', Use("rdma", ["mlx5_3"])),
        (b"no json", Use("", [])),
        (b"[]", Use("", [])),
    ],
)
def test_the_devices_of_an_engine_are_those_of_its_description(answer: bytes, expected: Use) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        session = f"127.0.0.1:{server.getsockname()[1]}"
        binding = SimpleNamespace(transfer_submit_write=None, transfer_check_status=None)
        engine = Engine("wheel 1", binding, session, [], True, False)

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.recv(11, socket.MSG_WAITALL)
                client.sendall(struct.pack("<QB", len(answer) + 1, 1) + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert engine.use() == expected
        thread.join(60)


class Refusing:
    """Mooncake's engine, built with CUDA, beside a network card that cannot reach GPU memory."""

    transfer_submit_write = transfer_check_status = None

    def batch_register_memory(self, addrs: list[int], sizes: list[int]) -> int:
        os.write(2, b"E rdma_context.cpp:602] Failed to register memory 0x10000000000: Bad address [14]\n")
        return -202


def test_a_card_that_cannot_reach_a_gpu_is_named_with_the_remedy(capfd: Any) -> None:
    engine = mooncake_engine.Engine("a wheel", Refusing(), "127.0.0.1:1", [], True, True)
    with pytest.raises(TransportError, match=r"code -202\): the network card cannot access GPU .*nvidia-peermem"):
        engine.register([Region(1 << 40, 4096, 1)])
    assert "Bad address" in capfd.readouterr().err


def test_regions_that_touch_are_registered_as_one(crew: Any) -> None:
    agent = crew.agent("mooncake")
    more = np.zeros(3 * 4096, np.uint8)
    start = more.ctypes.data
    agent.transport.register([Region(start + 8192, 4096), Region(start, 4096), Region(start + 4096, 4096)])
    assert [start, 3 * 4096, HOST] in told(agent.transport.metadata())["regions"]
    with pytest.raises(TransportError, match="must not overlap"):
        agent.transport.register([Region(start + 100, 8)])


def test_many_regions_are_said_to_be_slow(
    crew: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport_module, "_MANY_REGIONS", 3)
    agent = crew.agent("mooncake")
    more = np.zeros(4096, np.uint8)
    agent.transport.register([Region(more.ctypes.data + 8 * n, 4) for n in range(3)])
    assert "4 regions of memory" in caplog.text


def test_unknown_parameters_protocols_and_devices_are_refused_by_name() -> None:
    for params, said in [
        ({"protokol": "tcp"}, "no parameter 'protokol'; allowed: protocol, device, host"),
        ({"protocol": "udp"}, "no protocol 'udp'; allowed: tcp, rdma, nvlink"),
        ({"device": "mlx5_77"}, "no device 'mlx5_77'; this machine has"),
        ({"host": "no-such-host.invalid"}, "host no-such-host.invalid cannot be looked up: "),
        ({"host": "0.0.0.0"}, "peers can reach, not 0.0.0.0"),
    ]:
        with pytest.raises(ConfigError, match=said):
            open_transport("mooncake", "a", params)


def test_a_protocol_that_would_silently_become_tcp_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mooncake_engine, "_INFINIBAND", tmp_path / "none")
    with pytest.raises(TransportUnavailable, match="rdma needs an RDMA device"):
        open_transport("mooncake", "a", {"protocol": "rdma"})
    with pytest.raises(TransportUnavailable, match=r"was built without (nvlink|efa)"):
        open_transport("mooncake", "a", {"protocol": "nvlink"})


def test_the_variable_that_picks_the_protocol_is_the_users_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_FORCE_MNNVL", "mine")
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    open_transport("mooncake", "a").close()
    assert os.environ["MC_FORCE_MNNVL"] == "mine"
    assert "MC_FORCE_TCP" not in os.environ


def test_an_engine_that_completes_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that opens a session has a deadline, and the error of writes to that peer names the cause."""

    class Stuck:
        def send_probe(self, session: str) -> int:
            return 0

        def transfer_submit_write(self, session: str, local: int, remote: int, nbytes: int) -> int:
            return 7

        def transfer_check_status(self, entry: int) -> int:
            return 0

    monkeypatch.setattr(mooncake_engine, "_EMPTY_S", 0.05)
    engine = mooncake_engine.Engine("a wheel", Stuck(), "127.0.0.1:1", [], True, False)
    assert engine.open("127.0.0.1:2") == "127.0.0.1:2 did not complete an entry of no bytes within 0.05 s"


PAIR = (
    "pool = np.zeros(4096, np.uint8)\n"
    "a, b = open_transport('mooncake', 'a'), open_transport('mooncake', 'b')\n"
    "b.register([Region(pool.ctypes.data, 4096)])\n"
    "a.connect('b', b.metadata()); a.tell('b', b'x')\n"
)


def test_a_process_with_an_unclosed_agent_exits_cleanly_and_says_nothing() -> None:
    done = run_with_engines(PAIR)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_the_engine_logs_goes_to_stderr_at_every_level() -> None:
    done = run_with_engines(PAIR + "a.close(); b.close()\n", MC_LOG_LEVEL="INFO")
    assert (done.returncode, done.stdout) == (0, "")
    assert "TcpTransport: listen on port" in done.stderr


def test_a_variable_that_would_abort_the_process_is_refused(tmp_path: Path) -> None:
    done = run_with_engines("open_transport('mooncake', 'a')\n", MC_LOG_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "ConfigError: mooncake: MC_LOG_DIR ends the process" in done.stderr
