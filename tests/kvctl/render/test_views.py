"""Every declared view is consistent and reads fields that the contract declares."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import kvctl.lab.bench
import kvctl.render
from kvctl.render.bars import STAGE_GLYPHS
from kvctl.render.selection import select
from kvctl.render.view import View
from kvctl_agent.contract.states import STAGES


def all_views() -> Iterator[View]:
    for package in (kvctl.render, kvctl.lab.bench):
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(info.name)).values():
                if isinstance(value, View):
                    yield value


VIEWS = sorted({view.name: view for view in all_views()}.values(), key=lambda view: view.name)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_names_are_unique_and_sorts_exist(view: View) -> None:
    spellings = [spelling for column in view.columns for spelling in column.spellings]
    assert sorted(spellings) == sorted(set(spellings))
    assert all(view.column(name.removeprefix("-")) for name in view.sort)
    assert view.schema == f"kvctl.{view.name}/1"


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_what_is_printed_may_be_typed(view: View) -> None:
    for column in view.columns:
        json_name = [column.path] if isinstance(column.path, str) and column.path else []
        for name in (column.title, column.title.lower(), column.name, column.machine, *json_name):
            selection = select(view, name, f"-{name}", [f"{name} = -"])
            assert selection.columns == (column,), name
            assert [(column, True)] == [*selection.order]
            assert selection.filters[0].column is column


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_raw_names_end_in_their_unit(view: View) -> None:
    for column in view.columns:
        suffix = column.kind.value.suffix
        assert column.machine.endswith(suffix) or column.machine == suffix[1:]


def test_every_stage_has_a_glyph_of_its_own() -> None:
    assert tuple(STAGE_GLYPHS) == STAGES[1:]
    assert len({glyph for glyph, _ in STAGE_GLYPHS.values()}) == len(STAGE_GLYPHS)
