"""Values of recordings as Python that makes them again, laid out in lines that fit a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, is_dataclass
from dataclasses import fields as dataclass_fields
from enum import Enum
from typing import Any, NamedTuple

import msgspec
import numpy as np

WIDTH = 120
_INDENT = "    "
_FEW = 4  # consecutive numbers from which a range is shorter
_MODULES = {"kvctl_agent.protocol.events": "ev", "kvctl_agent.protocol.messages": "msg"}


class Call(NamedTuple):
    """`before`, the arguments separated by commas, `after`."""

    before: str
    arguments: list[Tree]
    after: str


Tree = str | Call


class Imports:
    """What the written values need."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}
        self.numpy = False

    def name(self, kind: type) -> str:
        """How a class is called in the written file."""
        if short := _MODULES.get(kind.__module__):
            package, _, module = kind.__module__.rpartition(".")
            self._names.setdefault(package, set()).add(f"{module} as {short}")
            return f"{short}.{kind.__name__}"
        self._names.setdefault(kind.__module__, set()).add(kind.__name__)
        return kind.__name__

    def lines(self) -> list[str]:
        found: list[str] = []
        for module, names in sorted(self._names.items()):
            renamed = [name for name in sorted(names) if " as " in name]
            plain = [name for name in sorted(names) if " as " not in name]
            found += [f"from {module} import {name}" for name in renamed]
            found += [f"from {module} import {', '.join(plain)}"] if plain else []
        return found


def tree(value: Any, imports: Imports) -> Tree:
    """How to write a value.

    Raises:
        TypeError: it is none that recordings hold.
    """
    if value is None or isinstance(value, bool | float | str | bytes) or type(value) is int:
        return _literal(value) if not isinstance(value, Enum) else _enum(value, imports)
    if isinstance(value, Enum):
        return _enum(value, imports)
    if isinstance(value, np.ndarray):
        imports.numpy = True
        return _array(value.tolist())
    if isinstance(value, msgspec.Struct):
        fields = [(field.name, field.default) for field in msgspec.structs.fields(value)]
        return _record(value, fields, imports)
    if is_dataclass(value):
        return _record(value, [(f.name, f.default) for f in dataclass_fields(value)], imports)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Call(f"{imports.name(type(value))}(", [tree(item, imports) for item in value], ")")
    if isinstance(value, tuple):
        arguments = [tree(item, imports) for item in value]
        return Call("(", arguments, ",)" if len(arguments) == 1 else ")")
    if isinstance(value, list):
        return Call("[", [tree(item, imports) for item in value], "]")
    if isinstance(value, dict):
        return Call("{", [_with(f"{_literal(key)}: ", tree(item, imports)) for key, item in value.items()], "}")
    raise TypeError(f"a test cannot hold a {type(value).__name__}")


def lines(node: Tree, indent: int = 0, first: str = "") -> Iterable[str]:
    """The value in lines; `first` is what stands before it in the first of them."""
    margin = _INDENT * indent
    flat = _flat(node)
    if isinstance(node, str) or len(margin) + len(first) + len(flat) < WIDTH:
        yield f"{margin}{first}{flat}"
        return
    yield f"{margin}{first}{node.before}"
    for argument in node.arguments:
        *body, last = lines(argument, indent + 1)
        yield from body
        yield f"{last},"
    yield f"{margin}{node.after.lstrip(',')}"


def _flat(node: Tree) -> str:
    return node if isinstance(node, str) else f"{node.before}{', '.join(map(_flat, node.arguments))}{node.after}"


def _with(before: str, node: Tree) -> Tree:
    return before + node if isinstance(node, str) else node._replace(before=before + node.before)


def _literal(value: object) -> str:
    """As `repr` has it, in double quotes where nothing stands against them."""
    text = repr(value)
    return text.replace("'", '"') if text[-1:] == "'" and '"' not in text and "\\'" not in text else text


def _enum(value: Enum, imports: Imports) -> str:
    return f"{imports.name(type(value))}.{value.name}"


def _array(numbers: list[int]) -> str:
    first = numbers[0] if numbers else 0
    if len(numbers) >= _FEW and numbers == list(range(first, first + len(numbers))):
        return f"np.arange({first}, {first + len(numbers)}, dtype=np.int32)"
    return f"np.array({numbers}, np.int32)"


def _record(value: Any, fields: Iterable[tuple[str, Any]], imports: Imports) -> Call:
    """By its fields' names, without those that are as they would be anyway."""
    arguments: list[Tree] = []
    for name, default in fields:
        item = getattr(value, name)
        known = default is not MISSING and default is not msgspec.NODEFAULT
        if known and not isinstance(item, np.ndarray) and item == default:
            continue
        arguments.append(_with(f"{name}=", tree(item, imports)))
    return Call(f"{imports.name(type(value))}(", arguments, ")")
