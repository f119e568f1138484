"""Health codes about requests that vLLM's own connectors hand over: handshakes, leases, prompts computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvctl.health.answers import Row, amount, inner, number, text
from kvctl.health.codes.facts import absent, failed_by_instance, failed_rooms, failure_alert, failure_finding
from kvctl.health.codes.network import row_about
from kvctl.health.finding import Code, Finding, Severity, counted, health_code, listed, pair
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration

HANDSHAKE = "KV_HANDSHAKE_FAILED"
_LATE = "kvctl_late_reads_total"
RECOMPUTED = "kvctl_recomputed_prompts_total"
# A decode engine that has the request renews its lease after a sixth of it.
_UNREAD_SHARE = 1 / 3
_MIN_UNREAD_NS = 5_000_000_000
_LISTED = 8
_PERMIT = (
    "permit the port between the two hosts, or correct VLLM_NIXL_SIDE_CHANNEL_HOST (MooncakeConnector: the bootstrap "
    "address)"
)


def leases(agent: Agent) -> bool:
    """Returns whether an agent observes vLLM's own connector, which holds computed blocks under a lease."""
    found = inner(agent.status, "integration")
    return (text(found, "engine"), text(found, "mode")) == ("vllm", "observe")


@health_code(
    HANDSHAKE,
    Severity.CRITICAL,
    "peers",
    sees="decode fails or recomputes every request of one prefill server, seconds after it arrived",
    means="Before the first transfer, a worker of vLLM's NIXL connector asks the side channel of the other engine "
    "(VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT) for the addresses of its memory, and gives up after 5 s; one of "
    "MooncakeConnector asks the bootstrap server in the request's remote_bootstrap_addr. No answer means that the port "
    "is filtered, or that the address is another host's; a mismatch of versions, models or layouts is "
    "named in the error.",
    remedy="Permit the port of the side channel between the hosts, and set VLLM_NIXL_SIDE_CHANNEL_HOST of the prefill "
    "server, or the bootstrap address of the proxy, to an address that decode hosts can reach.",
    alert=failure_alert(HANDSHAKE),
)
def handshake_failed(snapshot: Snapshot) -> Iterator[Finding]:
    gone = snapshot.once(absent)
    told: set[str] = set()
    for instance, all_failures in failed_by_instance(snapshot, HANDSHAKE).items():
        failures = [failed for failed in all_failures if not gone.intersection(failed.peers)]
        if not failures:
            continue
        told.update(failed.rank for failed in failures)
        peers = failures[0].peers
        ready = all(_state(snapshot, failures[0].rank, peer) == "ready" for peer in peers)
        finding = failure_finding(
            snapshot,
            handshake_failed,
            failures,
            f"{counted(len(failures), 'room')} of {instance} failed in the handshake with {listed(peers)}"
            f"{', which is connected now' if ready else ''}",
            f"when the handshake began and failed; {_try(peers[0]) if peers else _PERMIT}",
            subject=pair(instance, listed(peers)),
            agents=peers,
        )
        yield replace(finding, severity=Severity.INFO) if ready else finding
    for agent in snapshot.agents.values():
        for row in agent.peers if leases(agent) and agent.name not in told else ():
            error, peer = text(row, "last_error"), text(row, "peer")
            if text(row, "state") == "connecting" and error and peer not in gone:
                yield handshake_failed.finding(
                    pair(agent.name, peer),
                    agents=(agent.name, peer),
                    evidence={"endpoint": text(row, "endpoint"), "last_error": error},
                    cause=f"the handshake of {agent.name} with {peer} failed: {error}",
                    remedy=f"`kvctl peers -e {agent.name}` shows the error; {_try(peer)}",
                )


def _state(snapshot: Snapshot, name: str, peer: str) -> str:
    return text(row_about(snapshot.agents.get(name), peer), "state")


def _try(peer: str) -> str:
    """Returns the advice to try the address of a peer, which its name ends with."""
    host, _, port = peer.rpartition("@")[2].rpartition(":")
    return f"nc -zv {host} {port} on that host shows whether the port answers; {_PERMIT}"


@health_code(
    "KV_READ_AFTER_FREE",
    Severity.CRITICAL,
    "rooms",
    sees="wrong text with HTTP 200, when decode takes a request later than its lease",
    means="A transfer ended for a request whose blocks the prefill engine had freed already, because the lease had "
    "expired. Meanwhile the blocks may have been given to another request, so the decode engine may have read that "
    "one's KV. vLLM logs it as potentially invalid KV blocks and continues.",
    remedy="Raise kv_lease_duration in kv_connector_extra_config of both servers above the longest time between the "
    "answer of prefill and the request at decode, and do not let a proxy send requests to decode later.",
    alert=f"sum by (instance) (increase({_LATE}[10m])) > 0",
)
def read_after_free(snapshot: Snapshot) -> Iterator[Finding]:
    leases_ended = snapshot.once(failed_rooms).get("KV_HOLD_EXPIRED", ())
    expired = {failed.room for failed in leases_ended}
    for agent in snapshot.agents.values():
        count = agent.total(_LATE) or 0
        if count <= 0:
            continue
        recent = snapshot.since_before(agent.name, _LATE)
        readers = {
            text(row, "room"): other.name
            for other in snapshot.of_role("decode")
            for row in other.known_rooms
            if text(row, "room") in expired and text(row, "state") == "Success"
        }
        rooms = f": rooms {listed(sorted(readers)[:_LISTED])} of {listed(sorted(set(readers.values())))}"
        first = min(readers, default="")
        look = f"`kvctl rooms show {first}`" if first else f"`kvctl events -e {agent.name}`"
        yield read_after_free.finding(
            agent.name,
            severity=Severity.CRITICAL
            if recent != 0 or any(agent.name in failed.known_to for failed in leases_ended)
            else Severity.WARNING,
            agents=(agent.name, *sorted(set(readers.values()))),
            weight=count,
            evidence={"late_reads_total": int(count), "late_since_last_reading": recent, "rooms": sorted(readers)},
            cause=f"{counted(count, 'transfer')} of blocks ended after {agent.name} had freed them"
            f"{rooms if readers else ''}; the text of these requests may be wrong",
            remedy=f"{look} shows when the lease ended and when the blocks were read; raise kv_lease_duration in "
            "kv_connector_extra_config of both servers",
        )


@health_code(
    "KV_BLOCKS_UNREAD",
    Severity.WARNING,
    "rooms",
    sees="the KV cache of a prefill server fills up although it has nothing to compute",
    means="A prefill engine has computed prompts and holds their blocks for a decode engine, which has neither read "
    "them nor renewed their lease for a third of it. A decode engine that has the request in its queue renews the "
    "lease after a sixth of it, so these requests have not reached one.",
    remedy="Find out why the proxy did not send the request to decode with the kv_transfer_params of prefill's answer: "
    "the client has left, decode refused it, or the proxy dropped the parameters.",
)
def blocks_unread(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.of_role("prefill"):
        if not leases(agent) or agent.name in snapshot.once(absent):
            continue
        lease_ns = agent.period_ns("hold_s")
        patience_ns = max(_MIN_UNREAD_NS, int(lease_ns * _UNREAD_SHARE))
        unread = [row for row in agent.rooms if _held_ns(row) >= patience_ns]
        if not unread:
            continue
        unread.sort(key=_held_ns, reverse=True)
        oldest, age_ns = text(unread[0], "room"), _held_ns(unread[0])
        blocks = int(sum(amount(row, "pages") for row in unread))
        yield blocks_unread.finding(
            agent.name,
            since_ns=age_ns,
            weight=len(unread),
            evidence={
                "rooms": [text(row, "room") for row in unread[:_LISTED]],
                "waiting_rooms": len(unread),
                "blocks": blocks,
                "oldest_ns": age_ns,
                "lease_ns": lease_ns,
            },
            cause=f"{agent.name} holds {counted(blocks, 'block')} of {counted(len(unread), 'room')} that no decode "
            f"engine has asked for, the oldest for {duration(age_ns)}",
            remedy=f"`kvctl rooms show {oldest}` shows which servers know it; the proxy must send decode the request "
            "with the kv_transfer_params of prefill's answer",
        )


def _held_ns(row: Row) -> int:
    """Returns for how long a room has been held that no decode engine has asked for; 0 for others."""
    held = text(row, "state") == "Bootstrapping" and number(row, "forward_done_at_ns") is not None
    return int(amount(row, "state_age_ns")) if held else 0


def recomputed_prompts(snapshot: Snapshot, code: Code) -> Iterator[Finding]:
    """Yields findings about observed decode engines that compute prompts which prefill has computed for them."""
    wasted = [
        failed for failed in snapshot.once(failed_rooms).get("KV_HOLD_EXPIRED", ()) if failed.rank in snapshot.agents
    ]
    held = any(
        _held_ns(row) >= _MIN_UNREAD_NS for agent in snapshot.of_role("prefill") if leases(agent) for row in agent.rooms
    )
    for agent in snapshot.of_role("decode"):
        failed = int(agent.total(RECOMPUTED, reason="load-failed") or 0)
        alone = int(agent.total(RECOMPUTED, reason="no-parameters") or 0) if wasted or held else 0
        if not failed + alone:
            continue
        why = [f"the KV of {failed} could not be loaded"] * bool(failed)
        why += [f"{alone} came without the parameters of a prefill engine, while blocks were held for them"] * bool(
            alone
        )
        yield code.finding(
            agent.name,
            severity=Severity.WARNING if snapshot.since_before(agent.name, RECOMPUTED) != 0 else Severity.INFO,
            weight=failed + alone,
            evidence={"load_failed": failed, "no_parameters": alone},
            cause=f"{agent.name} computed {counted(failed + alone, 'prompt')} itself: {' and '.join(why)}",
            remedy=f"`kvctl rooms failed -e {agent.name}` shows the first causes"
            if failed
            else "`kvctl rooms` shows what prefill holds; the proxy must pass kv_transfer_params on to decode",
        )
