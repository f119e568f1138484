"""Checks the command line of a vLLM server before it is started: options, environment, packages and ports."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvctl.health.finding import Severity, listed
from kvctl.health.host.servers import (
    Problem,
    environment_of,
    package_problems,
    packages_of,
    port_problems,
    problem_facts,
    python_of,
    setting_problems,
)
from kvctl.health.host.view import Fact, HostView
from kvctl.health.host.vllm_options import TRANSFER, ServerOptions, read_options, server_arguments
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
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class Server:
    """A vLLM server; `packages` are those that it can import, None if they are not visible from here."""

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
        """Its role and API port: `this command (prefill, port 8100)`."""
        port = self.options.values.get("--port", "")
        details = ", ".join(filter(None, (self.role, port and f"port {port}")))
        return f"this command ({details})" if details else "this command"


def command_facts(host: HostView, argv: Sequence[str]) -> Iterator[Fact] | None:
    """Returns the facts about the server that a command line would start; None if it starts no vLLM server."""
    arguments = server_arguments(argv)
    if arguments is None:
        return None
    environ = environment_of(host, argv)
    packages = packages_of(host, python_of(host, argv, arguments, "vllm", environ), environ)
    return _facts(host, Server(read_options(arguments), environ, packages))


def _facts(host: HostView, server: Server) -> Iterator[Fact]:
    named = "kvctl" in server.options.values.get(TRANSFER, "").lower()
    if server.config is None and not (server.options.error and named):
        if server.options.transfer and mode(server.environ) == "observe":
            means = "kvctl shows what vLLM's own NIXL connector does"
            yield Fact(_TOPIC, f"{server.subject}: {VARIABLE}=observe", means)
            return
        yield Fact(
            _TOPIC,
            f"{server.subject}: no {TRANSFER} for kvctl's connector",
            "this server neither sends nor receives KV through kvctl",
            Severity.WARNING,
            f"add {_option({'kv_role': _PREFILL})}, at decode with {_DECODE}; or {VARIABLE}=observe in its environment "
            "to watch the NIXL connector of vLLM",
        )
        return
    problems = [*_option_problems(server), *_package_problems(server)]
    if server.role == "prefill":
        problems += port_problems(host, "kv_port", server.ports)
    yield from problem_facts(_TOPIC, server.subject, problems)
    if not problems:
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
            f"kv_load_failure_policy is {_shown(policy)}",
            "vLLM knows fail and recompute, and does not start",
            start,
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
