"""Every column that a command prints has a description."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.render.glossary import entries, tables
from kvctl.render.view import View
from tests.support.cli_commands import commands

VIEWS = {
    each.name: each
    for command in commands().values()
    if (view := getattr(command, "view", None)) is not None
    for _, each in tables(view)
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_every_column_has_a_meaning(view: View) -> None:
    for header, name, _, text in entries(view):
        assert text.endswith("."), (header, name)


def test_no_column_reads_what_another_one_reads() -> None:
    for view in VIEWS.values():
        paths = [column.path or column.machine for column in view.columns if not callable(column.path)]
        assert len(paths) == len(set(paths)), view.name


def test_help_prints_it_with_names_and_for_groups(kvctl: Any) -> None:
    for words in (("rooms",), ("rooms", "ls")):
        done = kvctl("help", "columns", *words)
        assert done.code == 0
        assert "\n  FOR " in done.out
        assert "(state_age_ns)" in done.out
    assert "\nWith -w:\n  TIME " in kvctl("help", "columns", "status").out
    done = kvctl("help", "columns", "completion")
    assert (done.code, done.out) == (2, "")
    assert "prints no table" in done.err
