"""The saved contexts and the one in use: `contexts.json` in the configuration directory, which only kvctl writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from kvctl.client.atomic_file import atomic_file
from kvctl.errors import CliError
from kvctl_agent.contract.values import near, shown

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
KEYS = ("endpoint", "key", "server_key", "timeout", "labels")
"""Keys of a context."""


@dataclass(slots=True)
class Contexts:
    """Content of the file; empty if the file does not exist.

    Attributes:
        in_use: name of the context in use, which may not exist.
    """

    path: Path
    in_use: str | None = None
    named: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Contexts:
        """Reads the file; raises click.UsageError if it cannot be read, or has another structure."""
        try:
            content = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return cls(path)
        except (OSError, ValueError, RecursionError) as error:
            raise click.UsageError(f"{path} cannot be read: {error}") from None
        match content:
            case {"in_use": str() | None as in_use, "contexts": dict(named)} if all(
                isinstance(each, dict) and not each.keys() - {*KEYS} for each in named.values()
            ):
                return cls(path, in_use, named)
        raise click.UsageError(f"{path} has no contexts: remove it, and add them with kvctl context add")

    def find(self, name: str, origin: str) -> Mapping[str, Any]:
        """Returns the values of a context.

        Raises:
            click.UsageError: it does not exist; the message begins with `origin`, the source of its name.
        """
        if name not in self.named:
            known = f"; there are: {', '.join(self.named)}" if self.named else "; there are none: kvctl context add"
            text = f"{origin}: no context {shown(name)} in {self.path}{near(name, self.named) or known}"
            raise click.UsageError(text)
        return self.named[name]

    def save(self) -> None:
        """Replaces the file, with mode 0600, because contexts name keys and addresses; raises CliError."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = {"in_use": self.in_use, "contexts": self.named}
            with atomic_file(self.path) as file:
                file.write(json.dumps(content, indent=2).encode())
        except OSError as error:
            raise CliError(f"cannot write {self.path}: {error.strerror}") from None
