"""The reference pages in docs/ say what the code says; the others name nothing that is not there."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from benchmarks.side_by_side import ROWS
from docs import figures
from kvctl.cli import cli
from kvctl.commands.options import GlobalOptions, KvctlGroup
from kvctl.health.codes import CODES_BY_NAME
from kvctl.render.rooms import ROOMS
from kvctl.render.view import View
from kvctl_agent.contract.config import KEYS
from kvctl_agent.contract.metrics import METRICS_BY_NAME

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RENDER = runpy.run_path(str(DOCS / "render.py"))
PAGES: dict[str, str] = RENDER["pages"]()
WRITTEN = [path for path in DOCS.glob("*.md") if path.name not in PAGES]
BY_HAND = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *sorted(WRITTEN))}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")
# `kvctl`, also of a venv and after settings of environment variables.
_COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.\w+/bin/)?(kvctl(?: .*)?)$", re.MULTILINE)
# A line ends where the shell takes over, or where a second column says in words what it does.
_END_OF_COMMAND = re.compile(r"\s\||\s>|\s#|\s&&|;|\s{2,}")
_FILE = re.compile(r"[\w.-]+(/[\w.-]+)+/?|[\w-]+\.(py|md|toml)|[\w-]+/")
# Files that a page has the reader write.
_OF_THE_READER = {"agent.toml", "config.toml"}
# Names of vLLM that users meet, and code of ours does not.
_OF_VLLM = {"kv_both", "kv_ip", "kv_load_failure_policy", "kv_rank"}
# Texts that pages quote of vLLM, SGLang, and the reader; and headings.
_OF_OTHERS = {
    "Class … not found in kvctl_agent.integrations.vllm.connector",
    "Internal server error",
    "Please specify kv_role",
    "Unexpected keyword argument",
    "Unsupported connector type: KvctlConnector",
    "pool memory leak detected",
    "stuck, ticket 4711",
    "unexpected keyword argument 'decode_allocation_policy'",
}
# What stands for something of the reader's, by what it may be.
_STANDS_FOR = {
    "ROOM": "7",
    "AGENT": "decode-0",
    "SERIAL": "17",
    "CODE": "KV_PEER_LOST",
    "KEY": "suspect_s",
    "TIME": "30s",
}


class Mention(NamedTuple):
    """A command line on a page; `whole` where it stands in a block, to be typed as it is."""

    page: str
    line: str
    whole: bool


def code(page: str) -> Iterator[str]:
    """What a page sets in backticks, outside its blocks."""
    return (text for text in _INLINE.findall(re.sub(r"\s*\n\s*", " ", _FENCE.sub("", page))))


def mentions() -> Iterator[Mention]:
    for name, page in BY_HAND.items():
        for language, block in _FENCE.findall(page):
            if language != "python":
                lines = block.replace("\\\n", " ")
                yield from (Mention(name, line, True) for line in _COMMAND.findall(lines))
        yield from (Mention(name, text, False) for text in code(page) if re.match(r"kvctl [a-z-]", text))


def words_of(mention: Mention) -> list[str]:
    """Returns the words of a command, up to where the shell or a description takes over."""
    return shlex.split(_END_OF_COMMAND.split(mention.line)[0])


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_declares(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name], "run: make docs"


@cache
def by_hand() -> dict[str, str]:
    """The hand-written pages and the picture as `make docs` would write them."""
    return dict(RENDER["by_hand"]())


@pytest.mark.parametrize("name", ["../README.md", "top.svg", *figures.TERMINALS, *(path.name for path in WRITTEN)])
def test_a_page_quotes_what_was_measured_and_what_the_code_prints(name: str) -> None:
    assert (DOCS / name).read_text() == by_hand()[name], "run: make docs"


def test_output_that_nothing_prints_cannot_be_quoted() -> None:
    with pytest.raises(ValueError, match="kvctl status"):
        figures.filled("```\n$ kvctl status -w\n✓ healthy\n```\n")
    assert figures.filled("```\n$ kvctl status -w\n$ kvctl top\n```\n") == "```\n$ kvctl status -w\n$ kvctl top\n```\n"
    with pytest.raises(KeyError):
        figures.filled("<!-- bench: nothing -->12<!-- -->")


def test_the_readmes_figures_of_gpus_are_those_of_the_page_on_performance() -> None:
    (claims,) = re.findall(r"From one H200 to another.*?\n\n", BY_HAND["README.md"], re.DOTALL)
    figures = re.findall(r"(?<![\w.])\d[\d.,]*\b", claims)
    assert len(figures) > 5
    for figure in figures:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d.,]*\d)", BY_HAND["docs/performance.md"]), figure


@pytest.mark.parametrize("result", sorted((DOCS / "side_by_side").glob("*.json")), ids=lambda path: path.stem)
def test_the_rows_measured_side_by_side_are_those_of_the_script(result: Path) -> None:
    document = json.loads(result.read_text())
    rows = {row.name: row for row in ROWS}
    assert rows.keys() >= {*document["rows"]}
    for row in (rows[name] for name in document["rows"]):
        if row.work.name in document["works"]:
            assert document["works"][row.work.name]["work"] == row.work.text, "measure it again"
    page = (DOCS / "performance.md").read_text()
    assert all(f"| {rows[name].work.text} |" in page for name in document["rows"])


def test_the_summary_of_the_page_on_performance_has_figures_of_its_tables() -> None:
    text = (DOCS / "performance.md").read_text()
    summary, tables = text.partition("\n## ")[0], text.partition("## Side by side with SGLang")[2]
    measured = [float(ratio) for ratio in re.findall(r"\| (?:≈ )?([\d.]+) x \|", tables)]
    measured += [float(share) for share in re.findall(r"engine ([\d.]+)% slower", tables)]
    table = summary.partition("| --- |")[2]
    figures = re.findall(r"\d+\.\d+", " ".join(line.split("|", 2)[-1] for line in table.splitlines()))
    assert len(figures) > 15
    for figure in figures:
        accuracy = 0.51 / 10 ** len(figure.partition(".")[2])
        assert any(abs(float(figure) - each) <= accuracy for each in measured), figure


def test_no_page_is_left_of_what_is_gone() -> None:
    written = {
        path.relative_to(DOCS).as_posix() for folder in ("commands", "health") for path in (DOCS / folder).iterdir()
    }
    assert written <= PAGES.keys(), "run: make docs"


@pytest.mark.parametrize(
    "page", [*BY_HAND, "CHANGELOG.md", *(f"docs/{name}" for name in PAGES if name.endswith(".md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", path.read_text()):
        assert (path.parent / target).exists(), target


# ---- commands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mention", sorted(set(mentions())), ids=lambda mention: f"{mention.page}: {mention.line}")
def test_a_command_can_be_typed(mention: Mention, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(DOCS)
    words = words_of(mention)
    whole = mention.whole and "…" not in words
    words = [_STANDS_FOR.get(word.strip("[]"), word.strip("[]")) for word in words if word != "…"]
    for word in words:
        # Files that are to be read have to be there; words that look like one do no harm.
        if not word.startswith("-") and "/" not in word:
            (tmp_path / word).touch()
    context, view = parse(words, whole=whole)
    flags = context.find_object(dict) or {}
    named = [name for key in ("columns", "sort_by") for name in str(flags.get(key) or "").split(",") if name]
    named += [name for each in flags.get("filters", ()) for name in re.findall(r"^[\w-]+", each)]
    for name in named:
        assert view is not None, "no view, no columns"
        assert view.column(name.removeprefix("-")) is not None, name


def parse(words: list[str], *, whole: bool) -> tuple[click.Context, View | None]:
    """As the command line would, short of running it; arguments may be missing where it is not `whole`.

    Raises:
        click.UsageError: it would be refused.
    """
    name, *rest = words
    at: click.Command = cli
    context: click.Context | None = None
    while True:
        try:
            context = at.make_context(name, list(rest), parent=context)
        except click.MissingParameter:
            if whole:
                raise
            return click.Context(at), None
        except click.exceptions.Exit:  # --help, --version, and a group alone that has no default
            return click.Context(at), None
        if not isinstance(at, click.Group):
            assert isinstance(at, GlobalOptions)
            return context, ROOMS if at.name == "abort" else at.view  # rooms abort filters the rows of kvctl rooms
        left = [*context._protected_args, *context.args]
        if not left:
            return context, at.shown_view(context) if isinstance(at, KvctlGroup) else None
        found, command, rest = at.resolve_command(context, left)
        assert command is not None
        assert found is not None
        name, at = found, command


def test_what_is_not_printed_is_found() -> None:
    assert is_printed("takes no prefill rooms")
    assert not is_printed("takes none of its rooms at all")
    assert not is_printed("nothing passes --filter")


def test_what_cannot_be_typed_is_found() -> None:
    for line in (
        "kvctl stauts",
        "kvctl rooms show",
        "kvctl rooms --stat Failed",
        "kvctl wait --for ready --timeout x y",
    ):
        with pytest.raises(click.UsageError):
            parse(line.split(), whole=True)


# ---- names ---------------------------------------------------------------------------------------------------------


@cache
def sources() -> str:
    """All Python of ours, the scripts of its benchmarks, and what says how it is built."""
    folders = ("kvctl", "kvctl_agent", "tests", "examples", "benchmarks", "docs", "release")
    python = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    scripts = (ROOT / "benchmarks").glob("*.sh")
    return "\n".join(path.read_text() for path in (*python, *scripts, ROOT / "pyproject.toml", ROOT / "Makefile"))


@cache
def vocabulary() -> frozenset[str]:
    """Every word of them, the names of files, and the variables of configuration keys."""
    files = {Path(place).stem for place in places()}
    return frozenset(re.findall(r"\w+", sources())) | files | {key.environment for key in KEYS}


@cache
def places() -> tuple[str, ...]:
    """Every file and folder of ours, from the root on."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    files = [Path(line) for line in listed.stdout.splitlines()]
    return tuple({f"/{each.as_posix()}" for path in files for each in (path, *path.parents)})


@pytest.mark.parametrize("page", BY_HAND)
def test_names_are_in_the_code(page: str) -> None:
    text = BY_HAND[page]
    failures = set(re.findall(r'"(KV_[A-Z_]+)"', sources()))
    for name in re.findall(r"\bKV_[A-Z]+(?:_[A-Z]+)*\b", text):
        assert name in CODES_BY_NAME or name in failures, name
    for name in re.findall(r"\bkvctl_(?!agent\b|prefill\b)\w+", text):  # a package; a parameter of vLLM's requests
        assert re.sub(r"_(bucket|sum|count)$", "", name) in METRICS_BY_NAME or name in METRICS_BY_NAME, name
    for name in (word for each in code(text) for word in re.findall(r"\b[A-Za-z]\w*_\w+\b", each)):
        assert name in vocabulary() | _OF_VLLM or name.endswith("_"), name


@cache
def texts() -> list[list[str]]:
    """The words of every text in the code; … for a word with a variable."""
    nodes = [
        node
        for folder in ("kvctl", "kvctl_agent", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    found = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
    return [["…" if re.search("…|%[sdr]", word) else word for word in text.split()] for text in found]


def is_printed(quoted: str) -> bool:
    """Whether a text in the code contains a quoted one, most of it as words."""
    words = ["…" if "…" in word else word for word in quoted.split()]

    def agrees(at: int, text: list[str], place: int, same: int) -> bool:
        if at == len(words):
            return same * 5 >= len(words) * 2
        if place == len(text):
            return False
        if words[at] == text[place] != "…":
            return agrees(at + 1, text, place + 1, same + 1)
        varies = text[place] == "…"
        return (varies and (agrees(at + 1, text, place, same) or agrees(at + 1, text, place + 1, same))) or (
            words[at] == "…" and (agrees(at + 1, text, place, same) or agrees(at, text, place + 1, same))
        )

    known = {*words}
    near = [text for text in texts() if len(known.intersection(text)) * 5 >= len(known) * 2]
    return any(agrees(0, text, start, 0) for text in near for start in range(len(text)))


@pytest.mark.parametrize("page", BY_HAND)
def test_quoted_texts_are_in_the_code(page: str) -> None:
    prose = " ".join(_FENCE.sub("", BY_HAND[page]).split())
    headings = {line.lstrip("# ") for line in BY_HAND[page].splitlines() if line.startswith("#")}
    for quoted in re.findall(r'(?<![`\w\[])"([^"`]{10,90})"', prose):
        if len(quoted.split()) > 2 and quoted not in headings | _OF_OTHERS:
            assert is_printed(quoted), quoted
    output = re.findall(r"^kvctl: .*", BY_HAND[page], re.MULTILINE)
    assert all(is_printed(line.removeprefix("kvctl: ")) for line in output)


@pytest.mark.parametrize("page", BY_HAND)
def test_files_and_targets_are_there(page: str) -> None:
    for name in code(BY_HAND[page]):
        if _FILE.fullmatch(name) and name not in _OF_THE_READER:
            assert any(place.endswith(f"/{name.rstrip('/')}") for place in places()), name
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([\w-]+)", BY_HAND[page], re.MULTILINE):
        assert f"\n{target}:" in makefile, target


@pytest.mark.parametrize("page", BY_HAND)
def test_settings_are_keys(page: str) -> None:
    for language, block in _FENCE.findall(BY_HAND[page]):
        if language == "toml":
            assert tomllib.loads(block).keys() <= {key.name for key in KEYS}


def test_the_program_for_engines_runs(tmp_path: Path, socket_dir: Path) -> None:
    blocks = [block for language, block in _FENCE.findall(BY_HAND["docs/engines.md"]) if language == "python"]
    program = "\n".join(blocks)
    command = [sys.executable, "-W", "error", "-c", program]
    run: Any = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
