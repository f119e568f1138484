"""Every line of a block of shell commands on a page is one that a test runs, or compares with what it names.

`CHECKS` says which, by program; docs/contributing.md has the reasons. tests/test_docs.py parses the commands of kvctl,
and tests/kvctl/commands/test_documented_commands.py runs those that only read.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_docs import BY_HAND

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SETTING = re.compile(r"\w+=")
_DESCRIPTION = re.compile(r"(^kvctl .*?\S)\s{2,}.*")  # in a second column
_VENV = re.compile(r"^\.(?:venv|sglang|vllm)/bin/")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
# Blocks that are no commands: files, and what programs print.
_OTHER_TEXT = re.compile(r"^(?:kvctl: |KVCTL_\w+=\S+$|preStop: |# level )")


class ShellCommand(NamedTuple):
    page: str
    words: tuple[str, ...]


def commands() -> Iterator[ShellCommand]:
    """Yields the commands of all blocks; of a block with output, those behind `$ `."""
    for page, text in BY_HAND.items():
        for language, block in _BLOCK.findall(text):
            if language not in ("", "sh"):
                continue
            lines = re.sub(r"\\\n\s*", " ", block).splitlines()
            if block.startswith("$ "):
                lines = [line[2:] for line in lines if line.startswith("$ ")]
            elif _OTHER_TEXT.match(block):
                continue
            yield from (ShellCommand(page, words) for words in _split(lines))


def _split(lines: list[str]) -> Iterator[tuple[str, ...]]:
    """Yields the words of each command, whose quotes and functions may span lines."""
    left = ""
    for line in lines:
        left = f"{left}\n{line}" if left else _DESCRIPTION.sub(r"\1", line)
        try:
            words = shlex.split(left, comments=True)
        except ValueError:
            continue
        if "server()" in words and words[-1] != "}":
            continue
        left = ""
        if words := words[words.index("{") + 1 :] if "server()" in words else words:
            named = next((n for n, word in enumerate(words) if not _SETTING.match(word)), len(words))
            yield tuple(words[named:])
    assert not left, left


def is_made(words: tuple[str, ...]) -> bool:
    targets = [word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)]
    variables = [word.partition("=")[0] for word in words[1:] if "=" in word]
    return all(f"\n{target}:" in MAKEFILE for target in targets) and all(f"$({name})" in MAKEFILE for name in variables)


def is_installed(words: tuple[str, ...]) -> bool:
    extras = re.findall(r"\[([\w,-]+)\]", " ".join(words))
    return words[1] == "install" and all(extra in EXTRAS for each in extras for extra in each.split(","))


def is_run_by_python(words: tuple[str, ...]) -> bool:
    """A file of ours with options that it has, or a module of an engine, which tests of real servers start."""
    if words[1] == "-c":
        compile(words[2], "page", "exec")
        return True
    if words[1] == "-m":
        return words[2].split(".")[0] in {"sglang", "sglang_router", "vllm"}
    source = (ROOT / words[1]).read_text()
    return all(word.partition("=")[0] in source for word in words[2:] if word.startswith("--"))


def has_its_files(words: tuple[str, ...]) -> bool:
    named = [word for word in words[1:] if re.match(r"(?:charts|examples|benchmarks|docs|tests)/", word)]
    return all((ROOT / word).exists() for word in (*named, *([words[0]] if "/" in words[0] else [])))


CHECKS: dict[str, Callable[[tuple[str, ...]], bool]] = {
    "make": is_made,
    "pip": is_installed,
    "pipx": is_installed,
    "python": is_run_by_python,
    "benchmarks/gpu.sh": has_its_files,
    "benchmarks/pack_gpu_site.sh": has_its_files,
    "benchmarks/sglang_layouts.sh": has_its_files,  # tests/kvctl/commands/test_bench_sglang.py
    "docker": has_its_files,
    "kubectl": has_its_files,
    "helm": has_its_files,
    # Commands of others, which need servers, clusters or files of the reader. Their tests: tests/sglang_servers,
    # tests/vllm_engines; what they ask of kvctl (paths, ports, settings) is compared by tests/test_docs.py.
    **dict.fromkeys(("curl", "vllm", "server", "export", "echo", "claude", "uvx", "nsys"), lambda words: True),
}


@pytest.mark.parametrize(
    "command", sorted(set(commands())), ids=lambda each: f"{each.page}: {' '.join(each.words)[:60]}"
)
def test_a_command_is_one_that_is_checked(command: ShellCommand) -> None:
    if not command.words:
        return  # settings of variables alone
    program, *rest = command.words
    program = _VENV.sub("", program)
    if program != "kvctl":  # tests/test_docs.py
        assert program in CHECKS, f"say in CHECKS how {program} is tested"
        assert CHECKS[program]((program, *rest)), command.words


def test_what_is_wrong_is_found() -> None:
    assert not is_made(("make", "benhc"))
    assert not is_made(("make", "soak", "MINUTE=3"))
    assert not is_installed(("pip", "install", ".[sglnag]"))
    assert not is_run_by_python(("python", "examples/vllm_proxy.py", "--prt", "8000"))
    assert not has_its_files(("kubectl", "apply", "-k", "examples/kubernets"))
    assert len(set(commands())) > 80
