"""Edits the contexts in the user file and preserves all other lines and comments.

The standard library has no TOML writer that keeps comments, so the text is edited. The result is parsed again and
written only if it has exactly the intended contents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvctl.client.atomic_file import atomic_file
from kvctl.commands.settings import CONTEXT, CONTEXTS
from kvctl.errors import CliError
from kvctl_agent.contract import toml_files

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HEADER = re.compile(r"\s*\[")
_IN_USE = re.compile(rf"\s*{CONTEXT}\s*=")


def put(path: Path, name: str, context: Mapping[str, Any]) -> None:
    """Adds or replaces the context `name`.

    Raises:
        CliError: the file cannot be written, or has a layout that cannot be edited.
    """
    lines = _lines(path)
    begin, end = _table(lines, name)
    block = [_header(name), *(f"{key} = {_value(value)}" for key, value in context.items())]
    if begin == end and lines and lines[-1].strip():
        block.insert(0, "")
    wanted = _parsed(lines)
    wanted[CONTEXTS] = {**wanted.get(CONTEXTS, {}), name: dict(context)}
    _replace(path, [*lines[:begin], *block, *lines[end:]], wanted)


def remove(path: Path, name: str) -> None:
    """Removes the context `name`, and the line that selects it; raises the same errors as `put`."""
    lines = _lines(path)
    wanted = _parsed(lines)
    wanted[CONTEXTS] = {key: value for key, value in wanted.get(CONTEXTS, {}).items() if key != name}
    begin, end = _table(lines, name)
    rest = [*lines[:begin], *lines[end:]]
    if wanted.get(CONTEXT) == name:
        del wanted[CONTEXT]
        rest = [line for index, line in enumerate(rest) if index != _in_use(rest)]
    _replace(path, rest, wanted)


def use(path: Path, name: str | None) -> None:
    """Selects the context `name`, or no context if it is None; raises the same errors as `put`."""
    lines = _lines(path)
    wanted = _parsed(lines)
    wanted.pop(CONTEXT, None)
    at = _in_use(lines)
    rest = [line for index, line in enumerate(lines) if index != at]
    if name is not None:
        wanted[CONTEXT] = name
        # A top-level key must precede the first table.
        rest.insert(_first_table(rest) if at is None else at, f"{CONTEXT} = {_value(name)}")
    _replace(path, rest, wanted)


def _lines(path: Path) -> list[str]:
    try:
        return toml_files.read_text(path).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CliError(f"cannot read {path}: {error}") from None


def _parsed(lines: Sequence[str]) -> dict[str, Any]:
    return toml_files.parse("\n".join(lines))


def _header(name: str) -> str:
    return f"[{CONTEXTS}.{_value(name) if '.' in name else name}]"


def _table(lines: Sequence[str], name: str) -> tuple[int, int]:
    """Returns the first line of a context's table and the line after its last.

    Both are the number of lines of the file if it has no such table. Blank lines and comments before the next table
    belong to that table.
    """
    spelled = rf"""(?:{re.escape(name)}|"{re.escape(name)}"|'{re.escape(name)}')"""
    header = re.compile(rf"\s*\[\s*{CONTEXTS}\s*\.\s*{spelled}\s*\]\s*(#.*)?")
    begin = next((index for index, line in enumerate(lines) if header.fullmatch(line)), len(lines))
    after = (index for index in range(begin + 1, len(lines)) if _HEADER.match(lines[index]) and _ends(lines, index))
    end = next(after, len(lines))
    while end > begin + 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return begin, end


def _ends(lines: Sequence[str], index: int) -> bool:
    """Returns whether the lines before `index` are valid TOML; a `[` within a multi-line list begins no table."""
    try:
        _parsed(lines[:index])
    except ValueError:
        return False
    return True


def _first_table(lines: Sequence[str]) -> int:
    found = next((i for i, line in enumerate(lines) if _HEADER.match(line) and _ends(lines, i)), len(lines))
    while found and found < len(lines) and lines[found - 1].lstrip().startswith("#"):
        found -= 1
    return found


def _in_use(lines: Sequence[str]) -> int | None:
    limit = _first_table(lines)
    return next((index for index, line in enumerate(lines[:limit]) if _IN_USE.match(line)), None)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in escaped) + '"'


def _replace(path: Path, lines: Sequence[str], wanted: Mapping[str, Any]) -> None:
    """Replaces the file atomically with mode 0600, because contexts name keys and addresses.

    Args:
        wanted: contents that `lines` must have when they are parsed.

    Raises:
        CliError: `lines` have other contents, or the file cannot be written.
    """
    try:
        same = _without_empty(_parsed(lines)) == _without_empty(wanted)
    except ValueError:
        same = False
    if not same:
        raise CliError(f"kvctl cannot edit the layout of {path}: change [{CONTEXTS}.NAME] in it by hand")
    target = path.resolve()  # keeps a symbolic link as a link
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_file(target) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise CliError(f"cannot write {target}: {error.strerror}") from None


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != CONTEXTS or value}
