"""Whether a peer's memory can be mapped here, which the direct path needs; and if not, why."""

from __future__ import annotations

import os

from kvctl_agent.device.base import Device, Export
from kvctl_agent.errors import DeviceError
from kvctl_agent.paths.mapped_memory import MappedMemory
from kvctl_agent.protocol.messages import PeerInfo
from kvctl_agent.runtime.liveness import host_identity

_FABRIC = "fabric"


def map_peer_memory(device: Device | None, who: PeerInfo) -> tuple[MappedMemory | None, str]:
    """The mapping of a peer's memory, or none and the reason in words.

    Args:
        device: that of our own pool; None where that is host memory.
    """
    if device is None:
        return None, "our pool is host memory"
    if not who.shared:
        return None, who.unshared or f"{who.name}'s pool is host memory"
    same_host = who.host == host_identity()
    if not same_host and any(each.kind != _FABRIC for each in who.shared):
        lacks = "its memory has no fabric handles (engines make pools with them, mem_pool=vmm the ring)"
        return None, f"{who.name} is on another host, and {lacks}"
    exports = [Export(each.addr, each.nbytes, each.kind, each.handle, each.device) for each in who.shared]
    try:
        return MappedMemory(device.open(exports, same_process=same_host and who.pid == os.getpid())), ""
    except DeviceError as error:
        return None, str(error)
