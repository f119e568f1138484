"""Opens a transport from one line of text, with or without the native code that posts its writes."""

from __future__ import annotations

import os

from kvctl_agent.memory.native_copier import NativeCopyPool
from kvctl_agent.transport import Transport, open_transport
from kvctl_agent.transport.nixl.transport import NixlTransport
from kvctl_agent.transport.registry import parse_params


class AlternatingPool(NativeCopyPool):
    """A considerate pool beside an engine that computes at every second write."""

    _asked = 0

    @property
    def has_threads(self) -> bool:
        self._asked += 1
        return self._asked % 2 == 0


class PooledTransport(NixlTransport):
    """NIXL whose writes a copy pool of `num_threads` threads posts; closes the pool, too."""

    def __init__(self, name: str, params: dict[str, str], kind: type[NativeCopyPool] = NativeCopyPool) -> None:
        wake = os.eventfd(0)
        self.pool = kind(int(params["num_threads"]), wake).start()
        os.close(wake)  # the pool has a copy
        super().__init__(name, params, copy_pool=self.pool)
        assert self.describe()["posts"] == "native"

    def close(self) -> None:
        super().close()
        self.pool.close()


class BindingTransport(NixlTransport):
    """NIXL by its binding alone, as where the native code is not built."""

    def __init__(self, name: str, params: dict[str, str]) -> None:
        super().__init__(name, params)
        self._native = None
        self._defers = False


def open_engine(engine: str, name: str) -> Transport:
    """Opens a transport from its name and, after a space, its parameters.

    Beside the names of transports there are `nixl+pool`, `nixl+alternating`, whose pool takes every second large write,
    and `nixl+binding`.
    """
    kind, _, text = engine.partition(" ")
    params = parse_params(text)
    if kind == "nixl+pool":
        return PooledTransport(name, params)
    if kind == "nixl+alternating":
        return PooledTransport(name, params, AlternatingPool)
    if kind == "nixl+binding":
        return BindingTransport(name, params)
    return open_transport(kind, name, params)
