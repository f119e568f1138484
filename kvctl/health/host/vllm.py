"""Checks vLLM servers with kvctl's connector: their options, environment and packages, and what differs between them.

The servers are processes of this host, or a command line that is to start one.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from kvctl.health.finding import Severity, listed
from kvctl.health.host.servers import (
    Problem,
    environment_of,
    package_problems,
    packages_in,
    packages_of,
    port_problems,
    problem_facts,
    python_of,
    setting_problems,
)
from kvctl.health.host.view import Fact, HostView
from kvctl.health.host.vllm_options import TRANSFER, ServerOptions, read_options, server_arguments, server_of_process
from kvctl_agent.contract.addresses import Address
from kvctl_agent.contract.settings import Settings, load_or_explain
from kvctl_agent.contract.vllm import (
    CONNECTOR,
    DISTRIBUTIONS,
    KV_PORT,
    LISTEN,
    MODULE_PATH,
    VARIABLE,
    is_supported,
    mode,
    supported_releases,
)

_TOPIC = "vLLM"
_PREFILL, _DECODE = "kv_producer", "kv_consumer"
_FIELDS = {
    *("kv_connector", "kv_connector_module_path", "kv_connector_extra_config", "kv_role", "kv_port"),
    *("kv_load_failure_policy", "engine_id", "kv_buffer_device", "enable_permute_local_kv"),
}
_POLICIES = ("fail", "recompute")
_SITE = re.compile(r"\s(/\S*/(?:site|dist)-packages)/")
_SAME_DTYPE = {"half": "float16", "float": "float32", "fp8": "fp8_e4m3"}
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class Server:
    """A vLLM server.

    Attributes:
        name: how findings name it: `process 123`, or `this command`.
        packages: versions of the packages that it can import, by name; None if they are not visible from here.
    """

    name: str
    options: ServerOptions
    environ: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] | None = None

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """The part of its KV transfer configuration that concerns kvctl's connector; None if it does not use it."""
        return next(filter(_is_ours, _configurations(self.options.transfer)), None)

    @property
    def role(self) -> str:
        return {_PREFILL: "prefill", _DECODE: "decode"}.get(_text(self.config or {}, "kv_role"), "")

    @cached_property
    def settings(self) -> Settings | str:
        """Settings of its agents, or why they refuse them."""
        extra = (self.config or {}).get("kv_connector_extra_config") or {}
        return load_or_explain(extra if isinstance(extra, dict) else {}, self.environ)

    @property
    def address(self) -> str:
        """Address of its registries."""
        settings = self.settings
        return (isinstance(settings, Settings) and settings["listen"]) or LISTEN

    @property
    def ports(self) -> range:
        """Ports of its registries, one for each data-parallel rank."""
        options = self.options
        first = (self.config or {}).get("kv_port", KV_PORT)
        if not isinstance(first, int):
            return range(0)
        rank = options.number("--data-parallel-rank", -1)
        if rank >= 0:
            return range(first + rank, first + rank + 1)
        first += options.number("--data-parallel-start-rank", 0)
        return range(
            first, first + options.number("--data-parallel-size-local", options.number("--data-parallel-size", 1))
        )

    @property
    def subject(self) -> str:
        """Its name, role and API port: `process 123 (prefill, port 8100)`."""
        port = self.options.values.get("--port", "")
        details = ", ".join(filter(None, (self.role, port and f"port {port}")))
        return f"{self.name} ({details})" if details else self.name


# ---- finding servers -------------------------------------------------------------------------------------------


def running_servers(host: HostView) -> list[Server]:
    """Returns the vLLM servers among the processes of this host whose command lines are visible."""
    found: dict[str, Server] = {}
    for pid in filter(str.isdecimal, host.names("/proc")):
        argv = _words(host.text(f"/proc/{pid}/cmdline"))
        arguments = server_of_process(argv)
        if arguments is None or _parent(host, pid) in found:
            continue
        environ = dict(word.partition("=")[::2] for word in _words(host.text(f"/proc/{pid}/environ")))
        folders = sorted(set(_SITE.findall(host.text(f"/proc/{pid}/maps") or "")))
        extra = [host.target(f"/proc/{pid}/cwd") or "", *environ.get("PYTHONPATH", "").split(":")]
        found[pid] = Server(f"process {pid}", read_options(arguments), environ, packages_in(host, folders, extra))
    return list(found.values())


def server_of_command(host: HostView, argv: Sequence[str]) -> Server | None:
    """Returns the server that a command line would start in this environment; None if it starts no vLLM server."""
    arguments = server_arguments(argv)
    if arguments is None:
        return None
    environ = environment_of(host, argv)
    packages = packages_of(host, python_of(host, argv, arguments, "vllm", environ), environ)
    return Server("this command", read_options(arguments), environ, packages)


def command_facts(host: HostView, argv: Sequence[str]) -> Iterator[Fact] | None:
    """Returns the facts about a command line; None if it starts no vLLM server."""
    server = server_of_command(host, argv)
    return None if server is None else server_facts(host, server)


def _words(text: str | None) -> list[str]:
    return [word for word in (text or "").split("\0") if word]


def _parent(host: HostView, pid: str) -> str:
    words = (host.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return words[1] if len(words) > 1 else ""


# ---- checks ----------------------------------------------------------------------------------------------------


def server_facts(host: HostView, command: Server | None = None) -> Iterator[Fact]:
    """Yields the facts about the servers of this host, or about one command and its conflicts with them."""
    running = running_servers(host)
    if command is None:
        ours = [server for server in running if _is_examined(server)]
        for server in ours:
            yield from _examine(server)
        for first, second in combinations(ours, 2):
            yield from _together(first, second)
        return
    if not _is_examined(command) and command.options.transfer and mode(command.environ) == "observe":
        yield Fact(_TOPIC, f"{command.subject}: {VARIABLE}=observe", "kvctl shows what vLLM's own NIXL connector does")
        return
    if not _is_examined(command):
        yield Fact(
            _TOPIC,
            f"{command.subject}: no {TRANSFER} for kvctl's connector",
            "this server neither sends nor receives KV through kvctl",
            Severity.WARNING,
            f"add {_option({'kv_role': _PREFILL})}, at decode with {_DECODE}; or {VARIABLE}=observe in its environment "
            "to watch the NIXL connector of vLLM",
        )
        return
    yield from _examine(command)
    yield from _bound_ports(host, command, running)
    for server in filter(_is_examined, running):
        yield from _together(command, server)


def _is_examined(server: Server) -> bool:
    named = "kvctl" in server.options.values.get(TRANSFER, "").lower()
    return server.config is not None or (bool(server.options.error) and named)


def _examine(server: Server) -> Iterator[Fact]:
    problems = [*_option_problems(server), *_package_problems(server)]
    if problems:
        yield from problem_facts(_TOPIC, server.subject, problems)
        return
    ports = listed(f"tcp://{server.address}:{port}" for port in server.ports)
    place = f", registr{'y' if len(server.ports) == 1 else 'ies'} {ports}" if server.role == "prefill" else ""
    yield Fact(_TOPIC, f"{server.subject}{place}", f"{TRANSFER} is valid for kvctl's connector")


def _option_problems(server: Server) -> Iterator[Problem]:
    config = server.config
    if config is None:
        yield Problem(
            f"{TRANSFER} is not JSON: {server.options.error}",
            "vLLM does not start with it",
            f"quote it for the shell: {_option({'kv_role': _PREFILL})}, at decode with {_DECODE}",
        )
        return
    child = config is not server.options.transfer
    start = f"its entry in connectors: {json.dumps(_valid(config))}" if child else f"start it with {_option(config)}"
    if server.options.ignored:
        yield Problem(f"{TRANSFER} beside {TRANSFER}.…", "vLLM ignores the former", "use one of the two forms")
    name, path, role = (_text(config, key) for key in ("kv_connector", "kv_connector_module_path", "kv_role"))
    if not name:
        yield Problem("kv_connector is missing", "vLLM starts without a connector and transfers nothing", start)
    elif name != CONNECTOR and path:
        yield Problem(f"kv_connector is {name}", f'vLLM ends with "Class {name} not found": it is {CONNECTOR}', start)
    if name and path != MODULE_PATH:
        means = f'vLLM ends with "Unsupported connector type: {name}"' if not path else "vLLM cannot import it and ends"
        yield Problem(f"kv_connector_module_path is {path or 'missing'}", means, start)
    if role not in (_PREFILL, _DECODE):
        yield Problem(
            f"kv_role is {role or 'missing'}",
            "the server does not start: it either sends KV or receives it",
            f"{start}, at decode with {_DECODE}",
        )
    if unknown := sorted(config.keys() - _FIELDS):
        old = "; the address is the setting listen, KVCTL_LISTEN" if "kv_ip" in unknown else ""
        yield Problem(
            f"unknown field{'s' * (len(unknown) > 1)} {listed(unknown)}",
            f'vLLM ends with "Unexpected keyword argument": older releases had some{old}',
            start,
        )
    yield from _value_problems(server, config, start)


def _value_problems(server: Server, config: Mapping[str, Any], start: str) -> Iterator[Problem]:
    policy = config.get("kv_load_failure_policy", "fail")
    if policy not in _POLICIES:
        yield Problem(
            f"kv_load_failure_policy is {_shown(policy)}", "vLLM knows fail and recompute, and does not start", start
        )
    port = config.get("kv_port", KV_PORT)
    if not isinstance(port, int) or not 0 < port <= _LARGEST_PORT or server.ports.stop - 1 > _LARGEST_PORT:
        yield Problem(f"kv_port is {_shown(port)}", "the registries have no valid port", start)
    if not isinstance(config.get("kv_connector_extra_config", {}), dict):
        yield Problem("kv_connector_extra_config is no object", "vLLM does not start with it", start)
    yield from setting_problems(server.settings, server.address if server.role == "prefill" else "")


def _package_problems(server: Server) -> Iterator[Problem]:
    packages = server.packages
    if packages is None:
        return
    version = next((packages[name] for name in DISTRIBUTIONS if name in packages), "")
    if version and not is_supported(version):
        yield Problem(
            f"vLLM {version}",
            f"kvctl's connector supports vLLM {supported_releases()}, and the server does not start",
            "install one of these, or use one of vLLM's own connectors",
        )
    yield from package_problems(packages, server.settings, "vllm", "vLLM ends with \"No module named 'kvctl_agent'\"")


# ---- two servers -----------------------------------------------------------------------------------------------


def _together(one: Server, other: Server) -> Iterator[Fact]:
    if one.role == other.role == "prefill":
        yield from _port_clash(one, other)
    elif {one.role, other.role} == {"prefill", "decode"} and one.options.model == other.options.model:
        for means, severity, difference in _differences(one.options, other.options):
            yield Fact(
                _TOPIC,
                f"{one.subject} and {other.subject}: {difference}",
                means,
                severity,
                "start both servers with the same value",
                "KV_COMPAT_MISMATCH",
            )


def _port_clash(one: Server, other: Server) -> Iterator[Fact]:
    first, last = max(one.ports.start, other.ports.start), min(one.ports.stop, other.ports.stop) - 1
    anywhere = any(Address("tcp", each.address.strip("[]")).is_wildcard for each in (one, other))
    if first > last or (one.address != other.address and not anywhere):
        return
    yield Fact(
        _TOPIC,
        f"{one.subject} and {other.subject}: both bind kv_port {first if first == last else f'{first} to {last}'}",
        "the one that starts later ends: its address is in use",
        Severity.WARNING,
        f'set "kv_port": {max(one.ports.stop, other.ports.stop)} for one of them; each data-parallel rank takes a port',
        "KV_PORT_CLASH",
    )


def _bound_ports(host: HostView, command: Server, running: Sequence[Server]) -> Iterator[Fact]:
    """Yields the ports of a command's registries that a process other than a known prefill server listens on."""
    if command.role != "prefill":
        return
    known = {port for server in running if server.role == "prefill" for port in server.ports}
    yield from problem_facts(_TOPIC, command.subject, port_problems(host, "kv_port", {*command.ports} - known))


def _differences(one: ServerOptions, other: ServerOptions) -> Iterator[tuple[str, Severity, str]]:
    refused = "their KV has different layouts, so that each room fails"
    sizes = one.number("--block-size", 0), other.number("--block-size", 0)
    if all(sizes) and max(sizes) % min(sizes):
        yield refused, Severity.WARNING, f"--block-size {sizes[0]} and {sizes[1]}, neither of which divides the other"
    for option in ("--dtype", "--kv-cache-dtype"):
        dtypes = [_dtype(each, option) for each in (one, other)]
        # The dtype of the model is not known here; quantised KV differs from any.
        if len({*dtypes}) > 1 and ("auto" not in dtypes or any(each.startswith("fp8") for each in dtypes)):
            yield refused, Severity.WARNING, f"{option} {dtypes[0]} and {dtypes[1]}"
    hybrid = "--disable-hybrid-kv-cache-manager"
    if (hybrid in one.values) != (hybrid in other.values):
        means = "each room of a model with sliding windows fails; other models have one KV cache group anyway"
        yield means, Severity.INFO, f"only one has {hybrid}"


def _dtype(options: ServerOptions, option: str) -> str:
    value = options.values.get(option) or "auto"
    return _SAME_DTYPE.get(value, value)


# ---- configurations --------------------------------------------------------------------------------------------


def _configurations(transfer: object) -> Iterator[Mapping[str, Any]]:
    """Yields a KV transfer configuration and, if it is that of MultiConnector, those of its children."""
    if not isinstance(transfer, dict):
        return
    yield transfer
    extra = transfer.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, dict) else None
    for child in children if isinstance(children, list) else ():
        if isinstance(child, dict):
            yield child


def _is_ours(config: Mapping[str, Any]) -> bool:
    named = (_text(config, "kv_connector"), _text(config, "kv_connector_module_path"))
    return any("kvctl" in each.lower() for each in named)


def _option(config: Mapping[str, Any]) -> str:
    """Returns the option with a configuration that vLLM and the connector accept, quoted for a shell."""
    return f"{TRANSFER} {shlex.quote(json.dumps(_valid(config)))}"


def _valid(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with what vLLM and the connector do not accept in it removed or put right."""
    kept = {key: value for key, value in config.items() if key in _FIELDS}
    kept |= {"kv_connector": CONNECTOR, "kv_connector_module_path": MODULE_PATH}
    if kept.get("kv_role") not in (_PREFILL, _DECODE):
        kept["kv_role"] = _PREFILL
    if kept.get("kv_load_failure_policy", "fail") not in _POLICIES:
        kept["kv_load_failure_policy"] = "recompute"
    port = kept.get("kv_port", KV_PORT)
    if not isinstance(port, int) or not 0 < port < _LARGEST_PORT - 1000:
        kept["kv_port"] = KV_PORT
    if not isinstance(kept.get("kv_connector_extra_config", {}), dict):
        del kept["kv_connector_extra_config"]
    return kept


def _text(config: Mapping[str, Any], name: str) -> str:
    """Returns a field that must be text; another value as JSON, "" for null."""
    value = config.get(name)
    return value if isinstance(value, str) else "" if value is None else _shown(value)


def _shown(value: object) -> str:
    return json.dumps(value, default=repr)[:60]
