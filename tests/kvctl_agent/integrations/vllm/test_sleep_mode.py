"""Sleep mode: no agent uses the memory of the KV cache while vLLM has freed it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvctl.lab.tcp_ports import free_port
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import DeadlineExceeded
from tests.support.vllm import stand_ins as vllm
from tests.support.vllm.modules import sleep_mode
from tests.support.vllm.server import Model, Server

PROMPT = 40
ASLEEP = "its engine has unregistered its memory"


@pytest.fixture
def pair() -> Iterator[tuple[Server, Server]]:
    port = free_port()
    prefill, decode = Server("prefill", Model(), port), Server("decode", Model(), port)
    yield prefill, decode
    prefill.close()
    decode.close()


def backend(server: Server) -> vllm.CuMemBackend:
    """Returns the backend that vLLM would create in the workers of a server."""
    return vllm.SleepModeBackendFactory.create_backend(server.workers[0]._worker._config.model_config)


def send(prefill: Server, name: str) -> None:
    prefill.add(name, PROMPT, {"do_remote_decode": True, "transfer_id": name})


def expect(prefill: Server, decode: Server, name: str) -> None:
    params = {"do_remote_prefill": True, "transfer_id": name, "kvctl_prefill": f"tcp://127.0.0.1:{prefill.port}"}
    decode.add(name, PROMPT, params)
    assert decode.receive(name)


def transfer(prefill: Server, decode: Server, name: str) -> None:
    send(prefill, name)
    expect(prefill, decode, name)
    compute(prefill, decode, name)


def compute(prefill: Server, decode: Server, name: str) -> None:
    """Computes a prompt and checks what decode receives."""
    prefill.step({name: PROMPT})
    prefill.finish(name)
    decode.wait(lambda: name in decode.received and name in prefill.sent, f"{name} is transferred", prefill)
    assert name not in decode.failed
    decode.check(name)


@pytest.mark.parametrize("asleep", ["prefill", "decode"])
@pytest.mark.parametrize("whole", [True, False], ids=["all memory", "the KV cache"])
def test_rooms_are_transferred_before_and_after(pair: tuple[Server, Server], asleep: str, whole: bool) -> None:
    transfer(*pair, "before")
    server = pair[asleep == "decode"]
    memory = backend(server)
    memory.suspend(2) if whole else memory.discard(("kv_cache",))
    assert server.agents[0].waiting_for() == ASLEEP
    memory.resume(["kv_cache"])
    assert server.agents[0].waiting_for() != ASLEEP
    transfer(*pair, "after")


def test_the_memory_is_freed_after_the_agents_and_comes_back_before_them(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, memory = pair[0].agents[0], backend(pair[0])
    seen = []
    for name in ("suspend", "resume"):
        monkeypatch.setattr(vllm.CuMemBackend, name, lambda *_, name=name: seen.append((name, agent.waiting_for())))
    memory.suspend()
    memory.resume()
    assert seen == [("suspend", ASLEEP), ("resume", ASLEEP)]
    assert agent.waiting_for() != ASLEEP


@pytest.mark.parametrize("tags", [["weights"], ["scheduling"], []])
def test_an_agent_sleeps_until_the_kv_cache_is_back(pair: tuple[Server, Server], tags: list[str]) -> None:
    memory = backend(pair[0])
    memory.discard(("weights",))
    assert pair[0].agents[0].waiting_for() != ASLEEP
    memory.suspend()
    memory.resume(tags)
    assert pair[0].agents[0].waiting_for() == ASLEEP
    memory.suspend()
    memory.resume()
    assert pair[0].agents[0].waiting_for() != ASLEEP


def test_a_request_that_was_kept_is_transferred_afterwards(pair: tuple[Server, Server]) -> None:
    prefill, decode = pair
    memory = backend(prefill)
    send(prefill, "kept")
    prefill.step({"kept": 16})
    memory.suspend()
    send(prefill, "queued")
    prefill.step()
    memory.resume()
    prefill.step(preempted=["kept"])
    for name in ("kept", "queued"):
        expect(prefill, decode, name)
        compute(prefill, decode, name)


def test_a_room_in_flight_fails_at_decode(pair: tuple[Server, Server]) -> None:
    prefill, decode = pair
    send(prefill, "room")
    expect(prefill, decode, "room")
    prefill.step({"room": 16})
    decode.step()
    handle = decode.workers[0]._worker._receives["room"]
    backend(prefill).suspend()
    assert handle.wait(30) is RoomState.FAILED
    assert "goes to sleep" in handle.error["text"]
    decode.wait(lambda: "room" in decode.failed and "room" in decode.received, "decode reports it")


def test_memory_that_is_still_used_stays(pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair
    memory = backend(decode)
    transfer(prefill, decode, "before")

    def busy(timeout: float) -> None:
        raise DeadlineExceeded("rooms still in flight")

    with monkeypatch.context() as patched:
        patched.setattr(decode.agents[0], "unregister", busy)
        with pytest.raises(DeadlineExceeded, match="in flight"):
            memory.suspend()
    assert memory.state() == "RUNNING"
    transfer(prefill, decode, "after")


def test_a_backend_that_is_not_followed_is_refused() -> None:
    config = vllm.ModelConfig(4)
    config.sleep_mode_backend = "checkpoint"
    sleep_mode.check_sleep_mode(config)
    config.enable_sleep_mode = True
    with pytest.raises(ValueError, match="does not support sleep mode with the backend checkpoint"):
        sleep_mode.check_sleep_mode(config)
