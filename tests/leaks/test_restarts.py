"""Peers that come and go 20 times: whoever stays holds as much after the last life as after the first few."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.leaks.census import Sizes, grown
from benchmarks.leaks.process import CONFIG
from benchmarks.leaks.side import Side

SIZES = {"prefill": 2, "decode": 1}
LIVES, FIRST_LIVES = 20, 5
TOMBSTONES_S = 3.0
WAIT_S = 60.0

Make = Callable[..., Side]


@pytest.fixture
def make(no_leaks: None, socket_dir: Path, transport: str) -> Iterator[Make]:
    made: list[Side] = []

    def side(role: str, name: str = "") -> Side:
        config: dict[str, Any] = {**CONFIG, "transport": transport, "bootstrap_timeout_s": TOMBSTONES_S}
        made.append(Side(role, SIZES, name or role, f"ipc://{socket_dir}/boot", config))
        made[-1].start()
        return made[-1]

    yield side
    with ExitStack() as stack:
        for each in made:
            stack.callback(each.close)


def live(prefill: Side, decode: Side, room: int) -> None:
    """One room that succeeds, and one that is in flight from here on."""
    prefill.ready(WAIT_S)
    decode.ready(WAIT_S)
    for number in (room, room + 1):
        decode.receive(number)
        prefill.claim(number)
    prefill.feed(room)
    for side in (prefill, decode):
        ends = side.wait(room, WAIT_S)
        assert {end["state"] for end in ends} == {"SUCCESS"}, (side.role, ends)


def outlive(stays: Side, room: int) -> None:
    """The room that was in flight has ended here, too: its peer said that it goes."""
    for end in stays.wait(room + 1, WAIT_S):
        assert end["released"]
        assert end["error"]["code"] in ("KV_PEER_LOST", "ABORTED"), end


def at_rest(stays: Side, before: Sizes | None = None) -> tuple[Sizes, list[str]]:
    """What the side holds when tombstones are over, and what of it is more than before."""
    time.sleep(TOMBSTONES_S + 0.3)
    deadline = time.monotonic() + WAIT_S
    while True:
        sizes = {
            **stays.census(),
            "threads": threading.active_count(),
            "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        }
        lines = grown(before or sizes, sizes)
        if not lines or time.monotonic() > deadline:
            return sizes, lines
        time.sleep(0.05)


@pytest.mark.parametrize("transport", ["nixl"])
def test_decode_ranks_that_come_and_go(make: Make) -> None:
    prefill, before = make("prefill"), None
    for life in range(LIVES):
        decode = make("decode")
        live(prefill, decode, 10 * life)
        decode.close()
        outlive(prefill, 10 * life)
        if life == FIRST_LIVES:
            before, _ = at_rest(prefill)
    assert at_rest(prefill, before)[1] == []
    assert prefill.errors() == []


@pytest.mark.parametrize(
    ("transport", "names"), [pytest.param("loopback", "same", marks=pytest.mark.sample), ("nixl", "new")]
)
def test_prefill_instances_that_come_and_go(make: Make, names: str) -> None:
    """Under the same names, as a restart does, or new ones, as pods have."""
    decode, before = make("decode"), None
    for life in range(LIVES // 2):  # two ranks each
        prefill = make("prefill", f"prefill-{life}" if names == "new" else "prefill")
        live(prefill, decode, 10 * life)
        prefill.close()
        outlive(decode, 10 * life)
        if life == FIRST_LIVES:
            before, _ = at_rest(decode)
    assert at_rest(decode, before)[1] == []
    assert decode.errors() == []
