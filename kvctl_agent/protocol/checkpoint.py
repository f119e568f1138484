"""Copies the state of a protocol machine, and rebuilds it; a recording of inputs begins with such a copy.

The state is a graph: parts belong to a transfer, which a room and several tables share. So a copy is a list of nodes,
one for each object, that refer to each other by number, and what is shared stays shared. `Copy` runs on the thread that
owns the machine. It copies mutable objects and keeps immutable ones (messages, keys, plans, page arrays) as they are,
so that it takes little time; msgspec encodes them later, on any thread, and checks their types when they are decoded.

A node is a list: the name of a class, then the values of its fields or items; a dictionary has its keys first, in a
tuple. A value is a scalar, or a list with the number of a node; an empty list is a room's record, which machines never
read. An immutable object is a node with one value. Only classes of `protocol`, `layout` and a few others are decoded.
The names of fields are stored once, so that `build` can refuse a recording of another build and name the class that
differs.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict, deque
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from kvctl_agent.errors import RecordingError, RecordingVersionError
from kvctl_agent.layout.page_indices import packed, unpacked
from kvctl_agent.protocol.decode.rooms import DecodeState
from kvctl_agent.protocol.machine import Machine, Tombstones
from kvctl_agent.protocol.peer import LocalInfo, Timing
from kvctl_agent.protocol.prefill.rooms import PrefillState
from kvctl_agent.telemetry.null import NULL_RECORD, NullRecord
from kvctl_agent.telemetry.room_records import RoomRecord

State = DecodeState | PrefillState

VERSION = 4
TOMBSTONES_KEPT = 4096
"""Latest tombstones copied; there may be very many, and late messages concern rooms that ended recently."""

_CLOCK_EVERY = 64  # objects copied between two reads of the clock
_PLAIN: frozenset[type] = frozenset({type(None), bool, float, str, bytes})
_CONTAINERS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "list": list, "set": set, "deque": deque}
_VALUES: dict[str, Any] = {"tuple": tuple, "frozenset": frozenset, "int": int, "ndarray": np.ndarray}
_NAMES = {kind: name for name, kind in (_CONTAINERS | _VALUES).items()}
_encode = msgspec.msgpack.Encoder(enc_hook=packed, order="deterministic").encode  # equal states, equal encodings
_MODULES = re.compile(r"(?:protocol|layout)(?:\.\w+)+|contract\.states|telemetry\.durations", re.ASCII)


class TooSlow(Exception):
    """Raised if the state of a machine cannot be copied within the time budget."""


class _Version(msgspec.Struct, array_like=True):
    version: int


class Checkpoint(msgspec.Struct, array_like=True, frozen=True):
    """State of a machine between two inputs, as it is stored.

    Attributes:
        flags: the boolean fields of the state, which the settings of the agent determine.
        left_out: number of tombstones left out, which are those beyond `TOMBSTONES_KEPT`.
        fields: names of the fields of each class.
        nodes: the objects; the first is a dictionary of the other fields of the state. Empty: the machine is new.
    """

    version: int
    local: LocalInfo
    timing: Timing
    flags: dict[str, bool]
    left_out: int
    fields: dict[str, list[str]]
    nodes: list[list[Any]]

    def fresh(self) -> Checkpoint:
        """Returns a checkpoint of a new machine with the same rank and settings."""
        return msgspec.structs.replace(self, left_out=0, fields={}, nodes=[])

    def pack(self) -> bytes:
        return _encode(self)


def unpack(data: bytes) -> Checkpoint:
    """Decodes a checkpoint that `Checkpoint.pack` has encoded.

    Raises:
        RecordingError: the data is not a checkpoint.
        RecordingVersionError: another build has recorded it.
    """
    try:
        version = msgspec.msgpack.decode(data, type=_Version).version
        if version != VERSION:
            raise RecordingVersionError(f"its checkpoints have version {version}, not {VERSION}")
        return msgspec.msgpack.decode(data, type=Checkpoint)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise RecordingError(f"not a checkpoint: {error}") from None


class Copy:
    """Copies the state of a machine; to be made between two of its inputs.

    Raises:
        TooSlow: copying takes more than `budget_ns` of CPU time.
    """

    def __init__(self, machine: Machine, budget_ns: int) -> None:
        self._deadline_ns = time.thread_time_ns() + budget_ns
        self._nodes: list[list[Any]] = []
        self._numbers: dict[int, int] = {}  # by id()
        self._kept: list[Any] = []  # all of these objects, so that no other gets the id() of one
        self._later: list[tuple[int, Any]] = []  # containers of immutable objects, which are expanded later
        self._fields: dict[str, list[str]] = {}
        self._left_out = 0
        self._local, self._timing = machine.local, machine.timing
        state = vars(machine.state)
        self._flags = {name: value for name, value in state.items() if type(value) is bool}
        self._reference({name: value for name, value in state.items() if type(value) is not bool})

    def pack(self) -> bytes:
        """Encodes the copy; may run on any thread, but on one at a time."""
        self._deadline_ns = 1 << 62
        while self._later:
            self._expand(*self._later.pop())
        return Checkpoint(
            VERSION, self._local, self._timing, self._flags, self._left_out, self._fields, self._nodes
        ).pack()

    def _reference(self, value: Any) -> Any:
        kind: type = type(value)
        if kind in _PLAIN or (kind is int and -(1 << 63) <= value < 1 << 64):
            return value
        if kind is RoomRecord or kind is NullRecord:
            return []
        number = self._numbers.get(id(value))
        if number is None:
            number = self._add(value)
            if number % _CLOCK_EVERY == 0 and time.thread_time_ns() > self._deadline_ns:
                raise TooSlow
            if _is_immutable(kind):
                self._nodes[number] = [_name(kind), value if kind is not int else hex(value)]
            else:
                self._expand(number, value)
        return [number]

    def _add(self, value: Any) -> int:
        number = self._numbers[id(value)] = len(self._nodes)
        self._kept.append(value)
        self._nodes.append([])
        return number

    def _defer(self, value: Any) -> list[int]:
        """Returns the reference to a container that will not change."""
        number = self._add(value)
        self._later.append((number, value))
        return [number]

    def _expand(self, number: int, value: Any) -> None:
        kind: Any = type(value)
        if kind is Tombstones:
            value = self._latest(value)
        name, items = _name(kind), value
        if issubclass(kind, dict):
            items = value.values()
        elif kind is set:
            items = sorted(value)
        elif kind not in _NAMES:
            self._fields[name] = list(_fields(kind))
            items = [getattr(value, field) for field in _fields(kind)]
        extra = [self._defer(tuple(value))] if issubclass(kind, dict) else [value.maxlen] if kind is deque else []
        self._nodes[number] = [name, *extra, *map(self._reference, items)]

    def _latest(self, tombstones: Tombstones[Any]) -> Tombstones[Any]:
        """Returns the latest tombstones; each is immutable, and is expanded later."""
        entries = tombstones._entries
        latest = list(islice(reversed(entries.items()), TOMBSTONES_KEPT))
        self._left_out += len(entries) - len(latest)
        found: Tombstones[Any] = Tombstones(tombstones._lifetime_ns, tombstones._capacity)
        found._entries.update(reversed(latest))
        self._defer(found._entries)
        return found


def build(checkpoint: Checkpoint) -> tuple[LocalInfo, Timing, State]:
    """Rebuilds the identity, timing and state with which a machine is constructed.

    Raises:
        RecordingError: the nodes are damaged.
        RecordingVersionError: the state of the machines has other fields in this build.
    """
    kind = PrefillState if checkpoint.local.role == "prefill" else DecodeState
    state: State = kind(checkpoint.local, checkpoint.timing)
    for name, names in checkpoint.fields.items():
        if differ := set(names) ^ set(_fields(_class(name))):
            raise RecordingVersionError(f"its {name} differs in {', '.join(sorted(differ))}")
    try:
        found = checkpoint.flags | (_Objects(checkpoint).at(0) if checkpoint.nodes else {})
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RecordingError(f"its checkpoint is damaged: {type(error).__name__}: {error}") from error
    # A fresh checkpoint has only some of the fields.
    if wrong := found.keys() - vars(state) if not checkpoint.nodes else vars(state).keys() ^ found.keys():
        raise RecordingVersionError(f"the state of its machine differs in {', '.join(sorted(wrong))}")
    for name, value in found.items():
        setattr(state, name, value)
    return checkpoint.local, checkpoint.timing, state


class _Objects:
    """Objects of a checkpoint, made when the first reference to them is resolved."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._nodes = checkpoint.nodes
        self._names = checkpoint.fields
        self._made: dict[int, Any] = {}

    def at(self, number: int) -> Any:
        if number not in self._made:
            name, *items = self._nodes[number]
            if name in _CONTAINERS:
                self._fill(number, name, items)
            elif name == "tuple":
                self._made[number] = tuple(map(self._value, items))
            elif name in self._names:
                self._make(number, _class(name), self._names[name], items)
            else:
                (item,) = items
                self._made[number] = int(item, 16) if name == "int" else _converted(item, _class(name))
        return self._made[number]

    def _value(self, item: Any) -> Any:
        if isinstance(item, list):
            return self.at(*item) if item else NULL_RECORD
        return item

    def _fill(self, number: int, name: str, items: list[Any]) -> None:
        if name == "deque":
            maxlen, *items = items
            target: Any = deque(maxlen=maxlen)
        else:
            target = _CONTAINERS[name]()
        self._made[number] = target  # before its items, which may refer to it
        values = list(map(self._value, items))
        if isinstance(target, dict):
            keys, *values = values
            target.update(zip(keys, values, strict=True))
        elif isinstance(target, set):
            target.update(values)
        else:
            target.extend(values)

    def _make(self, number: int, kind: Any, names: list[str], items: list[Any]) -> None:
        target = self._made[number] = object.__new__(kind)
        for name, item in zip(names, items, strict=True):
            setattr(target, name, self._value(item))


def _converted(item: Any, kind: type) -> Any:
    """Converts an immutable object from what msgspec has decoded; page arrays, which MessagePack lacks, from bytes."""
    try:
        return msgspec.convert(item, kind, dec_hook=lambda _, data: unpacked(data))
    except msgspec.ValidationError as error:
        raise RecordingVersionError(f"its {kind.__name__} differs: {error}") from None


@cache
def _is_immutable(kind: type) -> bool:
    """Returns whether objects of a class are kept as they are: not plain tuples, which may have mutable items."""
    if kind in (int, np.ndarray, frozenset) or issubclass(kind, msgspec.Struct | Enum):
        return True
    if issubclass(kind, tuple):
        return kind is not tuple
    return is_dataclass(kind) and bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Returns the names of the fields of a mutable class."""
    if is_dataclass(kind):
        return tuple(field.name for field in dataclass_fields(kind))
    return tuple(sorted(name for each in kind.__mro__ for name in getattr(each, "__slots__", ())))


@cache
def _name(kind: type) -> str:
    """Returns the name under which a class is stored; raises TypeError if it cannot be."""
    name = _NAMES.get(kind) or f"{kind.__module__.removeprefix('kvctl_agent.')}.{kind.__name__}"
    if kind in _NAMES:
        return name
    known = _MODULES.fullmatch(name.rpartition(".")[0]) and _class(name) is kind
    if not known or not (_fields(kind) or _is_immutable(kind)):
        raise TypeError(f"a checkpoint cannot hold a {kind.__name__}")
    return name


@cache
def _class(name: str) -> type:
    """Returns the class that is stored under a name; raises RecordingVersionError if this build has none."""
    if name in _VALUES:
        return _VALUES[name]  # type: ignore[no-any-return]
    module, _, kind = name.rpartition(".")
    try:
        found = getattr(import_module(f"kvctl_agent.{module}"), kind) if _MODULES.fullmatch(module) else None
    except (ImportError, AttributeError):
        found = None
    if not isinstance(found, type) or found.__module__ != f"kvctl_agent.{module}" or issubclass(found, BaseException):
        raise RecordingVersionError(f"it has a {name!r:.60}, which this build lacks")
    return found
