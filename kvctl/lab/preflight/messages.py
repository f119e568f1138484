"""Commands from `kvctl preflight` to the process of a rank; each but KeepAlive has one answer, a JSON object.

The channel is that of `kvctl.lab.ranks`: lines of JSON, `{"do": <command name>, "args": {...}}` to the process and a
`Message` from it. The process exits at the end of its standard input, and `SILENCE_S` after the last bytes from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from kvctl.lab.ranks.request import Role


@dataclass(frozen=True, slots=True)
class Begin:
    """Opens the transport; the answer describes the process, its memory and its host.

    Args:
        params: the transport's parameters, as `transport_params`.
        environment: variables to set before an engine is imported.
        device: GPU number, or HOST.
        address: address at which other hosts reach this one; "": the process finds it out.
        ports: TCP ports to listen on; a free one if there are none.
        token: what a connection to these ports must begin with, hexadecimal.
        leads: whether the process stands for its host: only then it listens and checks the host.
    """

    do: ClassVar[str] = "begin"
    name: str
    role: Role
    transport: str
    params: dict[str, str]
    environment: dict[str, str]
    device: int
    address: str
    ports: tuple[int, ...]
    token: str
    leads: bool


@dataclass(frozen=True, slots=True)
class Clock:
    """Asks for the wall clock."""

    do: ClassVar[str] = "clock"


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Shows that the client still runs; the only command without an answer."""

    do: ClassVar[str] = "keep_alive"


@dataclass(frozen=True, slots=True)
class Reach:
    """Connects to each port of another host, and exchanges small and large messages; `timeout_s` is for each step."""

    do: ClassVar[str] = "reach"
    address: str
    ports: tuple[int, ...]
    token: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Expect:
    """Clears the memory that a peer is about to write, and lets the transport make progress without pauses."""

    do: ClassVar[str] = "expect"


@dataclass(frozen=True, slots=True)
class Write:
    """Measures writes into the memory of a peer; `timeout_s` is for each of them."""

    do: ClassVar[str] = "write"
    peer: str
    metadata: str
    addr: int
    nbytes: int
    device: int
    same_host: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """Asks for the checksum of the first bytes of the memory, after a peer has written them."""

    do: ClassVar[str] = "check"
    nbytes: int


@dataclass(frozen=True, slots=True)
class Devices:
    """Asks for the network devices, as an agent answers `nics`; `peers` are the addresses of its peers' hosts."""

    do: ClassVar[str] = "devices"
    peers: tuple[str, ...] = ()


SILENCE_S = 150.0
"""Longest time without a command: a client whose host is gone closes no connection.

An engine may hold the GIL while the kernel tries to connect, which takes up to 127 s.
"""

Command = Begin | Clock | KeepAlive | Reach | Expect | Write | Check | Devices
COMMANDS: dict[str, type[Command]] = {kind.do: kind for kind in get_args(Command)}
