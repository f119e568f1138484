"""The classes that the plugin gives SGLang for the backend, by SGLang's name of their kind."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from kvctl_agent.integrations.sglang.manager import KvctlKVManager
from kvctl_agent.integrations.sglang.receiver import KvctlKVReceiver
from kvctl_agent.integrations.sglang.sender import KvctlKVSender


class KvctlKVBootstrapServer(CommonKVBootstrapServer):
    """SGLang's own bootstrap server; the row of a prefill instance's first rank has the address of our registry."""


CLASSES: dict[str, Any] = {
    "manager": KvctlKVManager,
    "sender": KvctlKVSender,
    "receiver": KvctlKVReceiver,
    "bootstrap_server": KvctlKVBootstrapServer,
}
