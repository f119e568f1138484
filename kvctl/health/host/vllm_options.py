"""Reads the options of a vLLM server from its command line as vLLM does, without importing vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

TRANSFER = "--kv-transfer-config"
_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")
_TAKE_A_VALUE = ("-m", "-W", "-X")  # options of Python
_SHORT = {
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpr": "--data-parallel-start-rank",
    "-dpn": "--data-parallel-rank",
}
_SHORT_NUMBER = re.compile(
    r"(?<=[:\[,])(\s*)(\d+(?:\.\d+)?[kKmMgGtT])(?=\s*[,}\]])"
)  # 80m, which vLLM takes for a number


class ServerOptions(NamedTuple):
    """Options of a vLLM server.

    Attributes:
        values: values by option, such as `--block-size`; "" for an option without one. The last one counts.
        transfer: value of `--kv-transfer-config`, any JSON value; None without the option.
        error: why `transfer` cannot be read; "" if it can.
        ignored: whether `--kv-transfer-config` is ignored because there are options `--kv-transfer-config.…`, too.
    """

    values: Mapping[str, str]
    transfer: object = None
    error: str = ""
    ignored: bool = False

    def number(self, option: str, default: int) -> int:
        """Returns the value of an option as a whole number; the default if it is missing or none."""
        value = self.values.get(option, "")
        return int(value) if value.isdecimal() and len(value) < 10 else default

    @property
    def model(self) -> str:
        return self.values.get("--model", "")


def server_of_process(argv: Sequence[str]) -> list[str] | None:
    """Returns the arguments of the vLLM server that a process is; None for other processes.

    A program that starts a server, such as timeout or a shell, is none, although it has the server's command line.
    """
    if not argv or not PurePath(argv[0]).name.startswith(("python", "vllm")):
        return None
    arguments = server_arguments(argv)
    if arguments is None:
        return None
    before = argv[1 : len(argv) - len(arguments) - 1]
    script = bool(before) and PurePath(before[0]).name == "vllm"
    options = all(word.startswith("-") or argv[n] in _TAKE_A_VALUE for n, word in enumerate(before))
    return arguments if script or options else None


def server_arguments(argv: Sequence[str]) -> list[str] | None:
    """Returns the arguments of a vLLM server in a command line, the model included; None if it starts none."""
    for position, word in enumerate(argv):
        rest = list(argv[position + 1 :])
        if word == "-m" and rest and rest[0] in _MODULES:
            rest = rest[1:]
            if argv[position + 1] == _MODULES[0]:
                return rest
        elif PurePath(word).name != "vllm":
            continue
        if rest[:1] == ["serve"]:
            return rest[1:]
    return None


def read_options(arguments: Sequence[str]) -> ServerOptions:
    """Reads the arguments of a vLLM server; never raises, whatever they are."""
    values: dict[str, str] = {}
    dotted: dict[str, Any] = {}
    words = list(arguments)
    if words and not words[0].startswith("-"):
        values["--model"] = words.pop(0)
    while words:
        name, equals, value = words.pop(0).partition("=")
        name = _SHORT.get(name, name)
        if not name.startswith("--"):
            continue
        option, dot, path = name.partition(".")
        option = option.replace("_", "-")
        if not equals and words and (dot or not words[0].startswith("-")):
            value = words.pop(0)
        if not dot:
            values[option] = value
        elif option == TRANSFER:
            _merge(dotted, path, value)
    text = values.get(TRANSFER)
    if dotted:
        return ServerOptions(values, dotted, "", text is not None)
    if text is None:
        return ServerOptions(values)
    try:
        return ServerOptions(values, _json(text))
    except (ValueError, RecursionError) as error:
        return ServerOptions(values, None, str(error) or type(error).__name__)


def _merge(config: dict[str, Any], path: str, text: str) -> None:
    """Sets the value at a dotted path such as `kv_connector_extra_config.listen`; one ending in + extends a list."""
    value: Any
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    *folders, name = path.removesuffix("+").split(".")
    for folder in folders:
        inner = config.get(folder)
        if not isinstance(inner, dict):
            config[folder] = inner = {}
        config = inner
    if path.endswith("+"):
        before = config.get(name)
        value = [*(before if isinstance(before, list) else ()), *text.split(",")]
    config[name] = value


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(_SHORT_NUMBER.sub(r'\1"\2"', text))
