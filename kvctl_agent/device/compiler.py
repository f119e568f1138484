"""From a variant of the copy kernel to machine code: Triton as a compiler only, without torch, a driver or a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

from kvctl_agent.device.variant import Variant
from kvctl_agent.errors import DeviceUnavailable

# The arguments of a launch, in order; the compiler may append pointers of its own.
ARGUMENTS = {
    "blocks_at": "i64",
    "strips_at": "i64",
    "pages_at": "i64",
    "items": "i32",
    "tiles": "i32",
    "most": "i32",
}

_MISSING = "a KV pool on a GPU needs Triton: pip install 'kvctl[gpu]'"


class Program(NamedTuple):
    """Machine code of one variant.

    Attributes:
        name: of the function in it.
        cubin: for one compute capability.
        ptx: what it was assembled from.
        threads: of a thread block.
        shared: bytes of dynamic shared memory of a thread block.
        appended: arguments after ours, all of them null.
    """

    name: str
    cubin: bytes
    ptx: str
    threads: int
    shared: int
    appended: int


_compiling = Lock()


def program(variant: Variant, capability: int) -> Program:
    """Compiles (0.1 to 0.5 s), or takes it from this process's or Triton's own cache.

    Args:
        capability: of the GPU, as 90 for 9.0.

    Raises:
        DeviceUnavailable: Triton is missing or cannot compile for this GPU; says what to do.
    """
    with _compiling:  # Two threads want the same ones at the same time: once is enough.
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
    """Compiles a kernel, or takes it from Triton's cache.

    Args:
        function: the kernel's Python; may refer to nothing but `triton.language`.
        arguments: of a launch: their types, by name, in order.
        values: of all its other parameters, by name: constants of the program.
        warps: of a thread block.
        capability: as for `program`.

    Raises:
        DeviceUnavailable: as for `program`.
    """
    try:
        compiled = _compile(function, arguments, values, warps, capability)
    except ImportError as error:
        raise DeviceUnavailable(f"{_MISSING} ({error})") from error
    except Exception as error:  # Triton's own, ptxas's, and the file system's of its cache.
        raise DeviceUnavailable(
            f"Triton cannot compile {function.__name__} for compute capability {capability / 10}: {error}; try a newer "
            "Triton, or a folder that can be written as TRITON_CACHE_DIR"
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
    """The kernel's constants by its own names."""
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
        "STRIPS": variant.strips,
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
    """Versions of Triton differ in how many scratch pointers they append."""
    entry = re.search(rf"\.entry\s+{name}\s*\(([^)]*)\)", ptx)
    assert entry is not None
    return entry[1].count(".param")
