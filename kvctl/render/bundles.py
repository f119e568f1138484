"""View of the contents of a debug bundle."""

from __future__ import annotations

from kvctl.render.kinds import Kind
from kvctl.render.view import Column, View, Width

BUNDLE = View(
    "bundle",
    (
        Column("file"),
        Column("size", path="bytes", kind=Kind.BYTES),
        Column("what"),
        Column("sha256", width=Width.WIDE),
    ),
    empty="an empty bundle",
)
