"""Writes and checks the test pattern in a KV pool on a GPU, with a kernel.

A sweep transfers hundreds of gigabytes and verifies all of them, which would take too long through host memory. Only
the first wrong page of a layer is downloaded, to be described by the code that checks host memory.
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
from kvctl_agent.memory.addresses import PlaneStrides

ARGUMENTS = {
    **dict.fromkeys(("places_at", "bases_at", "pages_at", "firsts_at"), "i64"),
    **dict.fromkeys(("items", "tiles", "units"), "i32"),
}
"""Names and types of the kernel's run-time arguments, in order."""

FILL, CHECK, QUIET = "fill", "check", "poison"
TILE = 2048
WARPS = 8
_WORD = 8
_TABLES_BYTES = 4 << 20
_PROGRAMS_PER_SM = 4


class Form(NamedTuple):
    """Compile-time constants of the kernel, as described at `content_kernel.content`."""

    task: str
    page_rows: int
    heads: int
    strides: PlaneStrides
    row_units: int
    unit: int

    @property
    def page_units(self) -> int:
        return self.page_rows * self.row_units

    def constants(self) -> dict[str, Any]:
        """Returns all compile-time constants under the names that the kernel uses."""
        from triton import language

        return {
            "TASK": self.task,
            "PAGE_ROWS": self.page_rows,
            "HEADS": self.heads,
            "PAGE_STRIDE": self.strides.page,
            "ROW_STRIDE": self.strides.row,
            "HEAD_STRIDE": self.strides.head,
            "ROW_UNITS": self.row_units,
            "UNIT": self.unit,
            "WORD": language.dtype(f"int{8 * self.unit}"),
            "POISON": int.from_bytes(bytes([POISON]) * _WORD, "little", signed=True),
            "TILE": TILE,
        }


class Launch(NamedTuple):
    """Inputs of one kernel launch.

    Attributes:
        tables: the kernel's four tables, concatenated for one upload; the table of layer addresses comes first.
        bases_at, pages_at, firsts_at: byte offsets of the other three tables in `tables`.
        layers: number of layers to process.
        units: number of units (see `content_kernel.content`) in each layer's range.
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
        """Returns the kernel's run-time arguments for tables uploaded to device address `at`."""
        addresses = (at, at + self.bases_at, at + self.pages_at, at + self.firsts_at)
        return (*addresses, self.layers * self.tiles, self.tiles, self.units)

    def firsts(self, tables: Bytes) -> npt.NDArray[np.int32]:
        """Returns the first wrong unit of each layer, or `units` for a layer without one.

        Args:
            tables: the downloaded bytes of the tables from offset `firsts_at` on.
        """
        return tables[: 4 * self.layers].view(np.int32)


def launch(task: str, view: PlaneView, pages: Pages, bases: Words | None, firsts: Sequence[int], count: int) -> Launch:
    """Builds the inputs of a launch that processes `count` pages of a room in each layer.

    Args:
        task: FILL, CHECK or QUIET.
        pages: indices of all pages of the room.
        bases: `pattern.row_bases` of the room; None for QUIET.
        firsts: for each layer, the position in `pages` at which its range starts.
    """
    rows, addresses = view.rows, list(view.addresses())
    bits = rows.row_bytes | _WORD
    for distance in (*view.strides, *(base for _, base in addresses)):
        bits |= distance
    unit = bits & -bits
    form = Form(task, rows.per_page * rows.heads, rows.heads, view.strides, rows.row_bytes // unit, unit)
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
    """Store for a pool on a GPU; each call uploads its tables, launches the content kernel and waits for it."""

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
        """Runs a launch; returns (layer, position in its range of the first wrong page) for each layer with one."""
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
        """Uploads the tables, launches the kernel and waits for it; returns the device address of the tables."""
        at = self._upload(work)
        if not work.units:
            return at
        function, code = self._kernel(work.form)
        values = (*work.arguments(at), *[0] * code.appended)
        # Each argument takes eight bytes; a 32-bit argument uses the lower half.
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
        """Returns the driver's function and the compiled program of a kernel variant; compiles it on first use."""
        if form not in self._kernels:
            from kvctl.lab.ranks.content_kernel import content

            code = assemble(content, ARGUMENTS, form.constants(), WARPS, self._device.capability)
            driver = load()
            with self._device.context.visit():
                module = checked(driver.cuModuleLoadData(code.cubin), "cannot load the content kernel")
                function = checked(driver.cuModuleGetFunction(module, code.name.encode()), "no content kernel in it")
            self._kernels[form] = (function, code)
        return self._kernels[form]
