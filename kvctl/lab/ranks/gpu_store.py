"""Writes and compares content on a GPU with a kernel: sweeps move hundreds of gigabytes, all of which is verified.

Wrong pages are downloaded, one per layer, and described by the code that checks host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl.lab.ranks.content_store import MirrorStore, PlaneView, WrittenPage
from kvctl.lab.ranks.pattern import POISON, Bytes, Pages, PlaneId, Words, Wrong, constants
from kvctl_agent.device.base import DeviceMemory
from kvctl_agent.device.cuda import CudaDevice
from kvctl_agent.device.driver import checked, load
from kvctl_agent.device.kernels import Program, assemble

ARGUMENTS = {
    **dict.fromkeys(("places_at", "bases_at", "pages_at", "firsts_at"), "i64"),
    **dict.fromkeys(("items", "tiles", "units"), "i32"),
}
"""The kernel's arguments, in order."""

FILL, CHECK, QUIET = "fill", "check", "poison"
TILE = 2048
WARPS = 8
_WORD = 8
_TABLES_BYTES = 4 << 20
_PROGRAMS_PER_SM = 4


class Form(NamedTuple):
    """Compile-time constants of the kernel; see `content_kernel.content`."""

    task: str
    page_rows: int
    row_units: int
    unit: int

    @property
    def page_units(self) -> int:
        return self.page_rows * self.row_units

    def constants(self) -> dict[str, Any]:
        """Returns the constants by the kernel's names."""
        from triton import language

        return {
            "TASK": self.task,
            "PAGE_ROWS": self.page_rows,
            "ROW_UNITS": self.row_units,
            "UNIT": self.unit,
            "WORD": language.dtype(f"int{8 * self.unit}"),
            "POISON": int.from_bytes(bytes([POISON]) * _WORD, "little", signed=True),
            "TILE": TILE,
        }


class Launch(NamedTuple):
    """One kernel launch.

    Attributes:
        tables: all tables, concatenated, for upload; the addresses of the layers come first.
        bases_at, pages_at, firsts_at: offsets of the other tables.
        layers: number of layers, and of firsts.
        units: units of a layer's range; a smaller first is the first wrong unit.
    """

    form: Form
    tables: Bytes
    bases_at: int
    pages_at: int
    firsts_at: int
    layers: int
    units: int

    @property
    def tiles(self) -> int:
        return -(-self.units // TILE)

    def arguments(self, at: int) -> tuple[int, ...]:
        """Returns the kernel's arguments with the tables at address `at`."""
        addresses = (at, at + self.bases_at, at + self.pages_at, at + self.firsts_at)
        return (*addresses, self.layers * self.tiles, self.tiles, self.units)

    def firsts(self, tables: Bytes) -> npt.NDArray[np.int32]:
        """Returns the resulting firsts, given the bytes from `firsts_at` on."""
        return tables[: 4 * self.layers].view(np.int32)


def launch(task: str, view: PlaneView, pages: Pages, bases: Words | None, firsts: Sequence[int], count: int) -> Launch:
    """Builds a launch over a range of `count` pages of each layer.

    Args:
        pages: all pages of the room.
        bases: of all its rows; None when looking for poison.
        firsts: for each layer, the start of its range in `pages`.
    """
    rows, addresses = view.rows, list(view.addresses())
    bits = rows.row_bytes | _WORD
    for _, base in addresses:
        bits |= base
    unit = bits & -bits
    form = Form(task, rows.page_bytes // rows.row_bytes, rows.row_bytes // unit, unit)
    words = -(-rows.row_bytes // _WORD)
    table = np.zeros((len(addresses), 2 + words), np.int64)
    table[:, 0] = [base for _, base in addresses]
    table[:, 1] = firsts
    if bases is not None:
        table[:, 2:] = [constants(plane, words).view(np.int64) for plane, _ in addresses]
    units = count * form.page_units
    parts = [
        table.reshape(-1).view(np.uint8),
        np.empty(0, np.uint8) if bases is None else np.ascontiguousarray(bases).view(np.uint8),
        pages.astype(np.int32).view(np.uint8),
        np.full(len(addresses), units, np.int32).view(np.uint8),
    ]
    _, bases_at, pages_at, firsts_at = np.cumsum([0, *(part.nbytes for part in parts[:3])]).tolist()
    return Launch(form, np.concatenate(parts), bases_at, pages_at, firsts_at, len(addresses), units)


class GpuStore:
    """Launches the content kernel and waits for it; the tables are uploaded for every launch."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._mirror = MirrorStore(device)
        self._kernels: dict[Form, tuple[Any, Program]] = {}
        self._tables: DeviceMemory | None = None

    def fill(self, view: PlaneView, pages: Pages, bases: Words) -> None:
        self._run(launch(FILL, view, pages, bases, [0] * view.shard.num_layers, len(pages)))

    def check(
        self, view: PlaneView, pages: Pages, bases: Words, firsts: Sequence[int], count: int
    ) -> tuple[PlaneId, Wrong] | None:
        for layer, page in self._wrong_pages(launch(CHECK, view, pages, bases, firsts, count)):
            plane, base = list(view.addresses())[layer]
            page += firsts[layer]
            wrong = self._mirror.check_layer(view, plane, base, pages[page : page + 1], bases, page)
            if wrong is not None:
                return plane, wrong
        return None

    def poison(self, view: PlaneView, pages: Pages | None = None) -> None:
        self._mirror.poison(view, pages)

    def written(self, view: PlaneView, pages: Pages) -> Iterator[WrittenPage]:
        addresses = list(view.addresses())
        for layer, page in self._wrong_pages(launch(QUIET, view, pages, None, [0] * len(addresses), len(pages))):
            # The caller may have poisoned the other layers after the first result.
            found = self._mirror.first_written(view, *addresses[layer], pages[page : page + 1])
            if found is not None:
                yield found

    def _wrong_pages(self, work: Launch) -> list[tuple[int, int]]:
        """Returns (layer, first wrong page of its range) of every layer that has one."""
        if not work.units:
            return []
        at = self._run(work)
        found = np.empty(4 * work.layers, np.uint8)
        self._device.download(at + work.firsts_at, found)
        firsts = found.view(np.int32)
        return [
            (int(layer), int(firsts[layer]) // work.form.page_units) for layer in np.flatnonzero(firsts < work.units)
        ]

    def _run(self, work: Launch) -> int:
        """Launches the kernel and waits for it; returns the address of its tables."""
        at = self._upload(work)
        if not work.units:
            return at
        function, code = self._kernel(work.form)
        values = (*work.arguments(at), *[0] * code.appended)
        # Eight bytes for each argument; narrower ones use the lower half.
        arguments = (ctypes.c_int64 * len(values))(*values)
        start = ctypes.addressof(arguments)
        pointers = (ctypes.c_void_p * len(values))(*range(start, start + 8 * len(values), 8))
        programs = min(work.layers * work.tiles, _PROGRAMS_PER_SM * self._device.multiprocessors)
        driver = load()
        with self._device.context.visit():
            # The default stream is sufficient: nothing else uses it while content is written or checked.
            launched = driver.cuLaunchKernel(
                function, programs, 1, 1, code.threads, 1, 1, code.shared, 0, ctypes.addressof(pointers), 0
            )
            checked(launched, "cannot launch the content kernel")
            checked(driver.cuStreamSynchronize(0), "the content kernel failed")
        return at

    def _upload(self, work: Launch) -> int:
        if self._tables is None or self._tables.nbytes < work.tables.nbytes:
            if self._tables is not None:
                self._tables.close()
            self._tables = self._device.allocate(max(_TABLES_BYTES, work.tables.nbytes))
        self._device.upload(self._tables.addr, work.tables)
        return self._tables.addr

    def _kernel(self, form: Form) -> tuple[Any, Program]:
        """Returns the driver's function and its compiled program."""
        if form not in self._kernels:
            from kvctl.lab.ranks.content_kernel import content

            code = assemble(content, ARGUMENTS, form.constants(), WARPS, self._device.capability)
            driver = load()
            with self._device.context.visit():
                module = checked(driver.cuModuleLoadData(code.cubin), "cannot load the content kernel")
                function = checked(driver.cuModuleGetFunction(module, code.name.encode()), "no content kernel in it")
            self._kernels[form] = (function, code)
        return self._kernels[form]
