"""Advice for ranks of SGLang's own transfer backends, which kvctl only observes.

The remedies of the health codes name commands and settings of agents, which have no effect there. The findings about
observed ranks get the remedies of this table instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvctl.health.finding import Finding

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


ADVICE: Mapping[str, Callable[[Finding], str]] = {
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
