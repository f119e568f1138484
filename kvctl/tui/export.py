"""Tables out of the TUI: a row for the clipboard, all rows for a file, with raw numbers as the CLI's data formats."""

from __future__ import annotations

import time
from pathlib import Path

from kvctl.render.data import comma_separated, json_document, tsv
from kvctl.render.view import Row
from kvctl.tui.table_specs import Listing

SUFFIXES = (".tsv", ".csv", ".json")


def line(listing: Listing, row: Row) -> str:
    """One row under its header."""
    return tsv(listing.sheet.view.columns, [row])


def default_name(listing: Listing, at_ns: int) -> str:
    """`kvctl-rooms-20261120-190412.tsv`."""
    moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(at_ns // 1_000_000_000))
    return f"kvctl-{listing.sheet.view.name}-{moment}.tsv"


def wrong(name: str) -> str:
    """Why a file of that name cannot be made; "" where it can, as far as one sees."""
    path = Path(name).expanduser()
    if not name.strip():
        return "a name is needed"
    if path.suffix not in SUFFIXES:
        return f"the name says the format: {', '.join(SUFFIXES)}"
    if path.exists():
        return f"{path} is there already: choose another name"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    return ""


def write(name: str, listing: Listing, at_ns: int) -> Path:
    """Writes the rows as they are on screen: filtered and in order.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    path = Path(name).expanduser()
    columns = listing.sheet.view.columns
    match path.suffix:
        case ".json":
            text = json_document(listing.sheet.view, list(listing.rows), (), at_ns, indent=True)
        case ".csv":
            text = comma_separated(columns, listing.rows)
        case _:
            text = tsv(columns, listing.rows)
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
        except OSError:
            path.unlink(missing_ok=True)
            raise
    return path
