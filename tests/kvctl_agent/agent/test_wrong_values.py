"""What an engine may hand over: integers of any type, and of everything else an error at once that changes nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl_agent.agent import Agent
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import ConfigError, KvctlError, LayoutError, LocalProtocolError
from kvctl_agent.layout.layer_grouping import ForwardInfo
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.rank import Rank
from kvctl_agent.runtime.handles import Receive

SURROGATE = "client said \ud800"


class Hostile:
    """Raises whatever is done with it."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("no")

    dtype = shape = property(_refuse)
    __index__ = __len__ = __iter__ = __bool__ = __eq__ = __hash__ = __float__ = __array__ = __repr__ = _refuse


# By name, since Hypothesis prints what it chooses from.
ODD: dict[str, Any] = {
    "hostile": Hostile(),
    "too many digits": 10**5000,
    "surrogate": SURROGATE,
    "object": object(),
    "type": int,
    "iterator": iter([1]),
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64 - 1, 2**64]),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([np.int64(3), np.uint64(2**64 - 1), np.int8(-1), np.bool_(True), np.float32(2), np.array(2)]),
    st.sampled_from(sorted(ODD)).map(lambda name: ODD[name]),
    st.sampled_from([range(2), range(3, 1), range(True), {}, {1}, 1j]),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.lists(st.integers(0, 70), max_size=4),
    st.lists(st.integers(0, 63), max_size=4).map(np.array),
    st.sampled_from([np.zeros((2, 2), int), np.array([1.5]), np.array(["a"]), np.array([None]), (), ((),), [range(2)]]),
)
EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def fleet(make_fleet: Any) -> Any:
    return make_fleet(prefill=(1, 1)).start()


class Innocent:
    """Rooms of the same two ranks that must succeed whatever else is handed over."""

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet
        self._number = 1 << 40

    def run(self) -> None:
        self._number += 1
        room = self._fleet.run(self._number, 2, aux=self._number % 8)
        self._fleet.recycle(room)


def test_integers_of_every_type_are_the_same_number(fleet: Any) -> None:
    torch = pytest.importorskip("torch")
    decode, prefill = fleet.decode[0], fleet.prefill[0]
    for number, kind in enumerate((int, np.int64, np.uint8, np.array, torch.tensor)):
        receive = decode.receive(
            kind(7), [kind(2 * number), kind(2 * number + 1)], prefix_tokens=kind(4), aux_index=kind(3)
        )
        send = prefill.send(kind(7))
        send.pages([kind(1), kind(2)], last=np.bool_(False))
        send.pages([kind(3)], last=np.bool_(True))
        send.finish(aux_index=kind(3))
        assert (receive.wait(60), send.wait(60)) == (RoomState.SUCCESS, RoomState.SUCCESS), receive.error
        assert [type(handle.room) for handle in (receive, send)] == [int, int]
        fleet.settle()
    assert fleet.errors() == []


def test_a_wrong_value_is_refused_at_once_and_the_rooms_beside_it_go_on(make_fleet: Any) -> None:
    fleet = make_fleet("loopback", prefill=(1, 1)).start()
    decode, prefill = fleet.decode[0], fleet.prefill[0]
    receive, send = decode.receive(1, [1], aux_index=1), prefill.send(1)
    calls: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: decode.receive(7.0, [2]), "room is 7.0: it must be a whole number from 0 to 18446744073709551615"),
        (lambda: decode.receive(True, [2]), "room is True: it must be a whole number"),
        (lambda: decode.receive("7", [2]), "room is '7': it must be a whole number"),
        (lambda: decode.receive(None, [2], fake=True), "room is None: it must be a whole number"),
        (lambda: prefill.send(7.5), "room is 7.5: it must be a whole number"),
        (lambda: decode.receive(7, [2], aux_index=1.5), "room 7: aux_index is 1.5: it must be None or a row"),
        (lambda: decode.receive(7, [2], prefill_only=1), "room 7: prefill_only is 1: it must be True or False"),
        (lambda: decode.receive(7, [2], fake=1), "fake is 1: it must be True or False"),
        (lambda: decode.receive(7, [[]], state_indices=None), "room 7: state_indices is None: it must have a list"),
        (lambda: decode.receive(7, [2, 3, 2]), "room 7: page 2 is given twice"),
        (lambda: decode.receive(7, [2, 1]), "room 7: page 1 belongs to room 1, which may still be written to"),
        (lambda: decode.receive(7, [2], aux_index=1), "room 7: aux row 1 belongs to room 1"),
        (lambda: send.pages(None), r"room 1: pages: None \(object \(\)\) is not a flat list of integers"),
        (lambda: send.pages([1], last=1), "room 1: last is 1: it must be True or False"),
        (lambda: send.layers(2, [1]), "room 1: layers is 2: it must be a range of layers"),
        (lambda: send.prefetch(5), "room 1: groups is 5: it must be a list of ranges of this rank's layers"),
        (lambda: send.finish(aux_index=1.5), "room 1: aux_index is 1.5"),
        (lambda: send.abort(None), "room 1: reason is None: it must be text"),
        (lambda: receive.abort(b"x"), "room 1: reason is b'x': it must be text"),
        (lambda: receive.wait("x"), "timeout is 'x': it must be a number of seconds"),
        (lambda: decode.drain(None), "timeout is None: it must be a number of seconds"),
    )
    for call, text in calls:
        with pytest.raises(LocalProtocolError, match=text):
            call()
    with pytest.raises(LayoutError, match="prefix and pages is 2147483648: it must be a whole number from 0"):
        decode.parts.limits._replace(page_tokens=1).opening(7, "", [2], 2**31 - 1, None, (), False, None, ())
    with pytest.raises(LayoutError, match="a prompt of 9 tokens has 3 pages of 4 tokens, but prefix and pages are 2"):
        decode.receive(7, [2], prefix_tokens=4, tokens=9)
    with pytest.raises(LocalProtocolError, match="room 7: tokens is 'x': it must be a whole number"):
        decode.receive(7, [2], tokens="x")
    with pytest.raises(ConfigError, match="7 is not an endpoint"):
        decode.receive(7, [2], prefill=7)
    send.pages([1], last=True)
    send.finish(aux_index=1)
    assert (receive.wait(60), send.wait(60)) == (RoomState.SUCCESS, RoomState.SUCCESS)
    assert decode.accepting
    assert decode.receive(7, [2], aux_index=1).room == 7
    assert fleet.errors() == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_reason_that_cannot_be_encoded_is_told_to_every_rank_as_escapes(make_fleet: Any, role: str) -> None:
    fleet = make_fleet("loopback", prefill=(1, 1)).start()
    receive, send = fleet.decode[0].receive(1, [1]), fleet.prefill[0].send(1)
    (send if role == "prefill" else receive).abort(SURROGATE)
    assert (receive.wait(60), send.wait(60)) == (RoomState.FAILED, RoomState.FAILED)
    assert receive.error["text"] == send.error["text"] == "client said \\ud800"
    assert (receive.released, send.released) == (True, True)


def test_a_message_that_cannot_be_encoded_fails_its_room_alone(make_fleet: Any) -> None:
    """What the checks of the public API do not know of: a bug."""
    fleet = make_fleet("loopback", prefill=(1, 1)).start()
    decode = fleet.decode[0]
    receive = decode.receive(1, [1])
    innocent = fleet.claim(fleet.receive(fleet.room(3, 2)))
    bad = Receive(2, decode.parts.mailbox.put, decode.telemetry.region)
    decode.parts.handles.add(bad)
    decode.parts.mailbox.put(ev.OpenRoom(2, 5, np.array([9], np.int32), 0, 1, np.int64(1), fleet.bootstrap))
    fleet.feed(innocent)
    assert innocent.wait() == {RoomState.SUCCESS}, innocent.errors()
    assert bad.wait(60) is RoomState.FAILED
    assert bad.released
    assert bad.error is not None
    assert (bad.error["rank"], bad.error["code"]) == ("decode-0", "MESSAGE_UNSENDABLE")
    assert bad.error["text"].startswith("to prefill-0: RoomOpen cannot be encoded")
    receive.abort("test is over")
    assert receive.wait(60) is RoomState.FAILED


RECEIVE = ["room", "pages", "prefill", "prefix_tokens", "aux_index", "state_indices", "prefill_only", "fake"]


def test_any_value_for_any_argument_of_receive(fleet: Any) -> None:
    decode, innocent = fleet.decode[0], Innocent(fleet)
    free = fleet.free["decode-0"]
    number = iter(range(1 << 41, 1 << 42))

    @EXAMPLES
    @given(st.sampled_from(RECEIVE), VALUES)
    def check(name: str, value: Any) -> None:
        arguments = {"room": next(number), "pages": [free[0], free[1]], name: value}
        before = decode.parts.handles.rooms
        try:
            handle = decode.receive(**arguments)
        except (LocalProtocolError, LayoutError, ConfigError):
            assert decode.parts.handles.rooms == before
        else:
            handle.abort("test is over")
            handle.wait(60)
            assert handle.released
        innocent.run()

    check()
    fleet.settle()
    assert fleet.errors() == []
    assert fleet.total(fleet.decode + fleet.prefill, "kvctl_internal_errors_total") == 0


SEND: dict[str, Callable[[Any, Any], Any]] = {
    "prefetch groups": lambda send, value: send.prefetch(value),
    "pages": lambda send, value: send.pages(value),
    "pages last": lambda send, value: send.pages([1], last=value),
    "pages event": lambda send, value: send.pages([1], event=value),
    "layers": lambda send, value: send.layers(value, [1]),
    "layers indices": lambda send, value: send.layers(range(2), value),
    "finish aux_index": lambda send, value: send.finish(aux_index=value),
    "finish state_indices": lambda send, value: send.finish(state_indices=value),
    "abort": lambda send, value: send.abort(value),
}


def test_any_value_for_any_argument_of_send(fleet: Any) -> None:
    decode, prefill, innocent = fleet.decode[0], fleet.prefill[0], Innocent(fleet)
    free = fleet.free["decode-0"]
    number = iter(range(1 << 41, 1 << 42))

    @EXAMPLES
    @given(st.sampled_from(["room", *SEND]), VALUES)
    def check(call: str, value: Any) -> None:
        if call == "room":
            try:
                handle = prefill.send(value)
            except LocalProtocolError:
                assert prefill.parts.handles.rooms == []
            else:
                handle.abort("test is over")
                handle.wait(60)
        else:
            room = next(number)
            receive, send = decode.receive(room, [free[0]]), prefill.send(room)
            try:
                SEND[call](send, value)
            except LocalProtocolError:
                send.prefetch()
                send.pages([1], last=True)
                send.finish()
                assert (receive.wait(60), send.wait(60)) == (RoomState.SUCCESS, RoomState.SUCCESS), receive.error
            else:
                send.abort("test is over")
                assert receive.wait(60).finished
                assert receive.released
        innocent.run()

    check()
    fleet.settle()
    assert fleet.errors() == []
    assert fleet.total(fleet.decode + fleet.prefill, "kvctl_internal_errors_total") == 0


AGENT = ["role", "rank", "pool", "name", "bootstrap", "model", "on_state", "copy_threads", "lost_s", "path", "checksum"]


def test_any_value_for_any_argument_of_an_agent(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 1))
    pool = fleet.model.pool(ParallelConfig(), 0)
    small = {"transport": "loopback", "staging_buffer_mb": 1, "staging_ring_mb": 1}

    @settings(EXAMPLES, max_examples=100)
    @given(st.sampled_from(AGENT), VALUES)
    def check(name: str, value: Any) -> None:
        given = {"role": "prefill", "rank": Rank(), "pool": pool, "name": "a", "bootstrap": fleet.bootstrap, **small}
        try:
            agent = Agent(**{**given, "model": fleet.model.shape, name: value})
        except KvctlError:
            return
        agent.close()

    check()
    pool.close()


@pytest.mark.parametrize("field", ["dp", "pp", "cp", "tp", "dp_size", "tp_size", "stages"])
def test_any_value_for_any_field_of_a_rank(field: str) -> None:
    @EXAMPLES
    @given(VALUES)
    def check(value: Any) -> None:
        try:
            rank = Rank(**{field: value})
            side = rank.parallel_config
        except LayoutError:
            return
        assert {type(number) for number in (*rank.coord, *side.stages, side.dp, side.tp)} == {int}

    check()


def test_any_value_for_the_rest_of_an_agents_calls(fleet: Any) -> None:
    prefill = fleet.prefill[0]
    calls: list[Callable[[Any], Any]] = [
        prefill.layer_groups,
        lambda value: prefill.layer_groups(ForwardInfo(value)),
        prefill.set_pipeline,
        prefill.wait_ready,
    ]

    @EXAMPLES
    @given(st.sampled_from(range(len(calls))), VALUES)
    def check(call: int, value: Any) -> None:
        with suppress(KvctlError):
            calls[call](value)

    check()
    Innocent(fleet).run()


def test_names_that_nobody_could_type_are_refused(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 1))
    for name in ("", "a\ud800", "a\nb", "\x1b[31m", "a" * 256, 5, None):
        with pytest.raises(ConfigError, match=r"name is .* it must be 1 to 255 bytes of printable text"):
            fleet.prefill_agent(0, name=name)


def test_a_wait_of_any_length_is_one(fleet: Any) -> None:
    receive = fleet.decode[0].receive(1, [1])
    began = time.monotonic()
    for timeout in (0, -5, np.float32(0.01), float("-inf")):
        assert not receive.wait(timeout).finished
    assert time.monotonic() - began < 30
    receive.abort("enough")
    for timeout in (float("inf"), 10**400, 1e300):
        assert receive.wait(timeout) is RoomState.FAILED
    with pytest.raises(LocalProtocolError, match=re.escape("timeout is nan: it must be a number of seconds")):
        receive.wait(float("nan"))
