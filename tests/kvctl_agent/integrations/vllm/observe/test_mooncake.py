"""What hooks on stand-ins of vLLM's MooncakeConnector see, as an observer serves it."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.integrations.vllm.observe import hooks, mooncake, observer
from kvctl_agent.integrations.vllm.observe.tracker import Shape, Tracker
from kvctl_agent.telemetry.hub import Telemetry
from tests.support.folded import folded
from tests.support.vllm import mooncake_connector as stand_ins
from tests.support.vllm.mooncake_connector import Metadata, Pull

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
PREFILL, DECODE = "prefill-tp0@10.0.0.1:8998", "decode-tp0@10.0.0.2:15000"


class Status(Enum):
    FINISHED_LENGTH_CAPPED = 1
    FINISHED_STOPPED = 2
    FINISHED_ABORTED = 3


def request(name: str, status: Status = Status.FINISHED_LENGTH_CAPPED, **params: Any) -> Any:
    params = {"transfer_id": "t-1", **params} if params else params
    return SimpleNamespace(request_id=name, kv_transfer_params=params, num_prompt_tokens=100, status=status)


def own(half: type) -> Any:
    """A class of its own, which a test may hook."""
    return type(half.__name__, (half,), {})


class Engine:
    """Both halves of a connector, hooked, and the tracker of its worker."""

    def __init__(self, role: Any, tmp_path: Path) -> None:
        kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        self.scheduler = own(stand_ins.MooncakeConnectorScheduler)(kv_role)
        self.worker = own(stand_ins.MooncakeConnectorWorker)(kv_role)
        observer.observe(SimpleNamespace(connector_scheduler=self.scheduler, connector_worker=None))
        observer.observe(SimpleNamespace(connector_scheduler=None, connector_worker=self.worker))
        self.watch = getattr(self.worker, hooks.WATCH)
        telemetry = Telemetry("me", role)
        telemetry.collected = []
        self.tracker = Tracker("me", Shape(role, 1024, 2, True), telemetry, tmp_path)
        self.watch.events.open(self.tracker, DocumentPublisher(telemetry.region, {}))
        self.watch.begin = None
        self.watch.turn = self.watch.events.publish

    def step(self, **fields: Any) -> None:
        """Makes a step as vLLM does: the metadata goes through pickle to the worker."""
        metadata = self.scheduler.build_connector_meta(None)
        vars(metadata).update(fields)
        self.worker.start_load_kv(pickle.loads(pickle.dumps(metadata)))
        self.worker.get_transfer_results()

    def finish(self, sent: tuple[str, ...] = (), received: tuple[str, ...] = ()) -> None:
        self.worker.done = sent, received, ()
        self.step()

    def room(self, name: str = "") -> Any:
        self.watch.events.flush()
        fold = folded(self.tracker.telemetry)
        rooms = [*fold.rooms.rows(None, 20), *fold.rooms.history(20)]
        (found,) = [room for room in rooms if room["request_id"] == name or not name]
        return found


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Engine]:
    vllm, variables = ModuleType("vllm"), ModuleType("vllm.envs")
    variables.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = 480  # type: ignore[attr-defined]
    vllm.envs = variables  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.envs", variables)
    return lambda role: Engine(role, tmp_path)


# ---- prefill -----------------------------------------------------------------------------------------------------


def computed(prefill: Engine, name: str = "p-1", transfer: str = "t-1", blocks: int = 3) -> None:
    asked = request(name, do_remote_decode=True, transfer_id=transfer)
    prefill.scheduler.on_new_request(asked)
    assert prefill.scheduler.request_finished(asked, (list(range(blocks)),))[0]
    prefill.step()


def ask(prefill: Engine, blocks: dict[str, int], need_send: int = 1) -> None:
    """Has a decode worker ask for requests; `blocks` has the numbers of blocks by the transfer's number."""
    meta = SimpleNamespace(
        remote_hostname="10.0.0.2",
        remote_port=15000,
        remote_tp_rank=0,
        req_blocks={f"d-{each}": (f"t-{each}", [list(range(count))]) for each, count in blocks.items()},
    )
    prefill.worker.ready = [
        (f"d-{each}", SimpleNamespace(p_req_id=f"p-{each}", need_send=need_send)) for each in blocks
    ]
    asyncio.run(prefill.worker.send_kv_to_decode(b"", None, meta))


def test_prefill_writes(engine: Callable[[Any], Engine]) -> None:
    prefill = engine("prefill")
    computed(prefill)
    assert (prefill.room()["state"], prefill.room()["pages"]) == ("Bootstrapping", 3)
    ask(prefill, {"1": 3})
    room = prefill.room()
    assert (room["state"], room["peers"]) == ("Transferring", [DECODE])
    assert (room["bytes"], room["paths"]) == (3 * 1024, {"write": 1})
    assert not prefill.watch.planned
    prefill.finish(sent=("p-1",))
    assert prefill.room()["state"] == "Success"


def test_decode_asks_before_the_prompt_arrives(engine: Callable[[Any], Engine]) -> None:
    prefill = engine("prefill")
    prefill.worker.ready = ()
    meta = SimpleNamespace(
        remote_hostname="10.0.0.2", remote_port=15000, remote_tp_rank=0, req_blocks={"d-1": ("t-1", [[1]])}
    )
    asyncio.run(prefill.worker.send_kv_to_decode(b"", None, meta))
    computed(prefill)
    assert (prefill.room()["state"], prefill.room()["peers"]) == ("WaitingForInput", [DECODE])


def test_requests_of_one_write_share_its_bytes_by_blocks(engine: Callable[[Any], Engine]) -> None:
    prefill = engine("prefill")
    computed(prefill)
    computed(prefill, "p-2", "t-2")
    computed(prefill, "p-3", "t-3")
    ask(prefill, {"1": 3, "2": 1, "3": 0})
    assert [prefill.room(f"p-{each}")["bytes"] for each in (1, 2, 3)] == [3 * 1024, 1024, 0]
    prefill.finish(sent=("p-1", "p-2", "p-3"))  # decode had all of the third
    assert [prefill.room(f"p-{each}")["state"] for each in (1, 2, 3)] == ["Success"] * 3


def test_a_write_that_fails_and_its_lease(engine: Callable[[Any], Engine]) -> None:
    prefill = engine("prefill")
    computed(prefill)
    prefill.worker.result = -1
    ask(prefill, {"1": 3})
    prefill.finish(sent=("p-1",))  # vLLM ends it with its lease
    failure = prefill.room()["failure"]
    assert failure["code"] == "KV_TRANSPORT"
    assert failure["text"].startswith("Mooncake's transfer engine returned -1 for 3 descriptors")


def test_blocks_that_nobody_asks_for(engine: Callable[[Any], Engine]) -> None:
    prefill = engine("prefill")
    computed(prefill)
    prefill.finish(sent=("p-1",))
    assert prefill.room()["failure"]["code"] == "KV_HOLD_EXPIRED"


@pytest.mark.parametrize("status", [Status.FINISHED_ABORTED, Status.FINISHED_STOPPED])
def test_prompts_whose_blocks_vllm_frees_at_once(engine: Callable[[Any], Engine], status: Status) -> None:
    prefill = engine("prefill")
    asked = request("p-1", status, do_remote_decode=True)
    prefill.scheduler.on_new_request(asked)
    prefill.scheduler.request_finished(asked, ([1],))
    prefill.step(reqs_not_processed={"t-1"})
    assert prefill.room()["failure"]["code"] == "ABORTED"


# ---- decode ------------------------------------------------------------------------------------------------------


def asking(decode: Engine, blocks: int = 3, workers: int = 1) -> dict[str, Pull]:
    """Has decode ask `workers` of a prefill engine for a request; 0: its bootstrap server does not answer."""
    decode.scheduler.on_new_request(request("d-1", do_remote_prefill=True))
    pulls = {"d-1": Pull(blocks)}
    decode.step(reqs_to_recv={"prefill": pulls})
    if workers:
        decode.worker._remote_agents["prefill"] = {}
        decode.worker._tp_size["prefill"] = workers
    asyncio.run(decode.worker.handle_new_engine_id("prefill", pulls))
    return pulls


def test_decode_receives_from_two_workers(engine: Callable[[Any], Engine]) -> None:
    decode = engine("decode")
    pulls = asking(decode, workers=2)
    others = PREFILL.replace("tp0", "tp1")
    assert (decode.room()["state"], decode.room()["peers"]) == ("WaitingForInput", [PREFILL, others])
    for _ in range(2):
        assert decode.room()["state"] != "Success"
        decode.worker.process_pulling_result(SimpleNamespace(ok_reqs=["d-1"]), pulls)
    decode.finish(received=("d-1",))
    room = decode.room()
    assert (room["state"], room["pages"], room["bytes"], room["paths"]) == ("Success", 3, 3 * 1024, {"write": 2})


def test_both_ends_have_one_room(engine: Callable[[Any], Engine]) -> None:
    prefill, decode = engine("prefill"), engine("decode")
    computed(prefill)
    asking(decode)
    assert prefill.room()["room"] == decode.room()["room"]


def test_a_bootstrap_server_that_does_not_answer(engine: Callable[[Any], Engine]) -> None:
    decode = engine("decode")
    asking(decode, workers=0)
    decode.finish(received=("d-1",))
    assert decode.room()["failure"]["code"] == "KV_HANDSHAKE_FAILED"
    assert decode.tracker.peers[PREFILL].error == "not found from bootstrap server"


def test_prefill_answers_with_an_error(engine: Callable[[Any], Engine]) -> None:
    decode = engine("decode")
    pulls = asking(decode)
    decode.worker._handle_failed_recv(pulls, ["d-1", "unknown"], "Timeout waiting for P side ready.")
    decode.finish(received=("d-1",))
    failure = decode.room()["failure"]
    assert failure["code"] == "KV_TRANSPORT"
    assert failure["text"].startswith("Timeout waiting for P side ready.")


def test_a_prompt_that_decode_has(engine: Callable[[Any], Engine]) -> None:
    decode = engine("decode")
    asking(decode, blocks=0)
    assert decode.room()["state"] == "Success"


# ---- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine_id", "port"), [("engine", 8998), ("engine_dp0", 8998), ("engine_dp2", 9000), ("my_dpx", 8998)]
)
def test_engines_of_one_bootstrap_server_have_names_of_their_own(engine_id: str, port: int) -> None:
    assert mooncake.port_of(8998, engine_id) == port


@pytest.mark.parametrize(
    ("kv_role", "name"), [("kv_producer", "prefill-tp0@10.0.0.2:8998"), ("kv_consumer", "decode-tp0@10.0.0.2:15000")]
)
def test_a_worker_is_served_until_it_is_shut_down(
    engine: Callable[[Any], Engine], monkeypatch: pytest.MonkeyPatch, kv_role: str, name: str
) -> None:
    module, platforms = ModuleType(MODULE), ModuleType("vllm.platforms")
    module.get_mooncake_bootstrap_addr = lambda _: ("127.0.0.1", 8998)  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(device_type="cpu")  # type: ignore[attr-defined]
    for each in (module, platforms):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    engine("prefill")  # the environment's variables
    monkeypatch.setenv("KVCTL_OBSERVER", "thread")
    worker = own(stand_ins.MooncakeConnectorWorker)(kv_role)
    observer.observe(SimpleNamespace(connector_scheduler=None, connector_worker=worker))
    worker.register_kv_caches({})
    assert worker._kvctl_observer.name == name
    worker.start_load_kv(Metadata())
    worker.shutdown()
    assert not hasattr(worker, "_kvctl_observer")
