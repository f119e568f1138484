"""Writes a man page for every command into docs/man or another folder; `make man` runs it.

The pages are generated from the help that `kvctl COMMAND --help` prints and are therefore not kept in the repository.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from click_man.core import write_man_pages

from kvctl.cli import cli
from kvctl.commands.options import GlobalOptions
from kvctl.commands.registry import COMMANDS, load
from kvctl_agent.contract import VERSION

# A line of text that begins as roff's requests do, as ".kvctl" does.
_TEXT_LIKE_A_MACRO = re.compile(r"^(?=['.])(?!\.(?:TH|SH|PP|TP|B)\b)", re.MULTILINE)


def write(folder: Path) -> list[Path]:
    """Write kvctl.1 and one page for each command below it; pages of commands that no longer exist are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("kvctl*.1"):
        old.unlink()
    for name in COMMANDS:
        command = load(name)
        assert command is not None
        cli.add_command(command, name)  # otherwise imported when it is called: the pages are made of what is there
    examples = dict(_examples("kvctl", cli))
    with _without_global_options(cli):
        write_man_pages("kvctl", cli, version=VERSION, target_dir=str(folder))
    pages = sorted(folder.glob("kvctl*.1"))
    for page in pages:
        page.write_text(_TEXT_LIKE_A_MACRO.sub(r"\\&", page.read_text()) + examples[page.stem])
    return pages


def _examples(name: str, command: click.Command) -> Iterator[tuple[str, str]]:
    """Yields (page name, sections that click-man does not write) for a command and every command below it."""
    lines = []
    if isinstance(command, GlobalOptions):
        for does, line in command.shown_examples():
            lines += [".PP", _roff(does) + ":", ".PP", ".nf", "    " + _roff(line), ".fi"]
        if command is not cli:
            lines += [".SH GLOBAL OPTIONS", r"See \fBkvctl(1)\fP."]
    yield name, "".join(f"{each}\n" for each in ([".SH EXAMPLES", *lines] if lines else []))
    if isinstance(command, click.Group):
        for child, leaf in command.commands.items():
            yield from _examples(f"{name}-{child}", leaf)


@contextmanager
def _without_global_options(command: click.Command) -> Iterator[None]:
    """Hides the global options in the commands below this one: only the page of kvctl lists them."""
    below = [leaf for leaf in _below(command) if isinstance(leaf, GlobalOptions)]
    options = [option for leaf in below for option in leaf.global_options]
    for option in options:
        option.hidden = True
    try:
        yield
    finally:
        for option in options:
            option.hidden = False


def _below(command: click.Command) -> Iterator[click.Command]:
    for child in command.commands.values() if isinstance(command, click.Group) else ():
        yield child
        yield from _below(child)


def _roff(text: str) -> str:
    return text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq")


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "man"
    pages = write(where)
    print(f"{len(pages)} pages; read them with: man -l {where}/kvctl.1, or MANPATH")
