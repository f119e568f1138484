"""What the user wants of every command: flags over environment over project file over user file.

A context (see `files`) counts right above what chose it: one of `--context` beats the environment, the one in use by
the user file does not even beat the project file.

A wrong value names where it comes from, because an old line in a file is the last place people look.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from kvctl.client.endpoints import LABELS
from kvctl.client.keys import KeyNames
from kvctl.render.units import parse_seconds

OUTPUTS = ("table", "wide", "tsv", "json", "jsonl", "csv", "yaml")
DEFAULT_OUTPUT = "table"
PROMETHEUS = "prom"
COLOURS = ("auto", "always", "never")
DEFAULT_TIMEOUT = "2s"


@dataclass(frozen=True, slots=True)
class Settings:
    """Global options, resolved.

    Attributes:
        output: one of OUTPUTS, "prom" or "nagios".
        watch_ns: time between readings; None reads once.
        keys: what names the keys for agents on other machines; files are read once there is one to ask.
        from_file: the recording or bundle to ask in place of live agents.
    """

    output: str
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
    from_file: Path | None


def resolve(flags: Mapping[str, Any]) -> Settings:
    """Merges the sources.

    Raises:
        click.UsageError: a value that is not allowed, with its source.
    """
    source = _Sources.read(flags)
    from_file = flags.get("from_file")
    return Settings(
        output=source.get("output", DEFAULT_OUTPUT, _one_of((*OUTPUTS, PROMETHEUS))),
        columns=flags.get("columns"),
        sort_by=flags.get("sort_by"),
        filters=tuple(flags.get("filters", ())),
        # Configured endpoints and labels name living agents: of a file only flags choose.
        endpoints=source.get("endpoint", (), _words) if from_file is None else tuple(flags.get("endpoint", ())),
        labels=source.labels() if from_file is None else _labels(flags.get("labels", ()), "--label"),
        keys=KeyNames(source.get("key", None, _text), source.get("server_key", None, _text)),
        timeout_ns=source.get("timeout", parse_seconds(DEFAULT_TIMEOUT), _positive),
        watch_ns=source.get("watch", None, _positive),
        quiet=bool(flags.get("quiet")),
        verbose=bool(flags.get("verbose")),
        color=source.get("color", "auto", _one_of(COLOURS)),
        from_file=from_file,
    )


def chosen_context(flags: Mapping[str, Any]) -> str | None:
    """Name of the context that counts here, whether there is one of that name or not.

    Raises:
        click.UsageError: one of the files cannot be read.
    """
    return next((str(layer.values[CONTEXT]) for layer in _said(flags, user_file()) if CONTEXT in layer.values), None)


def check_context(flags: Mapping[str, Any]) -> None:
    """Whether these flags make sense as a context.

    Raises:
        click.UsageError: a value that is not allowed.
    """
    source = _Sources(flags, None, (_Layer(_flag_name, flags),))
    source.get("endpoint", (), _words)
    source.get("timeout", 0, _positive)
    source.labels()


@dataclass(frozen=True, slots=True)
class _Layer:
    """Values of one source.

    Attributes:
        name: says which key of which source is meant.
        file: it holds defaults, so a context that it chooses is more than the rest of it.
    """

    name: Callable[[str], str]
    values: Mapping[str, Any]
    file: bool = False


def _flag_name(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _variable(key: str) -> str:
    return f"KVCTL_{key.upper()}"


@dataclass(frozen=True, slots=True)
class _Sources:
    """Everything that was said, the strongest first."""

    flags: Mapping[str, Any]
    context: _Layer | None
    layers: tuple[_Layer, ...]

    @classmethod
    def read(cls, flags: Mapping[str, Any]) -> _Sources:
        user = user_file()
        said = _said(flags, user)
        chooser = next((layer for layer in said if CONTEXT in layer.values), None)
        if chooser is None:
            return cls(flags, None, tuple(said))
        name = chooser.values[CONTEXT]
        chosen = context_of(user, name, chooser.name(CONTEXT))
        context = _Layer(lambda key: f"{key} of context {name} in {user.path}", chosen)
        # A flag or a variable beside the one that chose the context is meant to depart from it.
        said.insert(said.index(chooser) + (not chooser.file), context)
        return cls(flags, context, tuple(said))

    def get(self, key: str, default: Any, read: Callable[[Any], Any]) -> Any:
        for layer in self.layers if key in FILE_KEYS else self.layers[:1]:
            value = layer.values.get(key)
            if value is None or value == ():
                continue
            try:
                return read(value)
            except ValueError as error:
                raise click.UsageError(f"{layer.name(key)}: {error}") from error
        return default

    def labels(self) -> dict[str, str]:
        """Those of the context, narrowed further by the flags."""
        labels = {}
        if self.context is not None and (wanted := self.context.values.get("labels")):
            origin = self.context.name("labels")
            try:
                labels = _labels(_words(wanted), origin)
            except ValueError:
                raise click.UsageError(f"{origin}: {wanted!r} is not a list of KEY=VALUE") from None
        return {**labels, **_labels(self.flags.get("labels", ()), "--label")}


def _said(flags: Mapping[str, Any], user: File) -> list[_Layer]:
    """Every source but the context, the strongest first."""
    environment = {key: value for key in (*FILE_KEYS, CONTEXT) if (value := os.environ.get(_variable(key)))}
    files = [file for file in (project_file(), user) if file is not None]
    return [
        _Layer(_flag_name, flags),
        _Layer(lambda key: f"{_variable(key)} (environment)", environment),
        *(_Layer(lambda key, path=file.path: f"{key} in {path}", file.values, file=True) for file in files),  # type: ignore[misc]
    ]


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


def _labels(texts: tuple[str, ...], origin: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for piece in (piece.strip() for text in texts for piece in text.split(",")):
        key, separator, value = piece.partition("=")
        if not separator or not value or key not in LABELS:
            raise click.UsageError(f"{origin} {piece}: write KEY=VALUE with a key of {', '.join(LABELS)}")
        labels[key] = value
    return labels


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
