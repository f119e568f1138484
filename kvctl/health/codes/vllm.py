"""Advice for ranks of vLLM: the options of vLLM and the parameters of its proxy in question."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from kvctl.health.finding import Finding

_DATA_PARALLEL = re.compile(r"-dp\d")


def _also(advice: str) -> Callable[[Finding], str]:
    return lambda finding: f"{finding.remedy}; {advice}"


def _unclaimed(finding: Finding) -> str:
    if any(_DATA_PARALLEL.search(name) for name in finding.agents if name.startswith("prefill")):
        return (
            f"{finding.remedy}; this prefill server has several data-parallel ranks: the proxy must send it "
            "X-data-parallel-rank with the rank whose registry kvctl_prefill names"
        )
    return (
        f"{finding.remedy}; the proxy must send the request to the prefill server whose registry kvctl_prefill names, "
        "with do_remote_decode and the same transfer_id"
    )


def _lost(finding: Finding) -> str:
    if finding.evidence.get("role") != "prefill":
        return finding.remedy
    return (
        f"{finding.remedy}; with kv_load_failure_policy recompute, decode computes the prompts of failed rooms itself"
    )


ADVICE: Mapping[str, Callable[[Finding], str]] = {
    "KV_COMPAT_MISMATCH": _also(
        "in vLLM: the model, --dtype, --kv-cache-dtype, --block-size and --disable-hybrid-kv-cache-manager"
    ),
    "KV_WRONG_ROLE": lambda finding: (
        "`kvctl agents` shows the role of each agent; exchange kv_role of the two servers, or --prefill and --decode "
        "of the proxy"
    ),
    "KV_PEER_LOST": _lost,
    "KV_ROOM_UNCLAIMED": _unclaimed,
    "KV_HOLD_EXPIRED": _also(
        "the proxy must send decode the request with the kv_transfer_params of prefill's answer; decode's scheduler "
        "renews requests that wait in its queue"
    ),
    "KV_ROOM_DUPLICATE": _also(
        "the proxy must mint a transfer_id for each sequence: a request with n above 1 or several prompts goes to "
        "decode alone"
    ),
    "KV_IDLE": _also(
        "decode needs do_remote_prefill, transfer_id and kvctl_prefill in kv_transfer_params, prefill do_remote_decode"
    ),
}

_PROXY = "end the request at the proxy, or restart the decode server"

OBSERVED: Mapping[str, Callable[[Finding], str]] = {
    "KV_HOLD_EXPIRED": lambda finding: (
        f"`kvctl rooms show {finding.evidence['latest_room']}` shows whether decode knew it; the proxy must send it "
        "there with the kv_transfer_params of prefill's answer before the lease is over (kv_lease_duration; "
        "MooncakeConnector: the transfer_id of prefill, and VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)"
    ),
    "KV_PEER_LOST": lambda finding: (
        f"`kvctl agents` shows whether {finding.subject} runs; start its server again: decode servers connect to it "
        "with the next request"
    ),
    "KV_ROOM_STUCK_BOOTSTRAP": lambda finding: f"`kvctl peers` shows the handshakes; {_PROXY}",
    "KV_ROOM_STUCK_WAITING": lambda finding: f"`kvctl peers` shows who is heard; {_PROXY}",
    "KV_ROOM_STUCK_TRANSFER": lambda finding: f"`kvctl peers` shows who is heard; {_PROXY}",
}
"""For ranks of vLLM's own connectors, which kvctl only observes: commands that act on an agent have no effect there."""
