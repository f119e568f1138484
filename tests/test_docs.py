"""The reference pages in docs/ say what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = runpy.run_path(str(DOCS / "render.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_declares(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run: make docs"


def test_every_page_is_rendered_or_linked_from_the_readme() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    for path in DOCS.glob("*.md"):
        assert f"docs/{path.name}" in readme, f"README does not mention {path.name}"
