"""Formats rows for the clipboard and writes tables to files, in the CLI's data formats with unformatted numbers."""

from __future__ import annotations

import time
from pathlib import Path

from kvctl.render.data import comma_separated, json_document, tsv
from kvctl.render.view import Row
from kvctl.tui.table_specs import Listing

SUFFIXES = (".tsv", ".csv", ".json")


def row_with_header(listing: Listing, row: Row) -> str:
    """Formats one row as TSV, with a header line."""
    return tsv(listing.spec.view.columns, [row])


def default_name(listing: Listing, at_ns: int) -> str:
    """Returns a file name with the table's name and the local time, such as `kvctl-rooms-20261120-190412.tsv`."""
    moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(at_ns // 1_000_000_000))
    return f"kvctl-{listing.spec.view.name}-{moment}.tsv"


def check_name(name: str) -> str:
    """Returns an error message if a file of this name cannot be created or has an unknown suffix, otherwise ""."""
    path = Path(name).expanduser()
    if not name.strip():
        return "enter a name"
    if path.suffix not in SUFFIXES:
        return f"the suffix determines the format: {', '.join(SUFFIXES)}"
    if path.exists():
        return f"{path} exists already: choose another name"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    return ""


def write(name: str, listing: Listing, at_ns: int) -> Path:
    """Writes the filtered and sorted rows to a new file in the format of its suffix, and returns its path.

    Raises:
        OSError: the file exists or cannot be written; a partial file is removed.
    """
    path = Path(name).expanduser()
    columns = listing.spec.view.columns
    match path.suffix:
        case ".json":
            text = json_document(listing.spec.view, list(listing.rows), (), at_ns, indent=True)
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
