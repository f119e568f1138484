"""The two files that hold wishes for later: the user's own, and that of the project one stands in; and their contexts.

A context is a fleet under a name: `[contexts.NAME]` in the user file. Which one is in use is said by `--context`,
`KVCTL_CONTEXT`, or `context = "NAME"` in either file.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

PROJECT_FILE = ".kvctl.toml"
CONTEXT = "context"
CONTEXTS = "contexts"
FILE_KEYS = ("output", "timeout", "endpoint", "color", "key", "server_key")
CONTEXT_KEYS = ("endpoint", "key", "server_key", "timeout", "labels")


@dataclass(frozen=True, slots=True)
class File:
    """What one of the files says; empty where there is none."""

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def contexts(self) -> Mapping[str, Mapping[str, Any]]:
        contexts: Mapping[str, Mapping[str, Any]] = self.values.get(CONTEXTS, {})
        return contexts


def user_path() -> Path:
    """Where the user file is, or would be."""
    home = os.environ.get("XDG_CONFIG_HOME")
    if not home:
        try:
            home = str(Path("~/.config").expanduser())
        except RuntimeError:  # a uid without a name and without HOME, as in some containers
            home = "/etc"
    return Path(home) / "kvctl" / "config.toml"


def user_file() -> File:
    """The user file.

    Raises:
        click.UsageError: it cannot be read, or says what nobody understands.
    """
    return _read(user_path(), (*FILE_KEYS, CONTEXT, CONTEXTS))


def project_file() -> File | None:
    """The nearest `.kvctl.toml` from here up to the root of the repository; outside of one, only the one here.

    One that belongs to neither us nor root does not count: anybody may write in /tmp.

    Raises:
        click.UsageError: as `user_file`.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the directory was removed under our feet
        return None
    within = next((index for index, each in enumerate((here, *here.parents)) if (each / ".git").exists()), 0)
    for directory in (here, *here.parents)[: within + 1]:
        path = directory / PROJECT_FILE
        if path.is_file() and path.stat().st_uid in {os.getuid(), 0}:
            return _read(path, (*FILE_KEYS, CONTEXT))
    return None


def context_of(user: File, name: object, origin: str) -> Mapping[str, Any]:
    """The context of that name.

    Raises:
        click.UsageError: there is none; `origin` says who asked for it.
    """
    found = user.contexts.get(str(name))
    if found is None:
        near = difflib.get_close_matches(str(name), user.contexts, n=1)
        known = f"there are: {', '.join(user.contexts)}" if user.contexts else "there are none: kvctl context add"
        hint = f"did you mean {near[0]}?" if near else known
        raise click.UsageError(f"{origin}: no context {name!r} in {user.path}; {hint}")
    return found


def _read(path: Path, known: tuple[str, ...]) -> File:
    if not path.is_file():
        return File(path)
    import tomllib

    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}") from error
    _check(values, known, str(path))
    contexts = values.get(CONTEXTS, {})
    for name, context in contexts.items() if isinstance(contexts, dict) else [("", None)]:
        if not isinstance(context, dict):
            raise click.UsageError(f"{path}: {CONTEXTS} holds tables, [{CONTEXTS}.{name or 'NAME'}]")
        _check(context, CONTEXT_KEYS, f"{path}, context {name}")
    return File(path, values)


def _check(values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = values.keys() - set(known)
    if unknown:
        raise click.UsageError(f"{where}: unknown key {sorted(unknown)[0]!r}; known: {', '.join(known)}")
