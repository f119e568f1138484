"""Every declared view is consistent and reads fields that the contract declares."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import kvctl.lab.bench
import kvctl.render
from kvctl.render.bars import STAGE_GLYPHS
from kvctl.render.events import EVENTS
from kvctl.render.hosts import HOSTS
from kvctl.render.layers import LAYERS
from kvctl.render.peers import PEERS
from kvctl.render.rooms import CAUSES, FAILED, HISTORY, ROOMS
from kvctl.render.selection import select
from kvctl.render.staging import STAGING
from kvctl.render.status import GROUPS, STATUS
from kvctl.render.view import View, Width
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


@pytest.mark.parametrize(
    ("view", "source"),
    [(STATUS, "status"), (ROOMS, "room_row"), (STAGING, "staging")],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_column_finds_its_data(canned: Any, view: View, source: str) -> None:
    """A wrong path would always show `-`."""
    found_by_us = {"health": [], "instance": "decode"}  # added by kvctl
    rows = [{**found_by_us, **getattr(canned, source)(name)} for name in canned.FLEET]
    filled = {column.name for column in view.columns if any(column.value(row) is not None for row in rows)}
    unset = {"latency", "failure", "finished_at", "waiting_for", "integration", "ended_age"}
    assert {column.name for column in view.columns} - filled <= unset


@pytest.mark.parametrize(
    ("view", "source"),
    [(PEERS, "peers"), (EVENTS, "events"), (LAYERS, "layers")],
    ids=lambda v: getattr(v, "name", None),
)
def test_every_column_of_lists_finds_its_data(canned: Any, view: View, source: str) -> None:
    found_by_us = {"lane_evidence": []}  # added by kvctl
    rows = [{**found_by_us, **row} for name in canned.FLEET for row in getattr(canned, source)(name)]
    filled = {column.name for column in view.columns if any(column.value(row) is not None for row in rows)}
    unset = {"last_error", "watermark_sent"}
    assert {column.name for column in view.columns} - filled <= unset


@pytest.mark.parametrize(
    ("view", "kept", "first_hidden"),
    [
        (STATUS, "agent active done failed p99 health", "uptime transport peers rank ring p50"),
        (GROUPS, "group up active failed health", "ring p99 p50"),
        (HOSTS, "host up silent failed health", "clock_error clock_offset rtt"),
        (PEERS, "agent peer state errors differences last_error", "control_queue lane rtt"),
        (ROOMS, "room agent state age failure", "paths latency parked tokens bytes progress"),
        (HISTORY, "room agent state ago age failure", "paths tokens progress bytes latency"),
        (FAILED, "room ago rank code text", "waits_for after"),
        (CAUSES, "rooms code last_ago room cause", "ranks peers first_ago"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_narrow_terminal_keeps_what_an_operator_needs(view: View, kept: str, first_hidden: str) -> None:
    always = {column.name for column in view.columns if column.width is Width.CORE}
    assert always >= set(kept.split())
    hidden = [column.name for column in reversed(view.columns) if column.width is Width.NORMAL]
    assert hidden[: len(first_hidden.split())] == first_hidden.split()


def test_every_stage_has_a_glyph_of_its_own() -> None:
    assert tuple(STAGE_GLYPHS) == STAGES[1:]
    assert len({glyph for glyph, _ in STAGE_GLYPHS.values()}) == len(STAGE_GLYPHS)
