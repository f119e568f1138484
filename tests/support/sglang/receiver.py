"""The receiver's module, imported over empty base classes; `sys.modules` has neither of them afterwards."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

_BASES: dict[str, dict[str, Any]] = {
    "sglang.srt.disaggregation.base.conn": {
        "KVPoll": enum.IntEnum("KVPoll", "Failed Bootstrapping WaitingForInput Transferring Success", start=0),
        "KVTransferDestination": enum.Enum("KVTransferDestination", "DEVICE HOST"),
    },
    "sglang.srt.disaggregation.common.conn": {"CommonKVReceiver": object, "KVTransferError": Exception},
}
_RECEIVER = "kvctl_agent.integrations.sglang.receiver"

_installed = {name: types.ModuleType(name) for name in _BASES}
for _name, _members in _BASES.items():
    vars(_installed[_name]).update(_members)
    while _name := _name.rpartition(".")[0]:
        _installed.setdefault(_name, types.ModuleType(_name))
_before = {name: sys.modules.get(name) for name in (*_installed, _RECEIVER)}
sys.modules.update(_installed)
try:
    from kvctl_agent.integrations.sglang import receiver
finally:
    for _name, _module in _before.items():
        if _module is None:
            sys.modules.pop(_name, None)
        else:
            sys.modules[_name] = _module

__all__ = ["receiver"]
