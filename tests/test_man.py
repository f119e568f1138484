"""`make man`: a page for every command, which man reads without a complaint."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvctl.commands.registry import COMMANDS, load

SCRIPT = Path(__file__).parents[1] / "docs" / "man.py"


def paths(name: str, command: click.Command) -> Iterator[str]:
    yield name
    for child, leaf in getattr(command, "commands", {}).items():
        yield from paths(f"{name}-{child}", leaf)


def test_every_command_has_a_page_that_man_reads(tmp_path: Path) -> None:
    pytest.importorskip("click_man", reason="click-man is not installed")
    pages = runpy.run_path(str(SCRIPT))["write"](tmp_path)
    loaded = {name: load(name) for name in COMMANDS}
    expected = {path for name, command in loaded.items() if command for path in paths(f"kvctl-{name}", command)}
    assert {page.stem for page in pages} == {"kvctl", *expected}
    if shutil.which("man") is None or shutil.which("groff") is None:
        pytest.skip("man is not installed: the pages were written, and not read")
    done = subprocess.run(
        ["man", "--warnings=w", "-E", "UTF-8", "-l", *map(str, pages)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MANWIDTH": "100"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "kvctl-rooms-show - Show one room" in " ".join(done.stdout.split())
