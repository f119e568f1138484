"""What the user wants of every command, from flags, environment and user file — in that precedence.

A wrong value names where it comes from, because an old line in a file is the last place people look.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvctl.client.keys import KeyNames
from kvctl.client.labels import LABELS
from kvctl.views.units import parse_seconds

OUTPUTS = ("table", "wide", "plain", "json", "jsonl", "csv")
PROMETHEUS = "prom"
COLOURS = ("auto", "always", "never")
DEFAULT_TIMEOUT = "2s"
_FILE_KEYS = ("output", "timeout", "endpoint", "color", "key", "server_key")


@dataclass(frozen=True, slots=True)
class Settings:
    """Global options, resolved.

    Attributes:
        output: one of OUTPUTS or "prom"; None means a table on a terminal and TSV elsewhere.
        watch_ns: time between readings; None reads once.
        keys: what names the keys for agents on other machines; files are read once there is one to ask.
    """

    output: str | None
    columns: str | None
    sort_by: str | None
    filters: tuple[str, ...]
    endpoints: tuple[str, ...]
    labels: Mapping[str, str]
    keys: KeyNames
    timeout_ns: int
    watch_ns: int | None
    quiet: bool
    verbose: bool
    color: str

    def resolved_output(self) -> str:
        return self.output or ("table" if sys.stdout.isatty() else "plain")


def resolve(flags: Mapping[str, Any]) -> Settings:
    """Merges the sources.

    Raises:
        click.UsageError: a value that is not allowed, with its source.
    """
    file, path = _user_file()
    source = _Sources(flags, file, path)
    return Settings(
        output=source.get("output", None, _one_of((*OUTPUTS, PROMETHEUS))),
        columns=flags.get("columns"),
        sort_by=flags.get("sort_by"),
        filters=tuple(flags.get("filters", ())),
        endpoints=source.get("endpoint", (), _words),
        labels=_labels(flags.get("labels", ())),
        keys=KeyNames(source.get("key", None, _text), source.get("server_key", None, _text)),
        timeout_ns=source.get("timeout", parse_seconds(DEFAULT_TIMEOUT), _positive),
        watch_ns=source.get("watch", None, _positive),
        quiet=bool(flags.get("quiet")),
        verbose=bool(flags.get("verbose")),
        color=source.get("color", "auto", _one_of(COLOURS)),
    )


@dataclass(frozen=True, slots=True)
class _Sources:
    flags: Mapping[str, Any]
    file: Mapping[str, Any]
    path: Path

    def get(self, key: str, default: Any, read: Callable[[Any], Any]) -> Any:
        variable = f"KVCTL_{key.upper()}"
        candidates = [(f"--{key.replace('_', '-')}", self.flags.get(key))]
        if key in _FILE_KEYS:
            candidates += [
                (f"{variable} (environment)", os.environ.get(variable) or None),
                (f"{key} in {self.path}", self.file.get(key)),
            ]
        for origin, value in candidates:
            if value is None or value == ():
                continue
            try:
                return read(value)
            except ValueError as error:
                raise click.UsageError(f"{origin}: {error}") from error
        return default


def _user_file() -> tuple[Mapping[str, Any], Path]:
    home = os.environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    path = Path(home) / "kvctl" / "config.toml"
    if not path.is_file():
        return {}, path
    import tomllib

    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}") from error
    unknown = values.keys() - set(_FILE_KEYS)
    if unknown:
        raise click.UsageError(f"{path}: unknown key {sorted(unknown)[0]!r}; known: {', '.join(_FILE_KEYS)}")
    return values, path


def _one_of(allowed: tuple[str, ...]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
        return str(value)

    return read


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is no text")
    return value


def _words(value: Any) -> tuple[str, ...]:
    """A flag gives a tuple, the environment words or a comma list, the file a string or a list."""
    pieces = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(pieces, list | tuple) or not all(isinstance(piece, str) for piece in pieces):
        raise ValueError(f"{value!r} is not a list of agent names")
    return tuple(pieces)


def _positive(value: Any) -> int:
    ns = parse_seconds(str(value))
    if ns < 1_000_000:
        raise ValueError(f"{value!r} is shorter than a millisecond")
    return ns


def _labels(texts: tuple[str, ...]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for piece in (piece.strip() for text in texts for piece in text.split(",")):
        key, separator, value = piece.partition("=")
        if not separator or not value or key not in LABELS:
            raise click.UsageError(f"--label {piece}: write KEY=VALUE with a key of {', '.join(LABELS)}")
        labels[key] = value
    return labels
