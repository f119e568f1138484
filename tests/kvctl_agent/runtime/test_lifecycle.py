"""The states of an agent and who changes them; what keeps it from serving: for now, or for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvctl_agent.errors import ConfigError, DeadlineExceeded, LocalProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.peer import PeerState
from kvctl_agent.runtime.handles import HandleRegistry, Receive
from kvctl_agent.runtime.lifecycle import Lifecycle
from tests.support.regions import REGION


def wait_for(state: PeerState) -> None:
    """Waits with a peer in this state."""
    peer = SimpleNamespace(name="prefill-0", state=state, differences=("the name decode-0 is in use",))
    roster = SimpleNamespace(refused="", missing="missing tp=1", complete=False)
    registries: Any = SimpleNamespace(roster=lambda instance: roster)
    machine: Any = SimpleNamespace(instances=(), peers={"prefill-0": peer})
    local: Any = SimpleNamespace(name="decode-0", role="decode")
    unused: Any = None
    lifecycle = Lifecycle(local, ["ipc:///tmp/boot"], registries, machine, unused, unused, unused)
    lifecycle.started()
    lifecycle.wait_ready(0)


def test_a_peer_that_refuses_us_ends_the_wait() -> None:
    with pytest.raises(ConfigError, match="prefill-0 and decode-0 do not fit: the name decode-0 is in use"):
        wait_for(PeerState.REFUSED)


def test_what_may_pass_does_not() -> None:
    """Our own last process, on a host that the peer cannot see, is silent for a few seconds before it is given up."""
    with pytest.raises(DeadlineExceeded, match="missing tp=1"):
        wait_for(PeerState.CONNECTING)


SILENT = "no answer from the registry at tcp://a:1"


@pytest.mark.parametrize(
    ("role", "instances", "serving", "waits", "not_ready"),
    [
        ("prefill", ["tcp://a:1"], [], SILENT, SILENT),
        ("prefill", ["tcp://a:1"], [], None, None),
        ("decode", ["tcp://a:1"], [], SILENT, SILENT),
        ("decode", ["tcp://a:1", "tcp://b:1"], ["tcp://b:1"], SILENT, None),
        ("decode", [], [], None, None),
        ("decode", [], [], SILENT, None),  # from an instance that a room has named
    ],
)
def test_a_new_room_needs_one_instance_or_names_it(
    role: str, instances: list[str], serving: list[str], waits: str, not_ready: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `/readyz`, `kvctl wait --for ready` and `kvctl check ready` go by."""
    local: Any = SimpleNamespace(name="rank-0", role=role)
    telemetry: Any = SimpleNamespace(drain=lambda on: None)
    unused: Any = None
    lifecycle = Lifecycle(local, instances, unused, unused, telemetry, Log(), unused)
    assert lifecycle.not_ready() == "it has not been started"
    monkeypatch.setattr(lifecycle, "serving", lambda: serving)
    monkeypatch.setattr(lifecycle, "waiting_for", lambda: waits)
    lifecycle.started()
    assert lifecycle.not_ready() == lifecycle.not_connected() == not_ready
    lifecycle.begin_drain()
    assert lifecycle.not_ready() == "it is draining: kvctl resume ends this"
    assert lifecycle.not_connected() == not_ready


class Log(list[ev.Event]):
    """Events that a machine gets."""

    def put(self, *events: ev.Event) -> None:
        self.extend(events)


class Life(RuleBasedStateMachine):
    """Every order of calls of two threads, one step of `begin` … `end` at a time, beside a model of the states."""

    def __init__(self) -> None:
        super().__init__()
        self.local: Any = SimpleNamespace(name="decode-0", role="decode")
        self.telemetry: Any = SimpleNamespace(drain=lambda on: setattr(self, "drains", on))
        self.drains = False
        self.parts = self.components()
        registries, machine, mailbox, handles = self.parts
        self.life = Lifecycle(self.local, ["ipc:///a"], registries, machine, self.telemetry, mailbox, handles)
        self.state, self.busy, self.leaving = "new", "", False
        self.shut_downs = 0

    def components(self) -> tuple[Any, Any, Any, HandleRegistry]:
        return SimpleNamespace(), SimpleNamespace(rooms={}, instances=()), Log(), HandleRegistry("decode-0", None)

    def refused(self, call: Callable[[], Any]) -> Any:
        """Returns what the call returns; None if it is refused, without which it changes nothing."""
        try:
            return call() or True
        except LocalProtocolError:
            return None

    @rule(call=st.sampled_from(["start", "unregister", "register"]))
    def begin(self, call: str) -> None:
        begun = self.refused(lambda: self.life.begin(call))
        assert bool(begun) == (not self.busy and self.state != "closed")
        self.busy = call if begun else self.busy

    @precondition(lambda self: self.busy in ("start", "unregister", "register"))
    @rule()
    def step(self) -> None:
        rooms = self.parts[3].rooms
        if self.busy == "start":
            if self.refused(self.life.started):
                assert self.state == "new"
                self.state = "running"
        elif self.busy == "unregister":
            if self.refused(lambda: self.life.begin_drain(to_unregister=True)):
                assert self.state in ("running", "draining")
                self.state = "draining"
        else:
            new = self.components()
            before = self.life.instances
            if self.refused(lambda: self.life.register(("ipc:///a", "ipc:///gone"), *new)):
                assert self.state == "unregistered"
                self.parts, self.leaving = new, False
                self.state = self.life.state
                found = [event.instance for event in new[2] if isinstance(event, ev.ConnectInstance)]
                assert found == [each for each in before if each != "ipc:///a"]
                assert ev.DisconnectInstance("ipc:///gone") in new[2]
            assert not rooms or self.state in ("closed", "running", "draining")

    @precondition(lambda self: self.busy == "unregister")
    @rule()
    def give_back(self) -> None:
        rooms = self.parts[3].rooms
        try:
            done = self.life.unregister()
        except LocalProtocolError:
            assert self.state != "draining"
            return
        assert self.state == "draining"
        assert done == (not rooms)
        if done:
            self.state = "unregistered"
            self.parts[3].close()

    @precondition(lambda self: self.busy)
    @rule()
    def end(self) -> None:
        if self.busy == "close":
            self.life.closed(complete=True)
            self.shut_downs += 1
            self.busy = ""
        elif self.life.end():
            assert self.state == "closed"
            self.busy = "close"
        else:
            self.busy = ""

    @rule()
    def close(self) -> None:
        mine = self.life.close(0.0)
        assert mine == (not self.busy and not self.shut_downs)
        self.state = "closed"
        self.busy = "close" if mine else self.busy

    @rule()
    def drain(self) -> None:
        if self.refused(self.life.begin_drain):
            assert self.state in ("running", "draining")
            self.state = "draining"
            assert self.life.drains_again

    @rule()
    def leave(self) -> None:
        self.life.leave()
        self.leaving = True
        self.state = "draining" if self.state == "running" else self.state

    @rule()
    def resume(self) -> None:
        if self.refused(self.life.resume):
            assert self.state in ("running", "draining")
            assert not self.leaving
            self.state = "running"

    @rule(endpoint=st.sampled_from(["ipc:///a", "ipc:///b"]), on=st.booleans())
    def instances(self, endpoint: str, on: bool) -> None:
        change = self.life.add_instance if on else self.life.remove_instance
        if self.refused(lambda: change(endpoint)):
            assert (endpoint in self.life.instances) is on
        else:
            assert self.state == "closed"

    @rule(room=st.integers(0, 3), begun=st.booleans())
    def open_room(self, room: int, begun: bool) -> None:
        handles = self.parts[3]
        taken = room in handles.rooms
        event: Any = ("open", room)
        opened = self.refused(lambda: self.life.open_room(handles, Receive(room, _drop, REGION), event, (), begun))
        assert bool(opened) == (not taken and (self.state == "running" or (self.state == "draining" and begun)))
        assert not opened or self.parts[2][-1] == event

    @rule(room=st.integers(0, 3))
    def room_ends(self, room: int) -> None:
        self.parts[3].refuse(room, "test")

    @invariant()
    def agrees(self) -> None:
        assert self.life.state == self.state
        assert self.life.draining == (self.state == "draining")
        assert self.state == "closed" or self.drains == (self.state == "draining")
        assert self.shut_downs <= 1
        assert not self.parts[3].rooms or self.state != "unregistered"


def _drop(event: ev.Event) -> None:
    del event


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_room_made_for_components_that_were_replaced_is_refused() -> None:
    life = Life()
    life.life.started()
    former = life.parts[3]
    life.life.begin_drain(to_unregister=True)
    assert life.life.unregister()
    former.close()
    life.life.register((), *life.components())
    with pytest.raises(LocalProtocolError, match="decode-0 has been closed or unregistered"):
        life.life.open_room(former, Receive(1, _drop, REGION), ev.Drain(True), (), False)


def test_one_that_closes_beside_another_call_waits_for_its_end() -> None:
    life = Life().life
    life.begin("register")
    results: list[bool] = []
    closer = threading.Thread(target=lambda: results.extend([life.close(0.0), life.wait_closed(10)]))
    closer.start()
    while life.state != "closed":
        time.sleep(0.001)
    assert life.end()
    assert closer.is_alive()
    life.closed(complete=True)
    closer.join(10)
    assert results == [False, True]
    assert not life.close(0.0)


def test_a_shutdown_that_was_not_complete_is_continued_by_the_next_close() -> None:
    life = Life().life
    assert life.close(0.0)
    assert not life.close(0.0)  # as a signal handler would
    assert life.wait_closed(0)
    life.closed(complete=False)
    assert life.close(30.0)
    assert life.deadline_s == 30.0
