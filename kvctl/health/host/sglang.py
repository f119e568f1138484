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

_ROLE, _TRANSFER = "--disaggregation-mode", "--disaggregation-transfer-backend"
_BOOTSTRAP = "--disaggregation-bootstrap-port"
_DEFAULTS = {_TRANSFER: "mooncake", _BOOTSTRAP: "8998", "--port": "30000", "--host": "127.0.0.1"}  # SGLang's
_INVALID = "SGLang ends with \"invalid choice: 'kvctl'\""


def server_arguments(argv: Sequence[str]) -> list[str] | None:
    """Returns the arguments of an SGLang server in a command line; None if it starts none."""
    for position, word in enumerate(argv):
        following = argv[position + 1 : position + 2]
        started = "serve" if PurePath(word).name == "sglang" else "sglang.launch_server" if word == "-m" else None
        if [*following] == [started]:
            return list(argv[position + 2 :])
    return None


def command_facts(host: HostView, argv: Sequence[str]) -> Iterator[Fact] | None:
    """Returns the facts about the server that a command line would start; None if it starts no SGLang server."""
    arguments = server_arguments(argv)
    return None if arguments is None else _facts(host, argv, arguments)


def _facts(host: HostView, argv: Sequence[str], arguments: Sequence[str]) -> Iterator[Fact]:
    options, environ = {**_DEFAULTS, **read_options(arguments).values}, environment_of(host, argv)
    prefill, details = options.get(_ROLE) == "prefill", [f"port {options['--port']}"]
    subject = f"this command ({', '.join([options[_ROLE], *details] if _ROLE in options else details)})"
    python = python_of(host, argv, arguments, "sglang", environ)
    problems = [*_option_problems(options, environ), *_host_problems(host, options, environ, python)]
    yield from problem_facts("SGLang", subject, problems)
    if not problems:
        place = f", bootstrap port {options[_BOOTSTRAP]}" if prefill else ""
        means = f"its Python imports SGLang, which kvctl's plugin fits, in mode {mode(environ)}"
        yield Fact("SGLang", subject + place, means)


def _option_problems(options: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[Problem]:
    chosen, backend = mode(environ), options[_TRANSFER]
    if options.get(_ROLE) not in ("prefill", "decode"):
        remedy = f"add {_ROLE} prefill, or decode, and {_TRANSFER} {BACKEND}"
        yield Problem(f"no {_ROLE}", "this server neither sends nor receives KV", remedy)
    elif chosen in (None, "observe", "off") and backend == BACKEND:
        yield Problem(f"{VARIABLE}={environ[VARIABLE]}", _INVALID, f"unset it, or set one of {', '.join(MODES)}")
    elif (chosen, backend) not in (
        ("backend", BACKEND),
        ("replace", BACKEND),
        ("replace", "nixl"),
        ("observe", backend),
    ):
        yield Problem(
            f"{_TRANSFER} {backend}",
            "SGLang's own backend transfers, and the server is not visible to kvctl",
            f"{_TRANSFER} {BACKEND}; or {VARIABLE}=observe in its environment, to watch SGLang's own backend",
        )
    plugins = environ.get("SGLANG_PLUGINS", "")
    if plugins and BACKEND not in map(str.strip, plugins.split(",")):
        yield Problem(
            f"SGLANG_PLUGINS={plugins}", "SGLang does not load kvctl's plugin", f"add {BACKEND} to it, or unset it"
        )


def _host_problems(
    host: HostView, options: Mapping[str, str], environ: Mapping[str, str], python: str
) -> Iterator[Problem]:
    prefill, settings = options.get(_ROLE) == "prefill", load_or_explain({}, environ)
    listens = (isinstance(settings, Settings) and settings["listen"]) or options["--host"]
    yield from setting_problems(settings, listens if prefill else "")
    for option in ("--port", _BOOTSTRAP) if prefill else ("--port",):
        yield from port_problems(host, option, [int(options[option])] if options[option].isdecimal() else [])
    if (packages := packages_of(host, python, environ)) is None:
        yield Problem("its Python was not found", "its packages cannot be checked", "name it with its path")
    elif lacking := [*package_problems(packages, settings, "sglang", "SGLang has no plugin of it")]:
        yield from lacking
    elif problem := host.sglang_problem(python, environ):
        yield Problem(*problem)
