"""Agents that do not fit together: the differing factor, and both its values."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvctl.health.answers import text, texts
from kvctl.health.codes.failures import all_names, failure_finding, failures_by_rank
from kvctl.health.codes.formatting import common_factors, counted, listed, named_in
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot

_FACTOR = re.compile(r"(?P<name>.*\S) (?P<ours>\S+) ≠ (?P<theirs>\S+)")
_Pair = tuple[str, str]  # prefill, decode


def _refused(snapshot: Snapshot) -> dict[_Pair, list[str]]:
    """Pairs that refuse each other, with the factors in which they differ."""
    pairs: dict[_Pair, list[str]] = {}
    for agent in sorted(snapshot.agents.values(), key=lambda agent: agent.role, reverse=True):  # prefill's word first
        for row in agent.peers:
            factors = texts(row, "differences")
            if text(row, "state") != "refused" or not factors:
                continue
            ends = agent.name, text(row, "peer")
            first, second = ends if agent.role == "prefill" else ends[::-1]
            # A decode rank repeats what the prefill rank told it; only the protocol's version it compares itself.
            own = agent.role == "decode" and all(factor.startswith("protocol version") for factor in factors)
            ours, theirs = (second, first) if own else (first, second)
            pairs.setdefault((first, second), [_valued(factor, ours, theirs) for factor in factors])
    return pairs


def _valued(factor: str, ours: str, theirs: str) -> str:
    """`page_size 64 ≠ 32` as `page_size 64 (prefill-0) ≠ 32 (decode-1)`."""
    match = _FACTOR.fullmatch(factor)
    return factor if match is None else f"{match['name']} {match['ours']} ({ours}) ≠ {match['theirs']} ({theirs})"


def _compat(snapshot: Snapshot) -> Iterator[Finding]:
    pairs = _refused(snapshot)
    for odd, refusals in common_factors(list(pairs)):
        factors = list(dict.fromkeys(factor for pair in refusals for factor in pairs[pair]))
        others = [next(name for name in pair if name != odd) for pair in refusals]
        known = odd in snapshot.agents and any(other in snapshot.agents for other in others)
        yield Finding(
            code="KV_COMPAT_MISMATCH",
            severity=Severity.CRITICAL if known else Severity.WARNING,
            subject=odd,
            agents=(odd, *others),
            weight=len(refusals),
            evidence={"differences": factors[:8], "differing_factors": len(factors), "refused_with": others},
            cause=f"{odd} does not fit {listed(others)}: {'; '.join(pairs[refusals[0]][:2])}",
            remedy=f"`kvctl peers diff {' '.join(refusals[0])}` lists every factor; start {odd} with what the others "
            "have",
        )
    if not pairs:
        yield from _lately(snapshot, "KV_COMPAT_MISMATCH", Severity.WARNING, "because two agents do not fit together")


def _plan(snapshot: Snapshot) -> Iterator[Finding]:
    yield from _lately(
        snapshot, "KV_PLAN_MISMATCH", Severity.CRITICAL, "because its two ends do not agree on what is to be sent"
    )


def _lately(snapshot: Snapshot, code: str, severity: Severity, why: str) -> Iterator[Finding]:
    for rank, failures in failures_by_rank(snapshot, code).items():
        latest = failures[0]
        named = named_in(latest.text, snapshot.once(all_names))
        agents = (rank, *latest.known_to, *named)
        roles = {one: snapshot.agents[one].role for one in agents if one in snapshot.agents}
        other = next((one for one, role in roles.items() if role != roles.get(rank)), "")
        layouts = (
            f"`kvctl peers diff {rank} {other}` shows whether their layouts differ" if other else "compare layouts"
        )
        yield failure_finding(
            code,
            severity,
            failures,
            f"{counted(len(failures), 'room')} failed {why}",
            f"both ends; {layouts}; if they do not, the engines disagree on the prompt or its cached prefix",
            named,
        )


COMPAT_MISMATCH = Code(
    name="KV_COMPAT_MISMATCH",
    sees="no room can be opened between two agents; elsewhere: garbage, or NOT_FOUND under load",
    means="When two agents meet they compare what the layout of KV depends on: page size, dtype, heads, layers, the "
    "chunk grid, the version. These differ, so they refuse each other and every room between them fails at once. The "
    "factor is named with both values.",
    remedy="Start the odd one with the configuration of the others; kvctl peers diff lists all factors.",
    severity=Severity.CRITICAL,
    find=_compat,
    alert='sum by (instance) (kvctl_peers{state="refused"}) > 0',
)

PLAN_MISMATCH = Code(
    name="KV_PLAN_MISMATCH",
    sees="requests with a cached prefix fail; elsewhere they hang or their text is corrupt",
    means="Both ends of a room derive from the same inputs who owes what to whom. For this room the inputs differ: the "
    "number of pages, the cached prefix, the aux row or the state items that one engine gave are not those that the "
    "other expects. The first cause names the factor and both values.",
    remedy="Compare what the two engines make of this prompt: tokens, prefix length, page size, aux row.",
    severity=Severity.CRITICAL,
    find=_plan,
    alert='sum by (instance) (increase(kvctl_room_failures_total{code="KV_PLAN_MISMATCH"}[10m])) > 0',
)
