"""Chooses a variant of the copy kernel for a geometry, compiles it with Triton, and loads it into a CUDA context.

A variant copies with the widest words that the sizes and addresses of the geometry allow. Compiling needs Triton, but
neither torch nor a driver nor a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

from kvctl_agent.contract.extras import install
from kvctl_agent.device.base import Geometry, PageStrides, checksum_word
from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.errors import DeviceError, DeviceUnavailable

# The widest access of one GPU thread, in bytes.
_ACCESS = 16


class Tile(NamedTuple):
    """Size of the data that a thread block copies per iteration, and of the thread block.

    Attributes:
        nbytes: Maximum bytes of a tile, a power of two.
        warps: Warps of a thread block, a power of two.
    """

    nbytes: int
    warps: int


class Variant(NamedTuple):
    """Compile-time constants of the copy kernel; see `kernel.copy_rows` for those not listed here.

    Attributes:
        tile_units: Units that one thread block copies per iteration.
        check: Bytes of the words of a checksum; 0 for a copy.
    """

    rows: int
    heads: int
    units: int
    unit: int
    src: PageStrides | None
    dst: PageStrides | None
    align: int
    tile_units: int
    warps: int
    ranges: bool
    check: int = 0

    @property
    def word(self) -> int:
        """Size in bytes of a word that is loaded; the compiler merges words into accesses of up to 16 bytes."""
        return min(self.align, self.check or 8)

    @property
    def page_units(self) -> int:
        """Number of units in a page."""
        return self.rows * self.heads * self.units


def variant(geometry: Geometry, bits: int, tile: Tile, ranges: bool = False, checksum: bool = False) -> Variant:
    """Returns the kernel variant that copies blocks of a geometry, or computes their checksum.

    Args:
        bits: Bitwise or of all addresses and offsets of the blocks, which shows their common alignment.
        checksum: Whether the kernel computes the checksum of the blocks; the width of the geometry is that of a head.

    Raises:
        DeviceError: the geometry is invalid.
    """
    rows, heads, width, src, dst = geometry.merged()
    strides = [side for side in (src, dst) if side is not None]
    if min(rows, heads, width) < 1 or any(
        side.split < 1 or min(side.page, side.row, side.head, side.sub or width) < width for side in strides
    ):
        raise DeviceError(f"invalid geometry: {geometry}")
    for page, row, head, _, sub in strides:
        bits |= page | row | head | sub
    align = alignment(width | bits)
    # At most 16 accesses per thread: narrow accesses need smaller tiles, or registers spill.
    tile_bytes = min(tile.nbytes, tile.warps * 32 * 16 * align)
    # Units are powers of two, so that no thread idles: a row of 1,152 bytes is nine units of 128.
    unit = min(_lowest_bit(width), tile_bytes)
    check = checksum_word(geometry.width) if checksum else 0
    return Variant(rows, heads, width // unit, unit, src, dst, align, tile_bytes // unit, tile.warps, ranges, check)


def alignment(bits: int) -> int:
    """Returns the largest power of two up to 16 that divides all numbers whose bitwise or is `bits`."""
    bits |= _ACCESS
    return bits & -bits


def _lowest_bit(number: int) -> int:
    return number & -number


# The arguments of a launch, in order; the compiler may append scratch pointers.
ARGUMENTS = {
    "blocks_at": "i64",
    "ranges_at": "i64",
    "pages_at": "i64",
    "items": "i32",
    "tiles": "i32",
    "most": "i32",
    "sum_at": "i64",
}

_MISSING = f"a KV pool on a GPU needs Triton: {install('gpu')}"


class Program(NamedTuple):
    """Machine code of one variant.

    Attributes:
        cubin: Machine code for one compute capability.
        ptx: The PTX that it was assembled from.
        shared: Bytes of dynamic shared memory of a thread block.
        appended: Number of arguments that the compiler appended; all are passed as null.
    """

    name: str
    cubin: bytes
    ptx: str
    threads: int
    shared: int
    appended: int


_compiling = Lock()


def program(variant: Variant, capability: int) -> Program:
    """Returns the machine code of a variant; compiles it (0.1 to 0.5 s) unless this process or Triton has it cached.

    `capability` is the GPU's compute capability, for example 90 for 9.0.

    Raises:
        DeviceUnavailable: Triton is missing or cannot compile for this GPU; the text has a remedy.
    """
    with _compiling:  # Threads request the same variants at the same time; each is compiled once.
        return _program(variant, capability)


@lru_cache(maxsize=256)
def _program(variant: Variant, capability: int) -> Program:
    try:
        from kvctl_agent.device.kernel import copy_rows

        values = constants(variant)
    except ImportError as error:
        raise DeviceUnavailable(f"{_MISSING} ({error})") from error
    return assemble(copy_rows, ARGUMENTS, values, variant.warps, capability)


def assemble(
    function: Callable[..., None], arguments: Mapping[str, str], values: Mapping[str, Any], warps: int, capability: int
) -> Program:
    """Compiles a kernel, or loads it from Triton's cache.

    Args:
        function: The kernel's Python function, which may refer only to `triton.language`.
        arguments: Types of the launch arguments by name, in order.
        values: Values of all other parameters by name, which are compile-time constants.

    Raises:
        DeviceUnavailable: as for `program`.
    """
    try:
        compiled = _compile(function, arguments, values, warps, capability)
    except ImportError as error:
        raise DeviceUnavailable(f"{_MISSING} ({error})") from error
    except Exception as error:  # Errors of Triton, of ptxas, and of the file system that has the cache.
        raise DeviceUnavailable(
            f"Triton cannot compile {function.__name__} for compute capability {capability / 10}: {error}; try a newer "
            "Triton, or set TRITON_CACHE_DIR to a writable directory"
        ) from error
    ptx: str = compiled.asm["ptx"]
    metadata = compiled.metadata
    return Program(
        metadata.name,
        compiled.asm["cubin"],
        ptx,
        metadata.num_warps * 32,
        metadata.shared,
        _parameters(ptx, metadata.name) - len(arguments),
    )


def constants(variant: Variant) -> dict[str, Any]:
    """Returns the values of the kernel's compile-time constants by name."""
    from triton import language

    return {
        "ROWS": variant.rows,
        "HEADS": variant.heads,
        "UNITS": variant.units,
        "UNIT": variant.unit,
        **_strides("SRC", variant.src),
        **_strides("DST", variant.dst),
        "ALIGN": variant.align,
        "WORD": language.dtype(f"{'u' if variant.check else ''}int{8 * variant.word}"),
        "WORD_BYTES": variant.word,
        "TILE_UNITS": variant.tile_units,
        "RANGES": variant.ranges,
        "CHECK": variant.check,
    }


def _strides(name: str, side: PageStrides | None) -> dict[str, Any]:
    values = PageStrides(0, 0, 0) if side is None else side
    return {f"{name}_PAGED": side is not None} | {
        f"{name}_{field.upper()}": value for field, value in values._asdict().items()
    }


def _compile(
    function: Callable[..., None], arguments: Mapping[str, str], values: Mapping[str, Any], warps: int, capability: int
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = triton.JITFunction(function)
    constant = {(kernel.arg_names.index(name),): value for name, value in values.items()}
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    return triton.compile(
        ASTSource(kernel, signature, constant, {}),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps},
    )


def _parameters(ptx: str, name: str) -> int:
    """Counts the parameters of a compiled kernel; each Triton version appends a different number of pointers."""
    entry = re.search(rf"\.entry\s+{name}\s*\(([^)]*)\)", ptx)
    assert entry is not None
    return entry[1].count(".param")


class Kernel(NamedTuple):
    """A variant of the copy kernel that is loaded into a context.

    Attributes:
        threads, shared, appended: As in `Program`.
    """

    function: Any
    threads: int
    shared: int
    appended: int


class Kernels:
    """Cache of the kernels loaded into one context; they stay loaded as long as the context exists."""

    def __init__(self, context: Context, capability: int) -> None:
        """Creates an empty cache; `capability` is as for `program`."""
        self._context = context
        self._capability = capability
        self._loading = Lock()
        self._loaded: dict[Variant, Kernel] = {}

    def get(self, variant: Variant) -> Kernel:
        """Returns the kernel of a variant, compiled and loaded on first use.

        Raises:
            DeviceUnavailable: Triton is missing or cannot compile the kernel.
            DeviceError: the driver cannot load the kernel.
        """
        with self._loading:
            kernel = self._loaded.get(variant)
            if kernel is None:
                kernel = self._loaded[variant] = self._load(variant)
        return kernel

    def _load(self, variant: Variant) -> Kernel:
        code = program(variant, self._capability)
        driver = load()
        with self._context.visit():
            module = checked(driver.cuModuleLoadData(code.cubin), "cannot load the copy kernel")
            function = checked(driver.cuModuleGetFunction(module, code.name.encode()), "no copy kernel in its module")
        return Kernel(function, code.threads, code.shared, code.appended)
