"""Compares a release of SGLang with the interfaces that the plugin relies on, and with another release.

`python -m tests.support.sglang.compare FOLDER [OTHER]` reads the sources in both folders and imports nothing. It prints
the interfaces that the plugin does not support as they are, and exits with 1 if there are any; then those functions of
the classes that it builds on whose code differs in OTHER, which somebody should read.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvctl_agent.integrations.sglang.versions import (
    INTERFACES,
    OBSERVED_INTERFACES,
    OLDER_FORMS,
    PIPELINING_INTERFACES,
)

ALL = {**INTERFACES, **PIPELINING_INTERFACES, **OBSERVED_INTERFACES}
_D = "sglang.srt.disaggregation"
CLASSES = (
    f"{_D}.common.conn:CommonKVManager",
    f"{_D}.common.conn:CommonKVSender",
    f"{_D}.common.conn:CommonKVReceiver",
    f"{_D}.common.conn:CommonKVBootstrapServer",
    f"{_D}.prefill:PrefillBootstrapQueue",
    f"{_D}.prefill:SchedulerDisaggregationPrefillMixin",
    f"{_D}.decode:DecodePreallocQueue",
    f"{_D}.decode:DecodeTransferQueue",
    f"{_D}.utils:MetadataBuffers",
    "sglang.srt.mem_cache.radix_cache:RadixCache",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache",
)
"""Classes of SGLang that the plugin derives from, hooks, or whose calls it answers."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def unsupported(folder: Path, interfaces: Mapping[str, tuple[str, ...]] = ALL) -> Iterator[str]:
    """Yields one line for each interface that is missing in a release, or has parameters that are not supported."""
    for name, expected in interfaces.items():
        forms = (expected, *OLDER_FORMS.get(name, ()))
        found = _found(folder, name)
        if found is None:
            if None not in forms:
                yield f"{name} is missing"
        elif (parameters := _parameters(found)) is not None and parameters not in forms:
            yield f"{name} has parameters ({', '.join(parameters)}), expected ({', '.join(expected)})"


def other_code(folder: Path, other: Path) -> Iterator[str]:
    """Yields one line for each method of CLASSES that one release has otherwise than another, or alone."""
    for name in CLASSES:
        here, there = _methods(folder, name), _methods(other, name)
        for method in sorted(here.keys() | there.keys()):
            if here.get(method) != there.get(method):
                what = "other code" if method in here and method in there else "new" if method in here else "gone"
                yield f"{name}.{method}: {what}"


def _methods(folder: Path, name: str) -> dict[str, str]:
    """Returns the code of each method of a class, without comments and docstrings."""
    found = _found(folder, name)
    body = found.body if isinstance(found, ast.ClassDef) else ()
    return {each.name: _code(each) for each in body if isinstance(each, Function)}


def _code(function: Function) -> str:
    begins = int(ast.get_docstring(function) is not None)
    return "\n".join(map(ast.unparse, (function.args, *function.body[begins:])))


def _found(folder: Path, name: str) -> ast.stmt | None:
    """Returns the definition of `module:name`, or of `module:class.name`."""
    module, _, path = name.partition(":")
    body = _source(folder, module)
    found: ast.stmt | None = None
    for part in path.split("."):
        found = next((each for each in body if part in _names(each)), None)
        body = found.body if isinstance(found, ast.ClassDef) else []
    return found


def _names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return [statement.name] if isinstance(statement, ast.ClassDef | Function) else []


@functools.cache
def _source(folder: Path, module: str) -> list[ast.stmt]:
    path = folder.joinpath(*module.split("."))
    file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
    return ast.parse(file.read_text()).body if file is not None else []


def _parameters(found: ast.stmt) -> tuple[str, ...] | None:
    """Returns the names of a function's parameters, of a class those of its constructor; None of another value."""
    if isinstance(found, ast.ClassDef):
        constructor = next((each for each in found.body if "__init__" in _names(each)), None)
        names = _parameters(constructor) if constructor is not None else None
        return names and names[1:]
    if not isinstance(found, Function):
        return None
    every = found.args
    named = [*every.posonlyargs, *every.args, every.vararg, *every.kwonlyargs, every.kwarg]
    names = tuple(each.arg for each in named if each is not None)
    return names[1:] if "classmethod" in map(ast.unparse, found.decorator_list) else names


def main() -> None:
    folder, *others = map(Path, sys.argv[1:])
    lines = list(unsupported(folder))
    for line in lines:
        print(f"unsupported: {line}")
    for line in (line for other in others for line in other_code(folder, other)):
        print(f"read: {line}")
    raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
