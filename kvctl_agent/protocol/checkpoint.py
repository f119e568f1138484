"""A machine's state at one moment, taken in little time and told at leisure: where a recording of inputs begins.

`take` runs on the thread that owns the machine and copies only what can change; what cannot (messages, keys, plans,
page arrays) is kept by reference. `pack` turns that into bytes on any thread, later. Objects that are reached on two
ways are one object again after `build`. Nothing is pickled: classes of `checkpoint_classes` are written, no others.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from kvctl_agent.contract.snapshots import Role
from kvctl_agent.errors import RecordingError, RecordingVersionError
from kvctl_agent.protocol.checkpoint_classes import KEPT, TOMBSTONES_KEPT, classes, names_of
from kvctl_agent.protocol.decode.rooms import DecodeState
from kvctl_agent.protocol.machine import Machine, Tombstones
from kvctl_agent.protocol.peer import LocalInfo, Timing
from kvctl_agent.protocol.prefill.rooms import PrefillState
from kvctl_agent.protocol.value_codec import ValueCodec
from kvctl_agent.telemetry.room_records import RoomRecord

State = DecodeState | PrefillState

_LOOK_EVERY = 64  # objects between two looks at the clock


class Ref(NamedTuple):
    """Stands for the object with this number."""

    number: int


class Node(NamedTuple):
    """One object that can change: the name of its class, for objects their fields' names, and what it holds."""

    kind: str
    names: tuple[str, ...]
    values: list[Any]


class Checkpoint(NamedTuple):
    """`state` is the fields of the machine's state; `left_out` the tombstones that were too many to keep."""

    local: LocalInfo
    timing: Timing
    state: dict[str, Any]
    nodes: list[Node]
    left_out: int


class TooSlow(Exception):
    """The machine holds more than can be copied in the time allowed."""


def take(machine: Machine, budget_ns: int) -> Checkpoint:
    """Copy what can change of a machine between two of its events.

    Raises:
        TooSlow: it would take more than `budget_ns` of the processor's time.
    """
    walk = _Walk(time.thread_time_ns() + budget_ns)
    state = {name: walk.value(value) for name, value in vars(machine.state).items()}
    return Checkpoint(machine.local, machine.timing, state, walk.nodes, walk.left_out)


def build(checkpoint: Checkpoint) -> tuple[LocalInfo, Timing, State]:
    """What a machine in that state is built around.

    Raises:
        RecordingVersionError: the machines have other fields by now.
    """
    kind: type[State] = PrefillState if checkpoint.local.role == "prefill" else DecodeState
    state = kind(checkpoint.local, checkpoint.timing)
    expected = vars(state).keys()
    if expected != checkpoint.state.keys():
        differ = ", ".join(sorted(expected ^ checkpoint.state.keys()))
        raise RecordingVersionError(f"recorded by another build: the machine's state differs in {differ}")
    role: Role = "prefill" if checkpoint.local.role == "prefill" else "decode"
    shells = [_shell(node, role) for node in checkpoint.nodes]

    def real(value: Any) -> Any:
        if type(value) is Ref:
            return shells[value.number]
        if type(value) is tuple:
            return tuple(map(real, value))
        return value

    for shell, node in zip(shells, checkpoint.nodes, strict=True):
        _fill(shell, node, [real(value) for value in node.values])
    for name, value in checkpoint.state.items():
        setattr(state, name, real(value))
    return checkpoint.local, checkpoint.timing, state


def pack(checkpoint: Checkpoint) -> bytes:
    """As bytes; from any thread."""
    leaves = ValueCodec(classes().leaves)

    def told(value: Any) -> Any:
        if type(value) is Ref:
            return ["r", value.number]
        if type(value) is tuple:
            return ["t", [told(item) for item in value]]
        return leaves.told(value)

    nodes = [(node.kind, node.names, [told(value) for value in node.values]) for node in checkpoint.nodes]
    state = {name: told(value) for name, value in checkpoint.state.items()}
    head = [leaves.told(checkpoint.local), leaves.told(checkpoint.timing)]
    return msgspec.msgpack.encode([head, state, nodes, checkpoint.left_out, leaves.fields()])


def unpack(data: bytes) -> Checkpoint:
    """Read what `pack` wrote.

    Raises:
        RecordingError: it is no checkpoint.
        RecordingVersionError: it is one of another build.
    """
    try:
        (local, timing), state, nodes, left_out, fields = msgspec.msgpack.decode(data)
        leaves = ValueCodec(classes().leaves)
        leaves.check(fields)

        def read(value: Any) -> Any:
            match value:
                case ["r", int(number)] if 0 <= number < len(nodes):
                    return Ref(number)
                case ["t", [*items]]:
                    return tuple(map(read, items))
            return leaves.read(value)

        found = Checkpoint(
            leaves.read(local),
            leaves.read(timing),
            {str(name): read(value) for name, value in state.items()},
            [Node(str(kind), tuple(map(str, names)), list(map(read, values))) for kind, names, values in nodes],
            int(left_out),
        )
    except (msgspec.DecodeError, TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise RecordingError(f"not a checkpoint: {error}") from None
    if not (isinstance(found.local, LocalInfo) and isinstance(found.timing, Timing)):
        raise RecordingError("not a checkpoint: it does not say whose")
    for node in found.nodes:
        _check(node)
    return found


class _Walk:
    """Numbers the objects that can change and copies what they hold."""

    def __init__(self, deadline_ns: int) -> None:
        self.nodes: list[Node] = []
        self.left_out = 0
        self._numbers: dict[int, int] = {}  # by id; all of them live on in the machine while we walk
        self._deadline_ns = deadline_ns
        self._leaves = classes().leaves

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in self._leaves:
            return value
        if kind is tuple:
            return tuple([self.value(item) for item in value])
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.nodes)
            if number % _LOOK_EVERY == 0 and time.thread_time_ns() > self._deadline_ns:
                raise TooSlow
            self.nodes.append(Node("", (), []))  # the place is taken before what it holds, which may lead back here
            self.nodes[number] = self._node(kind, value)
        return Ref(number)

    def _node(self, kind: type, value: Any) -> Node:
        if kind is dict or kind is OrderedDict:
            flat: list[Any] = []
            for key, item in value.items():
                flat.append(key)
                flat.append(item if type(item) in self._leaves else self.value(item))
            return Node(kind.__name__, (), flat)
        if kind is list:
            return Node("list", (), [self.value(item) for item in value])
        if kind is set:  # sorted, so that equal states are equal bytes
            return Node("set", (), [self.value(item) for item in sorted(value)])
        if kind is deque:
            return Node("deque", (), [value.maxlen, *map(self.value, value)])
        if kind is Tombstones:
            return self._tombstones(value)
        names = names_of(kind)
        if names is None:
            raise TypeError(f"a checkpoint cannot hold a {kind.__name__}")
        names = names or tuple(vars(value))
        return Node(kind.__name__, names, [self.value(getattr(value, name)) for name in names])

    def _tombstones(self, graves: Tombstones[Any]) -> Node:
        """The latest ones: there may be very many, and a late message is about a room that ended lately."""
        kept = list(islice(reversed(graves._graves.items()), TOMBSTONES_KEPT))
        self.left_out += len(graves) - len(kept)
        flat = [piece for key, grave in reversed(kept) for piece in (key, grave)]
        return Node("Tombstones", (), [graves._lifetime_ns, graves._capacity, *flat])


def _shell(node: Node, role: Role) -> Any:
    match node.kind:
        case "dict":
            return {}
        case "OrderedDict":
            return OrderedDict()
        case "list":
            return []
        case "set":
            return set()
        case "deque":
            return deque(maxlen=node.values[0])
        case "Tombstones":
            return Tombstones(node.values[0], node.values[1])
        case "RoomRecord":
            return RoomRecord(0, 0, role, 0, event_limit=0)  # what is not kept is as in a new one
    return object.__new__(classes().states[node.kind])


def _fill(shell: Any, node: Node, values: list[Any]) -> None:
    match shell:
        case dict():
            shell.update(zip(values[::2], values[1::2], strict=True))
        case list() | deque():
            shell.extend(values[node.kind == "deque" :])
        case set():
            shell.update(values)
        case Tombstones():
            shell._graves.update(zip(values[2::2], values[3::2], strict=True))
        case _:
            for name, value in zip(node.names, values, strict=True):
                setattr(shell, name, value)


def _check(node: Node) -> None:
    """Whether this build has such an object, with these fields."""
    if node.kind in ("dict", "OrderedDict", "list", "set", "deque", "Tombstones"):
        return
    kind = classes().states.get(node.kind)
    if kind is None:
        raise RecordingVersionError(f"recorded by another build: it has a {node.kind!r:.40}")
    names = KEPT.get(kind) or names_of(kind)
    if names and names != node.names:
        differ = ", ".join(sorted(set(names) ^ set(node.names)))
        raise RecordingVersionError(f"recorded by another build: its {node.kind} differs in {differ or 'order'}")
