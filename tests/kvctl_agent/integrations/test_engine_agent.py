"""`EngineAgent` without an engine: what it makes of an engine's facts."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl_agent import EngineAgent, KVPool, ModelShape, Rank, RoomState, gil, rank_name
from kvctl_agent.contract.config import KEYS_BY_NAME
from kvctl_agent.contract.snapshots import Integration
from kvctl_agent.errors import ConfigError, MemoryLayoutError
from kvctl_agent.integrations.engine_agent import attempt

ENGINE = Integration(engine="other", engine_version="1.2", mode="plugin", settings={"dp": "2"})
LOGGER = logging.getLogger("engine")


def pool(layers: int = 2) -> KVPool:
    k, v = ([np.zeros((16, 1, 8), np.float16) for _ in range(layers)] for _ in "kv")
    return KVPool.from_tensors(k, v, page_size=4, total_kv_heads=1)


def agent(role: Any = "prefill", **changes: Any) -> EngineAgent:
    arguments: dict[str, Any] = {
        "rank": Rank(),
        "pool": pool(),
        "axes": {"dp": (1, 2), "pp": (0, 1)},
        "tp": 3,
        "server": "10.0.0.5:30000",
        "address": "127.0.0.1",
        "registry": "tcp://127.0.0.1:0" if role == "prefill" else None,
        "logger": LOGGER,
        "transport": "loopback",
        "staging_buffer_mb": 1,
    }
    return EngineAgent(ENGINE, role=role, **{**arguments, **changes})


@pytest.mark.usefixtures("no_leaks", "socket_dir")
class TestEngineAgent:
    def test_its_name_tells_axes_and_server_and_the_log_says_where_to_look(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level("INFO", "engine"), agent().start() as running:
            assert running.name == "prefill-dp1-tp3@10.0.0.5:30000"
            assert running.settings["listen"] == "127.0.0.1"
            assert running.observe.status()["integration"] == ENGINE
        (record,) = caplog.records
        assert record.message == (
            "kvctl: agent prefill-dp1-tp3@10.0.0.5:30000 is running (other 1.2, plugin); look at it with: kvctl status"
        )

    def test_file_and_environment_override_what_is_usual_for_the_engine(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = tmp_path / "agent.toml"
        file.write_text("hold_s = 9\n")
        monkeypatch.setenv("KVCTL_CONFIG", str(file))
        monkeypatch.setenv("KVCTL_CHUNK_TOKENS", "64")
        monkeypatch.setenv("KVCTL_NAME_SUFFIX", "here")
        defaults = {"hold_s": 30.0, "chunk_tokens": 32, "unclaimed_s": 25.0}
        with agent(defaults=defaults, cp_interleave=2) as made:
            assert made.name == "prefill-dp1-tp3@here"
            found = {key: (made.settings[key], made.settings.origin(key).split()[0]) for key in defaults}
            assert found == {"hold_s": (9, "file"), "chunk_tokens": (64, "environment"), "unclaimed_s": (25, "engine")}
            assert made.settings.origin("cp_interleave") == "argument"

    @pytest.mark.parametrize(
        ("role", "host", "settings", "warns"),
        [
            ("decode", "10.0.0.5", {}, True),
            ("decode", "10.0.0.5", {"insecure": True}, False),
            ("decode", "localhost", {}, False),
        ],
    )
    def test_decode_servers_on_a_network_are_told_that_they_need_a_key(
        self, role: str, host: str, settings: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        with agent(role, address=host, staging_ring_mb=1, **settings):
            assert ["need a key" in record.message for record in caplog.records] == [True] * warns

    def test_a_prefill_server_on_a_network_needs_one(self) -> None:
        with pytest.raises(ConfigError, match="key"):
            agent(address="10.0.0.5", registry="tcp://10.0.0.5:0")

    def test_stages_are_gathered_shapes(self) -> None:
        shape = pool().shape()
        stages = [shape, ModelShape(3, 1, shape.k_dim, shape.v_dim, shape.dtype_bytes)]
        other = {
            "rank": Rank(pp=1, pp_size=2),
            "stages": stages,
            "axes": {"pp": (1, 2)},
            "registry": "tcp://127.0.0.1:9",
        }
        with agent(pool=pool(3), **other) as made:
            assert (made.layers, made.rank.stages) == (range(2, 5), (2, 3))
            assert made.name.startswith("prefill-pp1-tp3@")
        with pytest.raises(MemoryLayoutError, match="2 layers, but the plan requires 3"):
            agent(pool=pool(2), **other)

    def test_turns_of_the_engine_and_rooms_that_are_being_sent_are_seen(self) -> None:
        with agent().start() as made:
            send = made.send(6)
            made.note_turn()
            assert made.observe.status()["engine_call"] == "poll"
            assert made.is_sending(6)
            send.abort("over")
            assert send.wait(10) is RoomState.FAILED
            assert not made.is_sending(6)

    def test_calls_of_a_batch_wake_the_control_loop_at_its_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        woken: list[int] = []
        write = gil.eventfd_write
        monkeypatch.setattr(gil, "eventfd_write", lambda fd: (woken.append(fd), write(fd)))
        with agent().start() as made:
            loop = made.parts.mailbox.fileno()
            with made.batch():
                sends = [made.send(room) for room in range(1, 9)]
                for send in sends:
                    send.abort("over")
                assert loop not in woken
            assert loop in woken
            assert {send.wait(10) for send in sends} == {RoomState.FAILED}


def test_every_configuration_key_can_be_an_argument() -> None:
    """As vLLM's `kv_connector_extra_config` passes them."""
    assert not KEYS_BY_NAME.keys() & inspect.signature(EngineAgent.__init__).parameters.keys()


def test_a_rank_is_named_after_the_axes_that_there_are() -> None:
    assert rank_name("decode", {"dp": (0, 1), "pp": (1, 2), "cp": (0, 4)}, 7) == "decode-pp1-cp0-tp7"
    assert rank_name("prefill", {}, 0, "a:1") == "prefill-tp0@a:1"


def test_an_error_in_one_request_does_not_reach_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    causes: list[str] = []

    def refuse() -> int:
        raise ConfigError("no such setting")

    def fail() -> int:
        return [][1]

    assert attempt(lambda: 7, causes.append, LOGGER) == 7
    assert attempt(refuse, causes.append, LOGGER) is None
    assert not caplog.records
    assert attempt(fail, causes.append, LOGGER) is None
    assert causes == ["no such setting", "IndexError: list index out of range"]
    assert caplog.records[0].exc_info is not None
