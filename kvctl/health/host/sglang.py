"""Checks the command line of an SGLang server before it is started: options, environment, packages and ports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

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
from kvctl.health.host.vllm_options import read_options
from kvctl_agent.contract.settings import Settings, load_or_explain
from kvctl_agent.contract.sglang import BACKEND, MODES, VARIABLE, mode

REPAIR = "install what is missing in the server's environment; docs/sglang.md has a complete one for CPUs"

_MODULE = "sglang.launch_server"
_ROLE, _TRANSFER, _BOOTSTRAP = (
    "--disaggregation-mode",
    "--disaggregation-transfer-backend",
    "--disaggregation-bootstrap-port",
)
_STOCK = "mooncake"  # SGLang's default
_BOOTSTRAP_PORT = "8998"
_PORT = "30000"
_INVALID = "SGLang ends with \"invalid choice: 'kvctl'\""


def server_arguments(argv: Sequence[str]) -> list[str] | None:
    """Returns the arguments of an SGLang server in a command line; None if it starts none."""
    for position, word in enumerate(argv):
        rest = list(argv[position + 1 :])
        script = PurePath(word).name == "sglang" and rest[:1] == ["serve"]
        if script or (word == "-m" and rest[:1] == [_MODULE]):
            return rest[1:]
    return None


def command_facts(host: HostView, argv: Sequence[str]) -> Iterator[Fact] | None:
    """Returns the facts about the server that a command line would start; None if it starts no SGLang server."""
    arguments = server_arguments(argv)
    return None if arguments is None else _facts(host, argv, arguments)


def _facts(host: HostView, argv: Sequence[str], arguments: Sequence[str]) -> Iterator[Fact]:
    options, environ = read_options(arguments).values, environment_of(host, argv)
    role, port = options.get(_ROLE, ""), options.get("--port", _PORT)
    subject = f"this command ({f'{role}, ' * bool(role)}port {port})"
    problems = [*_option_problems(options, environ), *_address_problems(host, options, environ)]
    python = python_of(host, argv, arguments, "sglang", environ)
    problems += _package_problems(host, python, environ)
    if problems:
        yield from problem_facts("SGLang", subject, problems)
        return
    bootstrap = f", bootstrap port {options.get(_BOOTSTRAP, _BOOTSTRAP_PORT)}" * (role == "prefill")
    yield Fact(
        "SGLang",
        f"{subject}{bootstrap}",
        f"its Python imports SGLang, which kvctl's plugin fits, in mode {mode(environ)}",
    )


def _option_problems(options: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[Problem]:
    chosen, backend = mode(environ), options.get(_TRANSFER, _STOCK)
    if options.get(_ROLE) not in ("prefill", "decode"):
        means = "this server neither sends nor receives KV"
        yield f"no {_ROLE}", means, f"add {_ROLE} prefill, or decode, and {_TRANSFER} {BACKEND}", ""
    elif chosen is None:
        means = f"the plugin is not loaded: {_INVALID}" if backend == BACKEND else "the plugin is not loaded"
        yield f"{VARIABLE}={environ.get(VARIABLE)}", means, f"set one of {', '.join(MODES)}", ""
    elif chosen in ("observe", "off") and backend == BACKEND:
        yield f"{VARIABLE}={chosen}", _INVALID, f"unset {VARIABLE}", ""
    elif (chosen, backend) not in (
        (MODES[0], BACKEND),
        ("replace", BACKEND),
        ("replace", "nixl"),
        ("observe", backend),
    ):
        yield (
            f"{_TRANSFER} {backend}",
            "SGLang's own backend transfers, and the server is not visible to kvctl",
            f"{_TRANSFER} {BACKEND}; or {VARIABLE}=observe in its environment, to watch SGLang's own backend",
            "",
        )
    plugins = environ.get("SGLANG_PLUGINS", "")
    if plugins and BACKEND not in (name.strip() for name in plugins.split(",")):
        yield (
            f"SGLANG_PLUGINS={plugins}",
            "SGLang does not load kvctl's plugin",
            f"add {BACKEND} to it, or unset it",
            "",
        )


def _address_problems(host: HostView, options: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[Problem]:
    prefill = options.get(_ROLE) == "prefill"
    settings = load_or_explain({}, environ)
    listens = (isinstance(settings, Settings) and settings["listen"]) or options.get("--host", "127.0.0.1")
    yield from setting_problems(
        settings, listens if prefill else "", "`kvctl config show` lists the settings and their variables KVCTL_…"
    )
    ports = {"--port": options.get("--port", _PORT)}
    if prefill:
        ports[_BOOTSTRAP] = options.get(_BOOTSTRAP, _BOOTSTRAP_PORT)
    for option, number in ports.items():
        yield from port_problems(host, option, [int(number)] if number.isdecimal() else [])


def _package_problems(host: HostView, python: str, environ: Mapping[str, str]) -> Iterator[Problem]:
    packages = packages_of(host, python, environ)
    if packages is None:
        yield "its Python was not found", "its packages cannot be checked", "name it with its path", ""
        return
    lacks = list(package_problems(packages, load_or_explain({}, environ), "sglang", "SGLang has no plugin of it"))
    yield from lacks
    if not lacks and (problem := host.sglang_problem(python, environ)):
        yield problem, "the plugin is not loaded, and the server ends, or transfers without kvctl", REPAIR, ""
