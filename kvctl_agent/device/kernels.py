"""Variants of the copy kernel that a context has loaded, shared by all its streams."""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

from kvctl_agent.device.compiler import program
from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.device.variant import Variant


class Kernel(NamedTuple):
    """A loaded variant.

    Attributes:
        function: the driver's.
        threads, shared, appended: as of its `Program`.
    """

    function: Any
    threads: int
    shared: int
    appended: int


class Kernels:
    """Of one context; they stay loaded as long as it lives."""

    def __init__(self, context: Context, capability: int) -> None:
        """
        Args:
            capability: of the GPU, as 90 for 9.0.
        """
        self._context = context
        self._capability = capability
        self._loading = Lock()
        self._loaded: dict[Variant, Kernel] = {}

    def get(self, variant: Variant) -> Kernel:
        """Compiles and loads what was not asked for before.

        Raises:
            DeviceUnavailable: there is no compiler, or it cannot.
            DeviceError: the driver cannot load it.
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
