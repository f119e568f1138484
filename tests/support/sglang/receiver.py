"""The receiver's module, imported over base classes that do nothing; `sys.modules` has none of them afterwards."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

_BASE = "sglang.srt.disaggregation.base.conn"
_POLLS = "Failed Bootstrapping WaitingForInput Transferring Success"


class _End:
    """SGLang's sender or receiver, with the methods that its newest release has."""

    def _poll_with_status(self) -> None: ...

    def _clear(self) -> None: ...

    def failure_exception(self) -> None: ...


_BASES: dict[str, dict[str, Any]] = {
    _BASE: {
        "KVPoll": enum.IntEnum("KVPoll", _POLLS, start=0, module=_BASE),
        "KVTransferDestination": enum.Enum("KVTransferDestination", "DEVICE HOST"),
    },
    "sglang.srt.disaggregation.common.conn": {
        "CommonKVReceiver": _End,
        "CommonKVSender": _End,
        "KVTransferError": Exception,
    },
}
_OVER_THEM = ("kvctl_agent.integrations.sglang.receiver", "kvctl_agent.integrations.sglang.common_conn")

_installed = {name: types.ModuleType(name) for name in _BASES}
for _name, _members in _BASES.items():
    vars(_installed[_name]).update(_members)
    while _name := _name.rpartition(".")[0]:
        _installed.setdefault(_name, types.ModuleType(_name))
_before = {name: sys.modules.get(name) for name in (*_installed, *_OVER_THEM)}
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
