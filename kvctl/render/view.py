"""The declaration of a view: columns with their path into the data, kind, and width class; default order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvctl.render.kinds import Kind

Row = Mapping[str, Any]


class Width(Enum):
    """Where a column has room: always, on terminals wide enough, or only with `-o wide` (and in TSV and CSV)."""

    CORE = "core"
    NORMAL = "normal"
    WIDE = "wide"


def folded(name: str) -> str:
    """A name of a column as it is compared."""
    return "_".join(name.casefold().replace("-", " ").split())


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One column.

    Attributes:
        name: its first name in `--columns`, `--sort-by` and `--filter`, which take the others of `spellings`, too.
        path: keys into the row joined by dots (`coverage.landed`), or a function of the row.
        header: of tables; the name in capitals unless given.
        styles: value -> terminal style, for values that deserve attention.
        fixed: width in streams of lines, whose rows come one by one; 0 takes what is left.
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
        """Name where raw values are printed: ends in the unit."""
        suffix = self.kind.value.suffix
        return self.name if self.name.endswith(suffix) or self.name == suffix[1:] else self.name + suffix

    @property
    def spellings(self) -> frozenset[str]:
        """What the column may be called: its name, its header and its path in JSON, each also with the unit."""
        names = {folded(name) for name in (self.name, self.title, self.path) if isinstance(name, str) and name}
        suffix = self.kind.value.suffix
        return frozenset(names | {self.machine} | {name if name.endswith(suffix) else name + suffix for name in names})

    def value(self, row: Row) -> Any:
        """The raw value, None where the row has none."""
        if callable(self.path):
            return self.path(row)
        value: Any = row
        for key in (self.path or self.machine).split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value

    def raw(self, row: Row) -> str:
        """The value as TSV and CSV print it."""
        return self.kind.value.raw(self.value(row))

    def human(self, row: Row) -> str:
        return self.kind.value.human(self.value(row))


@dataclass(frozen=True, slots=True)
class View:
    """One kind of data.

    Attributes:
        name: of the JSON schema, `kvctl.<name>/1`.
        sort: column names, `-` in front for descending.
        empty: what a terminal says when there is nothing to show.
    """

    name: str
    columns: tuple[Column, ...]
    sort: tuple[str, ...] = ()
    empty: str = "nothing to show"

    @property
    def schema(self) -> str:
        return f"kvctl.{self.name}/1"

    def column(self, name: str) -> Column | None:
        """The column of that name, as any output spells it, in any case; `WAITS FOR` may be typed as `waits-for`."""
        wanted = folded(name)
        return next((column for column in self.columns if wanted in column.spellings), None)

    def names(self) -> list[str]:
        return [column.name for column in self.columns]
