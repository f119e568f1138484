"""Lets stock SGLang servers run on a CPU; on PYTHONPATH of the servers.

Packages for GPUs that SGLang imports and that are not installed become stand-ins. A stand-in module has every
attribute: a class that can be derived from, called, subscripted and used as a decorator, and that computes nothing.

SGLang's NIXL manager registers KV pools as device memory wherever they are. NIXL is made to take that for host memory.
SGLang's checksum kernel of pages is for CUDA alone: the CPU computes another sum, with a line in the log for each.
HiCache pins memory for a GPU and copies tokens by kernels of CUDA: the CPU copies them, without waiting for anything.
Its attention backend for the CPU lacks a method that DP attention calls. Before 0.5.22 its allocator of pages has
kernels for GPUs alone.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import sys
import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

PACKAGES = ("sgl_kernel", "torchvision")


class _AnyAttribute(type):
    """Metaclass of stand-in classes: every attribute is a stand-in too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __getitem__(cls, key: Any) -> Any:
        return cls


class StandIn(metaclass=_AnyAttribute):
    """Any class, function, decorator or constant of a package that is not installed."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        decorated = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorated else super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return StandIn(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()


class _Module(ModuleType):
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _nixl_takes_host_memory(module: Any) -> None:
    """Makes "VRAM" another name of host memory in NIXL agents."""
    initialise = module.nixl_agent.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    module.nixl_agent.__init__ = __init__


def _checksums_on_the_host(module: Any) -> None:
    """Replaces SGLang's checksum kernel: the sum of the same pages, read by the CPU."""

    def compute(self: Any, pages: Any, state: Any = None) -> int:
        digest = 1
        for address, item_bytes in zip(self._kv_data_ptrs, self._kv_item_lens, strict=True):
            for page in pages.tolist():
                digest = zlib.adler32(ctypes.string_at(address + page * item_bytes, item_bytes), digest)
        print(f"host checksum of {len(pages)} pages", flush=True)
        return digest

    module.KvChecksumComputer.compute = compute


def _pads_like_other_backends(module: Any) -> None:
    """Adds what DP attention asks the CPU's attention backend for: the length of requests that fill up a batch."""
    module.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


class _HostKernel:
    """A kernel that is called as one of Triton: `kernel[grid](...)`."""

    def __init__(self, compute: Callable[..., None]) -> None:
        self._compute = compute

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._compute


def _allocates_on_the_host(module: Any) -> None:
    """Replaces the kernels of the allocator of pages, in releases that have no others for the CPU."""
    if hasattr(module, "alloc_decode_naive"):
        return

    def extend(prefixes: Any, ends: Any, last: Any, free: Any, out: Any, _: int, page_size: int) -> None:
        module.alloc_extend_naive(prefixes, ends, last, free, out, page_size, out.device)

    def decode(ends: Any, last: Any, free: Any, out: Any, _: int, page_size: int) -> None:
        pages = iter(free.tolist())
        for row, (end, slot) in enumerate(zip(ends.tolist(), last.tolist(), strict=True)):
            out[row] = slot + 1 if (end - 1) % page_size else next(pages) * page_size

    module.alloc_extend_kernel, module.alloc_decode_kernel = _HostKernel(extend), _HostKernel(decode)


def _skips_pinning(module: Any) -> None:
    """Replaces the registration of host memory with CUDA, which pins it for a GPU, by a function without effect."""
    module._cuda_host_register = lambda *_: None


def _reserves_no_host_memory(module: Any) -> None:
    """Sets HiCache's reserve of host memory, 10 GB, to zero, so that hosts with less free memory can have a pool."""
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _copies_tokens_on_the_host(module: Any) -> None:
    """Replaces HiCache's copies of tokens between its pool on the host and the pool of the server."""

    def copy(*, src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices]

    module.transfer_kv_direct = copy


# What is changed in modules after they ran, by their names.
CHANGES: dict[str, Callable[[Any], None]] = {
    "nixl_cu12._api": _nixl_takes_host_memory,
    "nixl_cu13._api": _nixl_takes_host_memory,
    "sglang.srt.disaggregation.checksum": _checksums_on_the_host,
    "sglang.srt.layers.attention.torch_native_backend": _pads_like_other_backends,
    "sglang.srt.mem_cache.allocator.paged": _allocates_on_the_host,
    "sglang.srt.mem_cache.pool_host.base": _reserves_no_host_memory,
    "sglang.srt.mem_cache.pool_host.common": _skips_pinning,
    "sglang.srt.mem_cache.pool_host.mha": _copies_tokens_on_the_host,
}


class _ChangesFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = CHANGES.get(name)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            change(module)

        loader.exec_module = exec_module
        return spec


# Last: a package that is installed is found before its stand-in.
sys.meta_path.append(_StandInFinder())
sys.meta_path.insert(0, _ChangesFinder())
