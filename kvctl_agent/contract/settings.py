"""Loads the agent's configuration and records the source of every value.

Sources, in increasing precedence: defaults, the engine's defaults, file, environment, arguments. An undeclared key is
an error in every source: a misspelt key that is silently ignored would be hard to find.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvctl_agent.contract import toml_files
from kvctl_agent.contract.config import KEYS, KEYS_BY_NAME, PLUGIN_PREFIXES, TOOL_VARIABLES, Key, Value
from kvctl_agent.contract.snapshots import ConfigRow
from kvctl_agent.contract.values import integer, near, shown
from kvctl_agent.errors import ConfigError

PREFIX = "KVCTL_"
AUTOMATIC = "auto"  # how file and environment say None, for keys whose default is automatic

# What Kubernetes (and formerly Docker) sets in every pod of a namespace that has a Service named kvctl or kvctl-*, by
# default. A value with a scheme tells KVCTL_..._PORT from the misspelt name of a key.
_SERVICE_LINK = re.compile(
    r"KVCTL_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)_(ADDR|PORT|PROTO))"
    r"|(?P<scheme>KVCTL_(\w+_)?PORT(_\d+_(TCP|UDP|SCTP))?)"
)
_LINK_SCHEMES = ("tcp://", "udp://", "sctp://")

_TRUE = ("1", "true", "on", "yes")
_FALSE = ("0", "false", "off", "no")


class Setting(NamedTuple):
    """A value and its source: "default", "engine", "automatic", "file <path>", "environment KVCTL_X" or "argument"."""

    value: Value
    origin: str


class Settings(Mapping[str, Any]):
    """Mapping from every configuration key to its value; only `change` and `complete` change a value.

    Values are typed Any: write `path: str = settings["path"]`; the loader has checked that the value has
    the key's declared type.

    Attributes:
        changes: number of changes so far.
    """

    def __init__(self, entries: Mapping[str, Setting]) -> None:
        self._entries = dict(entries)
        self.changes = 0

    def __getitem__(self, name: str) -> Any:
        return self._entry(name).value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def origin(self, name: str) -> str:
        """Returns the source of the value of key `name`."""
        return self._entry(name).origin

    def change(self, name: str, text: str, origin: str) -> tuple[Value, Value]:
        """Changes one key while the agent runs.

        Args:
            name: a key that can change at run time.
            text: the new value, in the syntax of an environment variable.
            origin: the source to record.

        Returns:
            The values before and after; if they are equal, nothing has changed.

        Raises:
            ConfigError: the key is unknown or cannot change at run time, or the value is not allowed.
        """
        key = _key(name, origin)
        if not key.runtime:
            raise ConfigError(
                f"{name} cannot change while the agent runs: set it in its configuration and restart it. "
                f"These can: {', '.join(each.name for each in KEYS if each.runtime)}"
            )
        before, now = self._entries[name], _setting(key, _parsed(key, text, origin), origin)
        entries = {**self._entries, name: now}
        _check_together(entries)
        if before.value != now.value:
            self._entries = entries
            self.changes += 1
        return before.value, now.value

    def complete(self, name: str, value: Value) -> None:
        """Replaces a value by one that the agent has completed; the origin of a default becomes "automatic"."""
        before = self._entries[name]
        if value != before.value:
            origin = "automatic" if before.origin == "default" else before.origin
            self._entries[name] = Setting(value, origin)
            self.changes += 1

    def rows(self) -> list[ConfigRow]:
        """Returns the reply to the admin command `config`: one row per key, in order of declaration."""
        return [
            {
                "key": key.name,
                "value": self._entries[key.name].value,
                "default": key.default,
                "origin": self._entries[key.name].origin,
                "unit": key.unit,
                "runtime": key.runtime,
                "help": key.help,
            }
            for key in KEYS
        ]

    def _entry(self, name: str) -> Setting:
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(f"no configuration key {name!r}{near(name, KEYS_BY_NAME)}") from None


def load_settings(
    arguments: Mapping[str, Value],
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    defaults: Mapping[str, Value] | None = None,
) -> Settings:
    """Loads the settings from arguments, environment, file and defaults.

    Args:
        arguments: values by key, of the key's declared type; None means automatic for keys whose default is automatic.
        environ: environment to read; None means `os.environ`.
        file: configuration file, which must exist. None means the file named by `KVCTL_CONFIG`, which must exist, or
            else `$XDG_CONFIG_HOME/kvctl/agent.toml`, which may be missing.
        defaults: values by key that take the place of the declared defaults, as those of an engine's integration.

    Raises:
        ConfigError: an unknown key, a wrong value, values that contradict each other, or an unreadable file.
    """
    environ = os.environ if environ is None else environ
    entries = {key.name: Setting(key.default, "default") for key in KEYS}
    entries.update(_from_program(defaults or {}, "engine"))
    entries.update(_from_file(environ, file))
    entries.update(_from_environment(environ))
    entries.update(_from_program(arguments, "argument"))
    _check_together(entries)
    return Settings(entries)


def load_or_explain(arguments: Mapping[str, Value], environ: Mapping[str, str]) -> Settings | str:
    """Returns the settings as `load_settings` loads them, or the text of its error."""
    try:
        return load_settings(arguments, environ)
    except ConfigError as error:
        return str(error)


def _from_program(values: Mapping[str, Value], origin: str) -> dict[str, Setting]:
    return {name: _setting(_key(name, origin), value, origin) for name, value in values.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    by_variable = {key.environment: key for key in KEYS}
    entries = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in TOOL_VARIABLES or f"{variable}_".startswith(PLUGIN_PREFIXES):
            continue
        key = by_variable.get(variable)
        if key is None and _is_service_link(variable, environ[variable]):
            continue
        if key is None:
            raise ConfigError(
                f"unknown environment variable {variable}{near(variable, (*by_variable, *TOOL_VARIABLES))}"
            )
        origin = f"environment {variable}"
        entries[key.name] = _setting(key, _parsed(key, environ[variable], origin), origin)
    return entries


def _is_service_link(variable: str, value: str) -> bool:
    """Returns whether Kubernetes has set the variable, for a Service whose name begins with kvctl."""
    link = _SERVICE_LINK.fullmatch(variable)
    return link is not None and (link["scheme"] is None or value.startswith(_LINK_SCHEMES))


def _from_file(environ: Mapping[str, str], file: Path | None) -> dict[str, Setting]:
    path = file
    if path is None and (named := environ.get("KVCTL_CONFIG")):
        path = Path(named)
    must_exist = path is not None
    if path is None:
        home = environ.get("XDG_CONFIG_HOME")
        path = (Path(home) if home else Path.home() / ".config") / "kvctl" / "agent.toml"
    try:
        table = toml_files.parse(toml_files.read_text(path))
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"configuration file {path} does not exist") from None
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"configuration file {path} is not valid TOML: {error}") from None
    origin = f"file {path}"
    entries = {}
    for name, value in table.items():
        key = _key(name, origin)
        automatic = value == AUTOMATIC and key.default is None
        entries[name] = _setting(key, None if automatic else value, origin)
    return entries


def _key(name: str, origin: str) -> Key:
    key = KEYS_BY_NAME.get(name)
    if key is None:
        raise ConfigError(f"unknown configuration key {name!r} ({origin}){near(str(name), KEYS_BY_NAME)}")
    return key


def _parsed(key: Key, text: str, origin: str) -> Value:
    """Converts the text of an environment variable to the type of its key; `_setting` checks the range."""
    if key.default is None and text == AUTOMATIC:
        return None
    if key.type is str:
        return text
    if key.type is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
    elif _is_plain_number(text):
        try:
            return int(text) if key.type is int else float(text)
        except ValueError:
            pass
    raise _wrong(key, text, origin)


def _is_plain_number(text: str) -> bool:
    # int() and float() also accept " 6_4 ", digits of other scripts, nan and inf: mistakes in a configuration.
    return bool(text) and len(text) <= 32 and set(text) <= set("0123456789+-.eE")


def _setting(key: Key, value: object, origin: str) -> Setting:
    """Creates the setting of a key, after checking type, choices and range of the value.

    An int key accepts any integer type, a float key also integers and subclasses of float (numpy.float64); nothing
    else is converted.
    """
    if value is None and key.default is None:
        return Setting(None, origin)
    if key.type in (int, float) and (number := integer(value)) is not None:
        value = float(number) if key.type is float and abs(number) <= 2**53 else number
    elif key.type is float and isinstance(value, float):
        value = float(value)
    if type(value) is not key.type:
        raise _wrong(key, value, origin)
    assert isinstance(value, str | int | float)
    if isinstance(value, str):
        fine = not key.choices or value in key.choices
    else:
        # Every numeric key has both bounds (a test checks this), which also excludes nan and inf.
        fine = key.type is bool or (
            key.minimum is not None and key.maximum is not None and key.minimum <= value <= key.maximum
        )
    if not fine:
        raise _wrong(key, value, origin)
    return Setting(value, origin)


def _wrong(key: Key, value: object, origin: str) -> ConfigError:
    hint = near(value, key.choices) if isinstance(value, str) else ""
    return ConfigError(f"{key.name} = {shown(value)} ({origin}) is not allowed: it takes {allowed(key)}{hint}")


def allowed(key: Key) -> str:
    """Describes the values that a key accepts, for example "an int from 1 to 64, or auto"."""
    if key.choices:
        text = "one of " + ", ".join(key.choices)
    elif key.type is bool:
        text = "true or false"
    elif key.type is str:
        text = "text"
    else:
        text = "an int" if key.type is int else "a number"
        if key.minimum is not None:
            text += f" from {key.minimum:.12g}"
        if key.maximum is not None:
            text += f" to {key.maximum:.12g}"
        if key.unit:
            text += f" {key.unit}"
    return f"{text}, or {AUTOMATIC}" if key.default is None else text


def _check_together(entries: Mapping[str, Setting]) -> None:
    """Checks constraints between keys: heartbeat_s < suspect_s < lost_s, pipeline_min_iters <= pipeline_max_iters."""
    for shorter, longer in itertools.pairwise(("heartbeat_s", "suspect_s", "lost_s")):
        low, high = entries[shorter], entries[longer]
        assert isinstance(low.value, float)
        assert isinstance(high.value, float)
        if low.value >= high.value:
            raise ConfigError(
                f"{shorter} = {low.value:g} ({low.origin}) must be less than {longer} = {high.value:g} "
                f"({high.origin}): raise {longer} or lower {shorter}"
            )
    fewest, most = entries["pipeline_min_iters"], entries["pipeline_max_iters"]
    assert isinstance(fewest.value, int)
    assert isinstance(most.value, int)
    if fewest.value > most.value:
        raise ConfigError(
            f"pipeline_min_iters = {fewest.value} ({fewest.origin}) must not exceed pipeline_max_iters = {most.value} "
            f"({most.origin}): raise pipeline_max_iters or lower pipeline_min_iters"
        )
