"""Appearance of every view at three sizes, in four states; `UPDATE_GOLDEN=1` rewrites the files, to be reviewed.

Every screen must fit. Compared with files are every view once with its colours and once in the smallest size, and the
views that change most with the state of the fleet.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvctl.tui import VIEWS
from kvctl.tui.snapshot import svg, text
from tests.kvctl.tui.screens import beat

HERE = Path(__file__).parent
SIZES = ((80, 24), (120, 40), (200, 60))
PAST = 30  # seconds of curves
COMPARED = {
    ("normal", 80): VIEWS,
    ("normal", 200): ("overview", "rooms"),
    ("empty", 80): ("overview", "rooms", "peers"),
    ("disconnected", 80): ("overview", "rooms", "peers"),
    ("large", 200): ("overview", "staging", "peers"),
}


def check(path: Path, screen: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(screen, encoding="utf-8")
    assert screen == path.read_text(encoding="utf-8")


def fits(screen: str, size: tuple[int, int]) -> None:
    lines = screen.splitlines()
    assert len(lines) == size[1]
    assert max(map(len, lines)) <= size[0]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("state", ["normal", "empty", "disconnected", "large"])
def test_views(state: str, size: tuple[int, int], specimen, large, ill, build, drive) -> None:
    shown = large if state == "large" else specimen
    if state == "empty":
        shown.prefill, shown.decode = [], []

    async def script(pilot: Any) -> None:
        for _ in range(PAST):
            await beat(pilot)
        for number, view in enumerate(VIEWS, 1):
            await pilot.press(str(number))
            await pilot.pause()
            if state == "disconnected" and number == 1:
                for other in range(2, len(VIEWS) + 1):
                    await pilot.press(str(other))
                    await pilot.pause()
                await pilot.press("1")
                shown.silent = {"decode-1", "prefill-0", "prefill-3", "decode-2"}
                shown.gone = set(shown.names) - shown.silent
                for _ in range(3):
                    await beat(pilot)
            screen = text(pilot.app)
            fits(screen, size)
            if view in COMPARED.get((state, size[0]), ()):
                check(HERE / "golden" / f"{view}-{state}-{size[0]}x{size[1]}.txt", screen)
            if state == "normal" and size == (120, 40):
                check(HERE / "golden" / f"{view}.svg", svg(pilot.app))

    drive(build(shown, findings=ill if state in {"normal", "large"} else ()), script, size)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_a_room(size: tuple[int, int], specimen, build, drive) -> None:
    async def script(pilot: Any) -> None:
        await pilot.press("enter")
        await pilot.pause()
        screen = text(pilot.app)
        fits(screen, size)
        if size == (80, 24):
            check(HERE / "golden" / "room-80x24.txt", screen)
        if size == (120, 40):
            check(HERE / "golden" / "room.svg", svg(pilot.app))

    drive(build(specimen, "rooms"), script, size)


def test_dialogs(specimen, build, drive) -> None:
    dialogs = {"help": ("question_mark",), "sort": ("s",), "filter": ("slash", "a")}

    async def script(pilot: Any) -> None:
        for name, keys in dialogs.items():
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
            screen = text(pilot.app)
            fits(screen, (80, 24))
            check(HERE / "golden" / f"dialog-{name}.txt", screen)
            await pilot.press("escape")
            await pilot.pause()

    drive(build(specimen, "rooms"), script, (80, 24))


def test_pictures_fetch_nothing_and_are_small() -> None:
    for path in (*(HERE / "golden").glob("*.svg"), HERE.parents[2] / "docs" / "top.svg"):
        drawn = path.read_text(encoding="utf-8")
        assert "url(" not in drawn.replace("url(#", "")
        assert "<script" not in drawn
        assert len(drawn) < 100_000
