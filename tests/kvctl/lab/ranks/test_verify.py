"""Verification of a decode rank's pool: right content passes; lost, misplaced, damaged and stray bytes do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvctl.lab.ranks import content as of_content
from kvctl.lab.ranks import content_store
from kvctl.lab.ranks.content import Content, allocate_pool
from kvctl.lab.ranks.content_store import PlaneView
from kvctl.lab.ranks.messages import Room, Start
from kvctl.lab.ranks.pattern import POISON, Bytes
from kvctl.lab.ranks.plan import PlannedGroup, PlannedShape, PlannedState
from kvctl.lab.ranks.request import KV_LAYOUTS, Sizes
from kvctl.lab.ranks.verify import verify
from tests.support.host_device import HostDevice
from tests.support.synthetic_rank import SHAPE, start_command

PAGE = 4

WHERE = {"device": -1}


@pytest.fixture(autouse=True, params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with a pool in host memory and with one on a device."""
    if request.param == "device":
        monkeypatch.setattr(of_content, "open_device", lambda index: HostDevice())
        monkeypatch.setitem(WHERE, "device", 0)


CONV: PlannedState = {
    "name": "conv",
    "layers": [0, 0, 1],
    "rows": 3,
    "heads": 4,
    "head_bytes": 12,
    "kind": "rows",
    "window": 0,
}
WINDOW: PlannedState = {**CONV, "name": "swa", "layers": [1, 2], "rows": 2, "kind": "window", "window": 5}
NEAR: PlannedGroup = {
    "name": "near",
    "layers": [0, 2],
    "page_size": 2,
    "window": 5,
    "kv_heads": 2,
    "head_dim": 8,
    "v_head_dim": 8,
}
GROUPED: PlannedShape = {**SHAPE, "groups": [NEAR], "states": [CONV]}
EVERYTHING: PlannedShape = {
    **SHAPE,
    "v_head_dim": 4,
    "k_scale_bytes": 4,
    "v_scale_bytes": 4,
    "draft": {"layers": 1, "kv_heads": 2, "head_dim": 4, "v_head_dim": 4},
    "states": [CONV, WINDOW],
}
LATENT: PlannedShape = {**SHAPE, "kind": "mla", "kv_heads": 1, "head_dim": 12, "v_head_dim": 0}


def start(shape: PlannedShape = SHAPE, **changes: Any) -> Start:
    return start_command(shape, **{"prefill": (Sizes(tp=2),), **WHERE, **changes})


def deck(content: Content, name: str) -> PlaneView:
    return next(deck for deck in content.views if deck.name == name)


def layer(content: Content, number: int, name: str) -> Bytes:
    """All bytes of one plane of one layer."""
    return next(each for sheet, each in deck(content, name).elements() if sheet.layer == number).reshape(-1)


def pages_of(content: Content, number: int, name: str) -> Any:
    return layer(content, number, name).reshape(-1, deck(content, name).rows.page_bytes)


def rooms(prefix_tokens: int = 0) -> list[Room]:
    return [
        Room(index=index, number=1000 + index, tokens=tokens, prefix_tokens=prefix_tokens, decode_dp=0)
        for index, tokens in enumerate((13, 8))
    ]


@pytest.fixture
def content() -> Iterator[Content]:
    yield from make()


def make(lot: list[Room] | None = None, **changes: Any) -> Iterator[Content]:
    pool = allocate_pool(start(**changes))
    content = Content(pool, start(**changes))
    content.take(lot or rooms())
    content.poison()
    yield content
    pool.close()


def receive(content: Content, skip: int = 0) -> None:
    """What a correct transfer leaves: everything, or all but the first `skip` pages of each room; state is whole."""
    content.fill(0)
    for each in (each for each in content.views if not each.shard.segment.state):
        for _, elements in each.elements():
            for number in content.rooms:
                elements[content.pages(number)[:skip]] = POISON


@pytest.mark.parametrize("mode", ["full", "sample"])
def test_what_was_sent_in_full_verifies(content: Content, mode: str):
    receive(content)
    report = verify(content, mode)
    assert report["mismatches"] == []
    assert report["rooms"] == 2
    assert (report["bytes"] == 6 * PAGE * 2 * 16 * 6) == (mode == "full")
    assert report["bytes"] > 0


def test_the_pages_of_a_rank_do_not_depend_on_the_run(content: Content):
    before = [content.pages(number).tolist() for number in content.rooms]
    content.take([Room(**{**as_dict(room), "number": room.number + 500}) for room in rooms()])
    assert [content.pages(number).tolist() for number in content.rooms] == before


def test_what_never_came_is_called_so(content: Content):
    (first, second) = (report for report in verify(content, "full")["mismatches"][:2])
    assert (first["room"], first["where"]) == (1000, "layer 0 k token 0 head 0 dim 0")
    assert first["hint"] == second["hint"] == "never written"


def test_a_swapped_page_is_traced_to_where_it_belongs(content: Content):
    receive(content)
    block = pages_of(content, 2, "v")
    here, there = content.pages(1000)[1], content.pages(1001)[0]
    block[[here, there]] = block[[there, here]]
    report = verify(content, "full")
    assert report["bad_rooms"] == [0, 1]
    assert report["mismatches"][0] == {
        "room": 1000,
        "where": f"layer 2 v token {PAGE} head 0 dim 0",
        "expected": report["mismatches"][0]["expected"],
        "found": report["mismatches"][0]["found"],
        "hint": "the row of room 1001 layer 2 v token 0 head 0",
    }


def test_swapped_heads_are_found(content: Content):
    receive(content)
    row = layer(content, 0, "k").reshape(-1, 2, 16)[content.pages(1001)[0] * PAGE]
    row[[0, 1]] = row[[1, 0]]
    (wrong,) = verify(content, "full")["mismatches"]
    assert (wrong["room"], wrong["where"]) == (1001, "layer 0 k token 0 head 0 dim 0")
    assert wrong["hint"] == "the row of room 1001 layer 0 k token 0 head 1"


def test_a_damaged_byte_is_no_ones_row(content: Content):
    receive(content)
    layer(content, 1, "k").reshape(-1, 16)[(content.pages(1000)[3] * PAGE + 2) * 2 + 1, 5] ^= 1
    (wrong,) = verify(content, "full")["mismatches"]
    assert wrong["where"] == "layer 1 k token 14 head 1 dim 2"
    assert len(bytes.fromhex(wrong["found"])) == 2


def test_a_byte_in_a_page_of_nobody_is_a_stray(content: Content):
    receive(content)
    layer(content, 1, "v")[7] = 0  # page 0
    (wrong,) = verify(content, "full")["mismatches"]
    assert (wrong["room"], wrong["where"]) == (0, "layer 1 v page 0 byte 7")
    assert wrong["hint"] == "no room owned it"


def test_the_cached_prefix_must_not_be_written():
    for content in make(rooms(prefix_tokens=PAGE)):
        receive(content, skip=1)
        assert verify(content, "full")["mismatches"] == []
        pages_of(content, 0, "k")[content.pages(1001)[0], 3] = 1
        (wrong,) = verify(content, "full")["mismatches"]
        assert wrong["room"] == 0


def test_aux_rows_are_checked_and_so_are_the_unused_ones(content: Content):
    receive(content)
    content.aux()[1, 9] ^= 255
    content.aux()[2, 4] = 0
    aux, stray = verify(content, "full")["mismatches"]
    assert (aux["room"], aux["where"]) == (1001, "aux dim 9")
    assert (stray["where"], stray["hint"]) == ("aux row 2 byte 4", "no room owned it")


def test_pages_of_a_failed_room_may_hold_anything(content: Content):
    receive(content)
    pages_of(content, 0, "k")[content.pages(1000)[0]] = 1
    assert verify(content, "full", failed={1000}) == {**verify(content, "full", {1000}), "rooms": 1, "mismatches": []}


def test_rooms_of_more_pages_than_are_written_or_compared_at_once(content: Content, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(content.store), "step_bytes", 1)
    receive(content)
    assert verify(content, "full")["mismatches"] == []
    last = len(content.pages(1000)) - 1
    pages_of(content, 1, "k")[content.pages(1000)[last], 0] ^= 1
    (wrong,) = verify(content, "full")["mismatches"]
    assert wrong["where"].startswith(f"layer 1 k token {last * PAGE} ")


def test_a_rank_of_later_layers_and_heads_checks_those():
    later = {"decode": Sizes(pp=2, tp=2, layers=(1, 2)), "unique": 3}
    for content in make(**later):
        content.fill(0)
        assert verify(content, "full")["mismatches"] == []
        assert [sheet.layer for sheet, _ in content.views[0].elements()] == [1, 2]
        assert content.views[0].rows.head_lo == 1
    for content in make(**later):
        # The same amount of memory, taken for the other stage's layers and the other rank's head.
        other = Content(content._pool, start(**later))
        earlier = [held._replace(layer_lo=0, layer_hi=2, head_lo=0, head_hi=1) for held in (content.views[0].shard,)]
        for each in other.views:
            object.__setattr__(each, "shard", earlier[0])
        assert verify(content, "full")["bad_rooms"] == [0, 1]


def test_everything_a_model_may_have_is_filled_and_verified():
    for content in make(shape=EVERYTHING):
        assert [deck.name for deck in content.views] == [
            *("k", "v", "k_scale", "v_scale", "draft k", "draft v", "draft k_scale", "draft v_scale"),
            *("conv", "swa"),
        ]
        receive(content)
        assert verify(content, "full")["mismatches"] == []
        for each in content.views:
            number = next(iter(each.elements()))[0].layer
            item = content.items[1001][each.shard.segment.index][0]
            pages_of(content, number, each.name)[item, -1] ^= 1
            (wrong,) = verify(content, "full")["mismatches"]
            assert wrong["room"] == 1001
            assert wrong["where"].startswith(f"layer {number} {each.name} ")
            pages_of(content, number, each.name)[item, -1] ^= 1


def test_a_latent_is_one_row_a_token_and_the_same_on_every_rank():
    found = []
    for unique in (0, 1):
        for content in make(shape=LATENT, decode=Sizes(tp=2), unique=unique):
            receive(content)
            assert verify(content, "full")["mismatches"] == []
            found.append(pages_of(content, 1, "latent")[content.pages(1000)].tobytes())
    assert found[0] == found[1]


def test_heads_of_state_are_shared_by_the_ranks_as_those_of_kv_are():
    whole, parts = [], []
    for content in make(shape=EVERYTHING):
        content.fill(0)
        whole = pages_of(content, 2, "conv")[content.states(1000)[0]].reshape(3, 4, 12)
    for unique in (0, 1):
        for content in make(shape=EVERYTHING, decode=Sizes(tp=2), unique=unique):
            content.fill(0)
            parts.append(pages_of(content, 2, "conv")[content.states(1000)[0]].reshape(3, 2, 12))
    assert np.array_equal(np.concatenate(parts, axis=1), whole)


def test_a_room_has_as_many_items_as_the_kind_of_state_says():
    for content in make(shape=EVERYTHING):
        conv, window = content.states(1000)
        assert (len(conv), len(window)) == (1, 2)  # 13 tokens in 4 pages; the last 5 tokens lie in two of them


def test_state_moves_whole_where_a_prefix_is_cached_and_spare_items_stay_quiet():
    for content in make(rooms(prefix_tokens=PAGE), shape=EVERYTHING):
        receive(content, skip=1)
        assert verify(content, "full")["mismatches"] == []
        pages_of(content, 0, "swa")[0, 3] = 1
        (wrong,) = verify(content, "full")["mismatches"]
        assert (wrong["room"], wrong["where"]) == (0, "layer 0 swa item 0 byte 3")


def test_pages_of_a_group_are_those_of_the_window():
    for content in make(shape=GROUPED):
        room = content.rooms[1000]  # of 13 tokens, of which 8 to 12 lie in pages 4 to 6
        assert [len(pages) for pages in content.wanted(room)] == [4, 3]
        assert content.computed(room)[1].tolist() == [-1] * 4 + content.wanted(room)[1].tolist()
        content.fill(0)
        assert verify(content, "full")["mismatches"] == []
        lost = content.wanted(room)[1][1]
        pages_of(content, 4, "near v")[lost] = POISON
        (wrong,) = verify(content, "full")["mismatches"]
        assert (wrong["where"], wrong["hint"]) == ("layer 4 near v token 10 head 0 dim 0", "never written")
        pages_of(content, 4, "near v")[lost] = pages_of(content, 4, "near v")[content.wanted(room)[1][0]]
        (wrong,) = verify(content, "full")["mismatches"]
        assert wrong["hint"] == "the row of room 1000 layer 4 near v token 8 head 0"


def test_cached_and_free_pages_of_a_group_stay_quiet():
    for content in make([Room(index=0, number=1000, tokens=13, prefix_tokens=12, decode_dp=0)], shape=GROUPED):
        content.fill(0)
        cached, wanted = np.split(content.computed(content.rooms[1000])[1][4:], [2])
        assert content.wanted(content.rooms[1000])[1].tolist() == wanted.tolist()
        for each in (each for each in content.views if not each.shard.segment.state):
            pages = cached if each.shard.segment.table else content.pages(1000)[:3]
            content.store.poison(each, pages)
        assert verify(content, "full")["mismatches"] == []
        for page in (cached[0], 0):
            pages_of(content, 3, "near k")[page, 3] = 1
            (wrong,) = verify(content, "full")["mismatches"]
            assert (wrong["room"], wrong["where"]) == (0, f"layer 3 near k page {page} byte 3")
            pages_of(content, 3, "near k")[page, 3] = POISON


def test_a_lot_is_filled_once(content: Content):
    content.fill(7)
    block = layer(content, 0, "k")
    block[:] = 0
    content.fill(7)
    assert not block.any()
    content.fill(8)
    assert block.any()


def as_dict(room: Room) -> dict[str, Any]:
    return {name: getattr(room, name) for name in Room.__slots__}


@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_pools_of_every_layout_are_filled_and_verified(layout: str):
    dense = {}
    for content in make(shape=EVERYTHING):
        content.fill(0)
        dense = {number: page_bytes(content, number) for number in content.rooms}
    for content in make(shape=EVERYTHING, kv_layout=layout):
        content.fill(0)
        assert {number: page_bytes(content, number) for number in content.rooms} == dense
        assert verify(content, "full")["mismatches"] == []
        page = int(content.pages(1001)[1])
        for each in (each for each in content.views if not each.shard.segment.state):
            (plane, elements), *_ = each.elements()
            elements[page, -1, 0, 0] ^= 1
            (wrong,) = verify(content, "full")["mismatches"]
            row = 2 * each.rows.per_page - 1
            assert wrong["where"] == f"layer {plane.layer} {each.name} token {row} head 0 dim 0"
            elements[page, -1, 0, 0] ^= 1
            elements[0, 0, 1, 2] = 7
            (stray,) = verify(content, "full")["mismatches"]
            at = each.rows.row_bytes + 2
            assert stray["where"] == f"layer {plane.layer} {each.name} page 0 byte {at}"
            elements[0, 0, 1, 2] = POISON


def page_bytes(content: Content, number: int) -> list[bytes]:
    """The content of a room's pages in every KV plane and layer, in the order of NHD."""
    return [
        elements[content.pages(number)].tobytes()
        for each in content.views
        if not each.shard.segment.state
        for _, elements in each.elements()
    ]


@pytest.mark.parametrize(("interleave", "layout"), [(1, "nhd"), (2, "hnd"), (4, "fused")])
def test_a_cp_rank_has_its_tokens_and_nothing_behind_the_end(interleave: int, layout: str):
    whole = {}
    for content in make(role="prefill", instance=0, prefill=(Sizes(),)):
        content.fill(0)
        whole = {number: rows_of(content, number) for number in content.rooms}
    for rank in range(2):
        config = {"cp_interleave": interleave}
        more = {"decode": Sizes(cp=2), "unique": rank, "config": config, "transfer_page": interleave}
        for content in make(**more, kv_layout=layout):
            assert [len(content.pages(number)) for number in (1000, 1001)] == [2, 1]
            content.fill(0)
            for room in rooms():
                found = rows_of(content, room.number)
                end = -(-room.tokens // interleave) * interleave
                own = [token for token in range(64) if token // interleave % 2 == rank][: len(found)]
                for token, row in zip(own, found, strict=True):
                    assert (row == (whole[room.number][token] if token < end else POISON)).all()
            assert verify(content, "full")["mismatches"] == []
            (plane, elements), *_ = content.views[0].elements()
            page = int(content.pages(1000)[1])
            elements[page, -1, 1, 0] = 3
            (wrong,) = verify(content, "full")["mismatches"]
            last = [token for token in range(64) if token // interleave % 2 == rank][2 * PAGE - 1]
            assert wrong["where"] == f"layer {plane.layer} k token {last} head 1 dim 0"
            assert (wrong["expected"] == "dbdb") == (last >= -(-13 // interleave) * interleave)


def rows_of(content: Content, number: int) -> Bytes:
    """The rows of K in layer 0 of a room, in the rank's order, `[rows, heads, bytes]`."""
    (_, elements), *_ = content.views[0].elements()
    found: Bytes = elements[content.pages(number)].reshape(-1, *elements.shape[2:])
    return found


def test_rows_behind_the_last_transfer_page_are_not_written():
    for content in make(transfer_page=2, page_size=8, pool_pages=6):
        content.fill(0)
        rows = rows_of(content, 1000)  # 13 tokens, so 14 in transfer pages of 2, and 2 pages of 8
        assert len(rows) == 16
        assert (rows[14:] == POISON).all()
        assert (rows[:14] != POISON).any(axis=(1, 2)).all()
        assert verify(content, "full")["mismatches"] == []


class CountingDevice(HostDevice):
    """Records (address, bytes) of every copy."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[tuple[int, int]] = []
        self.downloads: list[tuple[int, int]] = []

    def upload(self, addr: int, data: Bytes) -> None:
        self.uploads.append((addr, data.nbytes))
        super().upload(addr, data)

    def download(self, addr: int, out: Bytes) -> None:
        self.downloads.append((addr, out.nbytes))
        super().download(addr, out)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> CountingDevice:
    device = CountingDevice()
    monkeypatch.setattr(of_content, "open_device", lambda index: device)
    monkeypatch.setitem(WHERE, "device", 0)
    return device


def test_small_pages_of_a_device_are_copied_together(counting: CountingDevice, content: Content):
    content.fill(0)
    planes = sum(each.shard.num_layers for each in content.views)
    assert len(counting.uploads) == planes
    assert verify(content, "full")["mismatches"] == []
    copies = len(counting.downloads)
    assert verify(content, "full")["mismatches"] == []
    assert len(counting.downloads) - copies == 2 * planes  # those of rooms, and those of nobody


def test_a_span_of_copies_is_bounded(counting: CountingDevice, content: Content, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(content_store, "_SPAN_BYTES", 2 * deck(content, "k").rows.page_bytes)
    content.fill(0)
    assert verify(content, "full")["mismatches"] == []
    assert max(nbytes for _, nbytes in counting.downloads) <= 2 * deck(content, "k").rows.page_bytes


def test_poison_of_a_device_s_pages_writes_nothing_between_them(counting: CountingDevice, content: Content):
    view, pages = deck(content, "k"), np.array([5, 1, 2])
    content.store.poison(view, pages)
    size = view.rows.page_bytes
    assert counting.uploads == [
        (base + page * size, count * size) for _, base in view.addresses() for page, count in ((1, 2), (5, 1))
    ]
