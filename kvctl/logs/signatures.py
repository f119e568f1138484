"""The table of known failures, signatures.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kvctl.health.finding import Severity


@dataclass(frozen=True, slots=True)
class Signature:
    """One known failure.

    Attributes:
        code: its name.
        engine: program that writes the line.
        pattern: what the line contains; matches within one line.
        literals: texts, one of which a line must contain to match.
        cause: most likely cause.
        next: next step.
        report: URL of a public report, or the source file of the message.
    """

    code: str
    engine: str
    severity: Severity
    pattern: re.Pattern[bytes]
    literals: tuple[bytes, ...]
    cause: str
    next: str
    report: str


_TOKEN = re.compile(
    r"\\(?P<class>\w)|\\(?P<escaped>\W)|\[[^]]*\]|(?P<repeat>[?*+]|\{[^}]*\})|(?P<special>[()|.])|(?P<text>.)"
)


def literals(pattern: str) -> tuple[bytes, ...]:
    """Returns the longest literal outside of groups of each alternative of a pattern, b"" if one has none."""
    found, depth = [[""]], 0
    for token in _TOKEN.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        plain = token["text"] or token["escaped"]
        if token[0] == "|" and not depth:
            found.append([""])
        elif plain and not depth:
            found[-1][-1] += plain
        elif not depth or token[0] == "(":
            if token["repeat"] and token[0] != "+":
                found[-1][-1] = found[-1][-1][:-1]
            found[-1].append("")
    return tuple(max(runs, key=len).encode() for runs in found)


@cache
def signatures() -> tuple[Signature, ...]:
    """Returns all known failures, in the order of the table."""
    rows = tomllib.loads(files(__package__).joinpath("signatures.toml").read_text())["signature"]
    return tuple(
        Signature(
            **{
                **row,
                "severity": Severity[row["severity"].upper()],
                "pattern": re.compile(row["pattern"].encode()),
                "literals": literals(row["pattern"]),
            }
        )
        for row in rows
    )
