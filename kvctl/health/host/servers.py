"""What is common to the servers of all engines: their command lines, environments, packages, settings and ports."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from kvctl.health.finding import Severity
from kvctl.health.host.view import Fact, HostView
from kvctl_agent.contract.addresses import Address
from kvctl_agent.contract.extras import install
from kvctl_agent.contract.settings import Settings

_PACKAGE = re.compile(r"(.+?)-(\d[^-]*)\.(?:dist|egg)-info")
_LISTENING = "0A"


class Problem(NamedTuple):
    """Problem of a server; the attributes are those of `Fact`."""

    found: str
    means: str
    remedy: str
    code: str = ""


def environment_of(host: HostView, argv: Sequence[str]) -> dict[str, str]:
    """Returns the environment of a command line: of this process, and what `env` assigns in it."""
    return {**host.environ, **dict(word.partition("=")[::2] for word in argv if re.match(r"[A-Z_0-9]+=", word))}


def python_of(
    host: HostView, argv: Sequence[str], arguments: Sequence[str], script: str, environ: Mapping[str, str]
) -> str:
    """Returns the path of the Python that runs a command line, or the `script` in it; "" if it is not found.

    Args:
        arguments: the words after the engine's script or module.
    """
    words = reversed(argv[: len(argv) - len(arguments)])
    programs = (word for word in words if (name := PurePath(word).name) == script or name.startswith("python"))
    program = next(programs, "")
    paths = [program] if "/" in program else [f"{folder}/{program}" for folder in environ.get("PATH", "").split(":")]
    path = next((each for each in paths if host.path(each).is_file()), "")
    if path and not PurePath(path).name.startswith("python"):
        first, *_ = (host.text(path) or "").splitlines() or [""]
        path = first.removeprefix("#!").split(" ")[0] if first.startswith("#!/") else path
    return path


def packages_of(host: HostView, python: str, environ: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the packages that a Python can import, as `packages_in`."""
    library = PurePath(python).parent.parent / "lib"
    folders = [f"{library}/{name}/site-packages" for name in host.names(str(library)) if name.startswith("python3")]
    return packages_in(host, folders if python else (), environ.get("PYTHONPATH", "").split(":"))


def packages_in(host: HostView, folders: Sequence[str], extra: Sequence[str]) -> dict[str, str] | None:
    """Returns the versions of packages in site-packages folders, by name; None if these are not visible from here.

    In the extra folders, which are on the path, only kvctl is looked for.
    """
    names = [name for folder in folders for name in host.names(folder)]
    if not names:
        return None
    found = {match[1].lower().replace("_", "-"): match[2] for name in names if (match := _PACKAGE.fullmatch(name))}
    if "kvctl_agent" in names or any("kvctl_agent" in host.names(folder) for folder in extra if folder):
        found.setdefault("kvctl", "")
    return found


def setting_problems(settings: Settings | str, listens: str) -> Iterator[Problem]:
    """Yields what is wrong with the settings of a server's agents, or why the agents refuse them.

    Args:
        listens: address at which decode ranks reach a prefill server; "" for a decode server.
    """
    if isinstance(settings, str):
        lookup = "`kvctl config show` lists the settings and their variables KVCTL_…"
        yield Problem(settings, "the agent refuses it, and the server does not start", lookup)
    elif (
        listens
        and not Address("tcp", listens.strip("[]")).is_loopback
        and not settings["insecure"]
        and not settings["fleet_key"]
    ):
        yield Problem(
            f"listens on {listens} without a key",
            "other hosts reach that address, so the agent refuses it, and the server does not start",
            "`kvctl key new` creates one: set KVCTL_FLEET_KEY to its file on all servers; or KVCTL_INSECURE=1 in a "
            "network that you trust",
        )


def package_problems(
    packages: Mapping[str, str], settings: Settings | str, extra: str, missing: str
) -> Iterator[Problem]:
    """Yields which packages of kvctl's `extra` a server's agents lack; `missing`: consequence without kvctl."""
    remedy = f"{install(extra)}, with the pip of the server's environment"
    if "kvctl" not in packages:
        yield Problem("kvctl is not installed there", missing, remedy)
    transport = settings["transport"] if isinstance(settings, Settings) else ""
    if transport == "nixl" and not any(name.split("-")[0] == "nixl" for name in packages):
        yield Problem("NIXL is not installed there", "the agent has no engine that moves the bytes", remedy)


def port_problems(host: HostView, option: str, ports: Collection[int]) -> Iterator[Problem]:
    """Yields those of the ports on which a process of this host listens."""
    listening = {port for port, state, _ in host.tcp_sockets() if state == _LISTENING}
    if taken := sorted(listening.intersection(ports)):
        yield Problem(
            f"{option} {', '.join(map(str, taken))} is in use",
            "the server does not start",
            f"`ss -ltnp sport = :{taken[0]}` shows by whom; choose another {option}",
            "KV_PORT_CLASH",
        )


def problem_facts(topic: str, subject: str, problems: Iterable[Problem]) -> Iterator[Fact]:
    for found, means, remedy, code in problems:
        yield Fact(topic, f"{subject}: {found}", means, Severity.WARNING, remedy, code)
