"""All commands of `kvctl`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from kvctl.commands.registry import COMMANDS, load

Path = tuple[str, ...]


def _below(path: Path, command: click.Command) -> Iterator[tuple[Path, click.Command]]:
    yield path, command
    for name, child in command.commands.items() if isinstance(command, click.Group) else ():
        yield from _below((*path, name), child)


def commands() -> dict[Path, click.Command]:
    """Returns the commands and groups by their words, as ("rooms", "ls")."""
    loaded = {name: load(name) for name in COMMANDS}
    return {path: each for name, command in loaded.items() if command for path, each in _below((name,), command)}
