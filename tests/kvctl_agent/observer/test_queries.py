"""Every admin command over the real socket while rooms are moving: the contract's shape, and numbers that add up."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest

from kvctl_agent.contract import snapshots
from kvctl_agent.contract.admin import socket_path
from kvctl_agent.contract.commands import COMMANDS
from kvctl_agent.contract.metrics import METRICS_BY_NAME
from kvctl_agent.contract.states import STATE_LABELS, RoomState
from kvctl_agent.layout.layer_grouping import ForwardInfo
from tests.support.polling import until

# What each command answers; `stacks` and the others that the server answers itself included.
ANSWERS: dict[str, Any] = {
    "hello": snapshots.Hello,
    "commands": list[snapshots.CommandInfo],
    "config": list[snapshots.ConfigRow],
    "bootstrap": list[snapshots.Bootstrap],
    "status": snapshots.Status,
    "rooms": list[snapshots.RoomRow],
    "room": list[snapshots.RoomDetail],
    "slow": list[snapshots.RoomRow],
    "history": list[snapshots.RoomRow],
    "failed": snapshots.FailedRooms,
    "staging": snapshots.Staging,
    "layers": list[snapshots.LayerRow],
    "peers": list[snapshots.PeerRow],
    "nics": snapshots.Nics,
    "cost": snapshots.Cost,
    "events": snapshots.Events,
    "metrics": list[snapshots.MetricFamily],
    "health": snapshots.Health,
    "stacks": list[snapshots.ThreadStack],
}
# What acts is asked in test_operate.py.
ACTS = {"abort", "release", "forget", "drain", "resume", "set", "probe"}
FIRST = 1 << 63  # rooms are 64-bit numbers


def mismatch(value: Any, kind: Any) -> str:
    """Returns where a JSON value differs from an annotation of the contract; "" if it does not."""
    try:
        known = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return "" if known == value else f"more than the contract has: {value}"


def test_every_command_is_checked() -> None:
    assert set(ANSWERS) | ACTS == {command.name for command in COMMANDS}


@pytest.fixture
def fleet(make_fleet: Any, model: Any) -> Any:
    """Two writers, one reader; a ring of 1 MiB for rooms of 256 KiB a writer."""
    wide = model(heads=4, k_dim=128, v_dim=128, page_size=8, pages=600, layers=2)
    return make_fleet("nixl", model=wide, path="staged", chunk_tokens=64).start()


def ask(connect: Any, agent: Any, cmd: str, **args: Any) -> Any:
    reply = connect(socket_path(agent.name)).ask(cmd, **args)
    assert reply["ok"], reply
    return reply["data"]


def test_the_contracts_shape_at_any_moment_of_live_transfers(fleet: Any, connect: Any) -> None:
    rooms = [fleet.receive(fleet.room(FIRST + number, 16, aux=number)) for number in range(20)]
    clients = {agent.name: connect(socket_path(agent.name)) for agent in fleet.prefill + fleet.decode}
    stop = threading.Event()

    def compute() -> None:
        for room in rooms:
            fleet.claim(room)
            fleet.feed(room, (3, 9))
            if stop.wait(0.02):
                return

    engine = threading.Thread(target=compute)
    engine.start()
    wrong: set[str] = set()
    looked = 0
    seen: set[str] = set()
    try:
        while engine.is_alive() or looked < 3:
            looked += 1
            for name, client in clients.items():
                for cmd, kind in ANSWERS.items():
                    args = {"room": str(FIRST)} if cmd == "room" else {}
                    reply = client.ask(cmd, **args)
                    if cmd == "room" and not reply["ok"]:
                        assert reply["error"]["code"] == "unknown-room"
                        continue
                    assert reply["ok"], (name, cmd, reply)
                    assert reply["generated_at_ns"] > 0
                    seen.add(cmd)
                    if text := mismatch(reply["data"], kind):
                        wrong.add(f"{cmd}: {text}")
    finally:
        stop.set()
        engine.join()
    assert not wrong
    assert seen == set(ANSWERS)
    for room in rooms:
        assert room.wait() == {RoomState.SUCCESS}
        fleet.expect(room)
    fleet.check()
    assert fleet.errors() == []


def written(agent: Any) -> float:
    """Number of parts of KV that a prefill rank has sent."""
    total: float = agent.telemetry.metrics.total("kvctl_writes_total")
    return total


class TestPipelined:
    """Eight layers in four groups, each of which takes 10 ms to compute."""

    @pytest.fixture
    def done(self, make_fleet: Any, model: Any) -> Any:
        deep = model(heads=4, k_dim=128, v_dim=128, page_size=8, pages=600, layers=8)
        fleet = make_fleet("nixl", model=deep, path="staged", pipeline="on", pipeline_group_size=2).start()
        for number in range(3):
            room = fleet.claim(fleet.receive(fleet.room(FIRST + number, 16, aux=number)))
            groups = fleet.prefill[0].layer_groups(ForwardInfo((128,))).groups
            for send in room.sends:
                send.prefetch(groups)
            for index, group in enumerate(groups):
                time.sleep(0.01)
                for send in room.sends:
                    send.layers(group, room.src, last=True)
                if index < len(groups) - 1:  # all but the last are sent before the forward ends, however busy the host
                    sent = number * len(groups) + index + 1
                    deadline = time.monotonic() + 60
                    while any(written(agent) < sent for agent in fleet.prefill):
                        assert time.monotonic() < deadline
                        time.sleep(0.001)
            for send in room.sends:
                send.finish(aux_index=number)
            assert room.wait() == {RoomState.SUCCESS}
            fleet.expect(room)
        fleet.prefill[0].layer_groups(ForwardInfo(()))
        fleet.settle()
        fleet.check()
        return fleet

    def test_layers(self, done: Any, connect: Any) -> None:
        rows = ask(connect, done.prefill[0], "layers")
        assert [row["layers"] for row in rows] == [[0, 2], [2, 4], [4, 6], [6, 8]]
        assert {row["parts"] for row in rows} == {3}
        assert all(row["overlapped_ns"] > 0 for row in rows[:-1])
        assert rows[-1]["exposed_ns"] > 0
        ready = [row["stages"]["ready"]["p50_ns"] for row in rows]
        assert ready[0] == 0
        assert ready == sorted(ready)
        assert ready[-1] >= 29 * 10**6  # three groups later

    def test_decisions(self, done: Any, connect: Any) -> None:
        use = {"mode": "on", "min_tokens": 3072, "group_size": 2, "decisions": {"override": 3, "empty-batch": 1}}
        assert ask(connect, done.prefill[0], "status")["pipeline"] == use
        assert ask(connect, done.prefill[1], "status")["pipeline"] == {**use, "decisions": {}}
        done.prefill[1].set_pipeline("auto")
        measured = ask(connect, done.prefill[1], "status")["pipeline"]
        assert (measured["mode"], measured["group_size"]) == ("auto", None)


class TestNumbersAddUp:
    @pytest.fixture
    def done(self, fleet: Any) -> Any:
        """Ten rooms of 16 pages, two chunks, 4 pages of them cached, sent by two writers."""
        for number in range(10):
            fleet.run(FIRST + number, 16, (9,), prefix=4, aux=1)
        fleet.settle()
        return fleet

    def test_coverage_and_bytes_of_a_finished_room(self, done: Any, connect: Any) -> None:
        model = done.model
        payload = 12 * model.page_size * model.heads * (model.k_dim + model.v_dim) * 2 * model.layers
        cells = 2 * model.layers  # chunks x layers, from each writer
        for agent in done.prefill + done.decode:
            writes = 1 if agent.role == "prefill" else 2
            history = ask(connect, agent, "history")
            assert [row["room"] for row in history] == [str(FIRST + number) for number in range(9, -1, -1)]
            for row in history:
                assert row["state"] == "Success"
                assert row["failure"] is None
                assert (row["pages"], row["parts"], row["parked"]) == (12, 2 * writes, 0)
                assert row["tokens"] == 12 * model.page_size  # without the prefix
                assert row["paths"] == {"staged": 2 * writes}
                assert row["bytes"] == payload * writes // 2
                moved = cells * writes
                sent, landed = (moved, None) if agent.role == "prefill" else (None, moved)
                assert row["coverage"] == {"planned": moved, "sent": sent, "landed": landed, "scattered": landed}
                assert 0 < row["latency_ns"] < 100 * 10**9
                assert row["finished_at_ns"] - row["opened_at_ns"] == row["age_ns"]
            assert ask(connect, agent, "rooms") == []
            assert len(ask(connect, agent, "slow", limit=3)) == 3

    def test_status(self, done: Any, connect: Any) -> None:
        since = time.time_ns()
        total = 0
        for agent in done.prefill + done.decode:
            status = ask(connect, agent, "status")
            assert (status["name"], status["role"], status["device"]) == (agent.name, agent.role, "cpu")
            assert status["rooms_finished_total"] == {"Success": 10, "Failed": 0}
            assert status["rooms"] == {}
            assert status["waiting_for"] is None
            assert status["transport"]["engine"].startswith("nixl")
            assert status["transport"]["backend"] == "UCX"
            assert status["pool"] == {
                "pages": 600,
                "page_size": 8,
                "bytes": agent.pool.nbytes,
                "layers": 2,
                "heads": 2 if agent.role == "prefill" else 4,
            }
            assert status["bytes_total"] == status["rate"]["bytes"] > 0
            assert 0.0001 < status["rate"]["gb_per_s"] < 1000
            assert status["latency"]["count"] == 10
            assert (
                0 < status["latency"]["p50_ns"] <= status["latency"]["p90_ns"] <= status["latency"]["p99_ns"] < 10**11
            )
            total += status["bytes_total"] if agent.role == "decode" else 0
        decode = ask(connect, done.decode[0], "status")
        assert decode["peers"] == {"ready": 2}
        assert decode["ring"]["used_bytes"] == decode["ring"]["live"] == 0
        assert 0 < decode["ring"]["high_water_bytes"] <= decode["ring"]["size_bytes"] == 1 << 20
        assert total == sum(ask(connect, agent, "status")["bytes_total"] for agent in done.prefill)
        assert ask(connect, done.prefill[1], "status")["rank"] == {"dp": 0, "pp": 0, "cp": 0, "tp": 1, "unique": 1}
        assert time.time_ns() > since

    def test_metrics(self, done: Any, connect: Any) -> None:
        for agent in done.prefill + done.decode:
            families = {family["name"]: family for family in ask(connect, agent, "metrics")}
            assert families.keys() <= METRICS_BY_NAME.keys()

            def value(name: str, families: Any = families, **labels: str) -> Any:
                return sum(s["value"] for s in families[name]["samples"] if labels.items() <= s["labels"].items())

            writes = 1 if agent.role == "prefill" else 2
            assert value("kvctl_parts_total", path="staged") == 20 * writes
            assert value("kvctl_part_bytes_total") == ask(connect, agent, "status")["bytes_total"]
            assert value("kvctl_rooms_opened_total") == value("kvctl_rooms_finished_total", result="Success") == 10
            assert value("kvctl_peers", state="ready") == (1 if agent.role == "prefill" else 2)
            if agent.role == "prefill":
                assert value("kvctl_writes_total") == 20
                assert value("kvctl_engine_posts_total") >= 20
                assert value("kvctl_parts_parked") == 0
            else:
                assert value("kvctl_ring_grants_total") == 40
                assert value("kvctl_ring_used_bytes") == value("kvctl_quarantined_bytes") == 0
            for name in ("kvctl_transport_errors_total", "kvctl_fallbacks_total", "kvctl_room_failures_total"):
                assert value(name) == 0

    def test_peers(self, done: Any, connect: Any) -> None:
        until(
            lambda: ask(connect, done.prefill[0], "peers")[0]["rtt_ns"] is not None,
            "heartbeats carry no round trip",
            pause_s=0.1,
        )
        (reader,) = ask(connect, done.prefill[0], "peers")
        assert (reader["peer"], reader["role"], reader["state"]) == ("decode-0", "decode", "ready")
        assert reader["incarnation"] == ask(connect, done.decode[0], "hello")["incarnation"]
        assert 0 < reader["rtt_ns"] < 60 * 10**9
        assert 0 <= reader["last_heard_ns"] < 60 * 10**9
        assert reader["lane"] == "nixl"
        assert reader["watermark_sent"] is None
        assert len(reader["watermark_seen"]) == 3
        writers = ask(connect, done.decode[0], "peers")
        assert [row["peer"] for row in writers] == ["prefill-0", "prefill-1"]
        for row in writers:
            assert row["endpoint"].startswith("ipc://")
            assert (row["rooms"], row["errors_total"], row["differences"]) == (0, 0, [])


def test_rooms_predict_the_next(make_fleet: Any, model: Any, connect: Any) -> None:
    fleet = make_fleet("nixl", model=model(heads=4, page_size=8, pages=600), path="auto", staging="auto").start()
    (row,) = ask(connect, fleet.prefill[0], "cost", tokens=800)["costs"]
    assert (row["predicted_ns"], row["reason"]) == (None, "no room was transferred to it yet")
    for number in range(4):
        fleet.run(FIRST + number, 16)
    fleet.settle()
    (row,) = ask(connect, fleet.prefill[0], "cost", tokens=800)["costs"]
    assert (row["basis"], row["samples"], row["reason"]) == ("rooms", 4, None)
    assert row["path"] in {"bulk", "slice", "staged"}
    assert 0 < row["alone_ns"] == row["predicted_ns"] < 10**9


class TestGated:
    @pytest.fixture
    def full(self, fleet: Any) -> Any:
        """Rooms 1 to 6 want 3 MiB of a ring of 1 MiB. The first two hold all of it ahead of their forwards, so the
        last one, which is computed first, has its grants in the next round."""
        rooms = [fleet.claim(fleet.receive(fleet.room(number, 16))) for number in range(1, 7)]
        for room in rooms:
            for send in room.sends:
                send.prefetch()
        self.until_granted(fleet, 2)
        fleet.feed(rooms[-1])
        self.until_granted(fleet, 3)
        return fleet, rooms

    def until_granted(self, fleet: Any, rooms: int) -> None:
        until(lambda: fleet.decode[0].observe.staging()["ring"]["granted_total"] >= rooms * 2 * 2)

    def test_the_rings_allocations(self, full: Any, connect: Any) -> None:
        fleet, _ = full
        staging = ask(connect, fleet.decode[0], "staging")
        ring = staging["ring"]
        assert (staging["enabled"], staging["buffers"], staging["gated"]) == (True, None, [])
        assert len(ring["allocations"]) == 12
        assert ring["used_bytes"] == sum(one["end"] - one["offset"] for one in ring["allocations"])
        assert {one["state"] for one in ring["allocations"]} == {"granted"}
        assert {one["writer"] for one in ring["allocations"]} == {"prefill-0", "prefill-1"}
        assert {one["room"] for one in ring["allocations"]} == {"1", "2", "6"}
        serials = [one["serial"] for one in ring["allocations"]]
        assert serials == sorted(set(serials))
        for one in ring["allocations"]:
            assert 0 <= one["offset"] < one["end"] <= ring["size_bytes"] == 1 << 20
            assert 0 < one["age_ns"] < 60 * 10**9
        rounds = [one["round"] for one in ring["allocations"]]
        assert rounds == sorted(rounds)
        assert ring["round"] == rounds[-1] > 0
        assert (ring["watermark"]["round"], ring["watermark"]["tail"]) == (0, 0)
        assert ring["high_water_bytes"] <= ring["size_bytes"]

    def test_a_gated_part_is_listed_with_what_it_waits_for_until_it_goes(self, full: Any, connect: Any) -> None:
        fleet, rooms = full
        deadline = time.monotonic() + 60
        while len(gated := ask(connect, fleet.prefill[0], "staging")["gated"]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        buffers = ask(connect, fleet.prefill[0], "staging")["buffers"]
        assert buffers["pieces_used"] == 0, "a parked part holds no buffer"
        assert buffers["size_bytes"] == buffers["pieces"] * buffers["piece_bytes"]
        for part in gated:
            assert (part["room"], part["peer"], part["layers"]) == ("6", "decode-0", [0, 2])
            assert part["waiting_for"].startswith("watermark round ")
            assert part["bytes"] == 8 * 8 * 2 * 256 * 2 * 2
            assert 0 < part["age_ns"] < 60 * 10**9
        (row,) = [row for row in ask(connect, fleet.prefill[0], "rooms") if row["room"] == "6"]
        assert row["parked"] == 2
        answer = ask(connect, fleet.prefill[0], "cost")
        (cost,) = answer["costs"]
        assert (answer["rooms"], cost["rooms"], cost["queued_bytes"]) == (6, 1, sum(part["bytes"] for part in gated))
        ((gated_room,), (waiting_room,)) = (ask(connect, fleet.prefill[0], "room", room=room) for room in ("6", "1"))
        (owed,) = gated_room["owed_parts"]
        assert (owed["writer"], owed["decode"], owed["cells"]) == ("prefill-0", "decode-0", 4)
        assert (owed["chunks"], owed["layers"]) == ([0, 2], [0, 2])
        assert owed["waits_for"] == "the watermark of decode-0's ring"
        assert 0 < owed["age_ns"] < 60 * 10**9
        (owed,) = waiting_room["owed_parts"]
        assert owed["waits_for"] == "its pages from the engine"
        for room in rooms[:-1]:
            fleet.feed(room)
        for room in rooms:
            assert room.wait() == {RoomState.SUCCESS}
            fleet.expect(room)
        fleet.check()
        assert ask(connect, fleet.prefill[0], "staging")["gated"] == []
        assert ask(connect, fleet.decode[0], "staging")["ring"]["allocations"] == []


class TestRefusals:
    def test_an_unknown_room_is_named(self, fleet: Any, connect: Any) -> None:
        reply = connect(socket_path("decode-0")).ask("room", room="77")
        assert not reply["ok"]
        assert reply["error"]["code"] == "unknown-room"
        assert "decode-0 knows no room 77" in reply["error"]["message"]

    def test_rooms_by_state(self, fleet: Any, connect: Any) -> None:
        room = fleet.claim(fleet.receive(fleet.room(5, 16)))
        (receive,) = room.receives.values()
        deadline = time.monotonic() + 60
        while receive.state is not RoomState.WAITING_FOR_INPUT:
            assert time.monotonic() < deadline
        for state in STATE_LABELS:
            rows = ask(connect, fleet.decode[0], "rooms", state=state)
            assert [row["room"] for row in rows] == (["5"] if state == "WaitingForInput" else [])
        (detail,) = ask(connect, fleet.decode[0], "room", room="5")
        assert {owed["writer"] for owed in detail["owed_parts"]} == {"prefill-0", "prefill-1"}
        assert sum(owed["cells"] for owed in detail["owed_parts"]) == detail["coverage"]["planned"]
        assert {(owed["decode"], owed["waits_for"]) for owed in detail["owed_parts"]} == {("decode-0", "")}
        receive.abort("enough")
        room.wait()
        assert ask(connect, fleet.decode[0], "room", room="5")[0]["owed_parts"] == []
        while not (kept := ask(connect, fleet.prefill[1], "failed"))["rooms"]:
            assert time.monotonic() < deadline
        assert [each["failure"]["text"] for each in kept["rooms"]] == ["enough"]
        assert (kept["kept"], kept["dropped_total"]) == (1, 0)
        (row,) = ask(connect, fleet.decode[0], "history")
        assert row["state"] == "Failed"
        assert row["failure"]["text"] == "enough"
        assert row["failure"]["rank"] == "decode-0"
