"""The client on docs/routers.md, which is that of examples/cost_router.py, against real admin servers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.errors import RequestRefused
from kvctl_agent.host.keys import KeyPair
from kvctl_agent.observer.endpoints import RemoteEndpoint
from tests.support.admin_server import AdminServer

ROOT = Path(__file__).parents[3]
COST = {"role": "prefill", "costs": [], "ahead_ns": 0}

Serve = Callable[..., AdminServer]


def pair() -> KeyPair:
    return KeyPair(*(z85.decode(half) for half in zmq.curve_keypair()))


@pytest.fixture
def page() -> str:
    return (ROOT / "docs" / "routers.md").read_text()


@pytest.fixture
def agent(page: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Runs the program of the page with a context of its own, and closes the sockets that it opens."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    context: zmq.Context[Any] = zmq.Context()
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    names: dict[str, Any] = {}
    exec(compile(program, "docs/routers.md", "exec"), names)
    made: list[Any] = []

    def create(*args: Any, **options: Any) -> Any:
        made.append(names["Agent"](*args, **options))
        return made[-1]

    yield create
    context.destroy(linger=0)


def test_the_page_has_the_client_of_the_example(page: str) -> None:
    example = (ROOT / "examples" / "cost_router.py").read_text()
    (client,) = re.findall(r"^class Agent:\n.*?(?=\n\n\nclass )", example, re.MULTILINE | re.DOTALL)
    assert client in page


def test_a_refusal_and_silence_are_errors_that_name_the_agent(
    agent: Callable[..., Any], serve: Serve, tmp_path: Path
) -> None:
    def refuse(_: dict[str, Any]) -> Any:
        raise RequestRefused(ErrorCode.REFUSED, "not now")

    server = serve(own={"cost": refuse})
    client = agent(f"ipc://{server.path}", timeout_ms=60_000)
    with pytest.raises(RuntimeError, match=r"^ipc://.*decode-0\.sock: not now$"):
        client.ask("cost")
    silent = agent(f"ipc://{tmp_path}/none.sock", timeout_ms=50)
    with pytest.raises(TimeoutError, match=r"none\.sock has not answered cost within 50 ms"):
        silent.ask("cost")


def test_it_asks_over_tcp_with_keys(agent: Callable[..., Any], serve: Serve, tmp_path: Path) -> None:
    fleet, router = pair(), pair()
    clients = tmp_path / "clients"
    clients.write_text(f"read {router.public.hex()} the router\n")
    clients.chmod(0o600)
    key, server_key = tmp_path / "router.key", tmp_path / "fleet.pub"
    key.write_text(f'public = "{router.public.hex()}"\nsecret = "{router.secret.hex()}"\n')
    server_key.write_text(f"{fleet.public.hex()} fleet\n")
    server = serve(own={"cost": lambda _: COST}, remote=RemoteEndpoint("tcp://127.0.0.1:*", fleet, str(clients)))
    assert server.remote_address is not None
    assert agent(server.remote_address, str(key), str(server_key), timeout_ms=60_000).ask("cost") == COST
    stranger = agent(server.remote_address, timeout_ms=200)
    with pytest.raises(TimeoutError):
        stranger.ask("cost")
