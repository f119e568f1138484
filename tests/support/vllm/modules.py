"""The connector's modules, imported over the stand-ins; `sys.modules` has neither of them afterwards."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

from kvctl_agent.integrations.vllm import versions
from tests.support.vllm.stand_ins import MODULES

_PACKAGE = "kvctl_agent.integrations.vllm."


def _stand_ins() -> dict[str, types.ModuleType]:
    found: dict[str, types.ModuleType] = {}
    for name, members in MODULES.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            parent = ".".join(parts[:count])
            found.setdefault(parent, types.ModuleType(parent))
        vars(found[name]).update({member.__name__: member for member in members})
    return found


_installed = _stand_ins()


@contextmanager
def installed() -> Iterator[None]:
    """Has the stand-ins in `sys.modules`, and the connector's modules that were imported over them."""
    sys.modules.update(_installed)
    try:
        yield
    finally:
        for name in list(sys.modules):
            ours = name.startswith(_PACKAGE) and name != versions.__name__
            if ours or name.partition(".")[0] == "vllm":
                _installed[name] = sys.modules.pop(name)


with installed():
    from kvctl_agent.integrations.vllm import connector, metadata, pools, scheduler, sleep_mode, worker

__all__ = ["connector", "installed", "metadata", "pools", "scheduler", "sleep_mode", "versions", "worker"]
