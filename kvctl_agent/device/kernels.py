"""Loaded variants of the copy kernel, shared by all streams of a context."""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

from kvctl_agent.device.compiler import program
from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.device.variant import Variant


class Kernel(NamedTuple):
    """A loaded variant.

    Attributes:
        function: The driver's function handle.
        threads, shared, appended: As in `Program`.
    """

    function: Any
    threads: int
    shared: int
    appended: int


class Kernels:
    """The loaded kernels of one context. They stay loaded as long as the context exists."""

    def __init__(self, context: Context, capability: int) -> None:
        """Start without any kernel loaded.

        Args:
            context: The context.
            capability: Compute capability of the GPU, for example 90 for 9.0.
        """
        self._context = context
        self._capability = capability
        self._loading = Lock()
        self._loaded: dict[Variant, Kernel] = {}

    def get(self, variant: Variant) -> Kernel:
        """Return the kernel of a variant, compiled and loaded on first use.

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
