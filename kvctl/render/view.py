"""Declares views: columns with their path into the data, kind and width class, and the default order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvctl.render.kinds import Kind

Row = Mapping[str, Any]


class Width(Enum):
    """When a column is shown: always, if the terminal is wide enough, or only with `-o wide` (and in TSV and CSV)."""

    CORE = "core"
    NORMAL = "normal"
    WIDE = "wide"


def folded(name: str) -> str:
    """Normalises a column name for comparison."""
    return "_".join(name.casefold().replace("-", " ").split())


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One column.

    Attributes:
        name: name in `--columns`, `--sort-by` and `--filter`, which also accept the other `spellings`.
        path: keys into the row joined by dots (`coverage.landed`), or a function of the row.
        kind: kind of the values.
        width: when the column is shown.
        header: table header; the name in capitals by default.
        styles: terminal style by value.
        fixed: width in streams of lines; 0 for no padding.
    """

    name: str
    path: str | Callable[[Row], Any] = ""
    kind: Kind = Kind.TEXT
    width: Width = Width.CORE
    header: str = ""
    styles: Mapping[str, str] | None = None
    fixed: int = 0

    @property
    def title(self) -> str:
        return self.header or self.name.replace("_", " ").upper()

    @property
    def machine(self) -> str:
        """Name in machine-readable output; ends in the unit."""
        suffix = self.kind.value.suffix
        return self.name if self.name.endswith(suffix) or self.name == suffix[1:] else self.name + suffix

    @property
    def spellings(self) -> frozenset[str]:
        """Accepted names: name, header and JSON path, each with and without the unit."""
        names = {folded(name) for name in (self.name, self.title, self.path) if isinstance(name, str) and name}
        suffix = self.kind.value.suffix
        return frozenset(names | {self.machine} | {name if name.endswith(suffix) else name + suffix for name in names})

    def value(self, row: Row) -> Any:
        """Returns the raw value, or None."""
        if callable(self.path):
            return self.path(row)
        value: Any = row
        for key in (self.path or self.machine).split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value

    def raw(self, row: Row) -> str:
        """Formats the value for TSV and CSV."""
        return self.kind.value.raw(self.value(row))

    def human(self, row: Row) -> str:
        return self.kind.value.human(self.value(row))


@dataclass(frozen=True, slots=True)
class View:
    """Columns of one kind of data.

    Attributes:
        name: name of the JSON schema, `kvctl.<name>/1`.
        columns: the columns.
        sort: column names, with a leading `-` for descending order.
        empty: text for a terminal if there are no rows.
    """

    name: str
    columns: tuple[Column, ...]
    sort: tuple[str, ...] = ()
    empty: str = "nothing to show"

    @property
    def schema(self) -> str:
        return f"kvctl.{self.name}/1"

    def column(self, name: str) -> Column | None:
        """Returns the column with this name in any spelling and case; `waits-for` also matches `WAITS FOR`."""
        wanted = folded(name)
        return next((column for column in self.columns if wanted in column.spellings), None)

    def names(self) -> list[str]:
        return [column.name for column in self.columns]
