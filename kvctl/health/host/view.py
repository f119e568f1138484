"""Read-only view of a host (files, environment, limits) that tests can replace, and the type of a check's result."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvctl.health.finding import Severity
from kvctl_agent.host.processors import available_cores

HOST = "host"
"""Code of a finding about a host that has no health code."""

# For an import of torch and SGLang, on a busy host.
_IMPORT_S = 120.0


@dataclass(frozen=True, slots=True)
class Fact:
    """Result of one check of the host.

    Attributes:
        topic: subject of the check, the same on every host.
        found: state of the host, in a few words.
        means: consequence for transfers, one sentence.
        severity: INFO if nothing needs to be done.
        remedy: the next command or setting; "" if nothing needs to be done.
        code: health code whose page has more details; "" for none.
    """

    topic: str
    found: str
    means: str
    severity: Severity = Severity.INFO
    remedy: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class LocalAgent:
    """An agent whose socket is on this host.

    Attributes:
        pid: process id in kvctl's PID namespace; None if the agent is in another PID namespace or has ended.
        own_pid: process id in the agent's own PID namespace.
        listener: process id of what serves its addresses: its observer, or the agent itself; None as for `pid`.
    """

    name: str
    pid: int | None
    own_pid: int
    listener: int | None = None


def _packages() -> dict[str, str]:
    """Returns the versions of installed distributions by name, without importing them."""
    import importlib.metadata

    return {found.metadata["Name"].lower(): found.version for found in importlib.metadata.distributions() if found.name}


class ImportProblem(NamedTuple):
    """Why kvctl's plugin may not fit the SGLang that a Python imports, the effect on a server, and the remedy."""

    cause: str
    effect: str = "the plugin is not loaded, and the server ends, or transfers without kvctl"
    remedy: str = "install what is missing in the server's environment; docs/sglang.md has a complete one for CPUs"


def sglang_problem(python: str, environ: Mapping[str, str], timeout_s: float = _IMPORT_S) -> ImportProblem | None:
    """Returns the first cause why kvctl's plugin does not fit the SGLang that a Python imports; None if it fits."""
    command = [python, "-P", "-W", "ignore", "-m", "kvctl_agent.integrations.sglang.versions"]
    try:
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)
    except OSError as error:
        return ImportProblem(f"SGLang cannot be imported: {error}")
    except subprocess.TimeoutExpired:
        return ImportProblem(
            f"importing SGLang takes longer than {timeout_s:g} s: this host is busy, or an import hangs",
            "it is not known whether kvctl's plugin fits; a server starts as slowly, or not at all",
            "try again when the host is less busy",
        )
    lines = (ended.stdout.strip() or ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()
    return ImportProblem(lines[-1]) if ended.returncode else None


@dataclass(frozen=True, slots=True)
class HostView:
    """The host that checks read; tests replace the root directory, the environment, the limits and SGLang's import."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    packages: Callable[[], Mapping[str, str]] = _packages
    cores: Callable[[], int] = available_cores
    sglang_problem: Callable[[str, Mapping[str, str]], ImportProblem | None] = sglang_problem
    agents: tuple[LocalAgent, ...] = ()

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Returns the content of a file; None if it cannot be read."""
        try:
            return self.path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Returns the names in a directory, sorted; [] if it cannot be read."""
        try:
            return sorted(entry.name for entry in self.path(path).iterdir())
        except OSError:
            return []

    def target(self, path: str) -> str | None:
        """Returns the target of a symbolic link; None if it cannot be read."""
        try:
            return os.readlink(self.path(path))  # noqa: PTH115 - "pid:[4026531836]" is no path
        except OSError:
            return None

    def tcp_sockets(self) -> Iterator[tuple[int, str, str]]:
        """Yields local port, state (hexadecimal) and inode of all TCP sockets."""
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in (self.text(table) or "").splitlines()[1:]:
                words = line.split()
                state, inode = (words[3], words[9]) if len(words) > 9 else ("", "")
                yield int(words[1].rpartition(":")[2], 16), state, inode
