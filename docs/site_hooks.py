"""Hooks of MkDocs for `make site`: what the pages of docs/ need beside what they are on a code host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Links to files that are no pages of the site. Anything else below the root is shown as its path.
_OUTSIDE = re.compile(r"\[([^]]*)\]\(\.\./([^)#\s]+)([^)\s]*)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replaces folders in the navigation by their pages."""
    config.nav = _expanded(config.nav or [])
    return config


def _expanded(items: list[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if isinstance(item, str) and item.endswith("/"):
            pages = sorted(path.name for path in (ROOT / "docs" / item).glob("*.md"))
            found += [{name.removesuffix(".md"): f"{item}{name}"} for name in pages]
        elif isinstance(item, dict):
            ((title, below),) = item.items()
            found.append({title: _expanded(below) if isinstance(below, list) else below})
        else:
            found.append(item)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the changelog, which is outside docs/."""
    text = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **given: Any) -> str:
    """Replaces links that leave docs/: the site may be read where the rest of the checkout is not."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]  # one screen
    if page.file.src_uri.count("/"):
        return markdown

    def shown(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        if path == "CHANGELOG.md":
            return f"[{text}](changelog.md{anchor})"
        name = f"`{path}`"
        return name if text.strip("`") == path else f"{text} ({name} in a checkout)"

    return _OUTSIDE.sub(shown, markdown)
