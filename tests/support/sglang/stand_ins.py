"""Stand-ins for packages that SGLang imports and its disaggregation modules do not need, such as Triton.

`install()` adds a finder behind all others: an import of a package in PACKAGES that is not installed gives an empty
module, any name of which is a `StandIn`.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

# fmt: off
PACKAGES = (
    "aiter", "amdsmi", "anthropic", "apache_tvm_ffi", "av", "blobfile", "build", "compressed_tensors", "cuda",
    "cutlass", "datasets", "decord", "decord2", "deep_gemm", "dill", "einops", "fastapi", "flash_attn",
    "flashinfer", "gguf", "grpc", "huggingface_hub", "interegular", "IPython", "kernels", "llguidance",
    "mistral_common", "modelscope", "ninja", "nvidia", "openai", "openai_harmony", "outlines", "outlines_core",
    "partial_json_parser", "PIL", "pynvml", "quack", "scipy", "sentencepiece", "setproctitle", "sgl_deep_gemm",
    "sgl_kernel", "soundfile", "starlette", "tiktoken", "timm", "tokenizers", "torch_npu", "torchao",
    "torchaudio", "torchvision", "transformers", "triton", "tvm_ffi", "uvicorn", "uvloop", "vllm", "watchfiles",
    "xgrammar",
)
# fmt: on


# Parts of SGLang that need those packages.
SGLANG_PARTS = (
    "sglang.srt.configs",
    "sglang.srt.constrained",
    "sglang.srt.eplb",
    "sglang.srt.hardware_backend",
    "sglang.srt.layers",
    "sglang.srt.lora",
    "sglang.srt.managers",
    "sglang.srt.model_executor",
    "sglang.srt.model_loader",
    "sglang.srt.models",
    "sglang.srt.multimodal",
    "sglang.srt.sampling",
    "sglang.srt.speculative",
    "sglang.kernels",
)


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __or__(cls, other: object) -> Any:  # type: ignore[override]
        return cls

    def __ror__(cls, other: object) -> Any:  # type: ignore[override]
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __len__(cls) -> int:
        return 0


class StandIn(metaclass=_Meta):
    """A name of a package that is not installed: may be called, subscripted, subclassed, or decorate.

    An instance is false and empty. As a decorator it returns the function or class as it is.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __getitem__(self, key: object) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


class _Module(types.ModuleType):
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Meta(name, (StandIn,), {})  # one class for each name, so that isinstance() tells them apart
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(kernels: bool = False) -> None:
    """Adds the finders; with `kernels` SGLang's kernels are real, for a process that uses a GPU."""
    parts = [part for part in SGLANG_PARTS if not (kernels and part == "sglang.kernels")]
    sys.meta_path.append(_Finder(PACKAGES))
    sys.meta_path.insert(0, _Finder(parts))
