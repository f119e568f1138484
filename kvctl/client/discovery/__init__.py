"""Discovery URLs: values of `-e` that name a source which knows many agents, such as a registry or a file.

Each kind of source is an `AgentSource` in a module of this package, which is imported when such a URL is first used.
`AgentSources` asks the sources of a fleet, all at the same time.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, NamedTuple

from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode

if TYPE_CHECKING:
    from kvctl.client.discovery.source import AgentSource
    from kvctl.client.keys import KeyNames


class Kind(NamedTuple):
    """One kind of source: the text that begins its URLs, their form, and its class in the module `SCHEME_source`."""

    prefix: str
    form: str
    source: str


KINDS: dict[str, Kind] = {
    "registry": Kind("registry://", "registry://HOST:PORT", "RegistrySource"),
    "dns": Kind("dns://", "dns://NAME:PORT", "DnsSource"),
    "file": Kind("file://", "file:///PATH", "FileSource"),
    "kubernetes": Kind(
        "kubernetes://",
        "kubernetes://NAMESPACE[/LABEL=VALUE,…][?port=NAME][&context=NAME][&via=port-forward]",
        "PodSource",
    ),
}
"""Kinds of sources by scheme, which is also the name of the module."""

_PREFIXES = tuple(kind.prefix for kind in KINDS.values())
_PIECES = re.compile(rf"(?:{'|'.join(_PREFIXES)})\S*|[^\s,]+")  # URLs may contain commas


def is_url(text: str) -> bool:
    """Returns whether a value of `-e` is a discovery URL, not a name or an address of one agent."""
    return text.startswith(_PREFIXES)


def split(text: str) -> list[str]:
    """Splits a text with several values of `-e` at commas and white space."""
    return _PIECES.findall(text)


def open_source(url: str, keys: KeyNames) -> AgentSource:
    """Returns the source that a discovery URL names; the caller closes it.

    Raises:
        CliError: the URL is malformed, or a package that this kind of source needs is not installed.
    """
    scheme = url.partition(":")[0]
    module = importlib.import_module(f"{__name__}.{scheme}_source")
    source: AgentSource = getattr(module, KINDS[scheme].source)(url, keys)
    return source


def malformed(url: str, problem: str = "") -> CliError:
    """Returns the error for a URL of a known kind that does not have the kind's form."""
    form = KINDS[url.partition(":")[0]].form
    return CliError(f"{url}: {problem}{'; ' if problem else ''}write {form}", ExitCode.USAGE)
