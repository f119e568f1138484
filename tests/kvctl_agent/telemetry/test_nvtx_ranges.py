"""NVTX ranges: begun and ended for rooms, parts and scatters where they are asked for."""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any

import pytest

from kvctl_agent.errors import ConfigError


class Package(ModuleType):
    """The package `nvtx`, which notes its ranges; without a profiler all of them have the same handle."""

    def __init__(self) -> None:
        super().__init__("nvtx")
        self.begun: list[str] = []
        self.ended = 0

    def start_range(self, message: str) -> None:
        self.begun.append(message)

    def end_range(self, handle: None) -> None:
        self.ended += 1

    def wait(self) -> None:
        """Waits until all ranges have ended; a room may be over a moment before they are."""
        deadline = time.monotonic() + 60
        while self.ended < len(self.begun):
            assert time.monotonic() < deadline, f"{self.ended} of {len(self.begun)} ended: {self.begun}"
            time.sleep(0.002)
        assert self.ended == len(self.begun)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    monkeypatch.setitem(sys.modules, "torch.cuda.nvtx", None)
    monkeypatch.setitem(sys.modules, "nvtx", package := Package())
    return package


def test_rooms_parts_and_scatters_have_ranges(make_fleet: Any, package: Package) -> None:
    fleet = make_fleet("loopback", prefill=(1, 1), decode=(1, 1), nvtx=True).start()
    fleet.expect(fleet.run(7, pages=3))
    fleet.check()
    fleet.settle()
    package.wait()
    begun = package.begun
    assert begun.count("kvctl") == 2  # a probe of each agent
    assert {"kv prefill room 7", "kv decode room 7"} <= set(begun)
    assert any(text.startswith("kv staged ") and text.endswith(" of room 7 to decode-0") for text in begun)
    assert any(text.startswith("kv scatter of ") for text in begun)


def test_a_room_that_is_aborted_ends_its_ranges(make_fleet: Any, package: Package) -> None:
    fleet = make_fleet("loopback", prefill=(1, 1), decode=(1, 1), nvtx=True).start()
    room = fleet.receive(fleet.room(7, pages=3))
    next(iter(room.receives.values())).abort("enough")
    room.wait()
    fleet.settle()
    package.wait()
    assert "kv decode room 7" in package.begun


def test_without_the_key_nothing_is_marked(make_fleet: Any, package: Package) -> None:
    fleet = make_fleet("loopback", prefill=(1, 1), decode=(1, 1)).start()
    fleet.expect(fleet.run(7, pages=3))
    fleet.settle()
    assert package.begun == []


def test_a_host_that_cannot_mark_ranges_says_what_to_install(
    make_fleet: Any, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(ConfigError, match="nvtx = true needs torch with CUDA, or the package nvtx: pip install nvtx"):
        make_fleet("loopback", prefill=(1, 1), decode=(1, 1), nvtx=True).start()
