"""The result of a bench as one self-contained HTML page: its tables as on a terminal, and how it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvctl.render.report import Block, Grid
from kvctl.render.sanitize import printable_lines
from kvctl.render.terminal import render

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>{command}</title>
</head>
<body>
<h1><code>{command}</code></h1>
<p>{started_at}</p>
<pre>{tables}</pre>
<dl>{facts}</dl>
</body>
</html>
"""


def page(blocks: Sequence[Block], env: Mapping[str, Any], command: str, started_at: str) -> str:
    """Returns the page, to be written as UTF-8; all texts, some of which are of other machines, are escaped.

    Args:
        blocks: the terminal's output, whose tables have all their columns here.
        env: `env` of the saved result.
        command: command line that was run.
        started_at: start time as text, such as `2026-11-20 12:49:42 UTC`.
    """
    columns = [each.view.columns if isinstance(each, Grid) else () for each in blocks]
    facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>\n" for name, value in env.items() if value)
    return _PAGE.format(
        command=_text(command),
        started_at=_text(started_at),
        tables=_text(render(blocks, columns, None, colour=False)),
        facts=facts,
    )


def _text(value: object) -> str:
    return escape(printable_lines(", ".join(map(str, value)) if isinstance(value, list) else str(value)))
