"""Every event and message has a handler in each machine, or is listed here as refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from tests.support.protocol.simulation import World

TO_PREFILL = {
    msg.Hello,
    msg.RoomOpen,
    msg.RoomKept,
    msg.RoomDone,
    msg.RoomAbort,
    msg.RoomRenew,
    msg.StagingGrants,
    msg.StagingRefused,
    msg.StagingRevoke,
    msg.Watermark,
    msg.PartAck,
}
TO_DECODE = {
    msg.HelloAck,
    msg.HelloWanted,
    msg.RoomAccepted,
    msg.RoomRefused,
    msg.RoomDrained,
    msg.StagingRequest,
    msg.StagingRevoked,
    msg.TooLate,
    msg.PartReady,
    msg.ReadersDone,
}
OF_PREFILL = {
    ev.SendRoom,
    ev.DeclineRoom,
    ev.Prefetch,
    ev.Launched,
    ev.SendPages,
    ev.ForwardFailed,
    ev.Finish,
    ev.PartSent,
    ev.PartFailed,
    ev.PeerConnected,
}
OF_DECODE = {
    ev.OpenRoom,
    ev.RenewRooms,
    ev.ConnectInstance,
    ev.DisconnectInstance,
    ev.Arrived,
    ev.Scattered,
    ev.ScatterFailed,
    ev.Checked,
    ev.ReleaseHeld,
    ev.RosterKnown,
    ev.RosterMissing,
    ev.InstanceUnreachable,
}
REFUSED: dict[str, tuple[set[Any], set[Any]]] = {
    "decode-0": (OF_PREFILL, TO_PREFILL),
    "prefill-0": (OF_DECODE, TO_DECODE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_event_and_message_has_a_handler_or_is_refused(name: str) -> None:
    machine: Any = World().machines[name]
    events, messages = REFUSED[name]
    assert set(machine._events) == set(ev.Event.__subclasses__()) - events
    known = {*machine._handshake, *machine._messages}
    assert known == set(get_args(msg.AnyMessage)) - messages
    assert not machine._handshake.keys() & machine._messages.keys()
    assert {*machine._former_messages, *machine._lost_messages} <= machine._messages.keys()
