"""Opens a transport from one line of text, with or without the native code that posts its writes; or in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvctl_agent
from kvctl_agent.memory.host_copier import CopyPool
from kvctl_agent.transport import Transport, open_transport
from kvctl_agent.transport.nixl.transport import NixlTransport
from kvctl_agent.transport.registry import parse_params


class AlternatingPool(CopyPool):
    """A considerate pool beside an engine that computes at every second write."""

    _asked = 0

    @property
    def has_threads(self) -> bool:
        self._asked += 1
        return self._asked % 2 == 0


class PooledTransport(NixlTransport):
    """NIXL whose writes a copy pool of `num_threads` threads posts; closes the pool, too."""

    def __init__(self, name: str, params: dict[str, str], kind: type[CopyPool] = CopyPool) -> None:
        wake = os.eventfd(0)
        self.pool = kind(int(params["num_threads"]), wake).start()
        os.close(wake)  # the pool has a copy
        super().__init__(name, params, copy_pool=self.pool)
        assert self.describe()["posts"] == "native"

    def close(self) -> None:
        super().close()
        self.pool.close()


class BindingTransport(NixlTransport):
    """NIXL by its binding alone, as a version that native code cannot call."""

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


def run_with_engines(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new process that has imported `np` and the names of `kvctl_agent.transport`.

    Args:
        env: added to the environment, from which the variables of all engines are taken away.
    """
    prelude = "import numpy as np\nfrom kvctl_agent.transport import *\n"
    engines = ("UCX_", "NIXL_", "MC_", "GLOG_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(engines)}
    return subprocess.run(
        [sys.executable, "-c", prelude + code],
        capture_output=True,
        text=True,
        timeout=250,
        env={**clean, "PYTHONPATH": str(Path(kvctl_agent.__file__).parents[1]), **env},
        check=False,
    )
