"""What hooks on stand-ins of vLLM's connectors see, as an observer serves it, and that they harm nothing."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.integrations.vllm.observe import hooks, observer
from kvctl_agent.integrations.vllm.observe.tracker import Shape, Tracker
from kvctl_agent.telemetry.hub import Telemetry
from tests.support.folded import folded
from tests.support.polling import until
from tests.support.vllm import nixl_connector as stand_ins
from tests.support.vllm.nixl_connector import Metadata, to_receive


class Status(Enum):
    FINISHED_LENGTH_CAPPED = 1
    FINISHED_ABORTED = 2


def request(name: str, status: Status = Status.FINISHED_LENGTH_CAPPED, **params: Any) -> Any:
    return SimpleNamespace(request_id=name, kv_transfer_params=params or None, num_prompt_tokens=100, status=status)


def own(half: type) -> Any:
    """A class of its own, which a test may hook."""
    return type(half.__name__, (half,), {})


class Engine:
    """Both halves of a connector, hooked, and the tracker of its worker."""

    def __init__(self, kind: str, role: Any, tmp_path: Path, agent: type = stand_ins.NixlWrapper) -> None:
        kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        self.scheduler = own(getattr(stand_ins, f"Nixl{kind}ConnectorScheduler"))(kv_role)
        self.worker = own(getattr(stand_ins, f"Nixl{kind}ConnectorWorker"))(kv_role)
        self.agent = self.worker.nixl_wrapper = own(agent)()
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
        self.watch.events.flush()

    def rooms(self) -> list[Any]:
        self.watch.events.flush()
        fold = folded(self.tracker.telemetry)
        return [*fold.rooms.rows(None, 20), *fold.rooms.history(20)]

    def room(self) -> Any:
        (found,) = self.rooms()
        return found

    def counted(self, name: str, *labels: str) -> float:
        return folded(self.tracker.telemetry).metrics.total(name, *labels)


@pytest.fixture
def engine(tmp_path: Path) -> Callable[..., Engine]:
    return lambda kind, role, **more: Engine(kind, role, tmp_path, **more)


def test_pull_at_prefill(engine: Callable[..., Engine]) -> None:
    prefill = engine("Pull", "prefill")
    asked = request("p-1", do_remote_decode=True)
    prefill.scheduler.on_new_request(asked)
    prefill.step(reqs_in_batch={"p-1"})
    assert (prefill.room()["state"], prefill.room()["tokens"]) == ("Bootstrapping", 100)
    assert prefill.scheduler.request_finished(asked, ([1, 2, 3],))[0]
    prefill.step()
    assert prefill.room()["pages"] == 3
    prefill.agent.notifications = {"decode": [b"HB:p-1,p-2"]}
    prefill.step()
    assert (prefill.room()["state"], prefill.room()["peers"]) == ("WaitingForInput", ["decode"])
    prefill.agent.notifications = {"decode": [b"p-1:1"]}
    prefill.worker.done = (["p-1"], (), ())
    prefill.step()
    room = prefill.room()
    assert (room["state"], room["latency_ns"] > 0) == ("Success", True)
    (detail,) = folded(prefill.tracker.telemetry).rooms.detail(int(room["room"]))
    assert [event["stage"] for event in detail["timeline"]][-4:] == ["finish", "accept", "read", "sent"]
    prefill.worker._reqs_to_send.clear()
    prefill.worker._reqs_to_process.clear()
    prefill.agent.notifications = {"decode": [b"p-1:1"]}
    prefill.step(reqs_to_send={})
    assert prefill.counted("kvctl_late_reads_total") == 1


def test_a_lease_that_ends_at_prefill(engine: Callable[..., Engine]) -> None:
    prefill = engine("Pull", "prefill")
    asked = request("p-1", do_remote_decode=True)
    prefill.scheduler.on_new_request(asked)
    prefill.scheduler.request_finished(asked, ([1, 2, 3],))
    prefill.step()
    prefill.worker.done = (["p-1"], (), ())
    prefill.step()
    assert prefill.room()["failure"]["code"] == "KV_HOLD_EXPIRED"


def test_an_aborted_prompt_at_prefill(engine: Callable[..., Engine]) -> None:
    prefill = engine("Pull", "prefill")
    asked = request("p-1", Status.FINISHED_ABORTED, do_remote_decode=True)
    prefill.scheduler.on_new_request(asked)
    prefill.scheduler.request_finished(asked, ([1],))
    prefill.step(reqs_not_processed={"p-1"})
    assert prefill.room()["failure"]["code"] == "ABORTED"


def read(decode: Engine, blocks: int = 3) -> None:
    decode.scheduler.on_new_request(request("d-1", do_remote_prefill=True, remote_request_id="p-1"))
    decode.step(reqs_to_recv={"d-1": to_receive(blocks)})


def post(worker: Any) -> None:
    worker._read_blocks(
        read_spec=SimpleNamespace(remote_rank=0),
        dst_engine_id="prefill",
        request_id="d-1",
        remote_request_id="p-1",
        local_xfer_side_handle=1,
        local_dram_handle=None,
        remote_xfer_side_handle=2,
        expected_consumers=1,
        awaiting_kvs=True,
    )


def test_pull_at_decode(engine: Callable[..., Engine]) -> None:
    decode = engine("Pull", "decode")
    read(decode)
    assert (decode.room()["state"], decode.room()["pages"]) == ("Bootstrapping", 3)
    decode.worker._nixl_handshake("10.0.0.1", 5600, 1, "prefill", 1, 1, False)
    assert (decode.room()["state"], decode.room()["peers"]) == ("WaitingForInput", ["prefill-tp0@10.0.0.1:5600"])
    post(decode.worker)
    assert decode.room()["state"] == "Transferring"
    assert decode.counted("kvctl_descriptors_total", "read") == 8
    decode.agent.get_xfer_telemetry(decode.worker.handle)
    decode.agent.release_xfer_handle(decode.worker.handle)
    assert not decode.watch.posted
    decode.worker.done = ((), ["d-1"], ())
    decode.step()
    room = decode.room()
    assert (room["state"], room["bytes"], room["parts"], room["paths"]) == ("Success", 4096, 1, {"read": 1})
    assert (room["request_id"], room["latency_ns"] > 0) == ("d-1", True)
    assert decode.rooms()[0]["room"] == room["room"]


def test_both_ends_of_pull_have_one_room(engine: Callable[..., Engine]) -> None:
    prefill, decode = engine("Pull", "prefill"), engine("Pull", "decode")
    prefill.scheduler.on_new_request(request("p-1", do_remote_decode=True))
    prefill.step()
    read(decode)
    assert prefill.room()["room"] == decode.room()["room"]


class Again(Exception):
    """As ZMQ's error for no answer in time."""


def test_a_handshake_that_fails(engine: Callable[..., Engine]) -> None:
    decode = engine("Pull", "decode")
    read(decode)
    decode.worker.answers = Again()
    with pytest.raises(Again):
        decode.worker._nixl_handshake("10.0.0.1", 5600, 1, "prefill")
    decode.worker.done = ((), ["d-1"], ["d-1"])
    decode.step()
    failure = decode.room()["failure"]
    assert failure["code"] == "KV_HANDSHAKE_FAILED"
    assert failure["text"].startswith("handshake failed with 10.0.0.1:5600: no answer within 5 s")
    assert decode.counted("kvctl_recomputed_prompts_total", "load-failed") == 1


def test_a_peer_that_vllm_refuses_costs_the_hook_of_no_other_peer(engine: Callable[..., Engine]) -> None:
    decode = engine("Pull", "decode")
    ranks = decode.worker.transfer_topo.handshake_target_ranks

    def ranks_of(tp_size: int) -> Any:
        if tp_size == 3:
            raise AssertionError("3 is not a multiple of 2")
        return ranks(tp_size)

    decode.worker.transfer_topo.handshake_target_ranks = ranks_of
    read(decode)
    decode.worker._nixl_handshake("10.0.0.9", 5600, 3, "another")
    decode.worker.answers = Again()
    with pytest.raises(Again):
        decode.worker._nixl_handshake("10.0.0.1", 5600, 1, "prefill")
    assert decode.room()["peers"] == ["prefill-tp0@10.0.0.1:5600"]


def test_a_method_that_a_class_inherits_reports_once(engine: Callable[..., Engine]) -> None:
    prefill = engine("Pull", "prefill")
    prefill.scheduler.__class__ = own(type(prefill.scheduler))
    observer.observe(SimpleNamespace(connector_scheduler=prefill.scheduler, connector_worker=None))
    asked = request("p-1", do_remote_decode=True)
    prefill.scheduler.on_new_request(asked)
    prefill.scheduler.request_finished(asked, ([1, 2, 3],))
    prefill.step()
    (room,) = folded(prefill.tracker.telemetry).rooms.detail(int(prefill.room()["room"]))
    assert [event["stage"] for event in room["timeline"]] == ["finish"]


def test_a_prompt_without_parameters_and_one_that_is_cached(engine: Callable[..., Engine]) -> None:
    decode = engine("Pull", "decode")
    decode.scheduler.on_new_request(request("d-0"))
    read(decode, blocks=0)
    assert decode.counted("kvctl_recomputed_prompts_total", "no-parameters") == 1
    assert decode.room()["state"] == "Success"


def registration(name: str) -> bytes:
    return b"PUSH_REG:" + msgspec.msgpack.encode({"request_id": name, "decode_host": "10.0.0.2", "decode_port": 5601})


def test_push_at_both_ends(engine: Callable[..., Engine]) -> None:
    prefill, decode = engine("Push", "prefill"), engine("Push", "decode")
    asked = request("cmpl-1-0123abcd", do_remote_decode=True)
    prefill.scheduler.on_new_request(asked)
    prefill.scheduler.request_finished(asked, ([1, 2, 3],))
    prefill.agent.notifications = {"decode": [registration("cmpl-1-89abcdef")]}
    prefill.step()
    prefill.step()
    assert (prefill.room()["state"], prefill.room()["peers"]) == ("WaitingForInput", ["decode-tp0@10.0.0.2:5601"])
    prefill.worker._xfer_blocks(
        read_spec=SimpleNamespace(remote_rank=0),
        dst_engine_id="decode",
        request_id="cmpl-1-0123abcd",
        remote_request_id="cmpl-1-89abcdef",
        local_xfer_side_handle=1,
        remote_xfer_side_handle=2,
    )
    prefill.agent.get_xfer_telemetry(prefill.worker.handle)
    prefill.worker.done = (["cmpl-1-0123abcd"], (), ())
    prefill.step()
    assert (prefill.room()["state"], prefill.room()["paths"]) == ("Success", {"write": 1})
    decode.step(reqs_to_recv={"cmpl-1-89abcdef": to_receive(3, "whatever")})
    decode.agent.notifications = {"prefill": [b"cmpl-1-89abcdef:1"]}
    decode.worker.done = ((), ["cmpl-1-89abcdef"], ())
    decode.step()
    assert (decode.room()["state"], decode.room()["bytes"]) == ("Success", 3 * 1024)
    assert decode.room()["room"] == prefill.room()["room"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cmpl-1-0123abcd", "cmpl-1"),
        ("cmpl-1", "cmpl-1"),
        ("1-0123ABCD", "1"),
        ("a-0123abcg", "a-0123abcg"),
        ("-0123abcd", "-0123abcd"),
        ("", ""),
    ],
)
def test_ids_without_their_random_end(name: str, expected: str) -> None:
    assert hooks.base_id(name) == expected


INTEGER_ID = b"PUSH_REG:" + msgspec.msgpack.encode({"request_id": 7, "decode_host": "10.0.0.2", "decode_port": 5601})


@pytest.mark.parametrize(
    "message", [b"PUSH_REG:\xc1", b"PUSH_REG:\x01", b"PUSH_REG:\x80", INTEGER_ID, b"HB:\xff", b"p-1:many", b""]
)
def test_a_message_that_cannot_be_read_is_noted_and_costs_itself_alone(
    engine: Callable[..., Engine], message: bytes
) -> None:
    prefill = engine("Pull", "prefill")
    asked = request("p-1", do_remote_decode=True)
    prefill.scheduler.on_new_request(asked)
    prefill.scheduler.request_finished(asked, ([1],))
    prefill.step()
    prefill.agent.notifications = {"decode": [message, b"HB:p-1"]}
    prefill.step()
    assert prefill.room()["state"] == "WaitingForInput"
    events = folded(prefill.tracker.telemetry).recorder.since(None, 100)["events"]
    noted = [event["text"] for event in events if event["severity"] in ("warning", "error")]
    assert len(noted) == 1
    assert "cannot be read" in noted[0] or "after they had been freed" in noted[0]


def test_methods_that_a_release_does_not_have_are_named_and_the_others_hooked(
    engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    class Without(stand_ins.NixlWrapper):
        get_xfer_telemetry = None  # type: ignore[assignment]

    with caplog.at_level(logging.WARNING, "vllm.kvctl"):
        prefill = engine("Pull", "prefill", agent=Without)
    assert "has no Without.get_xfer_telemetry: what they do is not shown" in caplog.text
    prefill.scheduler.on_new_request(request("p-1", do_remote_decode=True))
    prefill.step()
    assert len(prefill.rooms()) == 1


def test_a_step_with_too_many_arrivals_counts_those_it_leaves_out_and_ends_the_others(
    engine: Callable[..., Engine],
) -> None:
    prefill = engine("Pull", "prefill")
    prefill.scheduler.on_new_request(request("p-first", do_remote_decode=True))
    prefill.step()
    assert len(prefill.tracker.rooms) == 1
    for number in range(4106):
        prefill.scheduler.on_new_request(request(f"p-{number}", do_remote_decode=True))
    asked = [request(name, Status.FINISHED_ABORTED, do_remote_decode=True) for name in ("p-first", "p-1")]
    for each in asked:
        prefill.scheduler.request_finished(each, ([1],))
    assert len(vars(prefill.scheduler)[hooks._PENDING_EVENTS]) == 4096 + 2
    prefill.step()
    assert len(prefill.tracker.rooms) == 4096 - 1
    assert not {"p-first", "p-1"} & set(prefill.tracker.rooms)
    assert prefill.counted("kvctl_internal_errors_total") == 10
    prefill.step()
    assert prefill.counted("kvctl_internal_errors_total") == 10


# ---- observation begins ------------------------------------------------------------------------------------------


@pytest.fixture
def envs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    vllm, variables = ModuleType("vllm"), ModuleType("vllm.envs")
    variables.VLLM_NIXL_SIDE_CHANNEL_HOST, variables.VLLM_NIXL_SIDE_CHANNEL_PORT = "10.0.0.2", 5601  # type: ignore[attr-defined]
    vllm.envs = variables  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.envs", variables)
    monkeypatch.setenv("KVCTL_OBSERVER", "thread")
    return tmp_path


def connector(kind: str, kv_role: str) -> Any:
    worker = own(getattr(stand_ins, f"Nixl{kind}ConnectorWorker"))(kv_role)
    worker.nixl_wrapper = own(stand_ins.NixlWrapper)()
    found = SimpleNamespace(connector_scheduler=None, connector_worker=worker)
    observer.observe(found)
    return worker


def test_a_worker_is_served_once_its_memory_is_registered_until_it_is_shut_down(envs: Path) -> None:
    worker = connector("Pull", "kv_consumer")
    assert not hasattr(worker, "_kvctl_observer")
    worker.register_kv_caches({})
    serving = worker._kvctl_observer
    assert serving.name == "decode-tp0@10.0.0.2:5601"
    worker.start_load_kv(Metadata())
    worker.shutdown()
    assert not hasattr(worker, "_kvctl_observer")
    worker.start_load_kv(Metadata())
    worker.shutdown()


@pytest.mark.parametrize(
    ("fields", "role"), [({"reqs_in_batch": {"p-1"}}, "prefill"), ({"reqs_to_recv": {"d-1": to_receive(2)}}, "decode")]
)
def test_a_worker_with_both_roles_has_that_of_its_first_request(envs: Path, fields: Any, role: str) -> None:
    worker = connector("Pull", "kv_both")
    worker.register_kv_caches({})
    worker.start_load_kv(Metadata())
    assert not hasattr(worker, "_kvctl_observer")
    worker.start_load_kv(Metadata(**fields))
    serving = until(lambda: getattr(worker, "_kvctl_observer", None), "an observer")
    assert serving.name == f"{role}-tp0@10.0.0.2:5601"
    worker.shutdown()
    ended()


def ended() -> None:
    """Waits for the threads in which observations begin."""
    for thread in threading.enumerate():
        if thread.name == "kvctl-begin":
            thread.join(60)
            assert not thread.is_alive()


def test_a_worker_that_is_shut_down_while_its_observer_starts_is_not_served(
    envs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting, go_on, made = threading.Event(), threading.Event(), []
    start = observer.Observer.start

    def slow(self: Any) -> None:
        made.append(self)
        start(self)
        starting.set()
        assert go_on.wait(60)

    monkeypatch.setattr(observer.Observer, "start", slow)
    worker = connector("Pull", "kv_both")
    worker.start_load_kv(Metadata(reqs_in_batch={"p-1"}))
    assert starting.wait(60)
    socket = Path(made[0].region.header.directory) / f"{made[0].name}.sock"
    until(socket.exists, "the admin socket")
    worker.shutdown()
    go_on.set()
    ended()
    assert not hasattr(worker, "_kvctl_observer")
    assert getattr(worker, hooks.WATCH).turn is None
    assert not socket.exists()


def test_a_worker_that_cannot_be_observed_works(envs: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = connector("Pull", "kv_consumer")
    worker.block_len_per_layer = None
    with caplog.at_level(logging.ERROR, "vllm.kvctl"):
        worker.register_kv_caches({})
    assert "this worker is not observed: TypeError" in caplog.text
    worker.start_load_kv(Metadata())


def test_other_connectors_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.kvctl"):
        observer.observe(SimpleNamespace())
    assert "is not observed" in caplog.text
