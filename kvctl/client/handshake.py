"""Watches how the connection to one TCP endpoint goes: libzmq tries again for ever and reports nothing by itself."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvctl.client.faults import FaultCode
from kvctl.client.keys import ClientKeys

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Handshake:
    """The life of one socket's connection.

    Attributes:
        socket: readable when `look` has something to tell.
    """

    def __init__(self, watched: zmq.Socket[bytes], keys: ClientKeys) -> None:
        """Before the connect of `watched`."""
        self._watched = watched
        self._keys = keys
        self._connected = False
        self.socket: zmq.Socket[bytes] = watched.get_monitor_socket(_EVENTS)

    def look(self) -> tuple[FaultCode, str] | None:
        """What has gone wrong, or None while nothing has."""
        while self.socket.poll(0):
            if (wrong := self._judge(recv_monitor_message(self.socket)["event"])) is not None:
                return wrong
        return None

    def close(self) -> None:
        """Before the close of the watched socket."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)

    def _judge(self, event: int) -> tuple[FaultCode, str] | None:
        match event:
            case zmq.EVENT_CONNECTED:
                self._connected = True
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                key = self._keys.own.public.hex()
                return FaultCode.NOT_PERMITTED, f"refuses our key {key}: it is not in the agent's admin_clients"
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                return FaultCode.PROTOCOL, "speaks ZMQ but not with keys: this is no admin_endpoint"
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                key = self._keys.server.hex()
                return FaultCode.NOT_PERMITTED, f"hung up: its fleet_key is not {key} (--server-key), or it is no agent"
            case zmq.EVENT_DISCONNECTED:
                return FaultCode.UNREACHABLE, "hung up: the agent has ended, or closed its admin_endpoint"
            case zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED if not self._connected:
                return FaultCode.UNREACHABLE, "nobody listens there: is the agent running, with this admin_endpoint?"
        return None
