"""Advice of the engine whose ranks a finding is about, in place of the remedy of the health code.

The remedies of the health codes name commands and settings of agents. With an engine, options of its servers and
parameters of its proxy take their place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvctl.health.answers import inner, text
from kvctl.health.finding import Finding
from kvctl.health.snapshot import Snapshot

_DATA_PARALLEL = re.compile(r"-dp\d")
_POOL = "SGLANG_DISAGG_STAGING_POOL_SIZE_MB"
_WAITING = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"
_ABORT = "abort the request at the router, or POST /abort_request on both servers"


def _room(finding: Finding) -> str:
    """Returns the number of the room that a finding is about, or of its latest one."""
    rooms = finding.evidence.get("rooms") or [""]
    return str(finding.evidence.get("latest_room") or finding.evidence.get("oldest_room") or rooms[0])


def _both_ends(then: str) -> Callable[[Finding], str]:
    return lambda finding: f"`kvctl rooms show {_room(finding)}` shows both ends on one timeline; {then}"


def _pinned(finding: Finding) -> str:
    return (
        f"`kvctl staging map -e {finding.agents[0]}` shows the region; SGLang frees it when its room ends, for a room "
        f"that does not end after {_WAITING}: {_ABORT}"
    )


def _small(finding: Finding) -> str:
    needed = finding.evidence["needed_ring_mb"]
    return (
        f"`kvctl staging -e {finding.agents[0]}` shows the ring; start the decode server with {_POOL}={needed} or more"
    )


def _oversized(finding: Finding) -> str:
    largest = finding.evidence["largest_part_bytes"]
    pool = f"{_POOL}={-(-largest >> 20)} or more" if largest else f"a larger {_POOL}"
    return (
        f"`kvctl staging -e {finding.agents[0]} -o wide` shows the ring, and how many chunks it refused; start the "
        f"decode server with {pool}, or the prefill server with a smaller --chunked-prefill-size"
    )


def _lost(finding: Finding) -> str:
    name = finding.agents[0]
    if finding.evidence.get("role") is None:
        return finding.remedy  # about hosts, or about rooms that failed before
    if finding.evidence["answers_kvctl"] and finding.evidence["role"] == "prefill":
        return (
            f"`kvctl peers -e {name}` shows which ranks it hears; decode servers ask its bootstrap server for a "
            "sign of life: see whether that address answers on their hosts"
        )
    if finding.evidence["answers_kvctl"]:
        return (
            f"`kvctl rooms failed` shows the first failure of a transfer to {name}; remove its cause and restart "
            f"{name}; SGLANG_ENABLE_FAILED_SESSION_PROBE=1 on the prefill server tries such a rank again"
        )
    again = "at the same bootstrap address: decode servers find it with the next request that the router sends there"
    if finding.evidence["role"] == "decode":
        again = "and its router sends it requests: prefill servers find it with the first"
    return f"`kvctl agents` shows whether {name} runs; start its server again, {again}; its own log shows why it ended"


SGLANG: Mapping[str, Callable[[Finding], str]] = {
    "KV_RING_PINNED": _pinned,
    "KV_RING_GATED_EMPTY": _pinned,
    "KV_RING_CYCLE": _pinned,
    "KV_RING_SMALL": _small,
    "KV_CHUNK_OVERSIZED": _oversized,
    "KV_GRANT_UNANSWERED": _both_ends(f"SGLang asks once for a region and does not repeat a lost request: {_ABORT}"),
    "KV_SUBSCRIBER_DEAD": lambda finding: (
        f"`kvctl staging -e {finding.agents[0]}` lists the chunks that wait; SGLang does not repeat a watermark: the "
        "next region that the decode rank frees sends one, so another request may help; otherwise restart the prefill "
        "server"
    ),
    "KV_PEER_LOST": _lost,
    "KV_ROOM_STUCK_BOOTSTRAP": _both_ends(
        "check that the router sends the two halves of a request to servers that know each other (bootstrap host, port "
        "and room), and that the decode server has memory for it; it fails after "
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"
    ),
    "KV_ROOM_STUCK_WAITING": _both_ends(f"{_ABORT}; it fails after {_WAITING}"),
    "KV_ROOM_STUCK_TRANSFER": _both_ends(f"{_ABORT}; it fails after {_WAITING}"),
    "KV_ROOM_STUCK_SCATTER": _both_ends(f"{_ABORT}; it fails after {_WAITING}"),
    "KV_READY_GAP": lambda finding: (
        f"`kvctl staging` shows whose ring they wait for: start that decode server with a larger {_POOL}, or add "
        "cores and SGLANG_DISAGGREGATION_QUEUE_SIZE for more transfer workers"
    ),
}
"""For ranks of SGLang's own transfer backends, which kvctl only observes: an agent's commands have no effect there."""


# ---- vLLM -------------------------------------------------------------------------------------------------------


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


def _prefill_lost(finding: Finding) -> str:
    if finding.evidence.get("role") != "prefill":
        return finding.remedy
    return (
        f"{finding.remedy}; with kv_load_failure_policy recompute, decode computes the prompts of failed rooms itself"
    )


VLLM: Mapping[str, Callable[[Finding], str]] = {
    "KV_COMPAT_MISMATCH": _also(
        "in vLLM: the model, --dtype, --kv-cache-dtype, --block-size and --disable-hybrid-kv-cache-manager"
    ),
    "KV_WRONG_ROLE": lambda finding: (
        "`kvctl agents` shows the role of each agent; exchange kv_role of the two servers, or --prefill and --decode "
        "of the proxy"
    ),
    "KV_PEER_LOST": _prefill_lost,
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

VLLM_OBSERVED: Mapping[str, Callable[[Finding], str]] = {
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


# By engine and mode; the ranks of SGLang's plugin in other modes are agents like others.
_ADVICE: Mapping[tuple[str, str], Mapping[str, Callable[[Finding], str]]] = {
    ("sglang", "observe"): SGLANG,
    ("vllm", "connector"): VLLM,
    ("vllm", "observe"): VLLM_OBSERVED,
}


def adapted(finding: Finding, snapshot: Snapshot) -> Finding:
    """Returns the finding with the advice for the engine of one of its ranks; otherwise the finding itself."""
    for name in finding.agents:
        if name in snapshot.agents:
            found = inner(snapshot.agents[name].status, "integration")
            advice = _ADVICE.get((text(found, "engine"), text(found, "mode")), {}).get(finding.code)
            if advice is not None:
                return replace(finding, remedy=advice(finding))
    return finding
