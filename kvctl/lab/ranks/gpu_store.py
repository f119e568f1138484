"""Content of a pool on a GPU, written and compared there: sweeps move hundreds of gigabytes, all of which is checked.

What is wrong is downloaded, a page for each layer, and named by the code that checks host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvctl.lab.ranks.content_launch import ARGUMENTS, CHECK, FILL, QUIET, WARPS, Form, Launch, launch
from kvctl.lab.ranks.content_store import Written
from kvctl.lab.ranks.mirror_store import MirrorStore
from kvctl.lab.ranks.page_assignment import Pages
from kvctl.lab.ranks.pattern import PlaneId, Words, Wrong
from kvctl.lab.ranks.plane_view import PlaneView
from kvctl_agent.device.base import DeviceMemory
from kvctl_agent.device.compiler import Program, assemble
from kvctl_agent.device.cuda import CudaDevice
from kvctl_agent.device.driver import checked, load

_TABLES_BYTES = 4 << 20
_PROGRAMS_PER_SM = 4


class GpuStore:
    """Launches the content kernel and waits for it; tables are uploaded for every launch."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._mirror = MirrorStore(device)
        self._kernels: dict[Form, tuple[Any, Program]] = {}
        self._tables: DeviceMemory | None = None

    def fill(self, deck: PlaneView, pages: Pages, bases: Words) -> None:
        self._run(launch(FILL, deck, pages, bases, [0] * deck.held.num_layers, len(pages)))

    def check(
        self, deck: PlaneView, pages: Pages, bases: Words, firsts: Sequence[int], count: int
    ) -> tuple[PlaneId, Wrong] | None:
        for layer, page in self._wrong_pages(launch(CHECK, deck, pages, bases, firsts, count)):
            sheet, base = list(deck.places())[layer]
            page += firsts[layer]
            wrong = self._mirror.look(deck, sheet, base, pages[page : page + 1], bases, page)
            if wrong is not None:
                return sheet, wrong
        return None

    def poison(self, deck: PlaneView, pages: Pages | None = None) -> None:
        self._mirror.poison(deck, pages)

    def written(self, deck: PlaneView, quiet: Pages) -> Iterator[Written]:
        places = list(deck.places())
        for layer, page in self._wrong_pages(launch(QUIET, deck, quiet, None, [0] * len(places), len(quiet))):
            # Whoever is told of one layer may poison the others at once.
            found = self._mirror.first_written(deck, *places[layer], quiet[page : page + 1])
            if found is not None:
                yield found

    def _wrong_pages(self, work: Launch) -> list[tuple[int, int]]:
        """(layer, first wrong page of its stretch) of every layer that has one."""
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
        """Launches it, and waits; where its tables are."""
        at = self._upload(work)
        if not work.units:
            return at
        function, code = self._kernel(work.form)
        values = (*work.arguments(at), *[0] * code.appended)
        # Eight bytes for each, narrower ones in the lower half.
        arguments = (ctypes.c_int64 * len(values))(*values)
        start = ctypes.addressof(arguments)
        pointers = (ctypes.c_void_p * len(values))(*range(start, start + 8 * len(values), 8))
        programs = min(work.layers * work.tiles, _PROGRAMS_PER_SM * self._device.multiprocessors)
        driver = load()
        with self._device.context.visit():
            # The default stream will do: nobody else puts anything on it while content is made or checked.
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
        """The driver's function and what it is made of."""
        if form not in self._kernels:
            from kvctl.lab.ranks.content_kernel import content

            code = assemble(content, ARGUMENTS, form.constants(), WARPS, self._device.capability)
            driver = load()
            with self._device.context.visit():
                module = checked(driver.cuModuleLoadData(code.cubin), "cannot load the content kernel")
                function = checked(driver.cuModuleGetFunction(module, code.name.encode()), "it has no such function")
            self._kernels[form] = (function, code)
        return self._kernels[form]
