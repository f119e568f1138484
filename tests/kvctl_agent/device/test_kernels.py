"""Machine code of the copy kernel for an H200, compiled without a GPU: accesses are wide, and no register spills."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl_agent.device import kernels
from kvctl_agent.device.base import Geometry, PageStrides
from kvctl_agent.device.kernels import ARGUMENTS, Program, Tile, program, variant
from kvctl_agent.device.row_copies import DEFAULT
from kvctl_agent.errors import DeviceUnavailable
from tests.kvctl_agent.device.geometries import of_rows

triton = pytest.importorskip("triton")

H200 = 90
GEOMETRIES = {
    "two of eight heads": of_rows(16, 512, 2048, 512, True, False),
    "into two of eight heads": of_rows(16, 512, 512, 2048, False, True),
    "between slices": of_rows(16, 512, 512, 2048, True, True),
    "pages": of_rows(16, 2048, 2048, 2048, True, True),
    "pages of one token": of_rows(1, 512, 2048, 512, True, False),
    "a page that is a tile and more": of_rows(64, 2048, 2048, 2048, True, False),
    "latent": of_rows(1, 1152, 1152, 1152, True, False),
    "three heads": of_rows(16, 768, 2048, 768, True, False),
    "rows of fp8": of_rows(16, 144, 144, 288, False, True),
}
ALIGNED, HALF = 0x7F0000000000, 0x7F0000000008


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def accesses(code: Program) -> Counter[str]:
    return Counter(re.findall(r"(?:ld|st)\.global\S*?((?:\.v\d)?\.b\d+)", code.ptx))


def registers(code: Program, folder: Path) -> dict[str, int]:
    """Registers per thread, as reported by the assembler."""
    file = folder / "kernel.cubin"
    file.write_bytes(code.cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump")
    said = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}


@pytest.mark.parametrize("tile", [DEFAULT.tile, DEFAULT.bounded], ids=["whole device", "bounded"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_lanes_move_16_bytes_where_addresses_allow(name: str, tile: Tile, tmp_path: Path) -> None:
    chosen = variant(GEOMETRIES[name], ALIGNED, tile)
    code = program(chosen, H200)
    lane_accesses = tile.nbytes // (tile.warps * 32 * 16)
    assert accesses(code)[".v2.b64"] == 2 * lane_accesses
    assert code.threads == 32 * tile.warps
    assert not code.shared or code.shared <= 48 << 10
    used = registers(code, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] * code.threads <= 64 << 10


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_less_aligned_addresses_get_narrower_words(bits: int, tmp_path: Path) -> None:
    chosen = variant(GEOMETRIES["two of eight heads"], ALIGNED | bits, DEFAULT.tile)
    code = program(chosen, H200)
    assert chosen.word == chosen.align == bits
    found = accesses(code)
    assert found[".v2.b64"] == 0
    assert found[f".b{8 * bits}"] >= 2 * chosen.tile_units * chosen.unit // bits // code.threads
    used = registers(code, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0


def test_a_whole_variant_is_compiled_once() -> None:
    chosen = variant(GEOMETRIES["pages"], ALIGNED, DEFAULT.tile)
    assert program(chosen, H200) is program(chosen, H200)


def test_arguments_that_the_compiler_appends_are_counted() -> None:
    code = program(variant(GEOMETRIES["pages"], ALIGNED, DEFAULT.tile), H200)
    listed = re.search(r"\.entry[^(]*\(([^)]*)\)", code.ptx)
    assert listed is not None
    kinds = re.findall(r"\.param \.(\w+)", listed[1])
    assert kinds[: len(ARGUMENTS)] == [kind.replace("i", "u") for kind in ARGUMENTS.values()]
    assert kinds[len(ARGUMENTS) :] == ["u64"] * code.appended


def test_no_torch_and_no_driver_are_needed() -> None:
    script = (
        "import sys\n"
        "from kvctl_agent.device.base import Geometry\n"
        "from kvctl_agent.device.kernels import program\n"
        "from kvctl_agent.device.kernels import Tile, variant\n"
        "program(variant(Geometry(16, 1, 512, None, None), 0, Tile(16384, 4)), 90)\n"
        "print('torch' in sys.modules, 'cuda' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_without_triton_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(DeviceUnavailable, match=r"pip install '\.\[gpu\]'"):
        program(variant(GEOMETRIES["pages"], 1, DEFAULT.tile), H200)


def test_what_triton_cannot_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("ptxas: no such architecture")

    monkeypatch.setattr(kernels, "_compile", fails)
    with pytest.raises(DeviceUnavailable, match=r"capability 9\.9: ptxas: no such architecture; try a newer"):
        program(variant(GEOMETRIES["pages"], 1, DEFAULT.tile), 99)


# Strides of a page of 16 tokens of 8 heads of 256 bytes, in vLLM's and FlashInfer's orders of the axes.
ROW = 8 * 256
STRIDED = {
    "HND to packed": Geometry(16, 8, 256, PageStrides(16 * ROW, 256, 16 * 256), None),
    "two heads of HND": Geometry(16, 2, 256, None, PageStrides(16 * ROW, 256, 16 * 256)),
    "K and V in one row": Geometry(16, 8, 256, PageStrides(32 * ROW, 512, 16 * 512), None),
    "HND to NHD": Geometry(16, 8, 256, PageStrides(16 * ROW, 256, 16 * 256), PageStrides(16 * ROW, ROW, 256)),
    "split pages of HND": Geometry(16, 8, 256, PageStrides(64 * ROW, 256, 64 * 256, 4, 16 * 256), None),
    "split pages to K and V in one row": Geometry(
        16, 8, 256, PageStrides(64 * ROW, 256, 64 * 256, 4, 16 * 256), PageStrides(32 * ROW, 512, 16 * 512)
    ),
}


@pytest.mark.parametrize("tile", [DEFAULT.tile, DEFAULT.bounded], ids=["whole device", "bounded"])
@pytest.mark.parametrize("name", STRIDED)
def test_strided_planes_are_copied_in_words_of_16_bytes_too(name: str, tile: Tile, tmp_path: Path) -> None:
    code = program(variant(STRIDED[name], ALIGNED, tile), H200)
    assert accesses(code)[".v2.b64"] == 2 * tile.nbytes // (tile.warps * 32 * 16)
    used = registers(code, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0


# Constants of contiguous pages as they were before planes had strides: rows, units of a row, bytes of a unit, alignment
# and units of a tile. With equal constants the compiled code is the same.
CONSTANTS = {
    "two of eight heads": (16, 1, 512, 16, 32),
    "into two of eight heads": (16, 1, 512, 16, 32),
    "between slices": (16, 1, 512, 16, 32),
    "pages": (1, 2, 16 << 10, 16, 1),
    "pages of one token": (1, 1, 512, 16, 32),
    "a page that is a tile and more": (1, 8, 16 << 10, 16, 1),
    "latent": (1, 9, 128, 16, 128),
    "three heads": (16, 3, 256, 16, 64),
    "rows of fp8": (16, 9, 16, 16, 1024),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_contiguous_pages_compile_to_the_constants_that_they_always_did(name: str) -> None:
    chosen = variant(GEOMETRIES[name], ALIGNED, DEFAULT.tile)
    rows, *others = CONSTANTS[name]
    assert (chosen.rows, chosen.units, chosen.unit, chosen.align, chosen.tile_units) == (rows, *others)
    assert chosen.heads == 1
    for side in (chosen.src, chosen.dst):
        assert side is None or side.split == 1
        assert side is None or rows == 1 or side.page == rows * side.row


@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("name", [*GEOMETRIES, *STRIDED])
def test_checksums_load_16_bytes_a_lane_and_store_nothing(name: str, ranges: bool, tmp_path: Path) -> None:
    geometry = {**GEOMETRIES, **STRIDED}[name]
    chosen = variant(geometry._replace(src=geometry.src or geometry.dst, dst=None), ALIGNED, DEFAULT.tile, ranges, True)
    code = program(chosen, H200)
    assert chosen.check == chosen.word == 4
    loads = Counter(re.findall(r"(ld|st)\.global\S*?\.v4\.b32", code.ptx))
    assert loads == {"ld": DEFAULT.tile.nbytes // (code.threads * 16)}
    assert len(re.findall(r"atom\.\S*add", code.ptx)) == 1
    used = registers(code, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] <= 64  # at least four thread blocks on a multiprocessor hide the latency of loads


@pytest.mark.parametrize(("width", "bits", "word"), [(256, 2, 2), (6, 0, 2), (3, 0, 1)])
def test_checksums_of_badly_aligned_rows_compile(width: int, bits: int, word: int) -> None:
    chosen = variant(of_rows(4, width, 2 * width, width, True, False), bits, DEFAULT.tile, False, True)
    assert (chosen.word, chosen.check) == (word, 4 if width == 256 else word)
    assert program(chosen, H200).cubin
