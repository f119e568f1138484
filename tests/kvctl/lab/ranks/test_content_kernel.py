"""The kernel that writes and checks content: in Triton's interpreter against the code for host memory; and compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from kvctl.lab.ranks import content as of_content
from kvctl.lab.ranks import gpu_store
from kvctl.lab.ranks.content import Content, allocate_pool
from kvctl.lab.ranks.gpu_store import ARGUMENTS, CHECK, FILL, QUIET, WARPS, GpuStore, Launch, launch
from kvctl.lab.ranks.messages import Room
from kvctl.lab.ranks.pattern import POISON
from kvctl.lab.ranks.plan import PlannedShape, PlannedState
from kvctl.lab.ranks.request import Sizes
from kvctl.lab.ranks.verify import verify
from kvctl_agent.device.kernels import Program
from tests.support.host_device import HostDevice, at
from tests.support.synthetic_rank import SHAPE as BASE
from tests.support.synthetic_rank import start_command

interpreter = pytest.importorskip("triton.runtime.interpreter")

STATES: list[PlannedState] = [
    {"name": "conv", "layers": [0, 0, 1], "rows": 3, "heads": 4, "head_bytes": 12, "kind": "rows", "window": 0},
    {"name": "odd", "layers": [1], "rows": 1, "heads": 2, "head_bytes": 7, "kind": "pages", "window": 0},
]
SHAPE: PlannedShape = {**BASE, "kv_heads": 4, "v_head_dim": 9, "k_scale_bytes": 4, "states": STATES}


@pytest.fixture(autouse=True)
def indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes an index of an array of one, which numpy 2.4 no longer does."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture
def content(monkeypatch: pytest.MonkeyPatch) -> Iterator[Content]:
    """Two rooms on the second of two tp ranks, in memory of the stand-in."""
    yield from make(monkeypatch)


@pytest.fixture(params=["hnd", "kv-inner", "fused", "block-outer"])
def strided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Content]:
    """The same rooms on the fourth of two cp ranks of two tp ranks each, in a pool of another layout."""
    more = {"decode": Sizes(cp=2, tp=2), "unique": 3, "kv_layout": request.param, "transfer_page": 2}
    shape = {**SHAPE, "k_scale_bytes": 0}
    yield from make(monkeypatch, shape=shape, config={"cp_interleave": 2}, **more)


def make(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Iterator[Content]:
    monkeypatch.setattr(of_content, "open_device", lambda index: HostDevice())
    slots = {"pool_pages": 24, "state_slots": {"conv": 5, "odd": 24}, "aux_slots": 2}
    second = {"name": "decode-1", "unique": 1, "decode": Sizes(tp=2), "shape": SHAPE, "device": 0}
    start = start_command(**{**slots, **second, **changes})
    pool = allocate_pool(start)
    content = Content(pool, start)
    content.take([Room(at, 100 + at, tokens, 0, 0, at) for at, tokens in enumerate((41, 30))])
    content.poison()
    yield content
    pool.close()


def run(constants: dict[str, Any], programs: int, *arguments: int) -> None:
    from kvctl.lab.ranks.content_kernel import content

    kernel: Any = interpreter.InterpretedFunction(content)
    kernel[(programs,)](*arguments, **constants)


def interpret(work: Launch) -> np.ndarray:
    """One launch; what became of the firsts."""
    # Their own: aligned as a device's memory is.
    tables = np.zeros(-(-work.tables.nbytes // 8), np.int64).view(np.uint8)
    tables[: work.tables.nbytes] = work.tables
    run(work.form.constants(), 3, *work.arguments(tables.ctypes.data))
    return tables[work.firsts_at :][: 4 * work.layers].view(np.int32)


class Gpu(HostDevice):  # type: ignore[misc]  # not found by the checker, whose path has no test folders
    """The stand-in, with what a store asks of a GPU beyond that; it is its own context."""

    capability, multiprocessors = 90, 1

    @property
    def context(self) -> Gpu:
        return self

    def visit(self) -> Any:
        return nullcontext()


class Driver:
    """Launches in the interpreter, by the block of arguments that it is given."""

    def cuModuleLoadData(self, image: Any) -> Any:
        return 0, image

    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        assert name == b"content"
        return 0, module

    def cuLaunchKernel(self, function: Any, x: int, y: int, z: int, *others: int) -> Any:
        *_, pointers, extra = others
        assert (y, z, others[0], extra) == (1, 1, 32 * WARPS, 0)
        listed = (ctypes.c_void_p * (len(ARGUMENTS) + 2)).from_address(pointers)
        values = [ctypes.c_int64.from_address(at).value for at in listed if at]
        assert values[len(ARGUMENTS) :] == [0, 0]  # for what the compiler appended
        run(function, x, *values[: len(ARGUMENTS)])
        return (0,)

    def cuStreamSynchronize(self, stream: int) -> Any:
        return (0,)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> GpuStore:
    """Without a GPU: tables and pools are the stand-in's."""

    def assemble(kernel: Any, arguments: Any, constants: Any, warps: int, capability: int) -> Program:
        assert (arguments, capability) == (ARGUMENTS, 90)
        return Program("content", constants, "", 32 * warps, 0, 2)

    monkeypatch.setattr(gpu_store, "assemble", assemble)
    monkeypatch.setattr(gpu_store, "load", Driver)
    return GpuStore(Gpu())


def test_it_finds_the_first_wrong_unit_of_each_layer(content: Content):
    content.fill(0)
    room = content.rooms[100]
    for deck, bases in content.with_bases(room):
        pages = content.items[100][deck.shard.segment.index]
        layers, count = deck.shard.num_layers, max(1, len(pages) - 2)
        starts = [layer % (len(pages) - count + 1) for layer in range(layers)]
        assert (interpret(launch(CHECK, deck, pages, bases, starts, count)) >= count).all()
        work = launch(CHECK, deck, pages, bases, starts, count)
        last = layers - 1
        (_, base), page = list(deck.addresses())[last], int(pages[starts[last] + count - 1])
        wrong = at(base + page * deck.rows.page_bytes, deck.rows.page_bytes)
        wrong[-1] ^= 1
        wrong[5] ^= 64
        firsts = interpret(work)
        assert firsts[last] == (count - 1) * work.form.page_units + 5 // work.form.unit, deck.name
        assert (firsts[:last] == work.units).all()
        wrong[5] ^= 64
        assert interpret(work)[last] == work.units - 1
        wrong[-1] ^= 1


def test_it_finds_what_is_not_poison(content: Content):
    for deck in content.views:
        quiet = np.arange(1, deck.num_slots)[::-1].astype(np.int64)
        work = launch(QUIET, deck, quiet, None, [0] * deck.shard.num_layers, len(quiet))
        assert (interpret(work) == work.units).all()
        _, base = next(deck.addresses())
        at(base, 1)[0] = 0  # page 0 is not among them
        assert (interpret(work) == work.units).all()
        at(base + deck.rows.page_bytes, 1)[0] = 0  # the last of them
        assert interpret(work)[0] // work.form.page_units == len(quiet) - 1
        at(base + deck.rows.page_bytes, 1)[0] = POISON


@pytest.mark.parametrize("task", [FILL, CHECK, QUIET])
def test_it_compiles_for_a_gpu(content: Content, task: str):
    from kvctl.lab.ranks.content_kernel import content as kernel
    from kvctl_agent.device.kernels import assemble

    deck = content.views[0]
    work = launch(task, deck, np.arange(3), None, [0] * deck.shard.num_layers, 3)
    code = assemble(kernel, ARGUMENTS, work.form.constants(), WARPS, 90)
    assert code.threads == 32 * WARPS
    assert code.shared < 48 << 10
    assert ("atom.global" in code.ptx) == (task != FILL)


def written_to(content: Content, name: str, layer: int, page: int, byte: int) -> None:
    deck = next(deck for deck in content.views if deck.name == name)
    at(list(deck.addresses())[layer][1] + page * deck.rows.page_bytes + byte, 1)[0] ^= 8


@pytest.mark.parametrize("mode", ["full", "sample"])
@pytest.mark.parametrize(
    "wrongs",
    [
        [],
        [("v", 2, 100, 3, 9), ("v", 1, 100, 5, 0)],
        [("odd", 0, 101, 7, 13), ("k_scale", 1, 100, 0, 7)],
        [("k", 0, 0, 0, 77), ("conv", 2, 0, 0, 4)],
    ],
)
def test_it_verifies_as_the_host_does(content: Content, store: GpuStore, mode: str, wrongs: list[Any]):
    content.fill(0)
    for name, layer, room, page, byte in wrongs:
        segment = next(deck for deck in content.views if deck.name == name).shard.segment.index
        number = int(content.items[room][segment][page]) if room else 0
        written_to(content, name, layer, number, byte)
    wanted = verify(content, mode)
    content.store = store
    assert verify(content, mode) == wanted
    assert bool(wanted["mismatches"]) or mode == "sample" or not wrongs


def test_a_store_s_own_content_verifies_on_the_host(content: Content, store: GpuStore):
    mirror, content.store = content.store, store
    content.poison()
    content.fill(1)
    content.store = mirror
    assert verify(content, "full")["mismatches"] == []


def test_strided_pools_and_stripes_are_written_as_the_host_writes_them(strided: Content, store: GpuStore):
    strided.fill(0)
    wanted = everything(strided)
    strided.poison()
    assert everything(strided) != wanted
    strided.store = store
    strided.fill(1)
    assert everything(strided) == wanted


@pytest.mark.parametrize(("room", "row"), [(100, 0), (101, 2), (100, 3), (0, 1)])
def test_strided_pools_and_stripes_verify_as_on_the_host(strided: Content, store: GpuStore, room: int, row: int):
    strided.fill(0)
    for deck in strided.views[:2]:
        page = int(strided.pages(room)[-1]) if room else 0
        base = list(deck.addresses())[1][1]
        at(base + page * deck.strides.page + row * deck.strides.row + deck.strides.head + 3, 1)[0] ^= 8
    wanted = verify(strided, "full")
    assert wanted["mismatches"]
    strided.store = store
    assert verify(strided, "full") == wanted


def everything(content: Content) -> bytes:
    (region, *_) = content._pool.regions()
    return at(region.addr, region.nbytes).tobytes()


@pytest.mark.parametrize("task", [FILL, CHECK, QUIET])
def test_it_compiles_for_strided_pools(strided: Content, task: str):
    from kvctl.lab.ranks.content_kernel import content as kernel
    from kvctl_agent.device.kernels import assemble

    deck = strided.views[1]
    work = launch(task, deck, np.arange(3), None, [0] * deck.shard.num_layers, 3)
    assert assemble(kernel, ARGUMENTS, work.form.constants(), WARPS, 90).threads == 32 * WARPS


def test_whoever_mends_a_stray_is_told_of_the_first_alone(content: Content, store: GpuStore):
    content.store = store
    deck = content.views[0]
    for layer in (0, 1):
        written_to(content, "k", layer, 7, 3)
    found = []
    for stray in content.store.written(deck, np.array([9, 7])):
        found.append((stray.plane.layer, stray.page))
        content.store.poison(deck, np.array([7]))
    assert found == [(0, 7)]
