"""Removes names of hosts and users, addresses, paths, keys and request ids from recorded data.

Each value is replaced by a name that is the same everywhere (`host-1`, `path-3`), so that relations remain visible.
Values are recognised by their form (addresses, paths, endpoints, long hexadecimal numbers) and by earlier occurrences:
the host of an endpoint is also recognised in the middle of a sentence.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import os
import pwd
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import Fault
from kvctl.client.recordings import Answer, RecordedAgent, RecordedSnapshot, of_document
from kvctl_agent.contract import snapshots
from kvctl_agent.contract.admin import socket_dir

# Fields with values from fixed vocabularies.
_VOCABULARY = frozenset(
    {"command", "role", "state", "stage", "kind", "severity", "code", "level", "type", "unit", "mode"}
)
_RECORDED_CLASSES = (RecordedSnapshot, RecordedAgent, Answer, Endpoint, Fault, ClockOffset)
_FIELDS = frozenset(
    name
    for each in (*vars(snapshots).values(), *_RECORDED_CLASSES)
    if isinstance(each, type)
    for name in getattr(each, "__annotations__", ())
)
_HOST_FIELDS = frozenset({"host", "peer_host"})
_PATH_FIELDS = frozenset({"path", "directory", "endpoint", "value", "default"})
_MIN_SUBSTRING = 6
# Names that reveal nothing and are parts of kvctl's own names.
_HARMLESS = frozenset({"localhost", "*", "kvctl", "kvctl_agent", "host", "user", "path", "address", "key"})
_SHARED_MEMORY = "/dev/shm"  # every Linux has it

_ENDPOINT = re.compile(
    r"\b([A-Za-z][A-Za-z0-9+.-]{0,15})://([^\s\"'<>|,;()\[\]{}]*(?:\[[0-9A-Fa-f:.%]+\])?[^\s\"'<>|,;(){}]*)"
)
_HOST_PARAMETER = re.compile(r"\bhost(?:name)?[=:]\s*([A-Za-z0-9][A-Za-z0-9.-]*)")
_FULL_NAME = re.compile(
    r"\b(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+"
    r"(?:local|localdomain|internal|intranet|lan|corp|home|com|net|org|io|cloud|svc|example|test|invalid)\b"
)
_FRAME = re.compile(r"^((?:/|\.{0,2}/|~)?[^:\n]*\.pyx?|<[^>\n]*>):(\d+) ")
_PATH = re.compile(r"(?<![\w/.])(?:~[\w-]*)?/(?:[\w.@%+~=#$-][^\s\"'`<>|,;:()\[\]{}]*)")
_RELATIVE = re.compile(
    r"(?<![\w/.])(?:\.{1,2}/[^\s\"'`<>|,;:()\[\]{}]+|[\w.-]+/[\w.-]+/[\w./-]+"
    r"|[\w.-]+/[\w.-]+\.(?:py|so|toml|sock|key|pub|secret|json|log)\b)"
)
_HEX = re.compile(r"(?<![0-9A-Za-z])[0-9A-Fa-f]{32,}(?![0-9A-Za-z])")
_MAC = re.compile(r"(?<![\w:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![\w:-])")
_FOUR = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w]|\.\d)")
_SIX = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?:\.\d{1,3}){0,3}(?:%\w+)?(?![\w:])")
_PORT = re.compile(r"(?<=[\w\]*]):\w+(?=/|$)")
_NAMED_ALREADY = re.compile(r"(?:host|user|path|address|key|request)-\d+")


class Redaction:
    """Replaces names in documents and texts; all snapshots of a recording share one object, so names are consistent.

    Args:
        hosts, users, paths: names to remove wherever they occur, see `of_this_machine`.
    """

    def __init__(self, hosts: Iterable[str] = (), users: Iterable[str] = (), paths: Iterable[str] = ()) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._literals: dict[str, str] = {}  # lower case -> name
        self._pattern: re.Pattern[str] | None = None
        for kind, values in (("path", paths), ("host", hosts), ("user", users)):
            for value in values:
                self._know(kind, value)

    @classmethod
    def of_this_machine(cls) -> Redaction:
        """Creates a redaction that removes the names of this machine and user, and their directories."""
        return cls(_hosts(), _users(), _paths())

    def learn(self, document: Any) -> None:
        """Collects host names that are recognisable by field or form, to remove them also where they are not."""
        for key, text in _texts(document):
            if key in _HOST_FIELDS:
                self._know("host", text)
            for found in _ENDPOINT.finditer(text):
                if found[1] != "ipc":
                    self._know("host", _host_of(found[2].rstrip(".!?")))
            for found in (*_HOST_PARAMETER.finditer(text), *_FULL_NAME.finditer(text)):
                self._know("host", found[found.lastindex or 0])

    def snapshot(self, snapshot: RecordedSnapshot) -> RecordedSnapshot:
        """Returns a redacted snapshot; a name recognised in it is also removed from the later snapshots."""
        document = snapshot.document()
        self.learn(document)
        return of_document(self.document(document))

    def document(self, document: Any, key: str = "") -> Any:
        """Returns JSON data with all texts and unknown field names redacted; `key` is the field that has the data."""
        if isinstance(document, str):
            if key in _VOCABULARY:
                return document
            if key == "request_id":  # clients may choose it
                return self._name("request", document)
            whole = key in _PATH_FIELDS and document.startswith(("/", "~/"))
            return self._name("path", document) if whole else self.text(document)
        if isinstance(document, Mapping):
            return {self._field(name): self.document(value, name) for name, value in document.items()}
        if isinstance(document, list | tuple):
            return [self.document(value, key) for value in document]
        return document

    def text(self, text: str) -> str:
        """Returns the text with all recognised names replaced."""
        text = "\n".join(_FRAME.sub(self._frame, line) for line in text.split("\n")) if ".py" in text else text
        text = _ENDPOINT.sub(self._endpoint, text)
        if self._literals:
            text = self._compiled().sub(lambda found: self._literals.get(found[0].lower(), "removed"), text)
        text = _PATH.sub(lambda found: self._name("path", found[0]), text)
        text = _RELATIVE.sub(lambda found: self._name("path", found[0]), text)
        text = _FULL_NAME.sub(lambda found: self._name("host", found[0]), text)
        text = _HEX.sub(lambda found: self._name("key", found[0].lower()), text)
        text = _MAC.sub(lambda found: self._name("address", found[0].lower()), text)
        text = _SIX.sub(self._address, text)
        return _FOUR.sub(self._address, text)

    def _field(self, name: Any) -> Any:
        return self.text(name) if isinstance(name, str) and name not in _FIELDS else name

    def _name(self, kind: str, value: str) -> str:
        if _NAMED_ALREADY.fullmatch(value) or value == _SHARED_MEMORY:
            return value
        name = self._names.get((kind, value))
        if name is None:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            name = self._names[kind, value] = f"{kind}-{self._counts[kind]}"
        return name

    def _know(self, kind: str, value: str) -> None:
        value = value.strip()
        if not value or value.lower() in self._literals or value.lower() in _HARMLESS or _is_address(value):
            return
        if not _NAMED_ALREADY.fullmatch(value):
            self._literals[value.lower()] = self._name(kind, value)
            self._pattern = None

    def _compiled(self) -> re.Pattern[str]:
        """Returns a cached pattern of the known names: long names match anywhere, short names only as whole words."""
        if self._pattern is None:
            parts = [
                re.escape(each) if len(each) >= _MIN_SUBSTRING else rf"(?<![A-Za-z0-9]){re.escape(each)}(?![A-Za-z0-9])"
                for each in sorted(self._literals, key=len, reverse=True)
            ]
            self._pattern = re.compile("|".join(parts), re.IGNORECASE)
        return self._pattern

    def _frame(self, found: re.Match[str]) -> str:
        return f"{_module(found[1]) or self._name('path', found[1])}:{found[2]} "

    def _endpoint(self, found: re.Match[str]) -> str:
        scheme, rest = found[1], found[2].rstrip(".!?")
        if not rest:
            return found[0]
        ends = found[2][len(rest) :]
        if scheme in {"ipc", "file"}:
            return f"{scheme}://{self._name('path', rest)}{ends}"
        host = _host_of(rest)
        port = _PORT.search(rest)
        shown = self.text(host) if _is_address(host) or host in _HARMLESS else self._name("host", host)
        return f"{scheme}://{shown}{port[0] if port else ''}{ends}"

    def _address(self, found: re.Match[str]) -> str:
        return self._name("address", found[0]) if _is_address(found[0]) else found[0]


def _module(path: str) -> str:
    """Returns the module name of a source file in a package, such as `kvctl_agent.runtime.control_loop`; else ""."""
    if path.startswith("<"):
        return path
    parts = Path(path).with_suffix("").parts
    for place in ("site-packages", "dist-packages"):
        if place in parts:
            return ".".join(parts[parts.index(place) + 1 :])
    for package in ("kvctl_agent", "kvctl"):
        if package in parts:
            return ".".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
    for number, part in enumerate(parts):
        if re.fullmatch(r"python3\.\d+", part):
            return ".".join(parts[number + 1 :])
    return ""


def _host_of(rest: str) -> str:
    rest = rest.partition("/")[0].rpartition("@")[2]
    if rest.startswith("["):
        return rest[1:].partition("]")[0]
    return rest if _is_address(rest) else rest.partition(":")[0]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _texts(document: Any, key: Any = "") -> Iterator[tuple[Any, str]]:
    """Yields all texts in JSON data, each with the field that has it; names of fields with ""."""
    if isinstance(document, str):
        yield key, document
    elif isinstance(document, Mapping):
        for name, value in document.items():
            yield from _texts(name)
            yield from _texts(value, name)
    elif isinstance(document, list | tuple):
        for value in document:
            yield from _texts(value, key)


def _hosts() -> list[str]:
    whole = socket.gethostname()
    return [*dict.fromkeys((whole, whole.partition(".")[0]))]


def _users() -> list[str]:
    found = [os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")]
    with contextlib.suppress(KeyError):
        found.append(pwd.getpwuid(os.getuid()).pw_name)
    with contextlib.suppress(KeyError, OSError):
        found.append(getpass.getuser())
    return found


def _paths() -> list[str]:
    found = [str(socket_dir()), os.environ.get("HOME", "")]
    with contextlib.suppress(KeyError):
        found.append(pwd.getpwuid(os.getuid()).pw_dir)
    with contextlib.suppress(RuntimeError):
        found.append(str(Path.home()))
    return [path for path in found if len(path) > 1]
