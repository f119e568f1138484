"""Endpoints that the agent chooses: a registry on a free port, control sockets on addresses of their own."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl_agent.errors import ConfigError


@pytest.mark.parametrize("port", ["0", "*"])
def test_a_registry_on_a_free_port_says_its_endpoint(make_fleet: Any, port: str) -> None:
    fleet = make_fleet(prefill=(1, 2))
    fleet.bootstrap = f"tcp://localhost:{port}"
    first = fleet.prefill_agent(0)
    fleet.prefill.append(first)
    assert first.bootstrap is None
    with pytest.raises(ConfigError, match=r"give the other ranks its Agent\.bootstrap"):
        fleet.prefill_agent(1)
    with pytest.raises(ConfigError, match=r"give the other ranks its Agent\.bootstrap"):
        fleet.decode_agent(0)
    first.start()
    fleet.bootstrap = first.bootstrap
    assert fleet.bootstrap.startswith("tcp://localhost:")
    assert int(fleet.bootstrap.rpartition(":")[2]) > 0
    fleet.prefill.append(fleet.prefill_agent(1).start())
    fleet.decode.append(fleet.decode_agent(0).start())
    for agent in fleet.prefill + fleet.decode:
        agent.wait_ready(60)
        assert agent.bootstrap == fleet.bootstrap
    with pytest.raises(ConfigError, match=r"give the other ranks its Agent\.bootstrap"):
        fleet.decode[0].receive(1, [0], prefill="tcp://localhost:0")
    fleet.run(7, 8)
    fleet.check()


def test_ranks_listen_on_addresses_of_their_own(make_fleet: Any) -> None:
    """The registry and both prefill ranks are at three addresses, as they are on three hosts."""
    fleet = make_fleet(prefill=(1, 2))
    fleet.bootstrap = "tcp://127.0.0.1:0"
    fleet.prefill.append(fleet.prefill_agent(0, listen="127.0.0.2").start())
    fleet.bootstrap = fleet.prefill[0].bootstrap
    fleet.prefill.append(fleet.prefill_agent(1, listen="127.0.0.3").start())
    fleet.decode.append(fleet.decode_agent(0).start())
    fleet.decode[0].wait_ready(60)
    channel = fleet.decode[0].parts.control_channel
    hosts = [channel.endpoint(agent.name).rpartition(":")[0] for agent in fleet.prefill]
    assert hosts == ["tcp://127.0.0.2", "tcp://127.0.0.3"]
    fleet.run(7, 8)
    fleet.check()


def test_a_public_listen_address_needs_a_key(make_fleet: Any) -> None:
    with pytest.raises(ConfigError, match=r"tcp://10\.0\.0\.5:0: 10\.0\.0\.5 is not a loopback address"):
        make_fleet().prefill_agent(0, listen="10.0.0.5")
    make_fleet().prefill_agent(0, listen="10.0.0.5", insecure=True).close()


def test_an_address_of_another_host_is_explained(make_fleet: Any) -> None:
    agent = make_fleet().prefill_agent(0, listen="192.0.2.1", insecure=True)
    with pytest.raises(ConfigError, match=r"cannot bind tcp://192\.0\.2\.1.*set listen to an address of this host"):
        agent.start()
