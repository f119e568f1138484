"""Requests for ring regions that nobody answers, and parts that no region could hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from kvctl.health.answers import amount, number, rows, text
from kvctl.health.codes.formatting import common_factors, counted, listed, pair
from kvctl.health.codes.ring import ring_of
from kvctl.health.codes.silence import absent
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.selection import natural_key
from kvctl.render.units import duration, size

_REQUESTS = 5
_LONGEST_ANSWER_NS = 10_000_000_000
_MIB = 1 << 20


class UnansweredRequest(NamedTuple):
    """A part whose writer has asked for its ring region again and again."""

    writer: str
    peer: str
    asked_ns: float
    requests: float
    room: str


def unanswered(snapshot: Snapshot) -> Mapping[tuple[str, str], Sequence[UnansweredRequest]]:
    """By writer and decode rank, where the decode rank is heard and answers none of it; use `snapshot.once`."""
    found: dict[tuple[str, str], list[UnansweredRequest]] = {}
    for agent in snapshot.of_role("prefill"):
        patience_ns = max(_LONGEST_ANSWER_NS, 2 * _REQUESTS * agent.period_ns("resend_s"))
        for part in rows(agent.staging.get("gated")):
            asked_ns, requests, peer = amount(part, "asked_age_ns"), amount(part, "requests"), text(part, "peer")
            often = requests >= _REQUESTS and asked_ns >= patience_ns
            # A silent peer grants nothing: it is named itself.
            if often and text(part, "waiting_for") == "grant" and peer not in snapshot.once(absent):
                part_asked = UnansweredRequest(agent.name, peer, asked_ns, requests, text(part, "room"))
                found.setdefault((agent.name, peer), []).append(part_asked)
    return found


def _unanswered(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for all that the same writer asks, or that the same decode rank leaves unanswered."""
    pairs = snapshot.once(unanswered)
    for common, concerned in common_factors(list(pairs)):
        parts = [part for each in concerned for part in pairs[each]]
        first = max(parts, key=lambda part: part.asked_ns)
        rooms = sorted({part.room for part in parts}, key=natural_key)
        writers, peers = (sorted({each[side] for each in concerned}, key=natural_key) for side in (0, 1))
        others = peers if common == writers[0] else writers
        yield Finding(
            code="KV_GRANT_UNANSWERED",
            severity=Severity.CRITICAL,
            subject=common if len(concerned) > 1 else pair(*concerned[0]),
            agents=(common, *others) if len(concerned) > 1 else (*peers, *writers),
            since_ns=int(first.asked_ns),
            weight=len(parts),
            evidence={
                "requests": int(first.requests),
                "asked_age_ns": int(first.asked_ns),
                "waiting_parts": len(parts),
                "writers": writers,
                "peers": peers,
                "rooms": rooms,
            },
            cause=f"{listed(writers)} asked {listed(peers)} for staging of {counted(len(rooms), 'room')} and got "
            f"neither grant nor refusal: {counted(first.requests, 'request')} in {duration(first.asked_ns)} for room "
            f"{first.room}; {counted(len(parts), 'part')} wait",
            remedy=f"`kvctl staging -e {first.writer}` lists the parts that wait for a grant and how often each was "
            f"asked for; `kvctl stacks -e {first.peer}` shows what its control thread does; `kvctl rooms abort "
            f"{first.room}` fails the room",
        )


GRANT_UNANSWERED = Code(
    name="KV_GRANT_UNANSWERED",
    sees="a room stays in Transferring, nothing is logged, the workers are idle",
    means="A writer asks the decode rank for a ring region for each staged part, and asks again every resend_s. A "
    "request is always answered at once, with a grant or a refusal, so a writer that has asked this often is not "
    "heard by a peer that it hears, or the peer's control thread does nothing. Peers that are silent altogether are "
    "KV_PEER_LOST.",
    remedy="See whether the decode rank hears the writer, and what its control thread does.",
    severity=Severity.CRITICAL,
    find=_unanswered,
    alert='sum by (instance) (rate(kvctl_control_resends_total{type="staging-request"}[2m])) > 0.5',
)


def _oversized(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.of_role("decode"):
        ring = ring_of(agent)
        refused, total = amount(ring, "refused_total"), amount(ring, "size_bytes")
        largest = number(ring, "refused_largest_bytes")
        grown = snapshot.since_before(agent.name, "kvctl_ring_refusals_total")
        if not refused or (largest is not None and largest <= total):
            continue  # what would fit the whole ring was refused because of quarantined bytes
        now = grown is not None and grown > 0
        needed = None if largest is None else ceil(largest / _MIB)
        chunks = sorted({one.setting("chunk_tokens") for one in snapshot.of_role("prefill")})
        cause = f"{counted(refused, 'part')} did not fit {agent.name}'s ring of {size(total)} and went by a slower path"
        shown = f"`kvctl staging -e {agent.name} -o wide` shows the ring, and how many parts it refused"
        remedy = f"{shown}; start {agent.name} with a larger staging_ring_mb"
        if largest is not None and needed is not None:
            cause = (
                f"a part needs {size(largest)}, {agent.name}'s ring has {size(total)}: {counted(refused, 'part')} went "
                "by a slower path"
            )
            remedy = f"{shown}; start {agent.name} with a staging_ring_mb of {needed} or more"
            if chunks and chunks[-1] and total:
                fitting = int(chunks[-1] * total / largest)
                remedy += f", or the prefill ranks with chunk_tokens of at most {fitting} (now {chunks[-1]:.0f})"
        yield Finding(
            code="KV_CHUNK_OVERSIZED",
            severity=Severity.WARNING,
            subject=f"{agent.name} ring",
            agents=(agent.name,),
            weight=refused,
            evidence={
                "refused_total": int(refused),
                "refused_since_before": grown,
                "largest_part_bytes": largest,
                "ring_bytes": int(total),
            },
            cause=cause + (", some of them just now" if now else ""),
            remedy=remedy,
        )


CHUNK_OVERSIZED = Code(
    name="KV_CHUNK_OVERSIZED",
    sees="some rooms are suddenly many times slower, most often those with long prompts",
    means="A part that is larger than the decode rank's whole ring can never be staged. It is sent by the path that "
    "needs no ring, which for unequal heads is one descriptor for each token and many times slower.",
    remedy="Raise staging_ring_mb of the decode rank to the size of the largest part, or lower chunk_tokens of the "
    "prefill ranks.",
    severity=Severity.WARNING,
    find=_oversized,
    alert="sum by (instance) (increase(kvctl_ring_refusals_total[10m])) > 0",
)
