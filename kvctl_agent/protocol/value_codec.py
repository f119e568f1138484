"""Values that do not change, as MessagePack and back: numbers of any size, enums, tuples with names, structs, arrays.

Every value that MessagePack has no word for is a list that begins with a letter; the classes are those that the caller
allows, and their fields travel along, so that a file of another build is told from a broken one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from kvctl_agent.errors import RecordingError, RecordingVersionError

_LOWEST, _HIGHEST = -(1 << 63), (1 << 64) - 1
_PLAIN: frozenset[type] = frozenset({type(None), bool, float, str, bytes})
_MOST_DIGITS = 4096


class ValueCodec:
    """Tells and reads values of `classes`."""

    def __init__(self, classes: Iterable[type]) -> None:
        self._classes = {kind.__name__: kind for kind in classes}
        self._met: set[type] = set()

    def told(self, value: Any) -> Any:
        """`value` in words that MessagePack has."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if _LOWEST <= value <= _HIGHEST else ["i", hex(value)]
        if kind is list or kind is tuple or kind is frozenset:
            return [kind.__name__[0], [self.told(item) for item in value]]
        if kind is dict:
            return ["d", [self.told(piece) for item in value.items() for piece in item]]
        if kind is range:
            return ["g", value.start, value.stop, value.step]
        if kind is np.ndarray:
            return ["a", value.dtype.str, list(value.shape), value.tobytes()]
        if self._classes.get(kind.__name__) is not kind:
            raise TypeError(f"a recording cannot hold a {kind.__name__}")
        if isinstance(value, Enum):
            return ["e", kind.__name__, value.value]
        self._met.add(kind)
        return ["c", kind.__name__, [self.told(getattr(value, name)) for name in _fields(kind)]]

    def read(self, told: Any) -> Any:
        """What was told.

        Raises:
            RecordingError: it is no such value.
        """
        match told:
            case None | bool() | int() | float() | str() | bytes():
                return told
            case ["i", str(digits)] if len(digits) <= _MOST_DIGITS:
                return int(digits, 16)
            case ["l", [*items]]:
                return list(map(self.read, items))
            case ["t", [*items]]:
                return tuple(map(self.read, items))
            case ["f", [*items]]:
                return frozenset(map(self.read, items))
            case ["d", [*pieces]]:
                read = list(map(self.read, pieces))
                return dict(zip(read[::2], read[1::2], strict=True))
            case ["g", int(start), int(stop), int(step)]:
                return range(start, stop, step)
            case ["a", "<i4" as dtype, [*shape], bytes(data)]:
                return np.frombuffer(data, dtype).reshape(shape)
            case ["e", str(name), value] if issubclass(self._class(name), Enum):
                return self._class(name)(value)
            case ["c", str(name), [*values]] if not issubclass(self._class(name), Enum):
                kind = self._class(name)
                return kind(**dict(zip(_fields(kind), map(self.read, values), strict=True)))
        raise RecordingError(f"a recording holds what this build does not know: {told!r:.80}")

    def fields(self) -> dict[str, list[str]]:
        """The fields of all classes that were told so far."""
        return {kind.__name__: list(_fields(kind)) for kind in self._met}

    def check(self, fields: Mapping[str, list[str]]) -> None:
        """Raises RecordingVersionError where the classes of a recording are not those of this build."""
        for name, theirs in fields.items():
            ours = list(_fields(self._class(name)))
            if ours != theirs:
                differ = ", ".join(sorted(set(ours) ^ set(theirs)))
                raise RecordingVersionError(f"recorded by another build: its {name} differs in {differ or 'order'}")

    def _class(self, name: str) -> type:
        kind = self._classes.get(name)
        if kind is None or kind in _PLAIN:
            raise RecordingVersionError(f"recorded by another build: it has a {name!r:.40}")
        return kind


def _fields(kind: type) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if is_dataclass(kind):
        return tuple(field.name for field in dataclass_fields(kind))
    return tuple(getattr(kind, "_fields", ()))
