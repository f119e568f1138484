"""Health codes about engines without an agent, from the metrics that they export (`kvctl.client.metrics.names`).

Counters are compared with the previous snapshot. What an engine counted before that is only reported as information,
because nobody knows when it happened.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from kvctl.client.metrics.names import (
    EXTERNAL,
    SOURCES,
    Engine,
    Moved,
    Signal,
    Use,
    exported,
    moved,
    reads_prefill,
    total,
    totals,
)
from kvctl.health.answers import inner, text
from kvctl.health.codes.leases import RECOMPUTED, recomputed_prompts
from kvctl.health.finding import Code, Finding, Severity, counted, health_code, listed
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration, size, three_digits

# A queue grows if it does by half and by so many requests, while others leave it.
_GROWN, _GROWN_SHARE = 4, 0.5
# SGLang publishes its gauges every 30 s while it is idle, and one request may take as long.
_STUCK_NS = 31_000_000_000
_SLOW_FACTOR = 4.0
_LIKE_SIZE = 2.0
_LEAST_TRANSFERS, _LEAST_BYTES = 5, 1 << 20
_LARGE_BYTES = 16 << 20
_TEN_GBIT = 1.25  # GB/s
_COMPUTED_SHARE, _COMPUTED_TOKENS = 0.25, 256


class _Growth(NamedTuple):
    """A counter of failures: its value, and its growth since the previous snapshot; None without one."""

    signal: Signal
    value: float
    growth: float | None


def _servers(snapshot: Snapshot) -> Iterator[tuple[Agent, Engine]]:
    for agent in snapshot.agents.values():
        if text(inner(agent.status, "integration"), "mode") == "metrics":
            for engine in exported(agent.families):
                yield agent, engine


def _url(agent: Agent) -> str:
    return shlex.quote(text(agent.status, "metrics_url"))


def _growths(snapshot: Snapshot, agent: Agent, engine: Engine, use: Use) -> Iterator[_Growth]:
    before = snapshot.earlier(agent.name)
    for signal, value in totals(engine, agent.families, use):
        then = None if before is None else total(before.families, signal) or 0
        yield _Growth(signal, value, None if then is None else value - then if value >= then else value)


def _grown(snapshot: Snapshot, agent: Agent, *uses: Use) -> float | None:
    """Returns the growth of all counters of these uses, over all engines of an endpoint; None if there are none."""
    found = [
        each for engine in exported(agent.families) for use in uses for each in _growths(snapshot, agent, engine, use)
    ]
    return sum(each.growth or 0 for each in found) if found and snapshot.earlier(agent.name) is not None else None


def _recent(snapshot: Snapshot, agent: Agent, engine: Engine) -> tuple[Moved | None, Moved | None]:
    """Returns the transfers since the previous snapshot, and those before; None where they are unknown."""
    before, now = snapshot.earlier(agent.name), moved(engine, agent.families)
    then = None if before is None else moved(engine, before.families)
    return (None, now) if now is None or then is None or then.ns > now.ns else (now.since(then), then)


def _while(snapshot: Snapshot) -> str:
    return f"within {duration(snapshot.since_ns)}"


@health_code(
    "KV_QUEUE_STUCK",
    Severity.WARNING,
    "rooms",
    sees="a queue of an engine without an agent grows, and no request leaves it",
    means="Requests wait in a queue of an engine that exports its metrics, and since the previous reading the queue "
    "has grown while no request has ended, no token was generated and no transfer has finished. The other side does "
    "not answer, or the engine hangs. A queue that stays as it is counts only if the readings are more than 30 s "
    "apart, as it may be one long request, and SGLang publishes its queues every 30 s while idle; before, and where a "
    "queue grows beside progress, the finding is information.",
    remedy="Look at the server at the other end of the transfers: whether it answers, and what its log says (kvctl "
    "logs). An agent in the servers tells which request waits for which rank.",
)
def queue_stuck(snapshot: Snapshot) -> Iterator[Finding]:
    for agent, engine in _servers(snapshot):
        before = snapshot.earlier(agent.name)
        if before is None:
            continue
        left = _grown(snapshot, agent, Use.FINISHED, Use.TOKENS) or 0
        recent, _ = _recent(snapshot, agent, engine)
        left += 0 if recent is None else recent.transfers
        for signal, now in totals(engine, agent.families, Use.QUEUE):
            then = total(before.families, signal) or 0
            # A forward is no progress of a transfer.
            transfers = signal.state in {"Bootstrapping", "Transferring"}
            computed = 0 if transfers else _grown(snapshot, agent, Use.COMPUTED) or 0
            moves = left + computed > 0
            if now < then + max(_GROWN, then * _GROWN_SHARE) if moves else not now >= then > 0:
                continue
            certain = not moves and (now > then or snapshot.since_ns >= _STUCK_NS)
            grew = f"grew from {then:.0f} to {now:.0f}" if now > then else f"stayed at {now:.0f}"
            beside = "although others left it" if moves else "and none left it"
            yield queue_stuck.finding(
                agent.name,
                severity=Severity.WARNING if certain else Severity.INFO,
                weight=now,
                evidence={
                    "metric": signal.metric,
                    "before": round(then),
                    "now": round(now),
                    "apart_ns": snapshot.since_ns,
                    "ended_or_transferred": round(left),
                },
                cause=f"{engine.name} at {agent.name}: {signal.noun}: the queue {grew} {_while(snapshot)}, {beside}",
                remedy=f"`kvctl health -w 10 -e {_url(agent)}` shows whether it goes on; look at the server at the "
                "other end: whether it answers, and its log (kvctl logs)",
            )


@health_code(
    "KV_REQUESTS_FAILED",
    Severity.WARNING,
    "rooms",
    sees="an engine without an agent counts failed requests or transfers",
    means="An engine that exports its metrics counted requests, transfers or operations that failed since the previous "
    "reading; what it counted before is information. The metrics do not tell why.",
    remedy="kvctl logs FILE names the known failures in the log of the server, with their causes.",
)
def requests_failed(snapshot: Snapshot) -> Iterator[Finding]:
    yield from counted_by_engines(snapshot, requests_failed, Use.FAILED, "failed", "its log tells why")


@health_code(
    "KV_RECOMPUTED",
    Severity.WARNING,
    "rooms",
    sees="time to first token rises: prompts are computed where their KV should have come from elsewhere",
    means="An engine that exports its metrics dropped the KV of requests and computed it again since the previous "
    "reading: preempted or retracted for want of memory, retried, or moved to another worker. Or a decode server of "
    "vLLM, which gets KV by NIXL, computed more than a quarter of its prompt tokens itself (with KV from elsewhere, "
    "which may be a cache, the finding is information). Or one that kvctl observes could not load the KV of prompts "
    "and computes them, as its kv_load_failure_policy is recompute, or gets them without the kv_transfer_params of "
    "prefill's answer, while prefill holds blocks that nobody reads.",
    remedy="Give decode more KV memory, or let the router send it fewer requests at once; where KV does not arrive, "
    "the log of the server names the failed loads (kvctl logs), and kvctl rooms failed those that it observes.",
    alert=f'sum by (instance) (increase({RECOMPUTED}{{reason="load-failed"}}[10m])) > 0',
)
def recomputed(snapshot: Snapshot) -> Iterator[Finding]:
    yield from recomputed_prompts(snapshot, recomputed)
    yield from counted_by_engines(snapshot, recomputed, Use.RECOMPUTED, "computed again", "give it more KV memory")
    for agent, engine in _servers(snapshot):
        before = snapshot.earlier(agent.name)
        if engine.name != "vllm" or before is None:
            continue
        grown = {
            source: (agent.total(SOURCES, source=source) or 0) - (before.total(SOURCES, source=source) or 0)
            for source in ("local_compute", "local_cache_hit", EXTERNAL)
        }
        computed, share = grown["local_compute"], grown["local_compute"] / max(1, sum(grown.values()))
        prefill = reads_prefill(agent.families)
        if agent.total(SOURCES, source=EXTERNAL) and share > _COMPUTED_SHARE and computed >= _COMPUTED_TOKENS:
            yield recomputed.finding(
                agent.name,
                severity=Severity.WARNING if prefill else Severity.INFO,
                weight=computed,
                evidence={f"{source}_tokens": round(min(value, 1e18)) for source, value in grown.items()},
                cause=f"vllm at {agent.name} gets KV from {'other servers' if prefill else 'elsewhere'}, and computed "
                f"{computed:.0f} prompt tokens itself {_while(snapshot)}, {share:.0%} of all",
                remedy=f"`kvctl metrics show -e {_url(agent)}` shows the sources of prompt tokens; its log names "
                "failed loads (kvctl logs FILE)",
            )


@health_code(
    "KV_NO_TOKENS",
    Severity.WARNING,
    "rooms",
    sees="requests succeed by the metrics, and clients get empty answers",
    means="An engine that exports its metrics counted requests that ended as they should since the previous reading, "
    "and not one generated token: clients get empty answers, or the requests were aborted and counted as a success.",
    remedy="Send one request to the server and look at its answer and at finish_reason; kvctl logs FILE names known "
    "failures in its log.",
)
def no_tokens(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in {agent.name: agent for agent, _ in _servers(snapshot)}.values():
        finished, tokens = (_grown(snapshot, agent, use) for use in (Use.FINISHED, Use.TOKENS))
        if finished and tokens == 0:
            yield no_tokens.finding(
                agent.name,
                weight=finished,
                evidence={"finished": round(finished), "tokens": 0, "apart_ns": snapshot.since_ns},
                cause=f"{agent.name} counted {counted(finished, 'finished request')} {_while(snapshot)}, and no "
                "generated token",
                remedy=f"`kvctl metrics show -e {_url(agent)}` shows its counters; send it one request and look at the "
                "answer and its finish_reason",
            )


def counted_by_engines(snapshot: Snapshot, code: Code, use: Use, verb: str, step: str) -> Iterator[Finding]:
    """Yields a finding of `code` for each endpoint and engine whose counters of one use are not 0.

    Args:
        verb: what happened to the counted ones.
        step: what to do about it, after a look at the counters.
    """
    for agent, engine in _servers(snapshot):
        found = [each for each in _growths(snapshot, agent, engine, use) if each.value > 0]
        grown = [each for each in found if each.growth]
        if not found:
            continue
        told = [f"{each.growth or each.value:.0f} {each.signal.noun}" for each in grown or found]
        when = _while(snapshot) if grown else "since its start"
        when += "" if grown or snapshot.earlier(agent.name) is None else f", none of them {_while(snapshot)}"
        yield code.finding(
            agent.name,
            severity=code.severity if grown else Severity.INFO,
            weight=sum(each.growth or 0 for each in grown) or sum(each.value for each in found),
            evidence={
                "metrics": [each.signal.metric for each in grown or found],
                "since_start_total": round(sum(each.value for each in found)),
                "apart_ns": snapshot.since_ns,
            },
            cause=f"{engine.name} at {agent.name} counted as {verb}: {listed(told)}, {when}",
            remedy=f"`kvctl metrics show -e {_url(agent)}` shows its counters; {step}",
        )


def slow_transfers(snapshot: Snapshot, code: Code) -> Iterator[Finding]:
    """Yields a finding of `code` for each endpoint whose transfers are slower than before, or than those of others."""
    earlier: dict[tuple[str, str], dict[str, Moved]] = {}
    for agent, engine in _servers(snapshot):
        _, before = _recent(snapshot, agent, engine)
        if before is not None and before.gb_per_s is not None:
            earlier.setdefault((engine.name, agent.role), {})[agent.name] = before
    for agent, engine in _servers(snapshot):
        recent, before = _recent(snapshot, agent, engine)
        latest = before if recent is None or not recent.transfers else recent
        rate = None if latest is None else latest.gb_per_s
        if latest is None or rate is None or latest.transfers < _LEAST_TRANSFERS:
            continue
        mean_bytes = latest.nbytes / latest.transfers
        alike = {
            name: each.gb_per_s
            for name, each in earlier.get((engine.name, agent.role), {}).items()
            if each.gb_per_s is not None
            and mean_bytes / _LIKE_SIZE <= each.nbytes / max(1, each.transfers) <= mean_bytes * _LIKE_SIZE
        }
        own = alike.pop(agent.name, None)
        references = {"its transfers before": own if latest is recent else None}
        references["those of the other servers"] = median(alike.values()) if len(alike) > 1 else None
        slower = [
            (reference / rate, reference, words)
            for words, reference in references.items()
            if reference is not None and mean_bytes >= _LEAST_BYTES and reference / rate >= _SLOW_FACTOR
        ]
        low = mean_bytes >= _LARGE_BYTES and rate < _TEN_GBIT
        if not slower and not low:
            continue
        factor, reference, words = max(slower, default=(_TEN_GBIT / rate, _TEN_GBIT, "a network of 10 Gbit/s"))
        yield code.finding(
            agent.name,
            severity=code.severity if slower else Severity.INFO,
            weight=factor,
            evidence={
                "gb_per_s": round(rate, 4),
                "reference_gb_per_s": round(reference, 4),
                "transfers": round(latest.transfers),
                "mean_bytes": round(mean_bytes),
            },
            cause=f"transfers of {engine.name} at {agent.name} ran at {three_digits(rate)} GB/s, {size(mean_bytes)} "
            f"each, {factor:.0f} times slower than {words} ({three_digits(reference)} GB/s)",
            remedy=f"`kvctl metrics show -e {_url(agent)}` shows their times and sizes; compare UCX_TLS, "
            "UCX_NET_DEVICES and the devices of the hosts with servers that are fast",
        )
