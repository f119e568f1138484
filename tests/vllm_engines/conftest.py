"""Engines by name, started when a test needs them, and the tokens of an undivided engine."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.client.calls import Call
from kvctl.client.fleet import Fleet, room_rows
from kvctl.lab.bench.sglang_servers import HOST
from kvctl.lab.tcp_ports import free_port
from kvctl_agent import room_number
from tests.vllm_engines.checkpoints import VOCABULARY, write_model
from tests.vllm_engines.processes import ANSWER_S, CONNECTOR, Engine, Pair, Tokens, start_all

# What engines on a CPU need, beside arguments.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # Of decode engines; the default of 1 GiB would be most of the memory that they take.
    "KVCTL_STAGING_RING_MB": "64",
    # Bytecode of vLLM and torch: without it an engine takes several times as long to start.
    "PYTHONDONTWRITEBYTECODE": "",
}
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "seed": 7,
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "kv_cache_memory_bytes": 1 << 28,
}
BLOCK_TOKENS = 32
# Prompts that are longer than this are prefilled in chunks.
CHUNK_TOKENS = 128
# Of engines without room for all requests of a test; at prefill, all of them compute at once.
FEW_BLOCKS: dict[str, Any] = {"num_gpu_blocks_override": 48, "max_model_len": 1024}
CROWDED: dict[str, Any] = {"scheduler_reserve_full_isl": False, "long_prefill_token_threshold": 64}
DUMMY: dict[str, Any] = {"load_format": "dummy"}
LAYER_BY_LAYER: dict[str, Any] = {
    "kv_transfer_config": {"kv_connector_extra_config": {"pipeline": "on", "pipeline_group_size": 3}}
}
# Arguments of the engines. A name begins with the role; the model is a Llama unless `model` names another.
ENGINES: dict[str, dict[str, Any]] = {
    "prefill": {"max_num_batched_tokens": CHUNK_TOKENS},
    "decode": {},
    "prefill-small": {**FEW_BLOCKS, **CROWDED},
    "decode-small": FEW_BLOCKS,
    "decode-fail": {"kv_transfer_config": {"kv_load_failure_policy": "fail"}},
    "decode-impatient": {"kv_transfer_config": {"kv_connector_extra_config": {"lost_s": 5.0}}},
    "prefill-multi": {},
    "decode-multi": {},
    "prefill-tp2": {"tensor_parallel_size": 2, "max_num_batched_tokens": CHUNK_TOKENS},
    "decode-tp2": {"tensor_parallel_size": 2},
    "prefill-pp2": {"pipeline_parallel_size": 2, "max_num_batched_tokens": CHUNK_TOKENS},
    "decode-pp2": {"pipeline_parallel_size": 2},
    "prefill-deep": {"model": "deep", **DUMMY, "max_num_batched_tokens": CHUNK_TOKENS, **LAYER_BY_LAYER},
    "decode-deep": {"model": "deep", **DUMMY},
    "prefill-64": {"block_size": 64, "max_num_batched_tokens": CHUNK_TOKENS},
    "decode-64": {"block_size": 64},
    "prefill-windows": {"model": "windows", **DUMMY, "max_num_batched_tokens": CHUNK_TOKENS},
    "decode-windows": {"model": "windows", **DUMMY},
}
# Engines whose connector is a child of MultiConnector, beside vLLM's ExampleConnector.
MULTI = ("prefill-multi", "decode-multi")
# Engines that most modules use; others stop when a pair without them is asked for.
SHARED = ("prefill", "decode")
# The engines that give the expected tokens of each model, without a transfer.
UNDIVIDED = {"llama": "decode", "windows": "decode-windows", "deep": "decode-deep"}


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Engines outlive the test that starts them."""


@pytest.fixture(autouse=True)
def socket_dir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines share one directory of admin sockets."""
    monkeypatch.setenv("KVCTL_SOCKET_DIR", str(folder / "sockets"))


@pytest.fixture(scope="session")
def folder() -> Path:
    """Checkpoints, logs and admin sockets; short enough for sun_path."""
    path = Path(tempfile.mkdtemp(prefix="kv-vllm-", dir="/tmp"))
    (path / "sockets").mkdir(mode=0o700)
    print(f"logs: {path}")
    return path


class Engines:
    """The engines of `ENGINES`, each started when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: dict[str, Engine] = {}
        self._registries: dict[str, str] = {}
        self._known: dict[tuple[str, tuple[int, ...], int], Tokens] = {}

    def pair(self, prefill: str, decode: str) -> Pair:
        self.stop(keep=(prefill, decode, *SHARED))
        start_all([self._new(name) for name in (prefill, decode) if not self._runs(name)])
        return Pair(self._engines[prefill], self._engines[decode], self._registries[prefill])

    def _runs(self, name: str) -> bool:
        return name in self._engines and self._engines[name].running

    def _new(self, name: str) -> Engine:
        arguments = {**ARGUMENTS, **ENGINES[name]}
        model = self._folder / model_of(name)
        if not model.exists():
            write_model(model, model.name)
        prefill, port = name.startswith("prefill"), free_port()
        self._registries[name] = f"tcp://{HOST}:{port}"
        transfer = {
            **CONNECTOR,
            "kv_role": "kv_producer" if prefill else "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_port": port,
            **arguments.pop("kv_transfer_config", {}),
        }
        if name in MULTI:
            stored = {"shared_storage_path": str(self._folder / name)}
            example = {**transfer, "kv_connector": "ExampleConnector", "kv_connector_extra_config": stored}
            del example["kv_connector_module_path"]
            transfer = {
                **transfer,
                "kv_connector": "MultiConnector",
                "kv_connector_module_path": None,
                "kv_connector_extra_config": {"connectors": [transfer, example]},
            }
        environment = {**ENVIRONMENT, "KVCTL_SOCKET_DIR": str(self._folder / "sockets")}
        self._engines[name] = Engine(
            Path(os.environ["VLLM_VENV"]) / "bin" / "python",
            self._folder,
            name,
            environment,
            {**arguments, "model": str(model), "kv_transfer_config": transfer},
        )
        return self._engines[name]

    def tokens(self, prompt: Tokens, tokens: int, model: str) -> Tokens:
        """Returns the tokens of an undivided engine; the engine must be idle if it is asked for the first time."""
        key = (model, tuple(prompt), tokens)
        if key not in self._known:
            name = UNDIVIDED[model]
            if not self._runs(name):
                start_all([self._new(name)])
            engine = self._engines[name]
            assert engine.call("reset"), f"{name} is not idle"
            self._known[key] = engine.answer(engine.submit(prompt, tokens)).tokens
            assert engine.call("reset"), f"{name} is not idle"
        return self._known[key]

    def stop(self, keep: tuple[str, ...] = ()) -> None:
        for name in [name for name in self._engines if name not in keep]:
            self._engines.pop(name).stop()


@pytest.fixture(scope="session")
def engines(folder: Path) -> Iterator[Engines]:
    engines = Engines(folder)
    yield engines
    engines.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the tests of each module so that each pair of engines starts once."""

    def order(item: pytest.Item) -> tuple[str, str]:
        return item.path.name, item.callspec.params.get("pair", "") if hasattr(item, "callspec") else ""

    items.sort(key=order)


@pytest.fixture(params=["prefill decode"])
def pair(request: pytest.FixtureRequest, engines: Engines, socket_dir: None) -> Iterator[Pair]:
    """A pair with empty prefix caches; after the test its engines and agents must have nothing left of any request."""
    pair = engines.pair(*request.param.split())
    both = (pair.prefill, pair.decode)
    for engine in both:
        assert engine.call("reset"), f"{engine.name} is not idle"
    yield pair
    for engine in both:
        wait_idle(engine)


Reference = Callable[..., Tokens]


@pytest.fixture
def reference(engines: Engines, pair: Pair) -> Reference:
    """Returns the tokens that an undivided engine of the pair's model generates after a prompt."""

    def tokens(prompt: Tokens, tokens: int = 16) -> Tokens:
        return engines.tokens(prompt, tokens, model_of(pair.decode.name))

    return tokens


def model_of(engine: str) -> str:
    return str(ENGINES[engine].get("model", "llama"))


def prompt_of(length: int, seed: object = 0) -> Tokens:
    chance = random.Random(f"{seed}/{length}")
    return [chance.randrange(3, VOCABULARY) for _ in range(length)]


def wait_idle(engine: Engine) -> None:
    """Waits until an engine has all blocks back, and neither it nor its agents know of a request or room."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        counts, left, rooms = engine.call("counts"), engine.call("left"), active_rooms()
        if (counts["free_blocks"], counts["requests"]) == (engine.free_blocks, 0) and not left and not rooms:
            return
        assert time.monotonic() < deadline, (
            f"{engine.name}: {counts} of {engine.free_blocks} blocks; {left}; active rooms {rooms}"
        )
        time.sleep(0.02)


def active_rooms() -> list[Any]:
    return rooms_of("rooms")


def room_record(transfer: str, role: str) -> dict[str, Any]:
    """Returns what the agents of a role have on record about a finished room; with TP the first of them."""
    room = str(room_number(transfer))
    deadline = time.monotonic() + ANSWER_S
    while True:
        found = [row for row in rooms_of("history") if row["room"] == room and row["role"] == role]
        if found:
            return dict(found[0])
        assert time.monotonic() < deadline, f"room {room} is not in the history of {role}"
        time.sleep(0.02)


def rooms_of(command: str) -> list[Any]:
    """Returns the rooms with which all agents answer a command."""
    with Fleet([], {}, timeout_ns=int(ANSWER_S * 1e9)) as fleet:
        survey = fleet.survey([Call(command)])
    return [row for agent in survey.agents for row in room_rows(agent.data, command)]
