"""Writes a man page for every command into docs/man (or the folder that is named); `make man` runs it.

They are made from the same help that `kvctl COMMAND --help` prints, so they are not kept in the repository.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from click_man.core import write_man_pages

from kvctl.cli import cli
from kvctl.commands.registry import COMMANDS, load
from kvctl_agent.contract.version import VERSION

# A line of text that begins as roff's requests do, as ".kvctl.toml" does.
_TEXT_LIKE_A_MACRO = re.compile(r"^(?=['.])(?!\.(?:TH|SH|PP|TP|B)\b)", re.MULTILINE)


def write(folder: Path) -> list[Path]:
    """The pages, kvctl.1 and one for each command below it; what was there of commands that are gone is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("kvctl*.1"):
        old.unlink()
    for name in COMMANDS:
        command = load(name)
        assert command is not None
        cli.add_command(command, name)  # otherwise imported when it is called: the pages are made of what is there
    write_man_pages("kvctl", cli, version=VERSION, target_dir=str(folder))
    pages = sorted(folder.glob("kvctl*.1"))
    for page in pages:
        page.write_text(_TEXT_LIKE_A_MACRO.sub(r"\\&", page.read_text()))
    return pages


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "man"
    pages = write(where)
    print(f"{len(pages)} pages; read them with: man -l {where}/kvctl.1, or MANPATH")
