"""vLLM's own connectors with `KVCTL_VLLM=observe`: rooms of both ends, and faults that doctor names first."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvctl.lab.tcp_ports import free_port
from kvctl_agent import room_number
from tests.vllm_engines.checkpoints import write_model
from tests.vllm_engines.conftest import ARGUMENTS, BLOCK_TOKENS, ENVIRONMENT, Engines, prompt_of
from tests.vllm_engines.processes import ANSWER_S, REPOSITORY, Engine, Params, Request, Tokens, start_all

CONNECTORS = {"pull": "NixlConnector", "push": "NixlPushConnector", "mooncake": "MooncakeConnector"}
LEASE_S = 15
# Of a Llama of 4 layers in float32.
PROMPT = 100
BLOCKS = -(-PROMPT // BLOCK_TOKENS)


def without_id(transfer: Params) -> Params:
    """Returns the configuration of a child of MultiConnector, which has the id of its parent."""
    return {key: value for key, value in transfer.items() if key != "engine_id"}


class Observed:
    """A prefill and a decode engine with one of vLLM's own connectors, and what kvctl says about them."""

    def __init__(self, kind: str, folder: Path, tp_size: int = 1) -> None:
        self.kind = kind
        self.folder = folder / f"{kind}-{tp_size}"
        self._tp_size = tp_size
        self.sockets = self.folder / "s"
        self.sockets.mkdir(parents=True, mode=0o700)
        write_model(self.folder / "model", "llama")
        self._numbers = count(1)
        self.ports = {role: free_port() for role in ("prefill", "decode")}
        self.prefill, self.decode = (self._engine(kind, role) for role in self.ports)

    def _engine(self, kind: str, role: str) -> Engine:
        transfer: dict[str, Any] = {
            "kv_connector": CONNECTORS[kind],
            "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
            "kv_buffer_device": "cpu",
            "engine_id": f"{kind}-{role}",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        if kind == "mooncake":
            transfer["kv_connector_extra_config"] = {"mooncake_protocol": "tcp"}
        if kind == "pull" and role == "prefill":  # beside another child
            stored = {"shared_storage_path": str(self.folder / "stored")}
            example = {**transfer, "kv_connector": "ExampleConnector", "kv_connector_extra_config": stored}
            children = {"connectors": [without_id(transfer), without_id(example)]}
            transfer = {**transfer, "kv_connector": "MultiConnector", "kv_connector_extra_config": children}
        environment = {
            **ENVIRONMENT,
            "KVCTL_VLLM": "observe",
            "KVCTL_OBSERVER": "process",
            "KVCTL_SOCKET_DIR": str(self.sockets),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.ports[role]),
            # Of MooncakeConnector; its decode engines listen at a port that its transfer engine chooses.
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.ports[role]),
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LEASE_S),
            "VLLM_MOONCAKE_CONNECTOR_TIMEOUT": "10",  # three times for a bootstrap server that does not answer
            "VLLM_HOST_IP": "127.0.0.1",
        }
        arguments = {
            **ARGUMENTS,
            "model": str(self.folder / "model"),
            "kv_transfer_config": transfer,
            "tensor_parallel_size": self._tp_size,
        }
        if kind == "pull":  # ExampleConnector does not support it, and both engines must have the same
            arguments["disable_hybrid_kv_cache_manager"] = True
        return Engine(Path(os.environ["VLLM_VENV"]) / "bin" / "python", self.folder, role, environment, arguments)

    def name(self, role: str) -> str:
        if self.kind != "mooncake":
            return f"{role}-tp0@localhost:{self.ports[role]}"
        if role == "prefill":
            return f"prefill-tp0@127.0.0.1:{self.ports[role]}"
        (decode,) = (row["name"] for row in self.kvctl("status") if row["role"] == "decode")
        return str(decode)

    # ---- requests --------------------------------------------------------------------------------------------------

    def compute(self, prompt: Tokens) -> Params:
        """Has prefill compute a prompt; returns the parameters for decode."""
        asked: Params = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.kind == "mooncake":
            asked["transfer_id"] = f"transfer-{next(self._numbers)}"
        params = self.prefill.answer(self.prefill.submit(prompt, 1, asked)).params
        if self.kind == "mooncake":
            assert not params
            address = f"http://127.0.0.1:{self.ports['prefill']}"
            ours = {"do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "mooncake-prefill"}
            return {**asked, **ours, "remote_bootstrap_addr": address}
        assert params, "prefill's answer has no kv_transfer_params"
        return params

    def sent(self, params: Params) -> list[Any]:
        """Returns prefill's rows of a request that has ended."""
        room = str(room_number(str(params.get("transfer_id"))))
        rows = [row for row in self.kvctl("rooms", "history") if row["role"] == "prefill"]
        request = params.get("remote_request_id")
        return [row for row in rows if row["request_id"] == request or (not request and str(row["room"]) == room)]

    def receive(self, prompt: Tokens, params: Params | None = None) -> Request:
        return self.decode.answer(self.decode.submit(prompt, 8, params))

    def hand_over(self, seed: object) -> Tokens:
        """Takes a prompt through both engines; returns decode's tokens."""
        prompt = prompt_of(PROMPT, seed)
        return self.receive(prompt, self.compute(prompt)).tokens

    def connect(self) -> None:
        """Takes prompts through both engines until one was transferred: vLLM waits 5 s for a busy engine, no longer."""
        deadline, number = time.monotonic() + ANSWER_S, 0
        while not [row for row in self.kvctl("rooms", "history") if row["bytes"]]:
            assert time.monotonic() < deadline, self.kvctl("rooms", "failed")
            number += 1
            self.hand_over(f"connect {number}")

    # ---- kvctl -----------------------------------------------------------------------------------------------------

    def kvctl(self, *arguments: str) -> Any:
        """Returns the rows that a command prints as JSON."""
        done = self._run(*arguments, "-o", "json")
        assert done.stdout, done.stderr
        return json.loads(done.stdout)["data"]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a command, which must succeed."""
        done = self._run(*arguments)
        assert done.returncode == 0, (arguments, done)
        return done

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvctl", "--timeout", "20s", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "KVCTL_SOCKET_DIR": str(self.sockets)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def until(self, read: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
        """Returns what `read` returns as soon as it holds; fails with the last answer at the deadline."""
        deadline = time.monotonic() + ANSWER_S
        while not holds(found := read()):
            assert time.monotonic() < deadline, found
        return found

    def doctor(self, code: str, beside: str = "") -> Any:
        """Waits until doctor names this code, and returns its finding; it must be the first, beside one from before."""
        rows = self.until(
            lambda: [row for row in self.kvctl("doctor") if row["rank"] is not None and row["code"] != beside],
            lambda rows: code in [row["code"] for row in rows],
        )
        assert rows[0]["code"] == code, [(row["code"], row["cause"]) for row in rows]
        return rows[0]

    def stop(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.kill()


@pytest.fixture(scope="module", params=list(CONNECTORS))
def observed(request: pytest.FixtureRequest, engines: Engines, folder: Path) -> Iterator[Observed]:
    engines.stop()
    pair = Observed(request.param, folder)
    try:
        start_all([pair.prefill, pair.decode])
        yield pair
    finally:
        pair.stop()


@contextmanager
def filtered() -> Iterator[int]:
    """Yields a port at which the kernel drops what arrives, as a firewall does: its queue of connections is full."""
    with ExitStack() as sockets:
        listening = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]


def test_rooms_of_both_ends(observed: Observed) -> None:
    pair, kind = observed, "read" if observed.kind == "pull" else "write"
    observed.connect()
    prompt = prompt_of(PROMPT, seed="rooms")
    params = pair.compute(prompt)
    received = pair.receive(prompt, params)
    assert received.tokens == pair.receive(prompt).tokens  # as decode computes it alone
    (sent,) = pair.until(lambda: pair.sent(params), bool)
    both = {row["role"]: row for row in pair.kvctl("rooms", "history") if row["room"] == sent["room"]}
    assert [(row["state"], row["pages"], row["tokens"]) for row in both.values()] == [("Success", BLOCKS, PROMPT)] * 2
    assert (both["decode"]["parts"], both["decode"]["paths"]) == (1, {kind: 1})
    block_bytes = both["decode"]["bytes"] // BLOCKS
    assert both["decode"]["bytes"] == BLOCKS * block_bytes > 0
    assert both["prefill"]["bytes"] == (0 if kind == "read" else BLOCKS * block_bytes)
    assert (both["prefill"]["peers"], both["decode"]["peers"]) == ([pair.name("decode")], [pair.name("prefill")])
    shown = json.dumps(pair.kvctl("rooms", "show", sent["room"]))
    assert f"holds {BLOCKS} blocks, with a lease of " in shown
    assert f"{kind} of " in shown
    peers = {(row["agent"], row["peer"], row["state"]) for row in pair.kvctl("peers")}
    assert peers == {
        (pair.name("prefill"), pair.name("decode"), "ready"),
        (pair.name("decode"), pair.name("prefill"), "ready"),
    }
    assert {row["integration"]["mode"] for row in pair.kvctl("status")} == {"observe"}
    assert not [row for row in pair.kvctl("events") if row["kind"] == "observe"]


def test_top_and_recordings(observed: Observed, tmp_path: Path) -> None:
    observed.connect()
    names = [observed.name(role) for role in ("prefill", "decode")]
    screen, file = tmp_path / "top.txt", tmp_path / "fleet.kvrec"
    for view in ("overview", "peers", "history", "layers"):
        observed.run("top", "--snapshot", str(screen), "--view", view, "--size", "160x40", "--interval", "1s")
        assert names[1] in screen.read_text(), screen.read_text()
    observed.run("record", str(file))
    now = {row["room"] for row in observed.kvctl("rooms", "history")}
    assert {row["name"] for row in observed.kvctl("status", "--from", str(file))} == set(names)
    rows = observed.kvctl("rooms", "history", "--from", str(file))
    assert {row["room"] for row in rows if row["bytes"]} <= now
    assert any(row["bytes"] for row in rows)
    observed.run("top", "--from", str(file), "--snapshot", str(screen), "--view", "history", "--size", "160x40")
    assert "Success" in screen.read_text(), screen.read_text()


def test_blocks_that_are_never_read_and_their_lease(observed: Observed) -> None:
    observed.connect()
    observed.compute(prompt_of(PROMPT, seed="unread"))
    found = observed.doctor("KV_BLOCKS_UNREAD")
    assert found["subject"] == observed.name("prefill")
    assert f"holds {BLOCKS} blocks of 1 room" in found["cause"]
    found = observed.doctor("KV_HOLD_EXPIRED")
    assert f"the lease of its {BLOCKS} blocks ended before they were transferred" in found["cause"]


def test_decode_is_frozen(observed: Observed) -> None:
    observed.connect()
    observed.decode.signal(signal.SIGSTOP)
    try:
        found = observed.doctor("KV_PROCESS_STOPPED")
    finally:
        observed.decode.signal(signal.SIGCONT)
    assert found["subject"] == observed.name("decode")


def test_a_filtered_port(observed: Observed) -> None:
    observed.connect()
    prompt = prompt_of(PROMPT, seed="filtered")
    params = observed.compute(prompt)
    with filtered() as port:
        away = {**params, "remote_engine_id": "elsewhere", "remote_port": port}
        if observed.kind == "mooncake":
            away["remote_bootstrap_addr"] = f"http://127.0.0.1:{port}"
        received = observed.receive(prompt, away)
        found = observed.doctor("KV_HANDSHAKE_FAILED")
    assert received.tokens == observed.receive(prompt).tokens
    host = observed.name("prefill").partition("@")[2].rpartition(":")[0]
    assert found["subject"].endswith(f"→ prefill-tp0@{host}:{port}")
    assert ("not found from bootstrap server" if observed.kind == "mooncake" else "no answer within 5 s") in found[
        "cause"
    ]


def test_blocks_that_are_read_after_their_lease(observed: Observed) -> None:
    if observed.kind != "pull":
        pytest.skip("prefill does not write any more, and vLLM lets decode wait")
    observed.connect()
    prompt = prompt_of(PROMPT, seed="late")
    params = observed.compute(prompt)
    request = params["remote_request_id"]
    observed.until(
        lambda: [row["state"] for row in observed.kvctl("rooms", "history") if row["request_id"] == request],
        lambda states: "Failed" in states,
    )
    observed.receive(prompt, params)
    observed.hand_over("steps")  # an idle engine does not look for notifications
    found = observed.doctor("KV_READ_AFTER_FREE")
    assert (found["subject"], found["severity"]) == (observed.name("prefill"), "critical")


def test_prefill_is_killed(observed: Observed) -> None:
    """The last test of a pair."""
    observed.connect()
    observed.compute(prompt_of(PROMPT, seed="killed"))
    observed.until(lambda: observed.kvctl("rooms"), lambda rows: any(row["role"] == "prefill" for row in rows))
    observed.prefill.kill()
    found = observed.doctor("KV_PROCESS_ENDED", beside="KV_READ_AFTER_FREE")
    assert found["subject"] == observed.name("prefill")
    assert "killed by SIGKILL" in found["cause"]
