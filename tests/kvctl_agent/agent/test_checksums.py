"""Checksums between living agents, in host memory and on devices: a part that differs fails its room by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.states import RoomState
from tests.support import host_device
from tests.support.host_device import Begun, HostDevice, at

PATIENCE_S = 60  # for what takes milliseconds on a quiet machine
SIDES = {"host": (), "both": ("prefill", "decode"), "prefill": ("prefill",), "decode": ("decode",)}


@pytest.mark.parametrize(
    ("sides", "path"),
    [("host", "staged"), ("prefill", "slice"), ("decode", "staged"), ("both", "direct"), ("both", "auto")],
)
def test_equal_checksums_on_both_sides(make_fleet: Any, sides: str, path: str) -> None:
    """Two writers of half the heads each, one reader."""
    devices = {role: HostDevice() for role in SIDES[sides]}
    fleet = make_fleet("loopback", path=path, checksum=True, device=devices, chunk_tokens=16).start()
    for number in range(1, 4):
        fleet.run(number, 11, cuts=(4, 9), aux=number)
        fleet.check()
    fleet.settle()
    assert fleet.errors() == []
    for device in devices.values():
        assert len(device.summed) >= 2  # one of each writer


def test_a_decode_rank_compares_whatever_its_own_setting_is(make_fleet: Any) -> None:
    device = HostDevice()
    fleet = make_fleet("loopback", prefill=(1, 1), device={"decode": device})
    fleet.prefill.append(fleet.prefill_agent(0, checksum=True).start())
    fleet.decode.append(fleet.decode_agent(0).start())
    fleet.decode[0].wait_ready(PATIENCE_S)
    fleet.run(7, 8, aux=2)
    fleet.settle()
    assert device.summed
    assert device.prepared_sums == []
    fleet.check()


def failed(fleet: Any, code: str) -> list[str]:
    """Sends a room, which must fail on all ranks with this code; returns the texts."""
    room = fleet.feed(fleet.claim(fleet.receive(fleet.room(7, 8))))
    assert room.wait(PATIENCE_S) == {RoomState.FAILED}, room.errors()
    fleet.settle()
    assert {handle.error["code"] for handle in room.handles} == {code}
    return [error["text"] for error in room.errors()]


@pytest.mark.parametrize("path", ["slice", "staged"])
def test_a_byte_that_changes_in_host_memory_is_found(
    make_fleet: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A byte of the decode rank's pages changes before they are compared."""
    fleet = make_fleet("loopback", path=path, checksum=True).start()
    checksums = fleet.decode[0].parts.arrivals._checksums
    begin = checksums.begin

    def corrupt(share: Any, pages: Any, head: int, lo: int, *others: Any) -> Any:
        block = fleet.decode[0].pool.segments[0].elements(lo, 0)
        block[pages[0], 0, head, 0] ^= 1
        return begin(share, pages, head, lo, *others)

    monkeypatch.setattr(checksums, "begin", corrupt)
    assert "sent with checksum" in failed(fleet, "KV_CHECKSUM_MISMATCH")[0]


def flip(begun: Begun) -> None:
    """Changes one bit of what a copy has written, in the middle of its last block."""
    geometry, blocks = begun.batches[-1]
    _, target, _, first, count = blocks[-1].tolist()
    page = 0 if geometry.dst is None else int(begun.pages[first + count // 2]) * geometry.dst.page
    at(target + page + geometry.width // 2, 1)[0] ^= 0x10


def wrong_page(begun: Begun) -> Begun:
    """The last destination page is its neighbour."""
    pages = begun.pages.copy()
    pages[-1] ^= 1
    return begun._replace(pages=pages)


def zeros(begun: Begun) -> None:
    """The last row of the last block is not copied."""
    geometry, blocks = begun.batches[-1]
    _, target, _, first, count = blocks[-1].tolist()
    page = (count - 1) * geometry.page_bytes
    if geometry.dst is not None:
        page = int(begun.pages[first + count - 1]) * geometry.dst.page
    at(target + page, geometry.width)[:] = 0


WRONG: dict[str, Callable[[Begun], Begun | None]] = {
    "flip": flip,
    "zeros": zeros,
    "wrong page": wrong_page,
}


COPIES = {"gather": (True, False), "scatter": (False, True), "direct": (True, True)}
"""Whether the source and the destination of each copy are paged."""


@pytest.mark.parametrize(
    ("copy", "wrong"),
    # A gather has no destination pages.
    [(copy, wrong) for copy in COPIES for wrong in WRONG if copy != "gather" or "page" not in wrong],
)
def test_a_wrong_copy_on_a_device_is_found_and_named(
    make_fleet: Any, monkeypatch: pytest.MonkeyPatch, copy: str, wrong: str
) -> None:
    devices = {"prefill": HostDevice(), "decode": HostDevice()}
    path = "direct" if copy == "direct" else "staged"
    fleet = make_fleet("loopback", path=path, checksum=True, device=devices).start()
    copy_all = host_device._copy_all
    copied = []

    def tampered(begun: Begun) -> None:
        geometry = begun.batches[0].geometry
        mine = (geometry.src is not None, geometry.dst is not None) == COPIES[copy]
        change = WRONG[wrong] if mine and not copied else None
        if change in (flip, zeros, None):
            copy_all(begun)
        if change is not None:
            copied.append(change)
            if (other := change(begun)) is not None:
                copy_all(other)

    monkeypatch.setattr(host_device, "_copy_all", tampered)
    texts = failed(fleet, "KV_CHECKSUM_MISMATCH")
    assert copied
    assert any("from prefill-" in text and "was sent with checksum" in text for text in texts), texts
    # Only that room is lost.
    fleet.run(8, 8, aux=1)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_checksum_that_a_device_cannot_compute_fails_its_room(make_fleet: Any, side: str) -> None:
    devices = {side: HostDevice()}
    fleet = make_fleet("loopback", path="slice", checksum=True, device=devices).start()
    devices[side].fail_next = 1
    assert "the stand-in device was told to fail" in failed(fleet, "KV_DEVICE")[0]
    fleet.run(8, 8, aux=1)


def test_a_room_that_is_aborted_meanwhile_leaves_nothing(make_fleet: Any) -> None:
    """The device does not end the checksum of either side before the room is gone."""
    device = HostDevice()
    fleet = make_fleet("loopback", path="slice", checksum=True, device={"prefill": device}).start()
    device.slow = 1 << 30
    room = fleet.feed(fleet.claim(fleet.receive(fleet.room(7, 8))))
    room.handles[0].abort("the client has gone")
    assert room.wait(PATIENCE_S) == {RoomState.FAILED}
    device.slow = 1
    for stream in device.streams:
        stream.run_to(None)
    fleet.settle()
    assert np.all([agent.parts.transfers.drained for agent in fleet.prefill])
