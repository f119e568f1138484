"""Every column that a command prints has a description."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.render.glossary import COMMON, entries, tables
from kvctl.render.layers import _STAGES
from kvctl.render.view import View
from kvctl_agent.contract.states import STAGES
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


def test_a_common_meaning_is_used_by_several_views() -> None:
    users = {name: [view.name for view in VIEWS.values() if names_without_help(view, name)] for name in COMMON}
    assert {name: views for name, views in users.items() if len(views) < 2} == {}
    assert _STAGES.keys() == set(STAGES)


def names_without_help(view: View, name: str) -> bool:
    column = next((column for column in view.columns if column.name == name), None)
    return column is not None and not column.help


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
