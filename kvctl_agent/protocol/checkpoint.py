"""Copies, encodes and rebuilds the state of a protocol machine; a recording of inputs begins with such a copy.

`take` runs on the thread that owns the machine. It copies mutable objects and keeps immutable values (messages, keys,
plans, page arrays) by reference, so that it takes little time; `pack` encodes the copy later, on any thread. `build`
restores shared references: an object with two references is one object again.

The encoding is MessagePack. A value of a type that MessagePack lacks is encoded as a list that begins with the name of
its type. Only types of `_registry` are encoded or decoded, and their field names are stored with them, so that `unpack`
can refuse a recording of another build and name the type that differs.
"""

from __future__ import annotations

import pkgutil
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from enum import Enum
from functools import lru_cache
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvctl_agent import layout, protocol
from kvctl_agent.contract.snapshots import Role
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import RecordingError, RecordingVersionError
from kvctl_agent.protocol.decode.rooms import DecodeState
from kvctl_agent.protocol.machine import Machine, Tombstones
from kvctl_agent.protocol.peer import LocalInfo, Timing
from kvctl_agent.protocol.prefill.rooms import PrefillState
from kvctl_agent.telemetry.room_records import BusyTime, RoomRecord

State = DecodeState | PrefillState

CHECKPOINT_VERSION = 2
TOMBSTONES_KEPT = 4096
"""Latest tombstones copied; there may be very many, and late messages concern rooms that ended recently."""

_CLOCK_EVERY = 64  # objects copied between two reads of the clock
_PLAIN: frozenset[type] = frozenset({type(None), bool, float, str, bytes})
_CONTAINERS: dict[str, Callable[..., Any]] = {"dict": dict, "OrderedDict": OrderedDict, "list": list, "set": set}
# Fields of telemetry objects that the machines need; the others are as in a new object.
_COPIED_FIELDS: dict[type, tuple[str, ...]] = {
    RoomRecord: (
        "key",
        "landed",
        "nonce",
        "opened_at",
        "pages",
        "parked",
        "planned",
        "room",
        "scattered",
        "sent",
    )
}


class Ref(NamedTuple):
    """Reference to a copied object: its index in `Checkpoint.nodes`."""

    number: int


class Node(NamedTuple):
    """Copy of one mutable object: a container with its items, or an object with its fields."""

    kind: str
    names: tuple[str, ...]
    values: list[Any]


class Checkpoint(NamedTuple):
    """State of a machine between two inputs.

    Attributes:
        state: fields of the machine's state, with references to `nodes`.
        left_out: number of tombstones left out, which are those beyond `TOMBSTONES_KEPT`.
    """

    local: LocalInfo
    timing: Timing
    state: dict[str, Any]
    nodes: list[Node]
    left_out: int

    def fresh(self) -> Checkpoint:
        """Returns a checkpoint of a new machine with the same rank and settings (the boolean fields of the state)."""
        flags = {name: value for name, value in self.state.items() if type(value) is bool}
        return self._replace(state=flags, nodes=[], left_out=0)


class TooSlow(Exception):
    """Raised if the state of a machine cannot be copied within the time budget."""


class _Registry(NamedTuple):
    """Types that a checkpoint may contain, by class name."""

    immutable: dict[str, type]
    mutable: dict[str, type]
    by_reference: frozenset[type]  # types whose values are not copied


@lru_cache(maxsize=1)
def _registry() -> _Registry:
    """Collects the types that a checkpoint may contain: all classes in the modules of protocol and layout.

    All of these modules are imported, so that no new class is forgotten.
    """
    immutable: set[type] = {RoomState}
    mutable: set[type] = {RoomRecord, BusyTime}
    for package in (protocol, layout):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for kind in vars(import_module(found.name)).values():
                if isinstance(kind, type) and kind.__module__ == found.name and not issubclass(kind, BaseException):
                    (immutable if _is_immutable(kind) else mutable).add(kind)
    by_reference = frozenset({*immutable, *_PLAIN, int, np.ndarray, range, frozenset})
    return _Registry(
        {each.__name__: each for each in immutable}, {each.__name__: each for each in mutable}, by_reference
    )


def _is_immutable(kind: type) -> bool:
    if issubclass(kind, msgspec.Struct | Enum) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return True
    return is_dataclass(kind) and bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _fields(kind: type) -> tuple[str, ...]:
    """Returns the names of the fields or slots of a class; () if each object has its own attributes."""
    if kind in _COPIED_FIELDS:
        return _COPIED_FIELDS[kind]
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if is_dataclass(kind):
        return tuple(field.name for field in dataclass_fields(kind))
    if issubclass(kind, tuple):
        return tuple(getattr(kind, "_fields", ()))
    return tuple(sorted(name for each in kind.__mro__ for name in getattr(each, "__slots__", ())))


def take(machine: Machine, budget_ns: int) -> Checkpoint:
    """Copies the state of a machine; to be called between two of its inputs.

    Raises:
        TooSlow: copying takes more than `budget_ns` of CPU time.
    """
    _registry()  # its first call takes longer than a copy may
    copier = _Copier(time.thread_time_ns() + budget_ns)
    state = {name: copier.copy(value) for name, value in vars(machine.state).items()}
    return Checkpoint(machine.local, machine.timing, state, copier.nodes, copier.left_out)


class _Copier:
    """Copies each mutable object to one entry of `nodes`, and replaces references to the object by `Ref`."""

    def __init__(self, deadline_ns: int) -> None:
        self.nodes: list[Node] = []
        self.left_out = 0
        self._numbers: dict[int, int] = {}  # by id(); the machine keeps all of the objects alive meanwhile
        self._deadline_ns = deadline_ns
        self._by_reference = _registry().by_reference

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in self._by_reference:
            return value
        if kind is tuple:
            return tuple([self.copy(item) for item in value])
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.nodes)
            if number % _CLOCK_EVERY == 0 and time.thread_time_ns() > self._deadline_ns:
                raise TooSlow
            self.nodes.append(Node("", (), []))  # takes the number before the fields, which may refer back to it
            self.nodes[number] = self._node(kind, value)
        return Ref(number)

    def _node(self, kind: type, value: Any) -> Node:
        if kind is dict or kind is OrderedDict:
            return self._mapping(kind.__name__, value.items())
        if kind is list:
            return Node("list", (), [self.copy(item) for item in value])
        if kind is set:  # sorted, so that equal states have equal encodings
            return Node("set", (), [self.copy(item) for item in sorted(value)])
        if kind is deque:
            return Node("deque", (), [value.maxlen, *map(self.copy, value)])
        if _registry().mutable.get(kind.__name__) is not kind:
            raise TypeError(f"a checkpoint cannot hold a {kind.__name__}")
        names = _fields(kind) or tuple(vars(value))
        if kind is Tombstones:
            return Node(kind.__name__, names, [self._tombstones(getattr(value, name)) for name in names])
        return Node(kind.__name__, names, [self.copy(getattr(value, name)) for name in names])

    def _mapping(self, kind: str, items: Iterable[tuple[Any, Any]]) -> Node:
        flat: list[Any] = []
        for key, item in items:
            flat.append(key)
            flat.append(item if type(item) in self._by_reference else self.copy(item))
        return Node(kind, (), flat)

    def _tombstones(self, value: Any) -> Any:
        """Copies one field of `Tombstones`; of the tombstones themselves only the latest `TOMBSTONES_KEPT`."""
        if not isinstance(value, OrderedDict):
            return self.copy(value)
        latest = list(islice(reversed(value.items()), TOMBSTONES_KEPT))
        self.left_out += len(value) - len(latest)
        self.nodes.append(self._mapping("OrderedDict", reversed(latest)))
        return Ref(len(self.nodes) - 1)


def build(checkpoint: Checkpoint) -> tuple[LocalInfo, Timing, State]:
    """Rebuilds the identity, timing and state with which a machine is constructed.

    Raises:
        RecordingVersionError: the state of the machines has other fields in this build.
    """
    role: Role = "prefill" if checkpoint.local.role == "prefill" else "decode"
    state: State = (PrefillState if role == "prefill" else DecodeState)(checkpoint.local, checkpoint.timing)
    # A fresh checkpoint has no objects and only some of the fields.
    wrong = vars(state).keys() ^ checkpoint.state.keys() if checkpoint.nodes else checkpoint.state.keys() - vars(state)
    if wrong:
        text = ", ".join(sorted(wrong))
        raise RecordingVersionError(f"recorded by another build: the machine's state differs in {text}")
    objects = [_empty(node, role) for node in checkpoint.nodes]

    def resolve(value: Any) -> Any:
        if type(value) is Ref:
            return objects[value.number]
        if type(value) is tuple:
            return tuple(map(resolve, value))
        return value

    for target, node in zip(objects, checkpoint.nodes, strict=True):
        _fill(target, node, [resolve(value) for value in node.values])
    for name, value in checkpoint.state.items():
        setattr(state, name, resolve(value))
    return checkpoint.local, checkpoint.timing, state


def _empty(node: Node, role: Role) -> Any:
    if node.kind in _CONTAINERS:
        return _CONTAINERS[node.kind]()
    if node.kind == "deque":
        return deque(maxlen=node.values[0])
    kind = _registry().mutable[node.kind]
    return RoomRecord(0, 0, role, 0, event_limit=0) if kind is RoomRecord else object.__new__(kind)


def _fill(target: Any, node: Node, values: list[Any]) -> None:
    match target:
        case dict():
            target.update(zip(values[::2], values[1::2], strict=True))
        case list():
            target.extend(values)
        case deque():
            target.extend(values[1:])
        case set():
            target.update(values)
        case _:
            for name, value in zip(node.names, values, strict=True):
                setattr(target, name, value)


def pack(checkpoint: Checkpoint) -> bytes:
    """Encodes a checkpoint; may run on any thread."""
    encoder = _Encoder()
    body = [encoder.encode(value) for value in checkpoint]
    return msgspec.msgpack.encode([CHECKPOINT_VERSION, encoder.fields, *body])


def unpack(data: bytes) -> Checkpoint:
    """Decodes a checkpoint that `pack` has encoded.

    Raises:
        RecordingError: the data is not a checkpoint.
        RecordingVersionError: the checkpoint was recorded by another build.
    """
    try:
        version, *rest = msgspec.msgpack.decode(data)
        if version != CHECKPOINT_VERSION:
            raise RecordingVersionError("recorded by another build: its checkpoint has another version")
        fields, *body = rest
        for name, names in fields.items():
            _check_fields(name, _class(name), tuple(names))
        found = Checkpoint(*map(_decode, body))
        well_formed = (
            isinstance(found.local, LocalInfo)
            and isinstance(found.timing, Timing)
            and isinstance(found.state, dict)
            and isinstance(found.nodes, list)
            and type(found.left_out) is int
        )
        if not well_formed:
            raise RecordingError("not a checkpoint: it has values of other types")
        for node in found.nodes:
            _check_node(node)
    except (msgspec.DecodeError, TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError(f"not a checkpoint: {error}") from None
    return found


def _check_node(node: Any) -> None:
    if not isinstance(node, Node) or not isinstance(node.kind, str) or not isinstance(node.values, list):
        raise RecordingError("not a checkpoint: it has values of other types")
    if node.kind in _CONTAINERS or node.kind == "deque":
        return
    kind = _registry().mutable.get(node.kind)
    if kind is None:
        raise RecordingVersionError(f"recorded by another build: it has a {node.kind!r:.40}")
    if _fields(kind):
        _check_fields(node.kind, kind, tuple(node.names))


def _check_fields(name: str, kind: type, recorded: tuple[str, ...]) -> None:
    if recorded != _fields(kind):
        differ = ", ".join(sorted(set(recorded) ^ set(_fields(kind))))
        raise RecordingVersionError(f"recorded by another build: its {name} differs in {differ or 'order'}")


class _Encoder:
    """Encodes values as MessagePack types; `fields` collects the field names of each class that it encodes."""

    def __init__(self) -> None:
        self.fields: dict[str, tuple[str, ...]] = {}

    def encode(self, value: Any) -> Any:
        kind: type = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 64 else ["int", hex(value)]
        if kind is list or kind is tuple:
            return [kind.__name__, *map(self.encode, value)]
        if kind is frozenset:  # sorted, so that equal values have equal encodings
            return ["frozenset", *map(self.encode, sorted(value))]
        if kind is dict:
            return ["dict", *[self.encode(piece) for item in value.items() for piece in item]]
        if kind is range:
            return ["range", value.start, value.stop, value.step]
        if kind is np.ndarray:
            return ["ndarray", value.dtype.str, list(value.shape), value.tobytes()]
        if _registry().immutable.get(kind.__name__) is not kind:
            raise TypeError(f"a recording cannot hold a {kind.__name__}")
        names = _fields(kind)
        if issubclass(kind, Enum):
            return [kind.__name__, value.value]
        self.fields[kind.__name__] = names
        return [kind.__name__, *[self.encode(getattr(value, name)) for name in names]]


def _decode(encoded: Any) -> Any:
    match encoded:
        case None | bool() | int() | float() | str() | bytes():
            return encoded
        case ["int", str(digits)] if len(digits) <= 4096:
            return int(digits, 16)
        case ["list" | "tuple" | "frozenset" as name, *items]:
            return {"list": list, "tuple": tuple, "frozenset": frozenset}[name](map(_decode, items))
        case ["dict", *pieces]:
            decoded = list(map(_decode, pieces))
            return dict(zip(decoded[::2], decoded[1::2], strict=True))
        case ["range", int(start), int(stop), int(step)]:
            return range(start, stop, step)
        case ["ndarray", "<i4" as dtype, [*shape], bytes(data)]:
            return np.frombuffer(data, dtype).reshape(shape)
        case [str(name), *items]:
            kind = _class(name)
            names = _fields(kind)
            if issubclass(kind, Enum):
                (value,) = items
                return kind(value)
            return kind(**dict(zip(names, map(_decode, items), strict=True)))
    raise RecordingError(f"a recording holds a value that this build does not know: {encoded!r:.80}")


def _class(name: str) -> type:
    kind = _registry().immutable.get(name)
    if kind is None:
        raise RecordingVersionError(f"recorded by another build: it has a {name!r:.40}")
    return kind
