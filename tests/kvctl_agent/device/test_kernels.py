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
from kvctl_agent.device.base import Geometry
from kvctl_agent.device.kernels import ARGUMENTS, Program, Tile, program, variant
from kvctl_agent.device.row_copies import DEFAULT
from kvctl_agent.errors import DeviceUnavailable

triton = pytest.importorskip("triton")

H200 = 90
GEOMETRIES = {
    "two of eight heads": Geometry(16, 512, 2048, 512, True, False),
    "into two of eight heads": Geometry(16, 512, 512, 2048, False, True),
    "between slices": Geometry(16, 512, 512, 2048, True, True),
    "pages": Geometry(16, 2048, 2048, 2048, True, True),
    "pages of one token": Geometry(1, 512, 2048, 512, True, False),
    "a page that is a tile and more": Geometry(64, 2048, 2048, 2048, True, False),
    "latent": Geometry(1, 1152, 1152, 1152, True, False),
    "three heads": Geometry(16, 768, 2048, 768, True, False),
    "rows of fp8": Geometry(16, 144, 288, 144, False, True),
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
        "program(variant(Geometry(16, 512, 2048, 512, True, False), 0, Tile(16384, 4)), 90)\n"
        "print('torch' in sys.modules, 'cuda' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_without_triton_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(DeviceUnavailable, match=r"pip install 'kvctl\[gpu\]'"):
        program(variant(GEOMETRIES["pages"], 1, DEFAULT.tile), H200)


def test_what_triton_cannot_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("ptxas: no such architecture")

    monkeypatch.setattr(kernels, "_compile", fails)
    with pytest.raises(DeviceUnavailable, match=r"capability 9\.9: ptxas: no such architecture; try a newer"):
        program(variant(GEOMETRIES["pages"], 1, DEFAULT.tile), 99)
