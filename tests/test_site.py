"""`make site`: the strict build, and that nothing is fetched from elsewhere when the site is viewed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What a browser fetches by itself; links that a reader follows may lead anywhere.
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^"'>\s]+|@import\s+[^;]+//|url\(["']?(?:https?:)?//"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert (built.returncode, built.stdout + built.stderr) == (0, ""), "run: make site"
    return directory


def test_every_page_is_on_the_site_and_found_by_the_search(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    for page in pages:
        assert (site / page.with_suffix(".html")).exists(), page
        assert page.with_suffix(".html").as_posix() in found, page
    assert "KV_PEER_LOST" in " ".join(entry["text"] for entry in index["docs"])
    assert (site / "changelog.html").exists()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for path in (*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")):
        assert not _FETCHED.findall(path.read_text()), path
    assert _FETCHED.search('<link rel="stylesheet" href="https://fonts.example/css">')
    assert _FETCHED.search("<script src=//cdn.example/x.js>")


def test_links_that_leave_the_pages_are_paths(site: Path) -> None:
    for path in site.rglob("*.html"):
        below = len(path.relative_to(site).parts) - 1
        for target in re.findall(r'href="((?:\.\./)+)', path.read_text()):
            assert target.count("../") <= below, (path, target)
    assert "<code>examples/cost_router.py</code>" in (site / "routers.html").read_text()
