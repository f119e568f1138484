"""Requests from a prefill to a decode server, over real agents; the servers call the hooks as vLLM does.

The transport is NIXL, except where a pair of its own is started for something else than how bytes move."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvctl.lab.tcp_ports import free_port
from kvctl_agent.contract.states import RoomState
from kvctl_agent.request_id import room_number
from tests.support.vllm import stand_ins as vllm
from tests.support.vllm.modules import worker as worker_module
from tests.support.vllm.server import Model, Server

ABORTED = vllm.RequestStatus.FINISHED_ABORTED
PLAIN = Model()
FIVE, TEN = (((tuple(range(count)), None),) for count in (5, 10))  # more layers than are never divided
WINDOWS = ((tuple(range(1, 20, 2)), None), (tuple(range(0, 20, 2)), 40))
HYBRID = (((0, 2), None), ((1, 3), 40), ((4,), 20))
IDS = count()


class Pair(NamedTuple):
    prefill: Server
    decode: Server

    @property
    def registry(self) -> str:
        return f"tcp://127.0.0.1:{self.prefill.port}"

    def name(self) -> str:
        """Returns a new name, of a request and of its transfer."""
        return f"request-{next(IDS)}"

    def to_prefill(self, name: str, tokens: int = 100) -> str:
        self.prefill.add(name, tokens, {"do_remote_decode": True, "transfer_id": name}, room_number(name))
        return name

    def to_decode(self, name: str, tokens: int = 100) -> str:
        params = {"do_remote_prefill": True, "transfer_id": name, "kvctl_prefill": self.registry}
        self.decode.add(name, tokens, params, room_number(name))
        return name

    def arrived(self, *names: str) -> None:
        """Waits for the KV of requests, and checks it."""
        self.received(*names)
        assert not self.decode.failed.intersection(names), {name: self.failures(name) for name in names}
        for name in names:
            self.decode.check(name)

    def received(self, *names: str) -> None:
        self.decode.wait(lambda: self.decode.received.issuperset(names), f"receive {names}", self.prefill)

    def sent(self, *names: str) -> None:
        self.prefill.wait(lambda: self.prefill.sent.issuperset(names), f"send {names}", self.decode)

    def failures(self, name: str) -> dict[str, str]:
        """Returns the code with which the room of a request failed on each agent."""
        found = {}
        for agent in (*self.prefill.agents, *self.decode.agents):
            for record in agent.observe.failed()["rooms"]:
                if record["room"] == str(room_number(name)):
                    found[agent.role] = record["failure"]["code"]
        return found

    def settle(self) -> None:
        """Waits until neither side holds anything of any request."""

        def over() -> bool:
            workers = [each._worker for server in self for each in server.workers]
            held = ((each._sends, each._receives, each._ended, each._failed) for each in workers)
            return not any(map(any, held)) and not any(each.agent.parts.machine.rooms for each in workers)

        self.prefill.wait(over, "the rooms end", self.decode)


MakePair = Callable[..., Pair]


@pytest.fixture(scope="module")
def sockets() -> Iterator[None]:
    directory = Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVCTL_SOCKET_DIR", str(directory))
        yield
    shutil.rmtree(directory)


def start(
    stack: ExitStack,
    prefill: Model = PLAIN,
    decode: Model = PLAIN,
    tp: tuple[int, int] = (1, 1),
    transport: str = "loopback",
    axes: tuple[dict[str, int], dict[str, int]] = ({}, {}),
    **extra: Any,
) -> Pair:
    port, servers = free_port(), []
    extra["transport"] = transport
    for role, model, size, others in zip(("prefill", "decode"), (prefill, decode), tp, axes, strict=True):
        servers.append(Server(role, model, port, size, **others, extra=extra))
        stack.callback(servers[-1].close)
    return Pair(*servers)


@pytest.fixture(scope="module")
def shared(vllm: None, sockets: None) -> Iterator[Pair]:
    with ExitStack() as stack:
        pair = start(stack, transport="nixl")
        name = pair.to_decode(pair.to_prefill("first"))  # connects them
        pair.decode.receive(name)
        pair.prefill.step({name: 100})
        pair.received(name)
        pair.prefill.finish(name)
        pair.sent(name)
        yield pair


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """A prefill and a decode server of one worker each, shared by the tests of the module."""
    yield shared
    for server in shared:
        for name in list(server.jobs):
            server.finish(name, ABORTED)
    shared.settle()


@pytest.fixture
def make_pair(no_leaks: None, socket_dir: Path) -> Iterator[MakePair]:
    with ExitStack() as stack:
        yield lambda *arguments, **options: start(stack, *arguments, **options)


class TestPrompts:
    """Prefill computes another prompt than decode asks for, in as many blocks: the request fails on both servers."""

    @pytest.mark.parametrize(("tokens", "prompt"), [(97, 0), (110, 0), (100, 1)])
    @pytest.mark.parametrize("first", ["prefill", "decode"])
    def test_other_prompts_are_not_received(self, pair: Pair, tokens: int, prompt: int, first: str) -> None:
        name = pair.name()
        params = {"do_remote_prefill": True, "transfer_id": name, "kvctl_prefill": pair.registry}
        if first == "prefill":
            pair.prefill.step({pair.to_prefill(name): 100})
        pair.decode.add(name, tokens, params, room_number(name) + prompt)
        pair.decode.receive(name)
        pair.decode.step()
        if first == "decode":
            pair.decode.step()
            pair.prefill.step({pair.to_prefill(name): 100})
        pair.prefill.wait(lambda: name in pair.decode.failed, "fail at decode", pair.decode)
        assert pair.failures(name) == {"prefill": "KV_PLAN_MISMATCH", "decode": "KV_PLAN_MISMATCH"}


class TestOrders:
    def test_prefill_first(self, pair: Pair) -> None:
        name = pair.to_prefill(pair.name())
        pair.prefill.step({name: 100})
        held, params = pair.prefill.finish(name)
        assert held
        pair.decode.add(name, 100, params, room_number(name))
        assert pair.decode.receive(name)
        pair.arrived(name)
        pair.sent(name)
        assert name not in pair.prefill.jobs

    def test_calls_for_the_rooms_of_a_step_are_in_batches(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        open_batches: list[Any] = []
        calls: list[bool] = []

        def watch(agent: Any) -> None:
            batch, mailbox = agent.batch, agent.parts.mailbox
            put = mailbox.put

            @contextmanager
            def watched() -> Iterator[None]:
                with batch():
                    open_batches.append(agent)
                    yield
                    open_batches.remove(agent)

            monkeypatch.setattr(agent, "batch", watched)
            monkeypatch.setattr(mailbox, "put", lambda *events: (calls.append(agent in open_batches), put(*events)))

        for agent in (*pair.prefill.agents, *pair.decode.agents):
            watch(agent)
        name = pair.to_decode(pair.to_prefill("batch"))
        pair.decode.receive(name)
        pair.prefill.step({name: 100})
        pair.prefill.finish(name)
        pair.received(name)
        pair.sent(name)
        assert len(calls) >= 4, "send, receive, pages and finish"
        assert all(calls)

    def test_a_step_that_computes_nothing_ends_when_a_room_does(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_module, "_NOTHING_TO_COMPUTE_S", 60.0)
        name = pair.to_decode(pair.to_prefill(pair.name()))
        pair.prefill.step({name: 100})
        pair.decode.receive(name)
        pair.decode.step()
        assert name in pair.decode.received
        pair.prefill.finish(name)
        pair.sent(name)

    def test_what_prefill_has_cached_is_sent_before_the_step_computes_the_rest(self, pair: Pair) -> None:
        name = pair.to_prefill(pair.name(), 700)
        pair.prefill.cached(name, 640)
        meta = pair.prefill.step({name: 60})
        assert [len(blocks) for _, (blocks,) in meta.cached] == [640 // PLAIN.block]
        pair.decode.receive(pair.to_decode(name, 700))
        pair.prefill.finish(name)
        pair.arrived(name)
        pair.sent(name)

    def test_a_cached_prefix_is_not_transferred(self, pair: Pair) -> None:
        name = pair.to_decode(pair.to_prefill(pair.name()))
        before = pair.prefill.agents[0].observe.status()["bytes_total"]
        pair.decode.receive(name, cached=64)
        pair.decode.step()
        pair.prefill.step({name: 100})
        pair.arrived(name)
        pair.prefill.finish(name)
        pair.sent(name)
        model = pair.prefill.model
        block = model.block * model.heads * 2 * model.dim * 4 * len(model.groups[0][0])
        assert pair.prefill.agents[0].observe.status()["bytes_total"] - before == 3 * block

    def test_a_prompt_that_decode_has_cached(self, pair: Pair) -> None:
        name = pair.to_decode(pair.to_prefill(pair.name(), 64), 64)
        pair.prefill.step({name: 64})
        pair.prefill.finish(name)
        assert not pair.decode.receive(name, cached=64)
        pair.decode.step()
        pair.sent(name)
        assert name not in pair.decode.failed
        pair.decode.finish(name)


class TestLayouts:
    @pytest.mark.parametrize(
        ("prefill", "decode", "tp", "transport"),
        [
            (Model(), Model(tokens_outermost=True), (2, 1), "nixl"),
            (Model(divided=2), Model(block=32), (1, 2), "loopback"),
            (Model(mla=True, divided=4), Model(mla=True), (2, 1), "loopback"),
            (Model(HYBRID, blocks=128), Model(HYBRID, blocks=128), (1, 1), "nixl"),
            (Model(HYBRID, blocks=128), Model(HYBRID, blocks=128, tokens_outermost=True), (1, 2), "loopback"),
        ],
        ids=["TP 2 to 1, other memory order", "TP 1 to 2, larger blocks", "MLA", "windows", "windows, TP 1 to 2"],
    )
    def test_kv_arrives(
        self, make_pair: MakePair, prefill: Model, decode: Model, tp: tuple[int, int], transport: str
    ) -> None:
        pair = make_pair(prefill, decode, tp, transport)
        names = [pair.to_decode(pair.to_prefill(f"r{tokens}", tokens), tokens) for tokens in (7, 90, 127)]
        for name in names[1:]:
            pair.decode.receive(name, cached=32 if name == "r127" else 0)
        pair.decode.step()
        pair.prefill.step({"r7": 7, "r90": 50})
        pair.prefill.step({"r90": 40, "r127": 70})
        pair.decode.receive("r7")
        pair.prefill.step({"r127": 57})
        for name in names:
            pair.prefill.finish(name)
        pair.arrived(*names)
        pair.sent(*names)

    @pytest.mark.parametrize("pipeline", ["off", "on"])
    @pytest.mark.parametrize(
        ("model", "tp", "axes"),
        [
            (Model(TEN), (1, 1), ({"pp": 2}, {})),
            (Model(FIVE), (2, 1), ({}, {"pp": 3})),
            (Model(WINDOWS, blocks=128), (1, 1), ({"pp": 2}, {})),
            (Model(FIVE, heads=1), (1, 2), ({}, {"dcp": 2})),
            (Model(TEN, mla=True, divided=2), (1, 4), ({"pp": 2}, {"dcp": 2})),
        ],
        ids=["PP 2 to 1", "TP 2 to PP 3", "windows, PP 2 to 1", "TP 1 to DCP 2", "MLA, PP 2 to TP 4 with DCP 2"],
    )
    def test_stages_and_tokens_are_divided(
        self, make_pair: MakePair, pipeline: str, model: Model, tp: tuple[int, int], axes: Any
    ) -> None:
        groups = {"pipeline": pipeline, "pipeline_group_size": 2}
        pair = make_pair(model, model, tp, axes=axes, **groups)
        names = [pair.to_decode(pair.to_prefill(f"r{tokens}", tokens), tokens) for tokens in (7, 90, 127)]
        for name in names:
            pair.decode.receive(name, cached=64 if name == "r127" else 0)
        pair.decode.step()
        pair.prefill.step({"r7": 7, "r90": 50})
        pair.prefill.step({"r90": 40, "r127": 70})
        pair.prefill.step({"r127": 57})
        for name in names:
            pair.prefill.finish(name)
        pair.arrived(*names)
        pair.sent(*names)
        metrics = pair.prefill.agents[0].telemetry.metrics
        assert metrics.total("kvctl_pipeline_decisions_total", "override" if pipeline == "on" else "off") == 3

    def test_layers_that_vllm_does_not_announce_are_sent_with_the_step(self, make_pair: MakePair) -> None:
        pair = make_pair(Model(FIVE), Model(FIVE), pipeline="on", pipeline_group_size=2)
        name = pair.to_decode(pair.to_prefill("r"))
        pair.decode.receive(name)
        pair.decode.step()
        (worker,) = pair.prefill.workers
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(worker, "save_kv_layer", lambda *_: None)
            pair.prefill.step({name: 100})
        pair.prefill.finish(name)
        pair.arrived(name)

    def test_stages_that_vllm_does_not_ask_to_save_are_sent_with_the_step(
        self, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = make_pair(Model(FIVE), Model(FIVE), axes=({"pp": 2}, {}))
        monkeypatch.setattr(pair.prefill.workers[0], "wait_for_save", lambda: None)
        name = pair.to_decode(pair.to_prefill("r"))
        pair.decode.receive(name)
        pair.prefill.step({name: 60})
        pair.prefill.step({name: 40})
        pair.prefill.finish(name)
        pair.arrived(name)
        pair.sent(name)

    def test_layers_of_microbatches_are_sent_with_the_step(
        self, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm.ParallelConfig, "use_ubatching", True)
        pair = make_pair(Model(FIVE), Model(FIVE), pipeline="on", pipeline_group_size=2)
        name = pair.to_decode(pair.to_prefill("r"))
        pair.decode.receive(name)
        pair.decode.step()
        (worker,) = pair.prefill.workers
        computed: list[str] = []
        monkeypatch.setattr(worker._worker, "_pass", lambda layers: computed.append(f"before {layers}"))
        monkeypatch.setattr(worker, "wait_for_save", lambda: computed.append("step"))
        pair.prefill.step({name: 100})
        assert computed == ["step"]
        monkeypatch.undo()
        worker.wait_for_save()
        pair.prefill.finish(name)
        pair.arrived(name)

    def test_a_stage_that_ends_within_a_pattern_of_layers_is_refused(self, make_pair: MakePair) -> None:
        model = Model(HYBRID, blocks=128)
        with pytest.raises(ValueError, match="at the end of each pipeline stage but the last"):
            make_pair(model, model, axes=({"pp": 2}, {}))


class TestPreemption:
    def test_blocks_are_taken_back_before_others_use_them(self, pair: Pair) -> None:
        name, other = pair.to_prefill(pair.name()), pair.to_prefill(pair.name())
        pair.prefill.step({name: 64})
        lost = list(pair.prefill.jobs[name].table[0])
        pair.prefill.step({other: 100}, preempted=[name])
        assert set(lost) & set(pair.prefill.jobs[other].table[0])
        pair.prefill.step({name: 100})
        for each in (name, other):
            pair.prefill.finish(each)
            pair.to_decode(each)
            pair.decode.receive(each)
        pair.arrived(name, other)
        pair.sent(name, other)

    def test_blocks_that_are_still_read_stop_the_step(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        name = pair.to_prefill(pair.name())
        pair.prefill.step({name: 64})
        with monkeypatch.context() as patched:
            patched.setattr(worker_module, "_RECALL_S", 0.0)
            patched.setattr("kvctl_agent.runtime.handles.Send.recall", lambda self: None)
            with pytest.raises(RuntimeError, match=rf"preempted request {name} \(room \d+\) are still read after 0 s"):
                pair.prefill.step(preempted=[name])
        pair.prefill.finish(name, ABORTED)
        pair.sent(name)


class TestAbort:
    @pytest.mark.parametrize("computed", [0, 48, 100])
    @pytest.mark.parametrize("opened", [False, True], ids=["not opened", "opened"])
    def test_at_prefill(self, pair: Pair, computed: int, opened: bool) -> None:
        name = pair.to_prefill(pair.name())
        if opened:
            pair.to_decode(name)
            pair.decode.receive(name)
            pair.decode.step()
        pair.prefill.step({name: computed} if computed else {})
        if opened and computed == 100:
            pair.received(name)
        assert pair.prefill.finish(name, ABORTED) == (True, None)
        pair.sent(name)
        if opened:
            pair.received(name)
            assert (name in pair.decode.failed) == (computed < 100)
        assert name not in pair.prefill.jobs

    @pytest.mark.parametrize("computed", [0, 48])
    def test_at_decode_while_it_receives(self, pair: Pair, computed: int) -> None:
        name = pair.to_decode(pair.to_prefill(pair.name()))
        pair.decode.receive(name)
        pair.decode.step()
        pair.prefill.step({name: computed} if computed else {})
        pair.decode.finish(name, ABORTED)
        assert name in pair.decode.jobs  # its blocks may still be written
        pair.received(name)
        assert name not in pair.decode.jobs
        pair.prefill.step({name: 100 - computed})
        pair.prefill.finish(name)
        pair.sent(name)
        assert pair.failures(name) == {"prefill": "ABORTED", "decode": "ABORTED"}

    @pytest.mark.parametrize("known", [True, False], ids=["known at prefill", "unknown there"])
    def test_at_decode_while_it_waits_for_blocks(self, pair: Pair, known: bool) -> None:
        name = pair.to_decode(pair.name())
        if known:
            pair.to_prefill(name)
            pair.prefill.step()
        pair.decode.step()
        pair.decode.finish(name, ABORTED)
        pair.decode.step()
        if not known:
            pair.to_prefill(name)
        pair.prefill.step({name: 100})
        pair.prefill.finish(name)
        pair.sent(name)
        assert pair.failures(name) == {"prefill": "ABORTED", "decode": "ABORTED"}


class TestFailures:
    def test_a_failed_receive_is_reported_at_once_and_finished_when_its_blocks_are_free(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = pair.to_decode(pair.to_prefill(pair.name()))
        pair.decode.receive(name)
        pair.decode.step()
        receive = pair.decode.workers[0]._worker._receives[name]
        with monkeypatch.context() as patched:
            patched.setattr(type(receive), "release", lambda self: None)  # a write to the blocks may be in flight
            pair.prefill.finish(name, ABORTED)
            pair.decode.wait(lambda: name in pair.decode.failed, f"{name} fails", pair.prefill)
            assert receive.state == RoomState.FAILED
            for _ in range(3):
                pair.decode.step()
            assert name not in pair.decode.received
        receive.release()
        pair.decode.failed.clear()
        pair.received(name)
        assert name not in pair.decode.failed  # reported once
        pair.sent(name)

    def test_a_room_that_decode_refuses_ends_at_prefill(self, pair: Pair) -> None:
        name, other = (pair.to_prefill(pair.name()) for _ in range(2))
        for each in (name, other):
            pair.to_decode(each)
        pair.decode.receive(name)
        pair.decode.step()
        pair.decode.jobs[other].table[0].extend([9999] * 7)
        pair.decode.receive(other)
        pair.received(other)
        assert other in pair.decode.failed
        pair.prefill.finish(name, ABORTED)
        pair.prefill.step({other: 100})
        pair.prefill.finish(other)
        pair.sent(name, other)
        assert pair.failures(other) == {"prefill": "ABORTED", "decode": "ABORTED"}
        pair.decode.jobs.pop(other)

    def test_a_request_with_a_malformed_registry_costs_only_itself(
        self, pair: Pair, caplog: pytest.LogCaptureFixture
    ) -> None:
        wrong = [
            "tcp://[::1:14579",
            "tcp://[host]:1",
            "tcp://[]:1",
            f"{pair.registry}/",
            "tcp://\ud800:1",
            "x" * 10_000,
        ]
        names = [pair.name() for _ in wrong]
        for name, registry in zip(names, wrong, strict=True):
            params = {"do_remote_prefill": True, "transfer_id": name, "kvctl_prefill": registry}
            pair.decode.add(name, 100, params, room_number(name))
            pair.decode.step()  # renews the room
            pair.decode.receive(name)
        pair.decode.wait(lambda: pair.decode.received.issuperset(names), "the requests", pair.decode)
        assert pair.decode.failed.issuperset(names)
        assert f"request {names[0]} cannot be received: 'tcp://[::1:14579' is not an endpoint" in caplog.text
        assert caplog.text.encode()  # a lone surrogate would fail in the handler of an engine's log
        name = pair.to_decode(pair.to_prefill(pair.name()))
        pair.prefill.step({name: 100})
        pair.prefill.finish(name)
        pair.decode.receive(name)
        pair.arrived(name)
        pair.sent(name)

    def test_an_unexpected_error_costs_only_its_request(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("a bug")

        (prefill,), (decode,) = pair.prefill.agents, pair.decode.agents
        unsent, unopened, name = (pair.to_decode(pair.to_prefill(pair.name())) for _ in range(3))
        pair.decode.receive(unsent)
        pair.prefill.step({unopened: 100, name: 100})
        with monkeypatch.context() as patched:
            patched.setattr(type(pair.prefill.workers[0]._worker._sends[unsent]), "pages", fail)
            pair.prefill.step({unsent: 100})
        pair.decode.receive(name)
        pair.decode.step()
        with monkeypatch.context() as patched:
            patched.setattr(decode, "receive", fail)
            pair.decode.receive(unopened)
            pair.decode.step()
        for each in (unsent, unopened, name):
            pair.prefill.finish(each)
        pair.arrived(name)
        pair.received(unsent, unopened)
        pair.sent(unsent, unopened, name)
        assert pair.decode.failed >= {unsent, unopened}
        assert f"room {room_number(unsent)} cannot be sent: RuntimeError: a bug" in caplog.text
        assert f"request {unopened} cannot be received: RuntimeError: a bug" in caplog.text
        assert (prefill.accepting, decode.accepting) == (True, True)

    def test_a_room_that_prefill_refuses_is_reported_as_sent(
        self, pair: Pair, caplog: pytest.LogCaptureFixture
    ) -> None:
        name = pair.to_prefill(pair.name())
        twice = f"{name}-again"
        pair.prefill.add(twice, 100, {"do_remote_decode": True, "transfer_id": name})
        pair.prefill.step({name: 100, twice: 100})
        assert f"request {twice} cannot be sent: room {room_number(name)}" in caplog.text
        for each in (name, twice):
            pair.prefill.finish(each)
        pair.prefill.step()
        assert pair.prefill.sent >= {twice}
        pair.to_decode(name)
        pair.decode.receive(name)
        pair.arrived(name)
        pair.sent(name)

    def test_no_decode_server_asks(self, make_pair: MakePair) -> None:
        pair = make_pair(hold_s=0.5)
        name = pair.to_prefill("r")
        pair.prefill.step({name: 100})
        pair.prefill.finish(name)
        pair.sent(name)
        assert pair.failures(name) == {"prefill": "KV_HOLD_EXPIRED"}

    def test_a_request_that_waits_at_decode_is_kept(self, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvctl_agent.integrations.vllm.scheduler._RENEW_S", 0.1)
        pair = make_pair(hold_s=2.0)
        pair.decode.agents[0].connect(pair.registry)
        pair.decode.agents[0].wait_ready(30)
        kept, dropped = (pair.to_prefill(name) for name in ("kept", "dropped"))
        pair.to_decode(kept)
        pair.prefill.step({kept: 100, dropped: 100})
        for name in (kept, dropped):
            pair.prefill.finish(name)
        pair.prefill.wait(lambda: dropped in pair.prefill.sent, "hold_s", pair.decode)
        assert kept not in pair.prefill.sent
        pair.decode.receive(kept)
        pair.arrived(kept)

    def test_a_server_that_prefill_never_hears_of(self, make_pair: MakePair) -> None:
        pair = make_pair(unclaimed_s=0.5)
        name = pair.to_decode("r")
        pair.decode.receive(name)
        pair.received(name)
        assert pair.failures(name)["decode"] == "KV_ROOM_UNCLAIMED"
        assert name in pair.decode.failed


class TestAgent:
    def test_data_parallel_ranks_are_instances_of_their_own(
        self, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # vLLM gives the ranks of most models the size 1, and leaves them their index.
        created = vllm.ParallelConfig.__init__
        monkeypatch.setattr(
            vllm.ParallelConfig,
            "__init__",
            lambda self, **sizes: (created(self, **sizes), setattr(self, "data_parallel_index", 1))[0],
        )
        pair = make_pair()
        (prefill,), (decode,) = pair.prefill.agents, pair.decode.agents
        assert prefill.name == f"prefill-dp1-tp0@127.0.0.1:{pair.prefill.port + 1}"
        assert decode.name.startswith("decode-dp1-tp0@")
        assert (decode.rank.dp, decode.rank.dp_size) == (0, 1)

    def test_names_and_settings(self, pair: Pair) -> None:
        (prefill,), (decode,) = pair.prefill.agents, pair.decode.agents
        assert prefill.name == f"prefill-tp0@127.0.0.1:{pair.prefill.port}"
        assert decode.name.startswith("decode-tp0@")
        assert decode.name.endswith(f":{pair.decode.port}-en"[:9])
        assert (prefill.settings["unclaimed_s"], prefill.settings["hold_s"]) == (25.0, 30.0)
        integration = prefill.observe.status()["integration"]
        assert (integration["engine"], integration["engine_version"]) == ("vllm", "0.32.0")

    def test_the_environment_overrides_the_defaults_here(
        self, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVCTL_HOLD_S", "7")
        pair = make_pair(unclaimed_s=9.0)
        settings = pair.prefill.agents[0].settings
        assert (settings["hold_s"], settings["unclaimed_s"]) == (7.0, 9.0)

    def test_request_ids_are_shown_on_both_sides(self, pair: Pair) -> None:
        name = pair.to_decode(pair.to_prefill(pair.name()))
        pair.decode.receive(name)
        pair.decode.step()
        pair.prefill.step({name: 100})
        pair.prefill.finish(name)
        pair.arrived(name)
        pair.sent(name)
        for agent in (*pair.prefill.agents, *pair.decode.agents):
            assert agent.observe.room(room_number(name))[0]["request_id"] == name
