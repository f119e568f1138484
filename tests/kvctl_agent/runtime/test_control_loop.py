"""The control loop: what a bug, a busy peer or an engine's callback may cost — one event, never the loop."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvctl_agent.errors import LocalProtocolError, TransportError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.bootstrap_registry import Lookup, Rank, Register
from kvctl_agent.protocol.peer import FormerIncarnation, PeerState
from kvctl_agent.runtime.bootstrap import Registries, RegistryClient, RegistryServer
from kvctl_agent.runtime.control_channel import ControlChannel
from kvctl_agent.runtime.control_loop import ControlLoop, Mailbox
from kvctl_agent.runtime.liveness import is_dead
from kvctl_agent.runtime.waiting import InputWait, turns_of_loop
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.region import Cell, Document
from tests.support.folded import folded
from tests.support.polling import until

Context = zmq.Context[zmq.Socket[bytes]]
AtBest = Callable[[Callable[[], float], float], None]


class StandInPeer:
    def __init__(self, pid: int, host: str = "host") -> None:
        self.name, self.incarnation, self.proven_dead, self.state = "peer", 5, False, PeerState.READY
        self.info = type("Who", (), {"pid": pid, "host": host})()
        self.route = b""
        self.former: dict[int, FormerIncarnation] = {}


class StandInMachine:
    """Answers events with the actions that the test gave for their room, or for their type if they have none."""

    def __init__(self) -> None:
        self.local: Any = SimpleNamespace(name="decode-0", role="decode", host="host", incarnation=1)
        self.peers: dict[str, Any] = {}
        self.handled: list[Any] = []
        self.ticks: list[tuple[int, int]] = []  # times, and how long the loop had been held up
        self.answers: dict[int | type[ev.Event], list[ev.Action] | Exception] = {}
        self.open_rooms = 0
        self.unacknowledged: list[int] = []

    def unanswered(self) -> list[int]:
        return self.unacknowledged

    def roster(self, instance: str) -> tuple[str, ...]:
        return ("prefill-0", "prefill-1")

    def handle(self, event: ev.Event, now_ns: int) -> list[ev.Action]:
        self.handled.append(event)
        if isinstance(event, ev.Tick):
            self.ticks.append((now_ns, event.stalled_ns))
        answer = self.answers.get(getattr(event, "room", type(event)), [])
        if isinstance(answer, Exception):
            raise answer
        return answer


class StandInExecutor:
    """Executes every action that is not the loop's own, in the place of all parts that do."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.error: Exception | None = None
        self.refusals: list[tuple[int, str]] = []
        self.takes_s = 0.0
        self.count = 0  # of the engine's handles

    def _do(self, what: Any) -> None:
        time.sleep(self.takes_s)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.done.append(what)

    def connect(self, peer: str, who: msg.PeerInfo, held: Any) -> None:
        self._do(peer)

    def drop(self, peer: str) -> None:
        self._do(peer)

    def ended(self, info: msg.PeerInfo) -> None:
        self._do(("ended", info.pid))

    def change_state(self, action: ev.StateChanged) -> None:
        self._do(action.room)

    def release(self, action: ev.Released) -> None:
        self._do(("released", action.room))

    def end_recall(self, action: ev.Recalled) -> None:
        self._do(("recalled", action.room))

    def learn(self, action: ev.Overlapped) -> None:
        self._do(action)

    def refuse(self, room: int, text: str) -> None:
        self.refusals.append((room, text))


class StandInArrivals:
    """Counts how often it is told that bytes are about to come."""

    def __init__(self) -> None:
        self.expected = 0

    def expect(self) -> None:
        self.expected += 1

    def put(self, order: ev.Scatter | ev.Check) -> None:
        raise AssertionError(f"nobody ordered {order}")

    def store_aux(self, order: ev.StoreAux) -> None:
        raise AssertionError(f"nobody ordered {order}")

    def turn(self) -> None:
        """Has nothing to do."""

    def idle(self) -> bool:
        return True

    def wait_s(self) -> float:
        return 0.02

    def wait(self, polled: ctypes.Array[Any], turns: object, timeout_s: float, pause_s: float) -> int | None:
        return None


class Rig:
    def __init__(
        self,
        context: Context,
        telemetry: Telemetry,
        directory: Path,
        arrivals: StandInArrivals | None = None,
        few_cores: bool = False,
    ) -> None:
        self.telemetry = telemetry
        self.machine, self.executor, self.mailbox = StandInMachine(), StandInExecutor(), Mailbox()
        endpoint = f"ipc://{directory}/boot"
        self.server = RegistryServer(context, endpoint)
        self.registries = Registries(context, Lookup("decode-0"))
        executor: Any = self.executor
        self.loop = ControlLoop(
            self.machine.local,
            self.machine,  # type: ignore[arg-type]
            self.mailbox,
            ControlChannel(context, "decode-0", 1, telemetry),
            self.registries,
            telemetry,
            handles=executor,
            connections=executor,
            pipelining=executor,
            arrivals=arrivals,  # type: ignore[arg-type]
            wait=InputWait(turns_of_loop(), telemetry.waited, arrivals, few_cores=few_cores),  # type: ignore[arg-type]
            server=self.server,
        )
        self.loop.open([endpoint])
        self.endpoint = endpoint

    def errors(self) -> list[str]:
        return [
            row["text"]
            for row in folded(self.telemetry).recorder.since(None, 1000)["events"]
            if row["severity"] == "error"
        ]

    def rooms(self) -> list[int]:
        return [event.room for event in self.machine.handled if isinstance(event, ev.SendRoom)]


@pytest.fixture
def rig(zmq_context: Context, telemetry: Telemetry, directory: Path) -> Iterator[Rig]:
    rig = Rig(zmq_context, telemetry, directory)
    rig.loop.start()
    yield rig
    assert rig.loop.close(60)
    rig.mailbox.close()


def changed(room: int) -> ev.StateChanged:
    return ev.StateChanged(room, 1)  # type: ignore[arg-type]


def test_an_event_is_handled_at_once_and_its_actions_in_order(rig: Rig, at_best: AtBest) -> None:
    rig.machine.answers[1] = [changed(11), ev.Released(11), changed(12)]

    def mean_s() -> float:
        since = time.monotonic()
        for _ in range(20):
            rig.executor.done.clear()
            rig.mailbox.put(ev.SendRoom(1))
            until(lambda: rig.executor.done == [11, ("released", 11), 12])
        return (time.monotonic() - since) / 20

    at_best(mean_s, 0.03)  # a tick comes only every 100 ms


def test_turns_and_the_end_are_noted_in_the_region(rig: Rig) -> None:
    cells = rig.telemetry.region.cells
    before_ns = time.monotonic_ns()
    until(lambda: cells[Cell.TURN_NS] > before_ns)
    first_ns = cells[Cell.TURN_NS]
    until(lambda: cells[Cell.TURN_NS] > first_ns)
    assert cells[Cell.LOOP_ENDED_NS] == 0
    assert rig.loop.close(60)
    assert first_ns < cells[Cell.LOOP_ENDED_NS] <= time.monotonic_ns()


def test_the_stack_of_an_engine_that_makes_no_calls(rig: Rig) -> None:
    region = rig.telemetry.region
    rig.executor.count = 1
    region.note_call(0)
    until(lambda: region.cells[Cell.PUBLISHED + Document.STACK])
    assert region.cells[Cell.CALL_TASK] == threading.get_native_id()


def test_a_bug_costs_one_event_and_not_those_behind_it(rig: Rig) -> None:
    rig.machine.answers[1] = KeyError("a bug")
    rig.mailbox.put(*(ev.SendRoom(room) for room in range(5)))
    until(lambda: rig.rooms() == [0, 1, 2, 3, 4])
    assert any("KeyError: 'a bug'" in text for text in rig.errors())


def test_sockets_that_fail_cost_no_tick(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All deadlines hang on it."""

    def tick(channel: ControlChannel, now_ns: int) -> list[tuple[str, str]]:
        raise OSError("no address")

    monkeypatch.setattr(ControlChannel, "tick", tick)
    until(lambda: any("no address" in text for text in rig.errors()))
    before = len(rig.machine.handled)
    until(lambda: any(isinstance(event, ev.Tick) for event in rig.machine.handled[before:]))


def test_an_action_that_fails_costs_itself_and_not_those_behind_it(rig: Rig) -> None:
    """For example an engine's callback that raises: the messages behind it must leave all the same."""
    rig.executor.error = RuntimeError("the engine's callback")
    rig.machine.answers[1] = [changed(11), changed(12)]
    rig.mailbox.put(ev.SendRoom(1), ev.SendRoom(2))
    until(lambda: rig.executor.done == [12] and rig.rooms() == [1, 2])
    assert any("the engine's callback" in text for text in rig.errors())


@pytest.mark.parametrize(
    "event",
    [ev.SendRoom(1), ev.OpenRoom(1, 2, [], 0, 0, -1, "ipc:///nowhere")],  # type: ignore[arg-type]
)
def test_a_room_that_the_machine_refuses_is_told_so(rig: Rig, event: ev.Event) -> None:
    """Else its handle would wait for a room that nobody knows."""
    rig.machine.answers[1] = LocalProtocolError("room 1 is open already")
    rig.mailbox.put(event)
    until(lambda: rig.executor.refusals == [(1, "room 1 is open already")])


def test_other_broken_orders_of_calls_are_recorded(rig: Rig) -> None:
    rig.machine.answers[1] = LocalProtocolError("pages after the last ones")
    rig.mailbox.put(ev.Prefetch(1))
    until(lambda: rig.errors() == ["pages after the last ones"])
    assert rig.executor.refusals == []


def test_a_peer_that_cannot_be_connected_is_unusable(rig: Rig) -> None:
    who = msg.PeerInfo("p", "prefill", [], [], 0, {}, {}, "nixl", b"", "", 1)
    rig.machine.answers[1] = [ev.ConnectPeer("prefill-0", 3, who, ())]
    rig.mailbox.put(ev.SendRoom(1))
    until(lambda: ev.PeerConnected("prefill-0") in rig.machine.handled)
    for error in (TransportError("no connection"), ValueError("a bug")):
        rig.executor.error = error
        rig.mailbox.put(ev.SendRoom(1))
        unusable = ev.PeerUnusable("prefill-0", str(error))
        until(partial(rig.machine.handled.__contains__, unusable))


def test_the_messages_of_an_event_that_an_action_causes_overtake_none(
    rig: Rig, zmq_context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What connecting a peer or finding an instance causes is handled after all actions of the present event."""
    register = Register(Rank("prefill-0", f"{rig.endpoint}-0", 1, [0, 0, 0, 0], [1, 1, 1, 1]))
    rank = RegistryClient(zmq_context, rig.endpoint, register)
    known = ev.RosterKnown(rig.endpoint, ("prefill-0",), (1,))
    until(lambda: rank.turn(time.monotonic_ns()) or known in rig.machine.handled)
    rank.close()
    until(lambda: known in rig.machine.handled)
    left: list[msg.Message] = []
    monkeypatch.setattr(rig.loop._channel, "queue", lambda peer, message, *_: left.append(message))
    first, second = msg.RoomDrained(1, 1), msg.RoomDrained(2, 1)
    who = msg.PeerInfo("p", "prefill", [], [], 0, {}, {}, "nixl", b"", "", 1)
    rig.machine.answers[ev.PeerConnected] = rig.machine.answers[ev.RosterKnown] = [ev.Send("prefill-0", second)]
    for cause in (ev.ConnectPeer("prefill-0", 3, who, ()), ev.FindInstance(rig.endpoint)):  # type: ignore[arg-type]
        left.clear()
        rig.machine.answers[1] = [cause, ev.Send("prefill-0", first)]
        rig.mailbox.put(ev.SendRoom(1))
        until(lambda: len(left) == 2)
        assert left == [first, second]


def test_ticks_come_ten_times_a_second_also_under_load(rig: Rig) -> None:
    stop = threading.Event()

    def flood() -> None:
        while not stop.wait(0.0005):
            rig.mailbox.put(ev.Prefetch(1))

    def ticks() -> int:
        return sum(isinstance(event, ev.Tick) for event in list(rig.machine.handled))

    flooder = threading.Thread(target=flood)
    since = time.monotonic()
    flooder.start()
    try:
        until(lambda: ticks() >= 10)
    finally:
        stop.set()
        flooder.join()
    assert ticks() <= 12 * max(1, time.monotonic() - since)


def test_what_came_while_it_could_not_run_is_read_before_the_next_tick(rig: Rig) -> None:
    """Else peers count as silent whose messages wait here."""
    until(lambda: any(isinstance(event, ev.Tick) for event in rig.machine.handled))  # before it nothing can be late
    rig.machine.answers[1] = [changed(11)]
    rig.executor.takes_s = 2.0
    rig.mailbox.put(ev.SendRoom(1))
    until(lambda: rig.rooms() == [1])
    rig.mailbox.put(ev.SendRoom(2))

    def first_after_stall() -> int | None:
        ticks = enumerate(rig.machine.handled.copy())
        return next((number for number, event in ticks if isinstance(event, ev.Tick) and event.stalled_ns), None)

    until(lambda: first_after_stall() is not None)
    number = first_after_stall()
    assert number is not None
    assert rig.machine.handled[number].stalled_ns >= 1_800_000_000
    assert rig.machine.handled.index(ev.SendRoom(2)) < number
    texts = [row["text"] for row in folded(rig.telemetry).recorder.since(None, 1000)["events"]]
    assert any(text.startswith("the control loop was held up for ") for text in texts)


def test_a_stop_within_a_tick_counts_for_no_peer_and_is_noted_by_the_next(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_ns: list[int] = []

    def stop(*_: object) -> None:
        if not stopped_ns:
            stopped_ns.append(time.monotonic_ns())
            time.sleep(2)

    monkeypatch.setattr(rig.loop._silent_engine, "look", stop)
    until(lambda: stopped_ns and any(at_ns > stopped_ns[0] for at_ns, _ in rig.machine.ticks))
    assert next(held_up_ns for at_ns, held_up_ns in rig.machine.ticks if at_ns > stopped_ns[0]) >= 1_800_000_000


def test_idle_it_sleeps(rig: Rig, at_best: AtBest) -> None:
    def share() -> float:
        cpu, since = time.process_time(), time.monotonic()
        time.sleep(0.5)
        return (time.process_time() - cpu) / (time.monotonic() - since)

    at_best(share, 0.03)


def test_a_complete_roster_reaches_the_machine_with_the_ranks_in_order(rig: Rig, zmq_context: Context) -> None:
    ranks = [
        RegistryClient(
            zmq_context,
            rig.endpoint,
            Register(Rank(f"prefill-{tp}", f"{rig.endpoint}-{tp}", 1, [0, 0, 0, tp], [1, 1, 1, 2])),
        )
        for tp in (1, 0)
    ]

    def known() -> bool:
        for rank in ranks:
            rank.turn(time.monotonic_ns())
        return ev.RosterKnown(rig.endpoint, ("prefill-0", "prefill-1"), (1, 1)) in rig.machine.handled

    until(known)
    for rank in ranks:
        rank.close()
    # A machine that could not take it asks again later, although nothing has changed.
    told = len(rig.machine.handled)
    rig.machine.answers[1] = [ev.FindInstance(rig.endpoint)]
    rig.mailbox.put(ev.SendRoom(1))
    until(lambda: any(isinstance(event, ev.RosterKnown) for event in rig.machine.handled[told:]))


class TestLiveness:
    def test_a_process_that_has_ended_is_proof(self, rig: Rig) -> None:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        rig.machine.peers["peer"] = StandInPeer(process.pid)
        time.sleep(0.7)
        assert not any(isinstance(event, ev.PeerDead) for event in rig.machine.handled)
        process.kill()  # a zombie until it is waited for
        dead = ev.PeerDead("peer", 5, f"process {process.pid} has ended")
        until(lambda: dead in rig.machine.handled)
        assert ("ended", process.pid) in rig.executor.done  # so the engine's writes to it end
        process.wait()
        assert process.stdin is not None
        process.stdin.close()

    def test_what_it_had_sent_lands_before_its_end_is_reported(self, rig: Rig) -> None:
        """Megabytes may lie in this host's sockets; the loop that takes them must have run since the process ended."""
        turns: list[tuple[bool, bool]] = []

        class Engine:
            def turn(self) -> None:
                reported = any(isinstance(event, ev.PeerDead) for event in rig.machine.handled)
                turns.append((is_dead(process.pid), reported))

            def idle(self) -> bool:
                return True

            def wait_s(self) -> float:
                return 0.4

        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        rig.loop._tasks.append(Engine())
        rig.machine.peers["peer"] = StandInPeer(process.pid)
        process.kill()
        process.wait()
        until(lambda: any(isinstance(event, ev.PeerDead) for event in rig.machine.handled))
        assert turns.count((True, False)) >= 20
        assert process.stdin is not None
        process.stdin.close()

    def test_the_end_of_a_process_that_was_replaced_is_proof_too(self, rig: Rig) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
        peer = StandInPeer(os.getpid())
        peer.former[3] = FormerIncarnation(StandInPeer(process.pid).info, b"")  # type: ignore[arg-type]
        rig.machine.peers["peer"] = peer
        until(lambda: ev.PeerDead("peer", 3, f"process {process.pid} has ended") in rig.machine.handled)
        assert not any(isinstance(event, ev.PeerDead) and event.incarnation == 5 for event in rig.machine.handled)

    def test_a_rank_that_has_registered_anew_has_its_former_process_looked_at_first(
        self, rig: Rig, zmq_context: Context
    ) -> None:
        """A server that restarts with another registry has the rank names of its predecessor, which are free then."""
        rig.loop._liveness_ns = 1 << 62  # nothing else looks
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
        rig.machine.peers["peer"] = StandInPeer(process.pid)
        register = Register(Rank("peer", f"{rig.endpoint}-0", 6, [0, 0, 0, 0], [1, 1, 1, 1]))
        rank = RegistryClient(zmq_context, rig.endpoint, register)
        known = ev.RosterKnown(rig.endpoint, ("peer",), (6,))

        def registered() -> bool:
            rank.turn(time.monotonic_ns())
            return known in rig.machine.handled

        until(registered)
        rank.close()
        dead = ev.PeerDead("peer", 5, f"process {process.pid} has ended")
        assert rig.machine.handled.index(dead) < rig.machine.handled.index(known)

    def test_a_pid_of_another_host_says_nothing(self, rig: Rig) -> None:
        rig.machine.peers["peer"] = StandInPeer(2**22 + 1, host="elsewhere")
        time.sleep(0.7)
        assert not any(isinstance(event, ev.PeerDead) for event in rig.machine.handled)


@pytest.mark.parametrize("few_cores", [False, True])
@pytest.mark.parametrize("sign", ["a room is accepted", "regions are granted"])
def test_arrivals_are_told_when_bytes_are_about_to_come_unless_cores_are_few(
    zmq_context: Context, telemetry: Telemetry, directory: Path, sign: str, few_cores: bool
) -> None:
    arrivals = StandInArrivals()
    rig = Rig(zmq_context, telemetry, directory, arrivals, few_cores)
    heard = [ev.Received("prefill-0", 7, msg.Heartbeat(1))]
    if sign == "a room is accepted":
        heard.append(ev.Received("prefill-0", 7, msg.RoomAccepted(3, 4)))
    else:
        rig.machine.answers[3] = [ev.Send("prefill-0", msg.StagingGrants(3, 4, [], []))]
        rig.mailbox.put(ev.SendRoom(3))
    rig.loop._channel.receive = lambda ready: iter([heard.pop()] if heard else [])  # type: ignore[method-assign]
    rig.loop.start()
    until(lambda: not heard and len(rig.machine.handled) > 3)
    assert arrivals.expected == (0 if few_cores else 1)
    assert rig.loop.close(60)
    rig.mailbox.close()


class WaitingArrivals(StandInArrivals):
    """Waits in place of the loop, as a transport's native code does."""

    def __init__(self, wait_s: float = 0.02) -> None:
        super().__init__()
        self.waits: list[tuple[float, float]] = []
        self._wait_s = wait_s

    def wait_s(self) -> float:
        return self._wait_s

    def wait(self, polled: ctypes.Array[Any], turns: object, timeout_s: float, pause_s: float) -> int:
        self.waits.append((timeout_s, pause_s))
        ctypes.CDLL(None).poll(polled, len(polled), int(timeout_s * 1e3))
        return time.monotonic_ns()


def test_the_transport_waits_for_tags_in_place_of_the_loop_until_something_else_is_due(
    zmq_context: Context, telemetry: Telemetry, directory: Path, at_best: AtBest
) -> None:
    arrivals = WaitingArrivals()
    rig = Rig(zmq_context, telemetry, directory, arrivals)
    rig.loop.start()

    def handled_s() -> float:
        time.sleep(0.15)
        since = time.monotonic()
        rig.machine.handled.clear()
        rig.mailbox.put(ev.SendRoom(1))
        until(lambda: rig.rooms() == [1])
        return time.monotonic() - since

    at_best(handled_s, 0.01)  # a tick comes only every 100 ms
    arrivals.waits.clear()
    time.sleep(0.5)
    waits = arrivals.waits.copy()
    assert 0 < len(waits) < 20  # for the ticks; without it the loop would have looked 25 times
    assert all(0.02 == pause_s < timeout_s <= 0.1 for timeout_s, pause_s in waits)
    assert rig.loop.close(60)
    assert rig.errors() == []
    rig.mailbox.close()


@pytest.mark.parametrize("rooms", [5, 40])
def test_on_few_cores_a_loop_with_many_rooms_waits_as_well_after_the_pause_in_which_it_lets_events_gather(
    zmq_context: Context, telemetry: Telemetry, directory: Path, rooms: int
) -> None:
    arrivals = WaitingArrivals(0.001)
    rig = Rig(zmq_context, telemetry, directory, arrivals, few_cores=True)
    rig.machine.open_rooms = rooms
    rig.loop.start()
    until(lambda: rig.machine.handled)
    arrivals.waits.clear()
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1

    since_s = time.monotonic()
    arrivals.turn = turn  # type: ignore[method-assign]
    time.sleep(0.5)
    assert 0 < turns < 200 * (time.monotonic() - since_s), "it turned although nothing was due"  # 1,000 a second before
    assert all(0.001 == pause_s < timeout_s <= 0.1 for timeout_s, pause_s in arrivals.waits.copy())
    assert rig.loop.close(60)
    assert rig.errors() == []
    rig.mailbox.close()


def test_what_was_queued_last_still_leaves_when_it_closes(
    zmq_context: Context, telemetry: Telemetry, directory: Path
) -> None:
    rig = Rig(zmq_context, telemetry, directory)
    rig.loop.start()
    rig.mailbox.put(*(ev.SendRoom(room) for room in range(100)))
    time.sleep(0.05)
    assert rig.loop.close(60)
    assert rig.rooms() == list(range(100))
    rig.mailbox.close()


@pytest.mark.parametrize("answered", [True, False])
def test_it_says_goodbye_once_its_peers_know_how_its_rooms_have_ended_or_when_its_time_is_over(
    zmq_context: Context, telemetry: Telemetry, directory: Path, answered: bool
) -> None:
    rig = Rig(zmq_context, telemetry, directory)
    rig.machine.unacknowledged = [7]
    rig.loop.start()
    until(lambda: rig.machine.handled)
    closing = threading.Thread(target=rig.loop.close, args=(60 if answered else 0.3,))
    closing.start()
    time.sleep(0.2)
    assert not any(isinstance(event, ev.Shutdown) for event in rig.machine.handled)
    if answered:
        rig.machine.unacknowledged = []
    closing.join(30)
    assert not closing.is_alive()
    assert isinstance(rig.machine.handled[-1], ev.Shutdown)
    rig.mailbox.close()
