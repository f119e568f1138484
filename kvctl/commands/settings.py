"""Values of the global options, merged from flags, environment, the context and the user file, in this order.

A context is a saved fleet (`context_file`), chosen by a flag, the environment or `kvctl context use`. One that a flag
chooses ranks above the environment. An error names the source of the value, since an old line in a file is easily
forgotten.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from kvctl.client.discovery import is_url, open_source, split
from kvctl.client.endpoints import LABELS, is_address
from kvctl.client.keys import NO_KEYS, KeyNames
from kvctl.commands.context_file import Contexts
from kvctl.render.units import parse_seconds
from kvctl_agent.contract import toml_files
from kvctl_agent.contract.values import shown

OUTPUTS = ("table", "wide", "tsv", "json", "jsonl", "csv")
DEFAULT_OUTPUT = "table"
PROMETHEUS = "prom"
COLOURS = ("auto", "always", "never")
DEFAULT_TIMEOUT = "2s"

CONTEXT = "context"
FILE_KEYS = ("output", "timeout", "endpoint", "color", "key", "server_key")


@dataclass(frozen=True, slots=True)
class Settings:
    """Global options of one call of `kvctl`.

    Attributes:
        output: one of OUTPUTS, "prom" or "nagios".
        watch_ns: time between readings; None reads once.
        keys: names of the keys for remote agents; the key files are read when such an agent is queried.
        names: names or globs, of which an agent must match one; empty for all agents at `endpoints`. These are the
            values of `-e` that are no addresses, if the context, the environment or a file has the fleet's addresses.
        from_file: recording that is read instead of live agents.
    """

    output: str
    columns: str | None
    sort_by: str | None
    filters: tuple[str, ...]
    endpoints: tuple[str, ...]
    names: tuple[str, ...]
    labels: Mapping[str, str]
    keys: KeyNames
    timeout_ns: int
    watch_ns: int | None
    quiet: bool
    verbose: bool
    color: str
    from_file: Path | None

    def naming(self, names: Sequence[str]) -> Settings:
        """Returns the settings with further agents selected, in addition to those of `-e`.

        Args:
            names: names or globs of agents, among those of the fleet if its addresses are known.
        """
        if any(map(is_address, self.endpoints)):
            return replace(self, names=(*self.names, *names))
        return replace(self, endpoints=(*self.endpoints, *names))


def resolve(flags: Mapping[str, Any]) -> Settings:
    """Merges flags, environment and files into the settings of one call.

    Raises:
        click.UsageError: a value is not allowed; the message names its source.
    """
    sources = _Sources.read(flags)
    from_file = flags.get("from_file")
    # Endpoints and labels in the environment and in files select live agents; only flags select from a file.
    endpoints, names = sources.fleet() if from_file is None else (tuple(flags.get("endpoint", ())), ())
    return Settings(
        output=sources.get("output", DEFAULT_OUTPUT, _one_of((*OUTPUTS, PROMETHEUS))),
        columns=flags.get("columns"),
        sort_by=flags.get("sort_by"),
        filters=tuple(flags.get("filters", ())),
        endpoints=endpoints,
        names=names,
        labels=sources.labels() if from_file is None else _labels(flags.get("labels", ()), "--label"),
        keys=KeyNames(sources.get("key", None, _text), sources.get("server_key", None, _text)),
        timeout_ns=sources.get("timeout", parse_seconds(DEFAULT_TIMEOUT), _duration_ns),
        watch_ns=sources.get("watch", None, _duration_ns),
        quiet=bool(flags.get("quiet")),
        verbose=bool(flags.get("verbose")),
        color=sources.get("color", "auto", _one_of(COLOURS)),
        from_file=from_file,
    )


def chosen_context(flags: Mapping[str, Any]) -> str | None:
    """Returns the name of the selected context, which may not exist; None if none is selected.

    Raises:
        click.UsageError: the file of contexts cannot be read.
    """
    return flags.get(CONTEXT) or os.environ.get(_variable(CONTEXT)) or contexts().in_use


def check_context(flags: Mapping[str, Any]) -> None:
    """Checks flags that are to be saved as a context.

    Raises:
        click.UsageError: a value is not allowed.
        CliError: a discovery URL is malformed, or a package that it needs is not installed.
    """
    sources = _Sources(flags, None, (_Layer(_flag, flags),))
    for endpoint in sources.get("endpoint", (), _names):
        if is_url(endpoint):
            open_source(endpoint, NO_KEYS).close()
    sources.get("timeout", 0, _duration_ns)
    sources.labels()


@dataclass(frozen=True, slots=True)
class _Layer:
    """Option values from one source: flags, environment, a file or a context.

    Attributes:
        origin: formats a key and this source for an error message.
    """

    origin: Callable[[str], str]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Sources:
    """All sources of option values, in order of precedence.

    Attributes:
        context: the selected context, which is also one of the layers; None if none is selected.
        layers: the sources, highest precedence first.
    """

    flags: Mapping[str, Any]
    context: _Layer | None
    layers: tuple[_Layer, ...]

    @classmethod
    def read(cls, flags: Mapping[str, Any]) -> _Sources:
        environment = {key: value for key in (*FILE_KEYS, CONTEXT) if (value := os.environ.get(_variable(key)))}
        layers = [_Layer(_flag, flags), _Layer(lambda key: f"{_variable(key)} (environment)", environment), user_file()]
        saved = contexts()
        chooser = next((index for index in (0, 1) if _has(layers[index], CONTEXT)), None)
        name = saved.in_use if chooser is None else str(layers[chooser].values[CONTEXT])
        if name is None:
            return cls(flags, None, tuple(layers))
        origin = "context in use" if chooser is None else layers[chooser].origin(CONTEXT)
        values = saved.find(name, origin)
        context = _Layer(lambda key: f"{key} of context {name} in {saved.path}", values)
        layers.insert(1 if chooser == 0 else 2, context)
        return cls(flags, context, tuple(layers))

    def get(self, key: str, default: Any, convert: Callable[[Any], Any]) -> Any:
        for layer in self.layers if key in FILE_KEYS else self.layers[:1]:
            if _has(layer, key):
                return self._converted(layer, key, convert)
        return default

    def fleet(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the endpoints, and the names that select agents there.

        Names and globs in flags select among the agents of the next source, such as the context, if that has addresses
        or discovery URLs; otherwise among the agents of this machine.
        """
        chosen: tuple[str, ...] = self.get("endpoint", (), _names)
        if not _has(self.layers[0], "endpoint") or any(map(is_address, chosen)):
            return chosen, ()
        fleet: tuple[str, ...] = replace(self, layers=self.layers[1:]).get("endpoint", (), _names)
        return (fleet, chosen) if any(map(is_address, fleet)) else (chosen, ())

    def _converted(self, layer: _Layer, key: str, convert: Callable[[Any], Any]) -> Any:
        try:
            converted = convert(layer.values[key])
        except ValueError as error:
            raise click.UsageError(f"{layer.origin(key)}: {error}") from error
        return converted

    def labels(self) -> dict[str, str]:
        """Merges the labels of the context with those of the flags, which take precedence."""
        labels = {}
        if self.context is not None and (value := self.context.values.get("labels")):
            origin = self.context.origin("labels")
            try:
                labels = _labels(_names(value), origin)
            except ValueError:
                raise click.UsageError(f"{origin}: {shown(value)} is not a list of KEY=VALUE") from None
        return {**labels, **_labels(self.flags.get("labels", ()), "--label")}


def _has(layer: _Layer, key: str) -> bool:
    return layer.values.get(key) not in (None, ())


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _variable(key: str) -> str:
    return f"KVCTL_{key.upper()}"


def _one_of(allowed: tuple[str, ...]) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"{shown(value)} is not one of {', '.join(allowed)}")
        return str(value)

    return convert


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{shown(value)} is not a non-empty string")
    return value


def _names(value: Any) -> tuple[str, ...]:
    """Converts values of `-e`, which may have several words or a comma list each: a tuple, a list or a string."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{shown(value)} is not a list of agent names")
    return tuple(name for text in texts for name in split(text))


def _duration_ns(value: Any) -> int:
    ns = parse_seconds(str(value))
    if ns < 1_000_000:
        raise ValueError(f"{shown(value)} is shorter than a millisecond")
    return ns


def _labels(texts: tuple[str, ...], origin: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for label in (label.strip() for text in texts for label in text.split(",")):
        key, separator, value = label.partition("=")
        if not separator or not value or key not in LABELS:
            raise click.UsageError(f"{origin} {label}: write KEY=VALUE with a key of {', '.join(LABELS)}")
        if labels.setdefault(key, value) != value:
            raise click.UsageError(f"{origin}: no agent has both {key}={labels[key]} and {key}={value}")
    return labels


def _directory() -> Path:
    """Returns the configuration directory, which may not exist."""
    home = os.environ.get("XDG_CONFIG_HOME")
    if not home:
        try:
            home = str(Path("~/.config").expanduser())
        except RuntimeError:  # in some containers the user id has no name and HOME is not set
            home = "/etc"
    return Path(home) / "kvctl"


def contexts() -> Contexts:
    """Reads the saved contexts; raises click.UsageError if they cannot be read."""
    return Contexts.read(_directory() / "contexts.json")


def user_file() -> _Layer:
    """Reads the user file, which may not exist.

    Raises:
        click.UsageError: the file cannot be read, or has an unknown key.
    """
    path = _directory() / "config.toml"
    try:
        values = toml_files.parse(toml_files.read_text(path)) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}") from None
    if unknown := values.keys() - set(FILE_KEYS):
        raise click.UsageError(f"{path}: unknown key {shown(sorted(unknown)[0])}; known: {', '.join(FILE_KEYS)}")
    return _Layer(lambda key: f"{key} in {path}", values)
