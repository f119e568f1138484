"""The reference pages in docs/ say what the code says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from kvctl.commands.registry import COMMANDS

DOCS = Path(__file__).parents[1] / "docs"
PAGES: dict[str, str] = runpy.run_path(str(DOCS / "render.py"))["pages"]()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_declares(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name], "run: make docs"


def test_no_page_is_left_of_what_is_gone() -> None:
    written = {
        path.relative_to(DOCS).as_posix() for folder in ("commands", "health") for path in (DOCS / folder).iterdir()
    }
    assert written <= PAGES.keys(), "run: make docs"


def test_every_page_is_rendered_or_linked_from_the_readme() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    for path in DOCS.glob("*.md"):
        assert f"docs/{path.name}" in readme, f"README does not mention {path.name}"


RELIABILITY = (DOCS / "reliability.md").read_text()


def test_what_the_page_on_reliability_names_is_there() -> None:
    root = DOCS.parent
    tests = {path.name for path in (root / "tests").rglob("test_*.py")}
    for name in re.findall(r"`((?:benchmarks|tests)/[\w./]+)", RELIABILITY):
        assert (root / name).exists(), name
    for name in re.findall(r"`(test_\w+\.py)", RELIABILITY):
        assert name in tests, name
    targets = (root / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)", RELIABILITY):
        assert f"\n{target}:" in targets, target
    for command in re.findall(r"`kvctl (\w+)", RELIABILITY):
        assert command in COMMANDS, command
