"""Compiles variants of the copy kernel to machine code with Triton, without torch, a driver or a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

from kvctl_agent.device.variant import Variant
from kvctl_agent.errors import DeviceUnavailable

# The arguments of a launch, in order; the compiler may append scratch pointers.
ARGUMENTS = {
    "blocks_at": "i64",
    "ranges_at": "i64",
    "pages_at": "i64",
    "items": "i32",
    "tiles": "i32",
    "most": "i32",
}

_MISSING = "a KV pool on a GPU needs Triton: pip install 'kvctl[gpu]'"


class Program(NamedTuple):
    """Machine code of one variant.

    Attributes:
        name: Name of the kernel function.
        cubin: Machine code for one compute capability.
        ptx: The PTX that it was assembled from.
        threads: Threads of a thread block.
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
    """Return the machine code of a variant, compiled (0.1 to 0.5 s) or from the cache of this process or of Triton.

    Args:
        variant: The variant of the copy kernel.
        capability: Compute capability of the GPU, for example 90 for 9.0.

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
    """Compile a kernel, or load it from Triton's cache.

    Args:
        function: The kernel's Python function, which may refer only to `triton.language`.
        arguments: Types of the launch arguments by name, in order.
        values: Values of all other parameters by name, which are compile-time constants.
        warps: Warps of a thread block.
        capability: As for `program`.

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
    """Return the values of the kernel's compile-time constants by name."""
    from triton import language

    return {
        "ROWS": variant.rows,
        "SPLIT": variant.split,
        "UNIT": variant.unit,
        "SRC_ROW": variant.src_row,
        "DST_ROW": variant.dst_row,
        "SRC_PAGED": variant.src_paged,
        "DST_PAGED": variant.dst_paged,
        "ALIGN": variant.align,
        "WORD": language.dtype(f"int{8 * variant.word}"),
        "WORD_BYTES": variant.word,
        "TILE_UNITS": variant.tile_units,
        "RANGES": variant.ranges,
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
    """Count the parameters of the compiled kernel; versions of Triton append different numbers of scratch pointers."""
    entry = re.search(rf"\.entry\s+{name}\s*\(([^)]*)\)", ptx)
    assert entry is not None
    return entry[1].count(".param")
