"""Rooms that fail: the first cause on every rank, pages back only when nothing is in flight, other rooms unharmed."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvctl_agent import Agent, KVPool, Rank
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import (
    AdminError,
    ConfigError,
    DeadlineExceeded,
    LayoutError,
    LocalProtocolError,
    TransportError,
)
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.memory.pool import DraftKV, GroupTensors, StateTensors
from kvctl_agent.parts import AgentParts
from tests.support.agents import mute
from tests.support.folded import folded
from tests.support.polling import until

FAILED, SUCCESS = {RoomState.FAILED}, {RoomState.SUCCESS}


class TestAbort:
    def test_pages_come_back_only_when_the_writers_have_drained(
        self, make_fleet: Any, request: pytest.FixtureRequest
    ) -> None:
        """A connection is being measured, so the part waits in the queue: until it is dropped, pages are not free."""
        fleet = make_fleet(prefill=(1, 1), path="slice").start()
        fleet.run(1, 4)
        busy, gate = threading.Event(), threading.Event()
        request.addfinalizer(gate.set)
        fleet.prefill[0].parts.transfers.run_between(lambda: busy.set() or gate.wait())
        assert busy.wait(60)
        room = fleet.feed(fleet.claim(fleet.receive(fleet.room(2, 8))))
        (receive,) = room.receives.values()
        until(lambda: fleet.prefill[0].parts.transfers._queue)
        receive.abort("enough")
        until(lambda: receive.state is RoomState.FAILED)
        assert receive.wait(0.1) is RoomState.FAILED
        assert not receive.released
        assert not room.sends[0].sent
        gate.set()
        assert room.wait(60) == FAILED
        assert receive.released
        assert room.sends[0].sent
        fleet.check()


class TestDisagreement:
    @pytest.mark.parametrize(
        ("changes", "factor"),
        [
            ({"page_size": 6}, "page_size 4 ≠ 6"),
            ({"heads": 16}, "shape.num_kv_heads 8 ≠ 16"),
        ],
    )
    def test_on_the_geometry_is_named_while_waiting(
        self, make_fleet: Any, model: Any, changes: dict[str, int], factor: str
    ) -> None:
        fleet, odd = make_fleet(prefill=(1, 1)), make_fleet(prefill=(1, 1), model=model(**changes))
        odd.bootstrap = fleet.bootstrap
        fleet.prefill = [fleet.prefill_agent(0).start()]
        odd.decode = [odd.decode_agent(0).start()]
        with pytest.raises(ConfigError, match=f"prefill-0 and decode-0 do not fit: .*{factor}"):
            odd.decode[0].wait_ready(60)
        assert factor in odd.decode[0].observe.peers()[0]["differences"]
        assert [row["state"] for row in fleet.prefill[0].observe.peers()] == ["refused"]
        # And a room says so too, at once.
        receive = odd.decode[0].receive(1, [0, 1])
        assert receive.wait(60) is RoomState.FAILED
        assert receive.error is not None
        assert factor in receive.error["text"]

    @pytest.mark.parametrize(
        ("prefill", "decode", "text"),
        [
            ({"tokens": 33}, {"tokens": 35}, "computes a prompt of 33 tokens, decode-[01] expects 35"),
            ({"tokens": 35, "digest": 8}, {"tokens": 35, "digest": 9}, f"digest {8:016x} ≠ {9:016x}"),
            ({"digest": 8}, {"tokens": 35, "digest": 9}, f"digest {8:016x} ≠ {9:016x}"),
            ({"tokens": 35}, {"tokens": 35, "digest": 9}, ""),
            ({"tokens": 35, "digest": 9}, {}, ""),
            ({}, {"tokens": 35, "digest": 9}, ""),
        ],
    )
    @pytest.mark.parametrize("first", ["prefill", "decode"])
    def test_on_the_prompt(self, make_fleet: Any, prefill: Any, decode: Any, text: str, first: str) -> None:
        fleet = make_fleet(decode=(1, 2), prefill=(1, 4)).start()
        room = fleet.room(1, 9)
        for role in (first, "decode" if first == "prefill" else "prefill"):
            fleet.claim(room, **prefill) if role == "prefill" else fleet.receive(room, **decode)
        for send in room.sends:
            send.pages(room.src, last=True)
            send.finish()
        assert room.wait(60) == (FAILED if text else SUCCESS)
        if text:
            assert {error["code"] for error in room.errors()} == {"KV_PLAN_MISMATCH"}
            assert len(room.errors()) == 6
            assert all("room 1: this side computes" in error["text"] for error in room.errors())
            assert re.search(text, room.errors()[0]["text"])
            assert fleet.total(fleet.decode, "kvctl_parts_total") == 0, "no part was written before"
        fleet.settle()
        fleet.run(2, 9)

    @pytest.mark.parametrize("segment", ["kv", "draft", "window", "conv", "kv k_scale"])
    def test_on_the_dtype_though_the_bytes_are_as_many(self, tmp_path: Path, segment: str) -> None:
        def agent(role: str, odd: torch.dtype) -> Agent:
            def tensors(name: str) -> Any:
                shape = (8, 2) if "scale" in name else (32, 2, 8)
                return [torch.zeros(shape, dtype=odd if name == segment else torch.int16)]

            pool = KVPool.from_tensors(
                tensors("kv"),
                tensors("kv"),
                page_size=4,
                total_kv_heads=2,
                k_scale=tensors("kv k_scale"),
                draft=DraftKV(tensors("draft"), tensors("draft"), 2),
                groups=[GroupTensors("window", DraftKV(tensors("window"), tensors("window"), 2), 4)],
                state=[StateTensors("conv", tensors("conv"))],
            )
            small: Any = {"transport": "loopback", "staging_buffer_mb": 4, "staging_ring_mb": 4}
            return Agent(role=role, rank=Rank(), pool=pool, name=role, bootstrap=f"ipc://{tmp_path}/b", **small).start()

        with agent("prefill", torch.float16), agent("decode", torch.bfloat16) as decode:
            with pytest.raises(ConfigError, match=f"prefill and decode do not fit: {segment} dtype float16 ≠ bfloat16"):
                decode.wait_ready(60)
            receive = decode.receive(1, [0], tokens=4, group_pages=[[0]])
            assert receive.wait(60) is RoomState.FAILED
            assert receive.error is not None
            assert receive.error["code"] == "KV_COMPAT_MISMATCH"


class TestReady:
    def test_who_waits_in_vain_is_told_for_whom(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 4))
        fleet.decode = [fleet.decode_agent(0).start()]
        with pytest.raises(DeadlineExceeded, match=r"decode-0 was not ready after 0.1 s: no answer from the registry"):
            fleet.decode[0].wait_ready(0.1)
        fleet.prefill = [fleet.prefill_agent(number).start() for number in (0, 3)]
        for agent in fleet.prefill:
            agent.wait_ready(60)
        until(lambda: fleet.decode[0].waiting_for() == "2 of 4 prefill ranks registered, missing tp=1,2")
        with pytest.raises(DeadlineExceeded, match="2 of 4 prefill ranks registered, missing tp=1,2"):
            fleet.decode[0].wait_ready(0.05)
        assert fleet.decode[0].observe.status()["waiting_for"] == "2 of 4 prefill ranks registered, missing tp=1,2"
        fleet.prefill += [fleet.prefill_agent(number).start() for number in (1, 2)]
        fleet.decode[0].wait_ready(60)
        fleet.run(1, 4)
        fleet.check()

    def test_an_agent_that_was_not_started_says_so(self, make_fleet: Any) -> None:
        fleet = make_fleet()
        fleet.decode = [fleet.decode_agent(0)]
        with pytest.raises(DeadlineExceeded, match="it has not been started"):
            fleet.decode[0].wait_ready(0.02)

    def test_a_rank_that_claims_anothers_place_is_refused(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 2)).start()
        impostor = fleet.prefill_agent(1, name="impostor")
        fleet.prefill.append(impostor)
        with pytest.raises(ConfigError, match="the registry refuses impostor claims tp=1, which prefill-1 holds"):
            impostor.start().wait_ready(60)
        impostor.close()
        fleet.prefill.pop()
        fleet.run(1, 4)
        fleet.check()


class TestNames:
    def test_a_second_agent_of_a_living_ones_name_is_refused(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1)).start()
        second = fleet.decode_agent(0)
        with pytest.raises(AdminError, match="decode-0"):
            second.start()
        second.close()
        fleet.run(1, 4)
        fleet.decode[0].close()
        fleet.decode = [fleet.decode_agent(0).start()]
        fleet.decode[0].wait_ready(60)
        fleet.run(2, 4)
        fleet.check()

    def test_the_suffix_may_be_the_name_of_the_host(self, make_fleet: Any) -> None:
        agent = make_fleet().decode_agent(0, name_suffix="hostname")
        assert agent.name == f"decode-0@{socket.gethostname()}"
        agent.close()
        with pytest.raises(ConfigError, match="it must be 1 to 255 bytes of printable text"):
            make_fleet().decode_agent(0, name_suffix="x" * 250)

    def test_a_second_registry_at_the_same_place_is_refused_and_the_first_goes_on(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1)).start()
        rival = fleet.prefill_agent(0, name="rival")
        with pytest.raises(ConfigError, match=r"cannot bind ipc://.*is another agent using it"):
            rival.start()
        rival.close()
        with pytest.raises(LocalProtocolError):
            rival.start()
        fleet.run(1, 4)
        fleet.check()

    @pytest.mark.parametrize(
        ("config", "error"),
        [
            ({"bootstrap": "tcp://0.0.0.0:7000"}, "not a loopback address"),
            ({"bootstrap": "tcp://127.0.0.1"}, "is not an endpoint"),
            ({"transport": "carrier-pigeon"}, "carrier-pigeon"),
            ({"transport_params": "speed"}, "'speed' is not a name=value pair"),
            ({"colour": "red"}, "colour"),
            ({"role": "spectator"}, "must be 'prefill' or 'decode'"),
        ],
    )
    def test_a_wrong_setting_is_named_and_leaves_nothing_open(
        self, make_fleet: Any, config: dict[str, str], error: str
    ) -> None:
        from kvctl_agent import Agent, Rank

        fleet = make_fleet()
        settings: dict[str, Any] = {
            "role": "prefill",
            "bootstrap": fleet.bootstrap,
            "transport": "loopback",
            "staging_buffer_mb": 4,
            **config,
        }
        pool = fleet.model.pool(ParallelConfig(), 0)
        with pytest.raises(ConfigError, match=error):
            Agent(rank=Rank(), pool=pool, name="a", model=fleet.model.shape, **settings)
        pool.close()


class TestCalls:
    def test_what_an_engine_may_not_do(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1)).start()
        prefill, decode = fleet.prefill[0], fleet.decode[0]
        for call, text in (
            (lambda: decode.send(1), r"decode-0 \(decode, running\) takes no prefill rooms"),
            (lambda: prefill.receive(1, [0]), r"prefill-0 \(prefill, running\) takes no decode rooms"),
            (
                lambda: decode.receive(2**64, [0]),
                "room is 18446744073709551616: it must be a whole number from 0 to 18446744073709551615",
            ),
            (lambda: decode.receive(-1, [0]), "room is -1: it must be a whole number from 0"),
            (lambda: decode.receive(1, [64]), "page 64 is outside the pool of 64"),
            (
                lambda: decode.receive(1, [0], aux_index=64),
                "aux_index is 64: it must be None or a row of the pool's 64",
            ),
            (lambda: decode.start(), "decode-0 was started before"),
            (lambda: decode.measure_connection(), r"decode-0 \(running\) has no connection to measure"),
        ):
            with pytest.raises(LocalProtocolError, match=text):
                call()
        for agent in (prefill, decode):
            assert agent.telemetry.metrics.totals("kvctl_rooms_refused_total") == {("role",): 1}
        with pytest.raises(LayoutError, match="not page-aligned"):
            decode.receive(1, [0], prefix_tokens=3)
        with pytest.raises(ConfigError, match="must be auto, bulk, slice, staged, direct"):
            prefill.set_path("teleport")
        first = decode.receive(2**64 - 1, [0])
        with pytest.raises(LocalProtocolError, match="room 18446744073709551615 is in use on decode-0"):
            decode.receive(2**64 - 1, [1])
        first.abort("test is over")

    def test_a_prefill_rank_refuses_rooms_of_another_dp_group_and_goes_on(self, make_fleet: Any) -> None:
        """Its decode ranks open them at the ranks of that group only, so it would wait for them in vain."""
        fleet = make_fleet(prefill=(2, 1), decode=(1, 1)).start()
        text = (
            r"room 7 is computed by dp group 1 of this instance \(its number % 2\), and prefill-0 belongs to dp group 0"
        )
        with pytest.raises(LocalProtocolError, match=text):
            fleet.prefill[0].send(7)
        assert fleet.prefill[0].send(7, fake=True).state is RoomState.SUCCESS
        receive, send = fleet.decode[0].receive(6, [3]), fleet.prefill[0].send(6)
        send.pages([5], last=True)
        assert receive.wait(20) is RoomState.SUCCESS
        assert send.wait(20) is RoomState.SUCCESS
        assert not fleet.prefill[1].parts.machine.rooms

    def test_a_callback_that_raises_costs_nobody_anything(self, make_fleet: Any) -> None:
        def broken(*args: Any) -> None:
            raise RuntimeError("the engine's own bug")

        fleet = make_fleet(prefill=(1, 1), on_state=broken).start()
        fleet.run(1, 9)
        fleet.check()
        assert any("the engine's own bug" in text for text in fleet.errors())


class TestClose:
    def test_the_switch_interval_is_the_process_s_own_again(self, make_fleet: Any) -> None:
        before = sys.getswitchinterval()
        fleet = make_fleet(prefill=(1, 1), switch_interval_ms=1.5)
        assert sys.getswitchinterval() == before, "created, not started"
        fleet.start()
        assert sys.getswitchinterval() == pytest.approx(0.0015)
        for agent in (*fleet.prefill, *fleet.decode):
            agent.close(5)
        assert sys.getswitchinterval() == before

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_rooms_in_flight_fail_with_a_cause_and_within_the_deadline(self, make_fleet: Any, side: str) -> None:
        fleet = make_fleet("nixl").start()
        rooms = [fleet.claim(fleet.receive(fleet.room(number, 3))) for number in range(10)]
        for room in rooms[::2]:
            for send in room.sends:
                send.pages(room.src[:2])
        until(lambda: all(send.state > RoomState.BOOTSTRAPPING for room in rooms for send in room.sends))
        agent = fleet.prefill[1] if side == "prefill" else fleet.decode[0]
        since = time.monotonic()
        agent.close(30)
        assert time.monotonic() - since < 30
        for room in rooms:
            assert room.wait(60) == FAILED
            for error in room.errors():
                assert error["text"] == f"agent {agent.name} is closing"
                assert (error["rank"], error["code"]) == (agent.name, "ABORTED")

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_a_room_that_meets_a_closing_agent_fails_on_the_others_at_once(self, make_fleet: Any, side: str) -> None:
        """Its opening may come too late to be answered; nobody waits for the silence of an agent that said goodbye."""
        fleet = make_fleet("loopback", prefill=(1, 1)).start()
        agent, other = (fleet.prefill[0], fleet.decode[0]) if side == "prefill" else (fleet.decode[0], fleet.prefill[0])
        agent.close(4)
        # It may have been forgotten by now, which only a peer that is proven dead is.
        until(
            lambda: any(
                row["kind"] == "peer-lost" and agent.name in row["text"] and "it was closed" in row["text"]
                for row in other.observe.events()["events"]
            )
        )

    def test_with_every_peer_gone_it_still_ends(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1)).start()
        rooms = [fleet.receive(fleet.room(number, 3)) for number in range(5)]
        mute(fleet.prefill[0])
        since = time.monotonic()
        fleet.decode[0].close(1.0)
        assert time.monotonic() - since < 30
        for room in rooms:
            (receive,) = room.receives.values()
            assert receive.state is RoomState.FAILED
            assert receive.error is not None
            assert "closing" in receive.error["text"] or "closed" in receive.error["text"]

    def test_after_it_nothing_can_be_asked_and_closing_again_is_fine(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1)).start()
        room = fleet.claim(fleet.room(9, 4))
        for agent in fleet.prefill + fleet.decode:
            agent.close()
            agent.close()
        with pytest.raises(LocalProtocolError, match="closed"):
            fleet.prefill[0].send(1)
        with pytest.raises(LocalProtocolError, match="closed"):
            fleet.decode[0].receive(1, [0])
        since = time.monotonic()
        with pytest.raises(LocalProtocolError):
            fleet.prefill[0].measure_connection()
        assert time.monotonic() - since < 30
        room.sends[0].pages([1])
        room.sends[0].abort("late")
        assert room.wait(0) == FAILED

    def test_an_observer_that_is_still_being_answered_keeps_nothing_open_but_itself(self, make_fleet: Any) -> None:
        agent = make_fleet(prefill=(1, 1)).start().prefill[0]
        close_admin = agent.admin.close

        def busy() -> None:
            close_admin()
            raise DeadlineExceeded("the admin server of prefill-0 did not stop within 2 s")

        agent.admin.close = busy
        agent.close()
        with pytest.raises(TransportError, match="closed"):
            agent.parts.transport.arrivals()
        assert agent.parts.context.closed
        assert "did not stop" in folded(agent.telemetry).recorder.since(None, 1)["events"][0]["text"]

    def test_parts_are_released_when_the_admin_server_cannot_be_built(
        self, make_fleet: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The fixture `no_leaks` also fails for a descriptor or thread that is left."""
        built: list[AgentParts] = []

        def build(*arguments: Any) -> AgentParts:
            built.append(AgentParts(*arguments))
            return built[-1]

        def broken(*_: Any, **__: Any) -> None:
            raise AdminError("admin handlers differ from the declared commands")

        monkeypatch.setattr("kvctl_agent.agent.AgentParts", build)
        monkeypatch.setattr("kvctl_agent.agent.ObserverLink", broken)
        with pytest.raises(AdminError, match="handlers differ"):
            make_fleet(prefill=(1, 1)).start()
        (parts,) = built
        assert parts.context.closed
        with pytest.raises(TransportError, match="closed"):
            parts.transport.arrivals()

    def test_one_that_was_never_started(self, make_fleet: Any) -> None:
        fleet = make_fleet()
        for agent in (fleet.prefill_agent(0), fleet.decode_agent(0)):
            agent.close()
            with pytest.raises(LocalProtocolError):
                agent.start()

    def test_as_a_context(self, make_fleet: Any) -> None:
        fleet = make_fleet()
        with fleet.prefill_agent(0).start() as agent:
            agent.wait_ready(60)
        with pytest.raises(LocalProtocolError):
            agent.send(1)


class TestDrain:
    def test_it_takes_no_new_rooms_and_waits_for_the_old_ones(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1)).start()
        room = fleet.claim(fleet.receive(fleet.room(12, 4)))
        with pytest.raises(DeadlineExceeded, match=r"prefill-0: rooms still in flight after 0.05 s: 12"):
            fleet.prefill[0].drain(0.05)
        with pytest.raises(LocalProtocolError, match="draining"):
            fleet.prefill[0].send(13)
        fleet.feed(room)
        fleet.prefill[0].drain(5)
        fleet.decode[0].drain(5)
        assert room.wait(0) == SUCCESS
        fleet.expect(room)
        fleet.check()


class TestCalibration:
    def test_it_is_made_when_costs_decide_and_not_before(self, make_fleet: Any) -> None:
        fleet = make_fleet(prefill=(1, 1)).start()
        chooser = fleet.prefill[0].parts.chooser
        fleet.run(1, 4)
        assert chooser.model is None
        fleet.set_path("auto")
        until(lambda: chooser.model is not None)
        first = chooser.model
        fleet.set_path("auto")
        fleet.run(2, 4)
        assert chooser.model is first
        (text,) = fleet.events("calibration")
        assert text.startswith("connection to decode-0: one write ")

    def test_it_touches_no_buffer_that_is_in_use(self, make_fleet: Any) -> None:
        """Parts may have been gathered already: they must not be overwritten."""
        fleet = make_fleet(prefill=(1, 1), path="auto").start()
        agent = fleet.prefill[0]
        fleet.run(1, 4)
        until(lambda: agent.parts.chooser.model is not None)
        held: list[Any] = []
        while (buffer := agent.parts.buffers.acquire(f"peer-{len(held)}")) is not None:
            buffer.span.array[:] = 0x5A
            held.append(buffer)
        agent.parts.buffers.release(held.pop())
        agent.parts.chooser.model = None
        done = threading.Event()
        agent.parts.transfers.run_between(lambda: (agent.parts.connections.calibrate(), done.set()))
        assert done.wait(60)
        assert agent.parts.chooser.model is not None
        for buffer in held:
            assert bool((buffer.span.array == 0x5A).all())
            agent.parts.buffers.release(buffer)

    def test_measuring_on_request_gives_sane_costs(self, make_fleet: Any) -> None:
        fleet = make_fleet("nixl", prefill=(1, 1)).start()
        for cost in (fleet.prefill[0].measure_connection() for _ in range(3)):
            assert 0.01 < cost.write_gb_per_s < 1000
            assert 0 < cost.write_us(1, 4096) < 1e5
            assert cost.write_us(1000, 1 << 20) >= cost.write_us(1, 1 << 20) * (1 - 1e-9)
