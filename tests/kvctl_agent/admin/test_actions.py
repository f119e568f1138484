"""The commands that act, over the real socket and on living agents: what is done, what is refused, what is said."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from kvctl_agent.contract.admin import socket_path
from kvctl_agent.contract.config import KEYS
from kvctl_agent.contract.snapshots import ActionResult, ConfigRow, Probe
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.protocol.events import Answered, Drain, Event
from kvctl_agent.runtime.control_loop import OperatorRequests
from tests.support.agents import mute
from tests.support.polling import until

PATIENCE_S = 60  # for what takes milliseconds on a quiet machine


class Desk:
    """Asks agents of one fleet, each over one connection."""

    def __init__(self, connect: Any) -> None:
        self._connect = connect
        self._clients: dict[str, Any] = {}

    def ask(self, agent: Any, cmd: str, **args: Any) -> Any:
        reply = self._ask(agent, cmd, args)
        assert reply["ok"], reply
        return reply["data"]

    def done(self, agent: Any, cmd: str, **args: Any) -> ActionResult:
        """The one thing that a command did."""
        (row,) = self.ask(agent, cmd, **args)
        assert row.keys() == ActionResult.__annotations__.keys()
        assert row["agent"] == agent.name
        found: ActionResult = row
        return found

    def refusal(self, agent: Any, cmd: str, **args: Any) -> tuple[str, str]:
        reply = self._ask(agent, cmd, args)
        assert not reply["ok"], reply
        return reply["error"]["code"], reply["error"]["message"]

    def config(self, agent: Any, key: str) -> ConfigRow:
        rows: list[ConfigRow] = self.ask(agent, "config")
        return next(row for row in rows if row["key"] == key)

    def _ask(self, agent: Any, cmd: str, args: dict[str, Any]) -> Any:
        client = self._clients.get(agent.name)
        if client is None:
            client = self._clients[agent.name] = self._connect(socket_path(agent.name))
        return client.ask(cmd, **args)


@pytest.fixture
def desk(connect: Any) -> Desk:
    return Desk(connect)


@pytest.fixture
def fleet(make_fleet: Any) -> Any:
    """Two writers, one reader."""
    return make_fleet("loopback", waiting_timeout_s=600.0).start()


def asked(fleet: Any, number: int) -> Any:
    """A room whose writers hold grants and have computed nothing."""
    room = fleet.claim(fleet.receive(fleet.room(number, 8)))
    for send in room.sends:
        send.prefetch()
    until(lambda: len(allocations(fleet)) == 2)
    return room


def allocations(fleet: Any) -> Any:
    return fleet.decode[0].observe.staging()["ring"]["allocations"]


def waits(agent: Any, field: str, ns: int) -> bool:
    """Whether the machine's deadline is that long."""
    return bool(getattr(agent.parts.machine.timing, field) == ns)


def finish(fleet: Any, room: Any) -> None:
    fleet.feed(room)
    assert room.wait(PATIENCE_S) == {RoomState.SUCCESS}, room.errors()
    fleet.expect(room)
    fleet.settle()
    fleet.check()
    assert fleet.errors() == []


class TestAbort:
    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_a_room_fails_on_every_rank_with_the_operators_words(self, fleet: Any, desk: Desk, role: str) -> None:
        room = asked(fleet, 7)
        agent = getattr(fleet, role)[0]
        done = desk.done(agent, "abort", room="7", reason="it was a test")
        assert (done["subject"], done["result"]) == ("room 7", "aborted")
        assert room.wait(PATIENCE_S) == {RoomState.FAILED}
        fleet.settle()
        for handle in room.handles:
            assert handle.error["text"] == "aborted by an operator: it was a test"
            assert handle.error["rank"] == agent.name
        told = [row for row in agent.observe.events()["events"] if row["kind"] == "operator"]
        assert [(row["room"], row["severity"]) for row in told] == [("7", "warning")]
        assert told[0]["text"].endswith("(asked by socket)")

    def test_an_earlier_life_of_its_number_waits_for_nobody(self, make_fleet: Any, desk: Desk) -> None:
        fleet = make_fleet("loopback", prefill=(1, 1)).start()
        fleet.run(7, 8)
        writer = fleet.prefill[0]
        until(lambda: not desk.ask(writer, "rooms"))
        fleet.claim(fleet.receive(fleet.room(7, 8)))
        until(lambda: [row["state"] for row in desk.ask(writer, "rooms")] == ["WaitingForInput"])
        mute(fleet.decode[0])  # it does not confirm the failure
        desk.done(writer, "abort", room="7")
        lives = desk.ask(writer, "room", room="7")
        assert [(life["state"], life["missing"]) for life in lives] == [("Failed", ["decode-0"]), ("Success", [])]

    def test_a_control_loop_that_does_not_answer_is_said_so(self, make_fleet: Any, desk: Desk) -> None:
        held = threading.Event()
        # An engine that breaks its promise.
        fleet = make_fleet("loopback", on_state=lambda handle, state: held.wait(PATIENCE_S)).start()
        agent = fleet.decode[0]
        room = fleet.receive(fleet.room(7, 8))
        try:
            code, text = desk.refusal(agent, "abort", room="7")
        finally:
            held.set()
        assert code == "timeout"
        assert "may still do it" in text
        assert {receive.wait(PATIENCE_S) for receive in room.receives.values()} == {RoomState.FAILED}


class TestRelease:
    def test_what_a_lost_writer_holds_is_freed_by_force_alone(self, make_fleet: Any, desk: Desk) -> None:
        """Its agent no longer answers, and its process, which is ours, lives: nothing proves that it will not write."""
        fleet = make_fleet("loopback", prefill=(1, 1), heartbeat_s=0.1, suspect_s=0.8, lost_s=2.0).start()
        room = fleet.claim(fleet.receive(fleet.room(7, 8)))
        room.sends[0].prefetch()
        until(lambda: allocations(fleet))
        mute(fleet.prefill[0])
        decode = fleet.decode[0]
        until(lambda: [row["state"] for row in allocations(fleet)] == ["quarantined"])
        (held,) = allocations(fleet)
        assert held["room_state"] == "Failed"
        code, text = desk.refusal(decode, "release", serial=held["serial"])
        assert code == "refused"
        assert "prefill-0 (process " in text
        assert "nothing proves" in text
        assert desk.refusal(decode, "release", room="7")[0] == "refused"
        (receive,) = room.receives.values()
        assert not receive.released
        (row,) = desk.ask(decode, "rooms")
        assert row["missing"] == ["prefill-0"]
        done = desk.done(decode, "release", room="7", force=True)
        assert (done["subject"], done["result"]) == ("room 7", "released")
        assert "its pages are the engine's again" in done["text"]
        until(lambda: receive.released)
        assert allocations(fleet) == []
        assert desk.ask(decode, "rooms") == []
        assert desk.done(decode, "release", room="7", force=True)["result"] == "unchanged"
        fleet.prefill[0].close(0.5)  # it would wait for a control loop that has gone

    def test_what_makes_no_sense(self, fleet: Any, desk: Desk) -> None:
        code, text = desk.refusal(fleet.prefill[0], "release", serial=1)
        assert (code, text) == ("refused", "prefill-0 is a prefill rank: rings are on decode ranks")
        for both in ({}, {"serial": 1, "room": "7"}):
            assert desk.refusal(fleet.decode[0], "release", **both)[0] == "bad-argument"
        assert desk.refusal(fleet.decode[0], "release", serial=99)[0] == "refused"
        assert desk.refusal(fleet.decode[0], "release", room="7")[0] == "unknown-room"


class TestForget:
    def test_a_peer_that_is_unknown_or_ready(self, fleet: Any, desk: Desk) -> None:
        decode = fleet.decode[0]
        done = desk.done(decode, "forget", peer="nobody")
        assert (done["subject"], done["result"]) == ("peer nobody", "unchanged")
        until(lambda: decode.machine.is_ready("prefill-0"))
        code, text = desk.refusal(decode, "forget", peer="prefill-0")
        assert code == "refused"
        assert text.startswith("prefill-0 is ready, heard ")


class TestDrain:
    def test_what_is_in_flight_goes_on_and_nothing_new_begins_until_it_is_resumed(self, fleet: Any, desk: Desk) -> None:
        room = asked(fleet, 7)
        agents = fleet.prefill + fleet.decode
        for agent in agents:
            done = desk.done(agent, "drain")
            assert (done["subject"], done["result"]) == ("rooms", "draining")
            assert "1 in flight" in done["text"]
            assert desk.done(agent, "drain")["result"] == "unchanged"
            status = desk.ask(agent, "status")
            assert (status["accepting"], status["draining"], status["resumed_age_ns"]) == (False, True, None)
            assert 0 <= status["draining_age_ns"] < status["uptime_ns"]
            assert desk.ask(agent, "hello")["draining"] is True
        with pytest.raises(LocalProtocolError, match=r"decode-0 \(decode, draining\) takes no decode rooms"):
            fleet.decode[0].receive(8, [1])
        with pytest.raises(LocalProtocolError, match=r"prefill-0 \(prefill, draining\) takes no prefill rooms"):
            fleet.prefill[0].send(8)
        for agent in (fleet.decode[0], fleet.prefill[0]):
            assert agent.telemetry.metrics.total("kvctl_rooms_refused_total", "state") == 1
        finish(fleet, room)
        assert "none in flight" in desk.done(fleet.decode[0], "drain")["text"]
        for agent in agents:
            assert desk.done(agent, "resume")["result"] == "accepting"
            assert desk.done(agent, "resume")["result"] == "unchanged"
            status = desk.ask(agent, "status")
            assert (status["accepting"], status["draining"]) == (True, False)
            assert 0 <= status["resumed_age_ns"] < status["draining_age_ns"] < status["uptime_ns"]
        fleet.run(8, 8)

    def test_health_checks_go_on(self, fleet: Any, desk: Desk) -> None:
        for agent in (fleet.prefill[0], fleet.decode[0]):
            desk.done(agent, "drain")
        checks = (fleet.prefill[0].send(0, fake=True), fleet.decode[0].receive(0, [], fake=True))
        assert {check.wait(PATIENCE_S) for check in checks} == {RoomState.SUCCESS}

    def test_a_room_that_comes_in_the_moment_of_draining_does_not_wait_for_its_engine(
        self, make_fleet: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fleet = make_fleet("loopback", prefill=(1, 1)).start()
        writer = fleet.prefill[0]
        put, room = writer.parts.mailbox.put, fleet.room(7, 8)

        def overtaken(*events: Any) -> None:
            """The engine comes, and then an opening, before the control loop has heard of the draining."""
            if isinstance(events[0], Drain):
                with suppress(LocalProtocolError):
                    room.sends.append(writer.send(7))
                fleet.receive(room)
                until(lambda: writer.parts.machine.knows(7))
            put(*events)

        monkeypatch.setattr(writer.parts.mailbox, "put", overtaken)
        writer.begin_drain()
        assert len(room.sends) == 1, "its engine was sent away, and the decode rank waits for it"
        finish(fleet, room)

    def test_an_engine_that_is_leaving_is_not_held(self, fleet: Any, desk: Desk) -> None:
        fleet.decode[0].drain(PATIENCE_S)
        assert desk.refusal(fleet.decode[0], "resume") == ("refused", "agent decode-0 is being closed by its engine")


class TestSet:
    @pytest.mark.parametrize("key", [key for key in KEYS if key.runtime], ids=lambda key: key.name)
    def test_every_key_that_may_change_does(self, fleet: Any, desk: Desk, key: Any) -> None:
        words = {"pipeline": "on", "pipeline_group_size": "2", "pipeline_min_iters": "3"}
        wanted = words.get(key.name, "7")
        for agent in fleet.prefill + fleet.decode:
            was = desk.config(agent, key.name)
            done = desk.done(agent, "set", key=key.name, value=wanted)
            assert (done["subject"], done["result"]) == (key.name, "set")
            row = desk.config(agent, key.name)
            assert (row["value"], row["origin"]) == (key.type(wanted), "admin socket")
            assert row["value"] != was["value"]
            if key.name.startswith("pipeline"):
                field = "mode" if key.name == "pipeline" else key.name.removeprefix("pipeline_")
                assert getattr(agent.parts.pipelining.options, field) == row["value"]
            else:
                field = {"bootstrap_timeout_s": "bootstrap_ns", "waiting_timeout_s": "waiting_ns"}[key.name]
                until(partial(waits, agent, field, 7 * 10**9))
            assert desk.done(agent, "set", key=key.name, value=wanted)["result"] == "unchanged"

    @pytest.mark.parametrize(
        ("key", "value", "wanted"),
        [
            ("waiting_timeout", "5", "did you mean waiting_timeout_s"),
            ("staging_ring_mb", "5", "cannot change while the agent runs"),
            ("waiting_timeout_s", "soon", "it takes a number from 0.1 to 86400 s"),
            ("pipeline", "onn", "did you mean on"),
            ("pipeline_min_iters", "900", "must not exceed pipeline_max_iters"),
        ],
    )
    def test_what_is_not_allowed_changes_nothing(
        self, fleet: Any, desk: Desk, key: str, value: str, wanted: str
    ) -> None:
        before = desk.ask(fleet.decode[0], "config")
        code, text = desk.refusal(fleet.decode[0], "set", key=key, value=value)
        assert code == "bad-argument"
        assert wanted in text
        assert desk.ask(fleet.decode[0], "config") == before


class TestProbe:
    @pytest.mark.parametrize("transport", ["loopback", "nixl"])
    def test_a_lane_is_measured_and_shown_from_then_on(self, make_fleet: Any, desk: Desk, transport: str) -> None:
        fleet = make_fleet(transport, prefill=(1, 1), decode=(2, 1)).start()
        writer = fleet.prefill[0]
        until(lambda: len(writer.parts.connections.by_peer) == 2)
        assert {row["lane_gb_per_s"] for row in desk.ask(writer, "peers")} == {None}

        def probed() -> Any:
            found = desk.ask(writer, "probe", peer="decode-1", bytes=2 << 20)
            assert found.keys() == Probe.__annotations__.keys()
            assert (found["agent"], found["peer"], found["lane"]) == ("prefill-0", "decode-1", transport)
            assert (found["moved_bytes"] is None) == found["running"]
            return None if found["running"] else found

        found = until(probed)
        rows = found["rows"]
        assert found["moved_bytes"] > sum(row["bytes"] * row["descriptors"] for row in rows)
        assert [row["bytes"] for row in rows] == [64, 512, 4096, 32768, 262144, 2 << 20]
        assert all(row["descriptor_ns"] > 0 and row["gb_per_s"] > 0 for row in rows)
        assert rows[-1]["descriptors"] == rows[0]["descriptors"] == 1
        shown = {row["peer"]: row for row in desk.ask(writer, "peers")}
        assert shown["decode-0"]["lane_gb_per_s"] is None
        # What every write takes anyway is no descriptor's; where that is most of a write, half of it is theirs.
        assert all(row["descriptors"] * row["descriptor_ns"] >= row["write_ns"] * 0.49 for row in rows[:-1])
        assert 0 < rows[-1]["write_ns"] <= 1.001 * (rows[-1]["descriptor_ns"] + rows[0]["write_ns"])
        moving_gb_per_s = rows[-1]["bytes"] / rows[-1]["descriptor_ns"]  # without what every write takes
        assert shown["decode-1"]["lane_gb_per_s"] == pytest.approx(moving_gb_per_s, rel=1e-3)
        assert rows[-1]["gb_per_s"] < moving_gb_per_s
        assert shown["decode-1"]["lane_descriptor_ns"] == pytest.approx(rows[1]["descriptor_ns"], abs=1)
        assert shown["decode-1"]["lane_measured_age_ns"] > 0
        assert shown["decode-1"]["same_host"]
        fleet.run(7, 8)
        fleet.check()

    def test_open_rooms_are_not_held_up_unless_that_is_wanted(self, fleet: Any, desk: Desk) -> None:
        room = asked(fleet, 7)
        code, text = desk.refusal(fleet.prefill[0], "probe")
        assert code == "refused"
        assert "1 open room, " in text
        until(lambda: not desk.ask(fleet.prefill[0], "probe", busy=True)["running"])
        finish(fleet, room)

    def test_a_measurement_that_nobody_came_for_is_not_given_to_the_next_who_asks(
        self, fleet: Any, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer = fleet.prefill[0]

        def left() -> None:
            """A client asks, and is gone before the measurement begins."""
            held = threading.Event()
            writer.parts.transfers.run_between(lambda: held.wait(PATIENCE_S) and None)
            assert desk.ask(writer, "probe", bytes=1 << 20)["running"]
            over = threading.Event()
            writer.parts.transfers.run_between(over.set)
            held.set()
            assert over.wait(PATIENCE_S)

        def probed(nbytes: int) -> Any:
            answer = desk.ask(writer, "probe", bytes=nbytes)
            return None if answer["running"] else answer["rows"]

        left()
        assert until(lambda: probed(2 << 20))[-1]["bytes"] == 2 << 20
        monkeypatch.setattr("kvctl_agent.admin.actions._UNCLAIMED_NS", 0)
        left()
        stale = writer.parts.connections.measured["decode-0"]
        until(lambda: probed(1 << 20))
        assert writer.parts.connections.measured["decode-0"] is not stale

    def test_nothing_is_written_to_a_peer_that_is_silent(self, make_fleet: Any, desk: Desk) -> None:
        """What it has registered may be gone with it."""
        fleet = make_fleet("loopback", prefill=(1, 1), heartbeat_s=0.1, suspect_s=0.4, lost_s=600.0).start()
        mute(fleet.decode[0])
        until(lambda: [row["state"] for row in desk.ask(fleet.prefill[0], "peers")] == ["suspect"])
        for peer in ({}, {"peer": "decode-0"}):
            code, text = desk.refusal(fleet.prefill[0], "probe", **peer)
            assert code == "refused"
            assert "decode-0 has been silent for " in text

    def test_what_cannot_be_measured(self, make_fleet: Any, desk: Desk) -> None:
        fleet = make_fleet("loopback", staging="off", path="auto").start()
        assert desk.refusal(fleet.decode[0], "probe")[1].startswith("decode-0 is a decode rank")
        assert desk.refusal(fleet.prefill[0], "probe", bytes=1)[0] == "bad-argument"
        code, text = desk.refusal(fleet.prefill[0], "probe", peer="decode-9")
        assert (code, text) == ("refused", "prefill-0 is not connected to 'decode-9'; connected: decode-0")
        assert "offers no scratch memory" in desk.refusal(fleet.prefill[0], "probe")[1]


def test_what_an_agent_takes_of_its_host(fleet: Any, desk: Desk) -> None:
    process = desk.ask(fleet.decode[0], "status")["process"]
    assert process["fds_limit"] is None or 0 < process["fds"] < process["fds_limit"]
    assert process["threads"] >= threading.active_count() - 1
    assert process["rss_bytes"] > 1 << 20
    assert process["cpu_ns"] > 0


def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    requests, numbers = OperatorRequests(lambda event: None), list[int]()

    def make(number: int) -> Event:
        numbers.append(number)
        return Drain(True)

    assert requests.ask(make, 0) is None
    requests.answer(Answered(numbers[0], "done", ""))
    assert requests._pending == {}
