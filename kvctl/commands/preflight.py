"""`kvctl preflight`: moves memory between hosts before a model loads, and names pairs that fail or are slow."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from kvctl.commands.bench import bench
from kvctl.commands.bench_options import GroupedCommand, bench_options, grouped_option
from kvctl.commands.bench_request import resolve
from kvctl.commands.doctor import blocks, next_step
from kvctl.commands.mutations import once_and_live
from kvctl.commands.options import Parsed, duration, given, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import ProgressLine
from kvctl.exit_codes import ExitCode
from kvctl.health.finding import Finding, Severity, counted
from kvctl.lab.preflight.judge import findings, pair_rows
from kvctl.lab.preflight.manifest import manifest
from kvctl.lab.preflight.run import Options, PlannedRank, Preflight, Results, place_ranks
from kvctl.lab.ranks.planner import plan as make_plan
from kvctl.lab.ranks.request import DEVICES, Load, Tokens
from kvctl.render.findings import row
from kvctl.render.preflight import PREFLIGHT, draw_rates
from kvctl.render.report import Block, Grid, Report, Text
from kvctl.render.view import Row
from kvctl_agent.contract.addresses import ip_address

_SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5"
_TRANSPORTS = ("nixl", "mooncake")
_MODEL = ("model", "kv_heads", "kind")
_HOST = re.compile(r"(?:[\w.-]+@)?[\w.:%\[\]-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Before pairs that seem slow are measured again, in s: a host that was busy for a moment is not slow.
_PAUSES_BEFORE_SLOW_PAIRS_S = (0.2, 0.5, 1.0, 2.0, 3.0)
_ANY_MEMORY_BYTES = 1 << 60


def _host(text: str) -> tuple[str, str]:
    name, _, address = text.partition("=")
    if not _HOST.fullmatch(name) or name.startswith("-"):
        raise ValueError(f"{text!r} is not a host: write NAME, USER@NAME or NAME=ADDRESS")
    if address and ip_address(address) is None:
        raise ValueError(f"{text!r}: {address!r} is not an IP address")
    return name, address


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name) or "\0" in value:
        raise ValueError(f"{text!r}: write NAME=VALUE")
    return name, value


def _command(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(_given(text, "command")))


def _given(text: str, noun: str = "image") -> str:
    if not text.strip():
        raise ValueError(f"no {noun} is given")
    return text


def _plain_command(text: str) -> tuple[str, ...]:
    command = _command(text)
    for word in command:
        if shlex.quote(word) != word:
            raise ValueError(
                f"{word!r} has characters that a shell on the host would interpret: use a path without them"
            )
    return command


def _options() -> list[click.Parameter]:
    taken = [each for each in bench_options() if getattr(each, "group", "") == "Layout" or each.name in _MODEL]
    transfer, start = "Transfer", "Ranks"
    port = "TCP port that agents will use between hosts; each is tried in both directions. Repeatable. [default: any]"
    ssh = (
        "Command that runs a command on a host, which replaces {host} or is appended. [default: ssh, without questions]"
    )
    python = "Python on the hosts that has kvctl and the engine."
    env = "Variable of the ranks, as of the workers: UCX_NET_DEVICES, UCX_TLS, …. Repeatable."
    deadline = "Longest time of each connection, message and write; at least 100ms."
    image = (
        "Start nothing: print a Kubernetes Job with a pod of IMAGE on each HOST, the name of a node, in which the "
        "preflight can then run."
    )
    params = "Parameters of the transport, as the key transport_params: protocol=rdma for Mooncake."
    return [
        click.Argument(["hosts"], nargs=-1, required=True, metavar="HOST...", type=Parsed("host", _host)),
        *taken,
        grouped_option(transfer, "--transport", None, "Engine.", type=click.Choice(_TRANSPORTS), default="nixl"),
        grouped_option(transfer, "--transport-params params", "NAME=VALUE,…", params, _params, default=""),
        grouped_option(transfer, "--device", None, "Memory to move.", type=click.Choice(DEVICES), default="cpu"),
        grouped_option(transfer, "--port ports", "N", port, type=click.IntRange(1, 65535), multiple=True),
        grouped_option(transfer, "--deadline", "TIME", deadline, type=duration("100ms"), default="5s"),
        grouped_option(start, "--ssh", "COMMAND", ssh, _command),
        grouped_option(start, "--python", "COMMAND", python, _plain_command, default="python3"),
        grouped_option(start, "--env environment", "NAME=VALUE", env, _assignment, multiple=True),
        grouped_option(start, "--manifest", "IMAGE", image, _given),
    ]


def _params(text: str) -> dict[str, str]:
    return dict(_assignment(word.strip()) for word in text.split(",") if word.strip())


@click.command(
    cls=GroupedCommand,
    params=_options(),
    view=PREFLIGHT,
    examples=[
        ("Four hosts, two of them for prefill", "kvctl preflight gpu1 gpu2 gpu3 gpu4 --prefill-tp 16 --decode-dp 16"),
        (
            "GPU memory over RDMA, as the workers will use it",
            "kvctl preflight gpu1 gpu2 --prefill-tp 8 --decode-tp 8 --device cuda --env UCX_NET_DEVICES=mlx5_0:1",
        ),
        (
            "A Job for two nodes of Kubernetes",
            "kvctl preflight node-1 node-2 --prefill-tp 8 --decode-tp 8 --manifest example/worker:1 > job.yaml",
        ),
    ],
)
@pass_settings
def preflight(settings: Settings, hosts: tuple[tuple[str, str], ...], **options: Any) -> None:
    """Move memory between hosts before a model loads: rate, latency and lane of each pair of ranks.

    Starts a process for each rank of the layout, over SSH, on the HOSTs: prefill ranks on the first of them, decode
    ranks on the others, in proportion. The pairs of ranks that would transfer write memory over the transport, one pair
    of hosts at a time, and compare the bytes. Before, each host is checked as by kvctl doctor --host-only, and pairs of
    hosts connect by TCP in both directions: ports, and large packets.

    HOST is what ssh accepts, or NAME=ADDRESS if other hosts reach it at another address than ssh does. All processes
    end with this one. The exit code is 1 if a pair deviates or fails, or a host has a warning.
    """
    once_and_live(settings)
    output = Output(settings)
    output.selection(PREFLIGHT)
    addresses = dict(hosts)
    if len(addresses) < len(hosts):
        twice = next(name for name in addresses if [other for other, _ in hosts].count(name) > 1)
        raise click.BadParameter(f"{twice} is given twice", param_hint="HOST")
    ranks, pairs = _layout([*addresses], options)
    chosen = Options(
        options["transport"],
        options["params"],
        dict(options["environment"]),
        tuple(dict.fromkeys(options["ports"])),
        options["ssh"] or _command(_SSH),
        options["python"],
        options["deadline"] / 1e9,
    )
    if options["manifest"] is not None:
        output.write(manifest(options["manifest"], [*addresses], ranks, chosen))
        return
    try:
        with ProgressLine(settings.quiet) as line, Preflight(addresses, ranks, pairs, chosen, line.show) as run:
            run.run()
            rows = pair_rows(ranks, pairs, run.results)
            for pause_s in _PAUSES_BEFORE_SLOW_PAIRS_S:
                if slow := [(each["prefill"], each["decode"]) for each in rows if each["verdict"] == "warning"]:
                    time.sleep(pause_s)
                    run.measure(slow)
                    rows = pair_rows(ranks, pairs, run.results)
            results = run.results
    except KeyboardInterrupt:
        raise click.exceptions.Exit(ExitCode.INTERRUPTED) from None
    found = findings(ranks, rows, results, chosen)
    wrong = any(each.severity > Severity.INFO for each in found) or any(each["verdict"] != "ok" for each in rows)
    report = Report(PREFLIGHT, rows, answered=len(results.begun))
    report.objects = lambda kept: [_document(kept, ranks, results, found, not wrong)]
    report.blocks = lambda kept, width: _blocks(kept, width, found, rows, len(hosts))
    output.emit(report)
    raise click.exceptions.Exit(ExitCode.FAILED if wrong else ExitCode.OK)


def _layout(hosts: Sequence[str], options: Mapping[str, Any]) -> tuple[list[PlannedRank], list[tuple[str, str]]]:
    """Returns the ranks of the layout, and the pairs of a prefill and a decode rank that transfer."""
    on_line = given(options)
    with bench.make_context("preflight", []) as defaults:
        asked = {**defaults.params, **{name: options[name] for name in options if name in defaults.params}}
    asked |= {"transports": ("loopback",), "device": "cpu", "cp_modes": asked["cp_modes"][:1]}
    request = resolve(asked, on_line).waves[0][0].request
    # Memory and engines of this machine do not matter; a long prompt reaches all ranks that share one.
    load = Load(1, Tokens((8192,)), 1)
    plan = make_plan(replace(request, loads=(load,), memory_bytes=_ANY_MEMORY_BYTES))
    try:
        ranks = place_ranks(hosts, plan, options["device"] == "cuda")
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    instance = "p{instance}-" if len(request.prefill) > 1 else ""
    pairs = ((f"{instance}prefill-{{writer}}".format(**each), f"decode-{each['reader']}") for each in plan["shares"])
    return ranks, list(dict.fromkeys(pairs))


def _document(
    rows: Sequence[Row], ranks: Sequence[PlannedRank], results: Results, found: Sequence[Finding], ok: bool
) -> dict[str, Any]:
    """Returns the data of JSON and YAML: the hosts, the connections between them, the pairs, and the findings."""
    hosts = []
    for rank in ranks:
        if rank.leads:
            begun: Mapping[str, Any] = results.begun.get(rank.name, {})
            clock = results.clocks.get(rank.name)
            hosts.append(
                {
                    "host": rank.host,
                    "hostname": begun.get("host"),
                    **{key: begun.get(key) for key in ("address", "version", "transport")},
                    "ranks": [each.name for each in ranks if each.host == rank.host],
                    "clock_offset_ns": clock.offset_ns if clock else None,
                    "clock_error_ns": clock.error_ns if clock else None,
                    "checks": [
                        {**fact, "severity": Severity(fact["severity"]).label} for fact in begun.get("facts", ())
                    ],
                    "nics": begun.get("devices", {}).get("nics", []),
                }
            )
    links = [{"from": ends[0], "to": ends[1], **each} for ends, ports in results.links.items() for each in ports]
    return {
        "ok": ok,
        "hosts": hosts,
        "links": links,
        "pairs": list(rows),
        "findings": [row(each) for each in found],
        "failed_ranks": dict(results.failed),
    }


def _blocks(kept: Sequence[Row], width: int, found: Sequence[Finding], rows: Sequence[Row], hosts: int) -> list[Block]:
    """Returns the report for people; `kept` are the rows that --filter has left."""
    ranked = []
    for each in found:
        step, where = next_step(each.remedy), each.evidence.get("hosts")
        ranked.append({**row(each), "rank": 0, "next": f"on {where}: {step}" if step and where else step})
    examined = f"{counted(len(rows), 'pair')} of ranks on {counted(hosts, 'host')}"
    head, *paragraphs = blocks(ranked, width, examined, complete=all(each["verdict"] == "ok" for each in rows))
    rates, deviating = draw_rates(kept, width), [each for each in kept if each["verdict"] != "ok"]
    table = [Grid(PREFLIGHT, deviating or kept)] if deviating or not rates else []
    return [head, *([Text(rates)] if rates else []), *table, *paragraphs]
