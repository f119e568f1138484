"""Judges the results of a preflight: a row for each pair of ranks, and findings, most severe first.

Devices, lanes and clocks are judged by the health codes, from the answers of the ranks before and after the
measurements, as those of agents.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Discovery, Endpoint
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.client.names import natural_key
from kvctl.health.codes import CODES_BY_NAME
from kvctl.health.codes.facts import common_agents
from kvctl.health.codes.network import too_large
from kvctl.health.engine import examine
from kvctl.health.finding import Finding, Severity, listed, pair
from kvctl.health.host.view import HOST
from kvctl.health.lanes import carried_by
from kvctl.health.snapshot import Snapshot
from kvctl.lab.preflight.run import Options, PlannedRank, Results
from kvctl.render.units import duration, size, three_digits
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.snapshots import Hello

_CODES = (
    *("KV_CLOCK_SKEW", "KV_NIC_DOWN", "KV_RAIL_IDLE", "KV_LANE_NOT_RDMA", "KV_NUMA_FAR", "KV_GID_UNROUTABLE"),
    *("KV_NIC_ERRORS", "KV_LANE_SLOW"),
)
# A pair is slow if a quarter of the pairs is so many times faster, also when it is measured again.
_SLOW_FACTOR = 5
_LATE_FACTOR = 10
_LATE_NS = 2_000_000
_COUNTED = ("before", "after", "moved_bytes")
_MEASURED = ("gb_per_s", "latency_ns", "first_ns", "moved_bytes")


def pair_rows(ranks: Sequence[PlannedRank], pairs: Sequence[tuple[str, str]], results: Results) -> list[dict[str, Any]]:
    """Returns a row of `kvctl.render.preflight.PREFLIGHT` for each pair."""
    host = {rank.name: rank.host for rank in ranks}
    rows = []
    for prefill, decode in pairs:
        written: Mapping[str, Any] = results.writes.get((prefill, decode), {})
        measured = {} if written.get("error") else written
        links = results.links.get((host[prefill], host[decode]), ())
        lane, carried = carried_by(*(measured[key] for key in _COUNTED)) if measured else ("", {})
        interconnect = measured.get("interconnect", {})
        rows.append(
            {
                "prefill": prefill,
                "decode": decode,
                "prefill_host": host[prefill],
                "decode_host": host[decode],
                "verdict": "unknown",
                "others_gb_per_s": None,
                **{key: measured.get(key) for key in _MEASURED},
                "rtt_ns": min((each["rtt_ns"] for each in links if each["rtt_ns"] is not None), default=None),
                "mtu": next((each["mtu"] for each in links if each["mtu"] is not None), None),
                "lane": interconnect.get("name") or lane or None,
                "lane_expected": interconnect.get("expected"),
                "lane_source": interconnect.get("source") if interconnect else "counters" if lane else None,
                "carried": carried,
                "problem": "",
            }
        )
    for row in rows:
        _judge_row(row, rows, results)
    return rows


def _judge_row(row: dict[str, Any], rows: Sequence[Mapping[str, Any]], results: Results) -> None:
    """Sets verdict and problem of a row; a pair is compared with the others."""
    key = row["prefill"], row["decode"]
    ends = row["prefill_host"], row["decode_host"]
    written: Mapping[str, Any] = results.writes.get(key, {})
    failed = next((results.failed[name] for name in key if name in results.failed), "")
    links = [*results.links.get(ends, ()), *results.links.get((ends[1], ends[0]), ())]
    broken = next((each["error"] for each in links if each["error"]), "")
    if written.get("wrong_bytes"):
        row["verdict"], row["problem"] = "critical", "bytes that arrived differ from those that were written"
    elif written.get("error"):
        row["verdict"], row["problem"] = "critical", written["error"]
    elif not written:
        why = failed or results.left_out.get(key, "") or broken
        row["verdict"] = "critical" if why else "unknown"
        row["problem"] = why or "not measured"
    else:
        # Pairs within one host are compared with their like.
        measured = [each for each in rows if each["gb_per_s"] is not None]
        alike = [e for e in measured if (e["prefill_host"] == e["decode_host"]) == (ends[0] == ends[1])]
        rates = sorted(each["gb_per_s"] for each in alike)
        latencies = sorted(each["latency_ns"] for each in alike)
        fast, short = rates[-1 - (len(rates) - 1) // 4], latencies[(len(latencies) - 1) // 4]
        row["others_gb_per_s"] = fast
        row["verdict"] = "ok"
        if row["gb_per_s"] * _SLOW_FACTOR < fast:
            row["verdict"] = "warning"
            row["problem"] = f"{three_digits(row['gb_per_s'])} GB/s, where others have {three_digits(fast)}"
        elif row["latency_ns"] > max(_LATE_FACTOR * short, short + _LATE_NS):
            row["verdict"] = "warning"
            row["problem"] = f"a small write takes {duration(row['latency_ns'])}, elsewhere {duration(short)}"


def findings(
    ranks: Sequence[PlannedRank], rows: Sequence[Mapping[str, Any]], results: Results, options: Options
) -> list[Finding]:
    """Returns the findings, most severe first."""
    found = [
        *_rank_findings(ranks, results, options),
        *_link_findings(ranks, results, options),
        *_pair_findings(rows, results, options),
        *_host_findings(ranks, results, options),
        *_health_findings(ranks, rows, results),
    ]
    return sorted(found, key=lambda each: (-each.severity, natural_key(each.subject)))


def _rank_findings(ranks: Sequence[PlannedRank], results: Results, options: Options) -> Iterator[Finding]:
    alike: dict[tuple[str, str], list[str]] = {}
    overdue = {prefill for (prefill, _), written in results.writes.items() if written.get("overdue")}
    for rank in ranks:
        if rank.name in results.failed and rank.name not in overdue:  # named with its pair otherwise
            alike.setdefault((rank.host, results.failed[rank.name]), []).append(rank.name)
    for (host, text), names in alike.items():
        check = shlex.join([*options.login(host), *options.python, "-m", "kvctl", "doctor", "--host-only"])
        yield _critical(
            "KV_NOT_READY",
            host,
            names,
            f"{listed(names)} on {host}: {text}",
            f"`{check}` must run without questions; it checks what the engine needs of {host}",
        )
    versions = {name: begun["version"] for name, begun in results.begun.items() if begun["version"] != VERSION}
    if versions:
        yield _critical(
            "KV_COMPAT_MISMATCH",
            listed(sorted({rank.host for rank in ranks if rank.name in versions})),
            versions,
            f"{listed(versions)} run kvctl {listed(sorted(set(versions.values())))}, this machine {VERSION}",
            "install one version on all hosts",
        )


def _link_findings(ranks: Sequence[PlannedRank], results: Results, options: Options) -> Iterator[Finding]:
    addresses = {rank.host: str(results.begun[rank.name]["address"]) for rank in ranks if rank.name in results.begun}
    unanswered: dict[tuple[str, int], dict[tuple[str, str], Mapping[str, Any]]] = {}
    for ends, links in results.links.items():
        for link in links:
            if link["state"] == "large lost":
                address, mtu = addresses[ends[1]], link["mtu"] or 1500
                yield _critical(
                    "KV_DATA_BLOCKED",
                    pair(*ends),
                    (),
                    f"{pair(*ends)}: small messages arrive; {link['error']}",
                    too_large(ends[0], address, mtu, options.login(ends[0])),
                    {"port": str(link["port"]), "address": address, "mtu": mtu},
                )
            elif link["state"] != "ok":
                # Without --port, each host listens on another one.
                unanswered.setdefault((link["state"], link["port"] if options.ports else 0), {})[ends] = link
    for of_ends in unanswered.values():
        for common, pairs in common_agents(list(of_ends)):
            yield _unanswered(common, {ends: of_ends[ends] for ends in pairs}, addresses, options)


def _unanswered(
    common: str, links: Mapping[tuple[str, str], Mapping[str, Any]], addresses: Mapping[str, str], options: Options
) -> Finding:
    """Returns the finding about links that have a host in common and fail in the same way."""
    ends, link = next(iter(links.items()))
    others = sorted({end for each in links for end in each} - {common})
    both = all((target, source) in links for source, target in links)
    sources, targets = (sorted({each[side] for each in links}) for side in (0, 1))
    why = {
        "refused": f"{ends[1]} listens there, so a firewall rejects them",
        "unresolved": f"write the host as {ends[1]}=ADDRESS",
    }.get(link["state"], "a firewall on the way drops the packets, or there is no route")
    address = addresses[ends[1]]
    ping = shlex.join([*options.login(ends[0]), "ping", "-c", "3", address])
    return _critical(
        "KV_PEER_LOST",
        f"{common} ↔ {listed(others)}" if both else pair(listed(sources), listed(targets)),
        (),
        f"{pair(*ends)}: {link['error']}; {why}",
        f"`{ping}` shows whether {ends[1]} answers at all: if it does, check the firewalls on the way from {ends[0]} "
        f"to {ends[1]}, or else routes and cables",
        {
            "port": str(link["port"]),
            "address": address,
            "state": link["state"],
            "links": [pair(*each) for each in links],
        },
    )


def _pair_findings(rows: Sequence[Mapping[str, Any]], results: Results, options: Options) -> Iterator[Finding]:
    blocked: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    slow: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        key, ends = (row["prefill"], row["decode"]), (row["prefill_host"], row["decode_host"])
        written = results.writes.get(key, {})
        if written.get("wrong_bytes"):
            yield _critical(
                "KV_CHECKSUM_MISMATCH",
                pair(*key),
                key,
                f"bytes that {key[1]} received over {options.transport} are not those that {key[0]} sent",
                CODES_BY_NAME["KV_CHECKSUM_MISMATCH"].remedy,
            )
        elif written.get("error"):
            blocked.setdefault(ends, []).append(row)
        elif row["verdict"] == "warning":
            slow.setdefault(ends, []).append(row)
    for ends, members in blocked.items():
        linked = "; TCP connections between them work, so a firewall drops the engine's ports, or the lane that it has "
        linked += "chosen does not lead there (UCX_NET_DEVICES, UCX_TLS, MC_… on both hosts)"
        yield _critical(
            "KV_DATA_BLOCKED",
            pair(*ends),
            [name for row in members for name in (row["prefill"], row["decode"])],
            f"{pair(*ends)}: {members[0]['problem']}{linked if ends[0] != ends[1] else ''}",
            f"give --env UCX_LOG_LEVEL=info to see the lanes of {options.transport}, and compare them on the two hosts",
            {"pairs": len(members), "transport": options.transport},
        )
    for common, pairs in common_agents(list(slow)):
        members = [row for ends in pairs for row in slow[ends]]
        worst = min(members, key=lambda row: row["gb_per_s"])
        sources, targets = (sorted({ends[side] for ends in pairs}) for side in (0, 1))
        subject = pair(listed(sources), listed(targets))
        yield Finding(
            "KV_LANE_SLOW",
            Severity.WARNING,
            subject,
            tuple(dict.fromkeys(name for row in members for name in (row["prefill"], row["decode"]))),
            f"{pair(worst['prefill'], worst['decode'])}: {worst['problem']}"
            + (f"; all slow pairs have {common} in common" if len(pairs) > 1 else ""),
            "compare speed, cables and limits of the rate of the devices in the evidence with those of a fast pair",
            {
                "lane_gb_per_s": round(worst["gb_per_s"], 4),
                "others_gb_per_s": round(worst["others_gb_per_s"], 4),
                "latency_ns": worst["latency_ns"],
                "lane": worst["lane"],
                "lane_source": worst["lane_source"],
                "carried": {
                    name: f"{size(nbytes)} of {size(worst['moved_bytes'])}" for name, nbytes in worst["carried"].items()
                },
            },
            weight=len(members),
        )


def _host_findings(ranks: Sequence[PlannedRank], results: Results, options: Options) -> Iterator[Finding]:
    facts: dict[tuple[str, str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for rank in ranks:
        begun: Mapping[str, Any] = results.begun.get(rank.name, {})
        for fact in begun.get("facts", ()):
            if fact["severity"] > Severity.INFO:
                facts.setdefault((fact["topic"], fact["found"], fact["means"]), []).append((rank.host, fact))
        for port, why in begun.get("ports_refused", {}).items():
            login = shlex.join(options.login(rank.host))
            yield Finding(
                "KV_PORT_CLASH",
                Severity.WARNING,
                f"{rank.host} port {port}",
                (),
                f"{rank.host} cannot listen on port {port}: {why}",
                f"`{login} ss -ltnp sport = :{port}` shows the process that has it",
            )
    for (topic, found, means), members in facts.items():
        fact, names = members[0][1], listed(host for host, _ in members)
        code, severity, cause = fact["code"] or HOST, Severity(fact["severity"]), f"{found}: {means}"
        yield Finding(code, severity, f"{names}: {topic}", (), cause, fact["remedy"], {"hosts": names})


def _health_findings(
    ranks: Sequence[PlannedRank], rows: Sequence[Mapping[str, Any]], results: Results
) -> Iterator[Finding]:
    after = _snapshot(ranks, rows, results, _snapshot(ranks, rows, results, None))
    for finding in examine(after, [CODES_BY_NAME[name] for name in _CODES]):
        if (code := CODES_BY_NAME.get(finding.code)) is not None:
            yield replace(finding, remedy=code.remedy)  # its own asks agents, which do not run yet


def _snapshot(
    ranks: Sequence[PlannedRank], rows: Sequence[Mapping[str, Any]], results: Results, before: Snapshot | None
) -> Snapshot:
    """Returns the answers of the ranks as those of agents: at the start, or, with `before`, at the end."""
    leaders = {rank.host: rank.name for rank in ranks if rank.leads}
    answers = []
    for rank in ranks:
        begun = results.begun.get(rank.name)
        if begun is None or rank.name not in results.devices:
            continue
        own = [row for row in rows if rank.name in (row["prefill"], row["decode"]) and row["moved_bytes"]]
        moved = 0 if before is None else sum(row["moved_bytes"] for row in own)
        hello = {"name": rank.name, "role": rank.role, "host": rank.host, "pid": begun["pid"], "incarnation": rank.name}
        clock = results.clocks.get(leaders[rank.host], ClockOffset(0, 1 << 62))
        data = {
            "status": {**hello, "version": begun["version"], "transport": begun["transport"]},
            "nics": {**(begun["devices"] if before is None else results.devices[rank.name]), "host": rank.host},
            "peers": [_peer(rank, row) for row in own],
            "metrics": [{"name": "kvctl_part_bytes_total", "samples": [{"labels": {}, "value": moved}]}],
        }
        answers.append(AgentAnswer(Endpoint(rank.name, None), cast(Hello, hello), 0, clock, data))
    taken_ns = 0 if before is None else 1
    return Snapshot(Survey(Discovery(Path()), answers), taken_ns, before)


def _peer(rank: PlannedRank, row: Mapping[str, Any]) -> dict[str, Any]:
    other = "decode" if rank.role == "prefill" else "prefill"
    found = {"peer": row[other], "state": "ready", "same_host": row["prefill_host"] == row["decode_host"]}
    found |= {"peer_host": row[f"{other}_host"], "lane": ""}
    if rank.role == "prefill" and row["lane_expected"]:
        found |= {key: row[key] for key in ("lane_expected", "lane_source")}
        found |= {"lane_kind": row["lane"], "lane_gb_per_s": row["gb_per_s"]}
    return found


def _critical(
    code: str, subject: str, agents: Iterable[str], cause: str, remedy: str, evidence: Mapping[str, Any] | None = None
) -> Finding:
    return Finding(code, Severity.CRITICAL, subject, tuple(dict.fromkeys(agents)), cause, remedy, evidence or {})
