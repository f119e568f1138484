"""A fleet with a key: it works, all its sockets refuse strangers, and nothing public is opened without one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from kvctl.lab.tcp_ports import free_port
from kvctl_agent.errors import AdminError, ConfigError
from kvctl_agent.host.keys import KeyPair, secret_text
from kvctl_agent.protocol import bootstrap_registry as registry
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import messages as msg
from kvctl_agent.security.curve import load_fleet_key
from tests.support.polling import until

A_WHILE_MS = 300
Context = zmq.Context[zmq.Socket[bytes]]


def pair() -> KeyPair:
    return KeyPair(*(z85.decode(half) for half in zmq.curve_keypair()))


@pytest.fixture
def fleet_key(tmp_path: Path) -> str:
    path = tmp_path / "fleet.key"
    path.touch(0o600)
    path.write_text(secret_text("fleet", pair()))
    return str(path)


@pytest.fixture
def strangers(zmq_context: Context) -> Iterator[Any]:
    """Connects DEALERs with a key that nobody knows, or with none."""
    made: list[zmq.Socket[bytes]] = []

    def connect(endpoint: str, server: bytes | None) -> zmq.Socket[bytes]:
        dealer = zmq_context.socket(zmq.DEALER)
        made.append(dealer)
        dealer.linger = 0
        if server is not None:
            own = pair()
            dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = own.public, own.secret, server
        dealer.connect(endpoint)
        return dealer

    yield connect
    for dealer in made:
        dealer.close()


def test_rooms_move_between_owners_of_the_key_and_its_threads_end(make_fleet: Any, fleet_key: str) -> None:
    fleet = make_fleet(fleet_key=fleet_key)
    fleet.start()
    assert sum(thread.name.endswith("-keys") for thread in threading.enumerate()) == 3
    fleet.run(7, 8)
    fleet.check()
    assert fleet.total(fleet.prefill + fleet.decode, "kvctl_connections_refused_total") == 0


@pytest.mark.parametrize("with_key", [True, False], ids=["a stranger's key", "no key"])
def test_registry_and_control_do_not_hear_strangers(
    make_fleet: Any, fleet_key: str, strangers: Any, with_key: bool
) -> None:
    fleet = make_fleet(fleet_key=fleet_key)
    fleet.bootstrap = f"tcp://127.0.0.1:{free_port()}"
    fleet.start()
    first = fleet.prefill[0]
    keys = load_fleet_key(fleet_key)
    assert keys is not None
    server = keys.public if with_key else None
    endpoint = fleet.decode[0].parts.control_channel.endpoint(first.name)
    known = set(first.parts.machine.peers)
    control = strangers(endpoint, server)
    with contextlib.suppress(zmq.Again):  # refused before it could say anything
        control.send(codec.encode(1, [msg.Heartbeat(1), msg.Bye(True)]), zmq.NOBLOCK)
    asker = strangers(fleet.bootstrap, server)
    rank = registry.Rank("thief", "tcp://127.0.0.1:1", 1, [0, 0, 0, 0], [1, 1, 1, 2])
    with contextlib.suppress(zmq.Again):
        asker.send(registry.encode(registry.Register(rank)), zmq.NOBLOCK)
    refused = 2 if with_key else 0
    until(
        lambda: first.telemetry.metrics.total("kvctl_connections_refused_total") >= refused,
        "the strangers are not refused",
    )
    assert not asker.poll(A_WHILE_MS)
    assert not control.poll(A_WHILE_MS)
    assert set(first.parts.machine.peers) == known
    assert first.telemetry.metrics.total("kvctl_connections_refused_total") == refused
    fleet.run(7, 8)
    fleet.check()


def test_an_agent_with_another_key_does_not_join(make_fleet: Any, fleet_key: str, tmp_path: Path) -> None:
    fleet = make_fleet(fleet_key=fleet_key, prefill=(1, 1))
    fleet.bootstrap = f"tcp://127.0.0.1:{free_port()}"
    prefill = fleet.prefill_agent(0).start()
    fleet.prefill.append(prefill)
    prefill.wait_ready(60)
    other = tmp_path / "other.key"
    other.touch(0o600)
    other.write_text(secret_text("other", pair()))
    decode = fleet.decode_agent(0, fleet_key=str(other)).start()
    fleet.decode.append(decode)
    with pytest.raises(TimeoutError, match="no answer from the registry"):
        decode.wait_ready(0.5)


class TestPublicAddresses:
    @pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:7000", "tcp://10.1.2.3:7000"])
    def test_registry_and_control_are_refused_without_a_key(
        self, make_fleet: Any, fleet_key: str, endpoint: str
    ) -> None:
        fleet = make_fleet()
        fleet.bootstrap = endpoint
        with pytest.raises(ConfigError, match=r"is not a loopback address and there are no keys.*fleet_key"):
            fleet.prefill_agent(0)
        fleet.prefill_agent(0, fleet_key=fleet_key).close()
        fleet.prefill_agent(0, insecure=True).close()

    def test_admin_is_refused_without_a_key_even_where_insecure(self, make_fleet: Any, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="needs fleet_key"):
            make_fleet().prefill_agent(
                0, insecure=True, admin_endpoint="tcp://0.0.0.0:7000", admin_clients=str(tmp_path / "clients")
            )


class TestBadKeyFiles:
    def test_halves_that_do_not_belong_together(self, make_fleet: Any, tmp_path: Path) -> None:
        path = tmp_path / "mixed.key"
        path.touch(0o600)
        path.write_text(secret_text("mixed", KeyPair(pair().public, pair().secret)))
        with pytest.raises(ConfigError, match=r"fleet_key: the two keys in .*mixed\.key are not a pair"):
            make_fleet().prefill_agent(0, fleet_key=str(path))

    def test_a_file_of_clients_that_is_missing_is_an_error_of_the_start(
        self, make_fleet: Any, fleet_key: str, tmp_path: Path
    ) -> None:
        agent = make_fleet().prefill_agent(
            0, fleet_key=fleet_key, admin_endpoint="tcp://127.0.0.1:*", admin_clients=str(tmp_path / "none")
        )
        with pytest.raises(AdminError, match="admin_clients: cannot read"):
            agent.start()

    def test_one_that_others_can_read(self, make_fleet: Any, fleet_key: str) -> None:
        os.chmod(fleet_key, 0o644)  # noqa: PTH101
        with pytest.raises(ConfigError, match=r"fleet_key: .*chmod 600"):
            make_fleet().prefill_agent(0, fleet_key=fleet_key)
